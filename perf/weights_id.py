"""The time to compute the id of a model's weights: 30 shards of 140 GB in total.

Measured with known digests, as blobs of the hub's cache and as a local directory with kept digests:
the files are sparse, and none is read. Without digests, one file is hashed, beside the digest of as
much memory on one core.
"""

from __future__ import annotations

import hashlib
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from perf.support.figure import Figure, publish
from perf.support.servers import parser

SHARDS = 30
SHARD_BYTES = 140_000_000_000 // SHARDS
FILE_BYTES = 512 << 20
PIECE_BYTES = 4 << 20
BOUND_S = 2.0


def sparse(path: Path) -> Path:
    with path.open("wb") as file:
        file.truncate(SHARD_BYTES)
    return path


def shard(number: int) -> str:
    return f"model-{number + 1:05}-of-{SHARDS:05}.safetensors"


def hub_snapshot(cache: Path, chance: random.Random) -> Path:
    """A snapshot of the hub's cache: links to blobs named by their digests."""
    repository = cache / "models--org--name"
    snapshot = repository / "snapshots" / f"{chance.getrandbits(160):040x}"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number in range(SHARDS):
        blob = sparse(repository / "blobs" / f"{chance.getrandbits(256):064x}")
        (snapshot / shard(number)).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


def directory(place: Path, chance: random.Random) -> Path:
    """A local directory with kept digests, which are invented because the files are sparse."""
    from pegaflow.weights import digests

    place.mkdir()
    files = [sparse(place / shard(number)) for number in range(SHARDS)]
    # Digests of newer files are not kept; the change time is the file system's.
    time.sleep(2.1)
    for file in files:
        digest = f"{chance.getrandbits(256):064x}"
        if not digests.DigestCache().put(file, digests.stamp(file), digest):
            raise RuntimeError(f"the digest of {file} was not kept")
    return place


def rounds(
    count: int, *calls: Callable[[], object], clock: Callable[[], float] = time.perf_counter
) -> list[list[float]]:
    """Seconds of each call, in turns."""
    samples: list[list[float]] = [[] for _ in calls]
    for _ in range(count):
        for call, its in zip(calls, samples, strict=True):
            begin = clock()
            call()
            its.append(clock() - begin)
    return samples


def spread(samples: Sequence[float], unit: float, name: str) -> str:
    return f"{min(samples) * unit:.3g} to {max(samples) * unit:.3g} {name}"


def known(run: str, model: Path, count: int, seed: int) -> Figure:
    from pegaflow.weights.digests import DigestCache
    from pegaflow.weights.files import weight_files
    from pegaflow.weights.identity import identify, look_at

    def stat() -> None:
        for file in model.iterdir():
            os.stat(file)

    ours, bound = rounds(count, lambda: identify(look_at(weight_files(model)), DigestCache()), stat)
    return Figure(
        run=run,
        params={"shards": SHARDS, "bytes": SHARDS * SHARD_BYTES, "seed": seed},
        figure=statistics.median(ours),
        unit="s",
        bound=BOUND_S,
        bound_name=f"{BOUND_S:g} s; stat of the files {statistics.median(bound) * 1e3:.3g} ms",
        target=1.0,
        n=count,
        spread=spread(ours, 1e3, "ms"),
    )


def hashing(place: Path, count: int, seed: int) -> Figure:
    from pegaflow.weights.digests import hash_file

    file = place / "random"
    piece = random.Random(seed).randbytes(PIECE_BYTES)
    pieces = FILE_BYTES // PIECE_BYTES
    file.write_bytes(piece * pieces)

    def memory() -> None:
        digest = hashlib.sha256()
        for _ in range(pieces):
            digest.update(piece)

    # CPU time, because other programs run ahead of the niced background thread.
    ours, bound = rounds(count, lambda: hash_file(file), memory, clock=time.process_time)
    rates = [FILE_BYTES / took / 1e6 for took in ours]
    return Figure(
        run="digest of a file in the page cache, a second of CPU",
        params={"bytes": FILE_BYTES, "seed": seed},
        figure=statistics.median(rates),
        unit="MB/s",
        bound=FILE_BYTES / statistics.median(bound) / 1e6,
        bound_name="hashlib over memory, one core",
        target=0.7,
        n=count,
        spread=spread(rates, 1, "MB/s"),
        at_least=True,
    )


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--rounds", type=int, default=9)
    options = made.parse_args()
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="pega-") as name:
        place = Path(name)
        os.environ["PEGAFLOW_CACHE_DIR"] = str(place / "cache")
        figures = [
            known(
                "weights id, snapshot of the hub's cache",
                hub_snapshot(place / "hub", chance),
                options.rounds,
                options.seed,
            ),
            known(
                "weights id, directory with kept digests",
                directory(place / "model", chance),
                options.rounds,
                options.seed,
            ),
            hashing(place, options.rounds, options.seed),
        ]
    publish(figures, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
