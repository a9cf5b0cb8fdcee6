"""The time in which a node loads blocks that only the disk of another node has.

Two servers on one machine are connected over TCP. In each round an engine of the owner saves 64 new
blocks of 256 KiB, and an engine of the other node loads them: once from the owner's pool, which is
the bound, and once from its disk, after the pool was emptied. The order alternates, and every byte
is compared.
"""

from __future__ import annotations

import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from demo.stage import wait_until
from pegaflow.api import Cache
from perf.support.figure import Figure, publish
from perf.support.servers import parser
from tests.support.vllm_server import PegaServer, free_port

BLOCKS = 64
BLOCK = 256 << 10  #: Bytes.
POOL = "512mb"
PATIENCE_S = 60.0
#: For comparison: a block crosses the disk and the pool of its owner before the network.
TARGET = 0.0


class Engine:
    """The blocks of one engine, and their cache."""

    def __init__(self, server: PegaServer) -> None:
        self.memory = np.zeros((BLOCKS, BLOCK), np.uint8)
        self.blocks = list(range(BLOCKS))
        self.cache = Cache(
            [self.memory],
            factors={"model": "m"},
            endpoint=server.address,
            instance="engine",
            load_patience=PATIENCE_S,
            **dict.fromkeys(("lookup_deadline", "open_deadline", "reserve_deadline"), PATIENCE_S),
        )
        if not self.cache.wait_ready(timeout_s=PATIENCE_S):
            raise RuntimeError("the server does not serve the engine")


class Nodes:
    """An owner with a disk, and another node."""

    def __init__(self, owner: PegaServer, reader: PegaServer, chance: random.Random) -> None:
        self._owner = owner
        self._chance = chance
        self.saver, self.loader = Engine(owner), Engine(reader)
        wait_until("the nodes are connected", lambda: self._ready(reader), PATIENCE_S)

    @staticmethod
    def _ready(server: PegaServer) -> bool:
        return server.metrics().total("pegaflow_peer_ready") == 1

    def close(self) -> None:
        for engine in (self.saver, self.loader):
            engine.cache.close()

    def _total(self, name: str) -> int:
        return int(self._owner.metrics().total(f"pegaflow_ssd_{name}_blocks_total"))

    def load(self, from_disk: bool) -> float:
        """Seconds of the load of new blocks."""
        keys = [self._chance.randbytes(16) for _ in range(BLOCKS)]
        content = np.frombuffer(self._chance.randbytes(BLOCKS * BLOCK), np.uint8)
        self.saver.memory[:] = content.reshape(BLOCKS, BLOCK)
        written, staged = self._total("written"), self._total("staged")
        if self.saver.cache.save(keys, self.saver.blocks).error is not None:
            raise RuntimeError("a save failed")
        wait_until("the disk is written", lambda: self._total("written") >= written + BLOCKS, 60)
        if from_disk:
            wait_until("the pool is empty", self._empty, PATIENCE_S)
        self.loader.memory[:] = 0
        began = time.perf_counter()
        loaded = self.loader.cache.load(keys, self.loader.blocks)
        seconds = time.perf_counter() - began
        if loaded.blocks != BLOCKS or not np.array_equal(self.loader.memory, self.saver.memory):
            raise RuntimeError(f"a load was not whole and right: {loaded}")
        if self._total("staged") - staged != BLOCKS * from_disk:
            raise RuntimeError("the blocks came from elsewhere")
        return seconds

    def _empty(self) -> bool:
        status, report = self._owner.post("/cache/memory/cleanup")
        return status == 200 and report["still_referenced_blocks"] == 0


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=20)
    arguments.add_argument("--path", type=Path, default=None, help="a directory on the disk")
    options = arguments.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="pega-staged-", dir=options.path))
    at = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    binary = options.build_dir / "server" / "pegaflow-server"
    disk = ["--ssd-cache-path", str(directory / "pegaflow.ssd"), "--ssd-cache-capacity", "1gb"]
    disk += ["--ssd-write-ahead", POOL]
    servers = []
    for name, address, more in (("owner", at[0], disk), ("reader", at[1], [])):
        (directory / name).mkdir()
        peers = ["--peers", ",".join(at), "--peer-listen", address]
        servers.append(PegaServer(binary, directory / name, POOL, [*peers, *more]))
    seconds: dict[bool, list[float]] = {True: [], False: []}
    with servers[0], servers[1]:
        nodes = Nodes(servers[0], servers[1], random.Random(options.seed))
        for number in range(options.rounds):
            for from_disk in (number % 2 == 0, number % 2 == 1):
                seconds[from_disk].append(nodes.load(from_disk))
        nodes.close()
    shutil.rmtree(directory)
    ratios = [pool / disk for pool, disk in zip(seconds[False], seconds[True], strict=True)]
    rate = {key: BLOCKS * BLOCK / 1e6 / statistics.median(found) for key, found in seconds.items()}
    figure = Figure(
        run="ssd_staged",
        params={"blocks": BLOCKS, "block_bytes": BLOCK, "seed": options.seed},
        figure=rate[True],
        unit="MB/s",
        bound=rate[False],
        bound_name="from the owner's pool",
        target=TARGET,
        n=options.rounds,
        spread=f"ratios {min(ratios):.2f} to {max(ratios):.2f}",
        at_least=True,
    )
    return 0 if publish([figure], options.json) else 1


if __name__ == "__main__":
    raise SystemExit(main())
