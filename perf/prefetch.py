"""A prefetch beside a remote and a local hit, over a link of limited rate.

A far server has a prompt's blocks. A request for it arrives at the near node; parsing and queueing
take some time, and then the engine loads. With a prefetch the blocks are pulled meanwhile, and the
load joins what is still in flight. Each round runs all arms in a random order, with prompts of
their own, and checks every loaded byte.

The targets: when parsing and queueing take longer than the pull, a load after a prefetch takes at
most 1.1 times a local one; otherwise prefetch and load take no longer than the pull and a local
load after the arrival.

Needs root, for the namespaces.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from pegaflow.api import Cache
from perf.support.figure import Figure, note, publish
from perf.support.limited_link import servers_on_link
from perf.support.servers import parser
from perf.support.veth import NoNamespaces
from tests.support.vllm_server import PegaServer

LAYERS = 4
LAYER_BYTES = 128 << 10
BLOCK_BYTES = LAYERS * LAYER_BYTES
ARMS = ("local", "pull", "prefetch")
WARM_UP = 3
#: A busy machine must not turn a hit into a miss.
PATIENT = ("--peer-deadline", "1s", "--fetch-deadline", "8s")


@dataclasses.dataclass(frozen=True)
class Cell:
    blocks: int
    gigabytes_per_second: float
    wait_in_pulls: float  #: Parsing and queueing, as a multiple of the time of a pull.
    wait_s: float = 0.0  #: The same in seconds.


class Engine:
    """An engine at one server, whose block ``i`` has the keys and bytes of a prompt's block."""

    def __init__(self, server: PegaServer, blocks: int) -> None:
        self.kv = [np.zeros((blocks, LAYER_BYTES), np.uint8) for _ in range(LAYERS)]
        self.cache = Cache(
            self.kv, block_axis=0, factors={"perf": "prefetch"}, endpoint=server.address
        )
        if not self.cache.wait_ready(30):
            raise TimeoutError(f"{server.address} does not serve the engine")

    def fill(self, seed: int, count: int) -> None:
        for layer, array in enumerate(self.kv):
            for block in range(count):
                array[block] = _byte(seed, layer, block)

    def check(self, seed: int, count: int) -> None:
        for layer, array in enumerate(self.kv):
            for block in range(count):
                if not (array[block] == _byte(seed, layer, block)).all():
                    raise AssertionError(f"block {block} of prompt {seed} is wrong")


def _byte(seed: int, layer: int, block: int) -> int:
    return (seed * 31 + layer * 7 + block) % 251 + 1


def _keys(seed: int, count: int) -> list[bytes]:
    return [seed.to_bytes(16, "big") + block.to_bytes(16, "big") for block in range(count)]


class Bench:
    def __init__(self, far: Engine, near: Engine, server: PegaServer) -> None:
        self._far, self._near, self._server = far, near, server
        self._space = server.get_by_socket("/instances")["instances"][0]["namespace"]
        self._sources = [
            {"node": link["node"], "blocks": 1}
            for link in server.get_by_socket("/links")["links"]
            if link["state"] == "ready"
        ]
        self._seed = int.from_bytes(os.urandom(4), "big")

    def run(self, arm: str, cell: Cell) -> float:
        """Seconds from the end of parsing and queueing to the last loaded byte."""
        self._seed += 1
        seed, keys = self._seed, _keys(self._seed, cell.blocks)
        ids = list(range(cell.blocks))
        owner = self._near if arm == "local" else self._far
        owner.fill(seed, cell.blocks)
        saved = owner.cache.save(keys, ids)
        if saved.blocks != cell.blocks:
            raise AssertionError(f"{saved.blocks} of {cell.blocks} blocks were saved")
        self._near.fill(0, cell.blocks)
        arrived = time.perf_counter()
        if arm == "prefetch":
            body = {
                "namespace": self._space,
                "id": f"perf-{seed}",
                "keys": b"".join(keys).hex(),
                "sources": self._sources,
            }
            status, _ = self._server.post("/prefetch", body)
            if status != 202:
                raise AssertionError(f"POST /prefetch: {status}")
        time.sleep(max(0.0, arrived + cell.wait_s - time.perf_counter()))
        began = time.perf_counter()
        loaded = self._near.cache.load(keys, ids)
        took = time.perf_counter() - began
        if loaded.blocks != cell.blocks:
            raise AssertionError(f"{arm}: {loaded.blocks} of {cell.blocks} blocks were loaded")
        self._near.check(seed, cell.blocks)
        return took


def measure(bench: Bench, cell: Cell, rounds: int, rng: random.Random) -> list[Figure]:
    times: dict[str, list[float]] = {arm: [] for arm in ARMS}
    # The rate of the link is learned, by the server and by this program.
    pulls = [bench.run("pull", cell) for _ in range(WARM_UP)]
    cell = dataclasses.replace(cell, wait_s=cell.wait_in_pulls * statistics.median(pulls))
    for arm in ARMS:
        bench.run(arm, cell)
    for _ in range(rounds):
        for arm in rng.sample(ARMS, len(ARMS)):
            times[arm].append(bench.run(arm, cell))
    median = {arm: statistics.median(values) for arm, values in times.items()}
    note(
        f"{cell}: "
        + ", ".join(
            f"{arm} {median[arm] * 1e3:.2f} ms ({min(v) * 1e3:.2f} to {max(v) * 1e3:.2f})"
            for arm, v in times.items()
        )
    )
    hidden = cell.wait_in_pulls > 1
    # Otherwise from the arrival on.
    figure = median["prefetch"] + (0 if hidden else cell.wait_s)
    bound = median["local"] + (0 if hidden else median["pull"])
    spread = f"{min(times['prefetch']) * 1e3:.2f} to {max(times['prefetch']) * 1e3:.2f} ms"
    return [
        Figure(
            run="prefetch",
            params=dataclasses.asdict(cell),
            figure=figure * 1e3,
            unit="ms",
            bound=bound * 1e3,
            bound_name="local load" if hidden else "pull and local load",
            target=1.1 if hidden else 1.0,
            n=rounds,
            spread=spread,
        )
    ]


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=9)
    arguments.add_argument("--blocks", type=int, default=64, help="of 512 KiB")
    arguments.add_argument("--gbps", type=float, nargs="*", default=[0.1], help="GB/s of the link")
    arguments.add_argument("--waits", type=float, nargs="*", default=[0.0, 0.5, 1.5])
    options: argparse.Namespace = arguments.parse_args()
    rng = random.Random(options.seed)
    binary = options.build_dir / "server" / "pegaflow-server"
    directory = Path(tempfile.mkdtemp(prefix="pega-perf-"))
    figures = []
    try:
        with servers_on_link(binary, directory, "1gb", ["2gb"], PATIENT) as (link, far, (near,)):
            engines = [Engine(server, options.blocks) for server in (far, near)]
            bench = Bench(*engines, near)
            for rate in options.gbps:
                link.limit(rate)
                for wait in options.waits:
                    cell = Cell(options.blocks, rate, wait)
                    figures += measure(bench, cell, options.rounds, rng)
            for engine in engines:
                engine.cache.close()
    except NoNamespaces as error:
        note(f"skipped: {error}")
        return 77
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return 0 if publish(figures, options.json) else 1


if __name__ == "__main__":
    sys.exit(main())
