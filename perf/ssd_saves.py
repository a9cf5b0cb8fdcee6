"""The time of a reserve and of a reset where the server has a disk, beside one that has none.

Both servers have a pool of the same size. Each save has new blocks, so it evicts as many; the
server with a disk writes them ahead. The saves alternate between the servers. A save reserves its
blocks, copies them (4 MiB) and publishes them; its time includes the copies, which share the cores
with the writes. Then the namespace is reset, again and again with a save in between: the answer
waits until the disk has recorded the new epoch. Exits with 1 when a target is missed.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pegaflow.api import Cache, token_keys
from perf.support.figure import Figure, note, publish
from perf.support.servers import parser
from tests.support.prometheus import Metrics
from tests.support.vllm_server import PegaServer

BLOCKS = 256  #: Of a save.
BLOCK = 16 << 10  #: Bytes.
TOKENS = 16
POOL = "256mb"
#: Saves that fill the pool before the first that is measured.
FIRST = 80
PATIENCE_S = 60.0
TARGET = 1.05
RESET_LIMIT_S = 0.1


class Saver:
    """An engine that saves blocks which no server has."""

    def __init__(self, server: PegaServer) -> None:
        self._cache = Cache(
            [np.ones((BLOCKS, BLOCK), np.uint8)],
            factors={"model": "m"},
            endpoint=server.address,
            instance="engine",
            **dict.fromkeys(("lookup_deadline", "open_deadline", "reserve_deadline"), PATIENCE_S),
        )
        if not self._cache.wait_ready(timeout_s=PATIENCE_S):
            raise RuntimeError("the server does not serve the engine")
        self._saves = 0
        self._blocks = list(range(BLOCKS))

    def save(self) -> float:
        """Returns its seconds."""
        first = self._saves * BLOCKS * TOKENS
        self._saves += 1
        keys = token_keys(range(first, first + BLOCKS * TOKENS), TOKENS)
        began = time.perf_counter()
        saved = self._cache.save(keys, self._blocks)
        seconds = time.perf_counter() - began
        if saved.error is not None or saved.blocks != BLOCKS:
            raise RuntimeError(f"a save was not whole: {saved}")
        return seconds

    def reset(self) -> float:
        """Returns its seconds. A save is in the pool, and with a disk may be written."""
        self.save()
        began = time.perf_counter()
        if not self._cache.reset():
            raise RuntimeError("no server has confirmed a reset")
        return time.perf_counter() - began

    def close(self) -> None:
        self._cache.close()


def reserve_quantile(before: Metrics, after: Metrics, share: float) -> float:
    """Seconds from the arrival of a reserve to its answer, interpolated in the server's buckets."""

    def counts(page: Metrics) -> dict[float, float]:
        return {
            float(labels["le"]): value
            for _, labels, value in page.items("pegaflow_rpc_duration_seconds_bucket")
            if labels["method"] == "reserve"
        }

    former = counts(before)
    each = sorted((edge, count - former[edge]) for edge, count in counts(after).items())
    wanted = share * each[-1][1]
    low = below = 0.0
    for edge, count in each:
        if count >= wanted:
            return low + (edge - low) * (wanted - below) / (count - below)
        low, below = edge, count
    raise RuntimeError("no reserve was counted")


def in_turn(
    savers: list[Saver], count: int, call: Callable[[Saver], float]
) -> list[tuple[float, float]]:
    """The seconds of each call, with the disk and without; the servers alternate."""
    seconds = []
    for number in range(count):
        took = {saver: call(saver) for saver in (savers if number % 2 == 0 else savers[::-1])}
        seconds.append((took[savers[0]], took[savers[1]]))
    return seconds


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--saves", type=int, default=1000, help="for each server")
    arguments.add_argument("--resets", type=int, default=100, help="for each server")
    arguments.add_argument("--path", type=Path, default=None, help="a directory on the disk")
    options = arguments.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="pega-saves-", dir=options.path))
    disk = ["--ssd-cache-path", str(directory / "pegaflow.ssd"), "--ssd-cache-capacity", "2gb"]
    binary = options.build_dir / "server" / "pegaflow-server"
    for name in ("with", "without"):
        (directory / name).mkdir()
    with (
        PegaServer(binary, directory / "with", POOL, disk) as tiered,
        PegaServer(binary, directory / "without", POOL) as plain,
    ):
        savers = [Saver(tiered), Saver(plain)]
        for _ in range(FIRST):
            for saver in savers:
                saver.save()
        before = [server.metrics() for server in (tiered, plain)]
        seconds = in_turn(savers, options.saves, Saver.save)
        after = [server.metrics() for server in (tiered, plain)]
        written = after[0].total("pegaflow_ssd_write_bytes_total")
        resets = np.array(in_turn(savers, options.resets, Saver.reset)) * 1e3
        for saver in savers:
            saver.close()
    shutil.rmtree(directory)
    reserves = [reserve_quantile(*pages, 0.99) for pages in zip(before, after, strict=True)]
    figures = [
        Figure(
            run="ssd_saves, reserve at the server, p99",
            params={"blocks": BLOCKS, "block_bytes": BLOCK, "seed": options.seed},
            figure=reserves[0] * 1e6,
            unit="us",
            bound=reserves[1] * 1e6,
            bound_name="without a disk",
            target=TARGET,
            n=options.saves,
            spread="interpolated in buckets",
        ),
        Figure(
            run="ssd_saves, reset, median",
            params={"seed": options.seed},
            figure=float(np.median(resets[:, 0])),
            unit="ms",
            bound=RESET_LIMIT_S * 1e3,
            bound_name="the limit",
            target=1.0,
            n=options.resets,
            spread=f"p10 {np.percentile(resets[:, 0], 10):.2f}, p90 "
            f"{np.percentile(resets[:, 0], 90):.2f} ms; without a disk "
            f"{np.median(resets[:, 1]):.2f} ms",
        ),
    ]
    samples = np.array(seconds) * 1e3
    for name, percent in (("median", 50), ("p99", 99)):
        on, off = np.percentile(samples, percent, axis=0)
        note(f"whole saves, {name}: {on:.2f} ms beside {off:.2f}; {written / 1e6:.0f} MB written")
    return 0 if publish(figures, options.json) else 1


if __name__ == "__main__":
    raise SystemExit(main())
