"""Loads out of another node's pool, past the pool of the reader's node and through it.

One node has the blocks. Two more nodes have a reader each: at one the worker reads the owner's pool
itself (`--direct-pool force`), at the other the server fetches the blocks, and the worker copies
them. Each round saves new blocks and loads them at both, in a random order, and checks every byte.
UCX runs over TCP on loopback, where a network costs processor time, so a figure of the processor
time of the reader's two processes stands beside that of the time of a load.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from perf.support.figure import Figure, note, publish
from perf.support.servers import parser
from tests.gpu.direct import TEST_VARIABLE
from tests.gpu.processes import EngineProcess
from tests.support.vllm_server import PegaServer
from tests.support.waiting import wait_until

LAYERS = 32
ARMS = {"past": "force", "through": "off"}
#: A busy machine must not turn a hit into a miss.
PATIENT = ("--peer-deadline", "1s", "--fetch-deadline", "8s")
WARM_UP = 2
#: Here both ways cost the same copies; see docs/benchmarks.md.
TARGET = 1.25


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Reader:
    """An engine at a node of its own, and what its loads cost."""

    def __init__(self, server: PegaServer, device: str, shape: dict[str, int]) -> None:
        self._server = server
        self._engine = EngineProcess(device).open(
            str(server.socket), "reader", direct_group="perf", over_tcp="lo", **shape
        )
        self._engine.call("wait_ready")
        self.seconds: list[float] = []
        self.cpu: list[float] = []

    def load(self, origins: list[int], blocks: list[int], *, past: bool) -> None:
        self._engine.call("fill", blocks, origins, 1)
        cpu = self._cpu()
        begin = time.perf_counter()
        loaded = self._engine.call("load", "perf", origins, blocks)
        self.seconds.append(time.perf_counter() - begin)
        self.cpu.append(self._cpu() - cpu)
        if loaded["blocks"] != len(origins) or loaded["error"]:
            raise AssertionError(f"not all blocks were loaded: {loaded}")
        if (loaded["direct_bytes"] > 0) != past:
            raise AssertionError(f"{loaded['direct_bytes']} bytes were read past the pool")
        if self._engine.call("wrong", blocks, origins):
            raise AssertionError("a loaded byte is wrong")

    def _cpu(self) -> float:
        return cpu_seconds(self._engine.pid) + cpu_seconds(self._server.pid)

    def close(self) -> None:
        self._engine.close()


def figure(
    name: str, past: list[float], through: list[float], options: argparse.Namespace
) -> Figure:
    mib = options.blocks * LAYERS * (options.segment_kib << 10) >> 20
    low, high = min(past) * 1e3, max(past) * 1e3
    note(f"{name}: through the pool {min(through) * 1e3:.1f} to {max(through) * 1e3:.1f} ms")
    return Figure(
        run=f"pool_reads_{name}",
        params={"mib": mib, "segment_kib": options.segment_kib, "device": options.device},
        figure=statistics.median(past) * 1e3,
        unit="ms",
        bound=statistics.median(through) * 1e3,
        bound_name="through the pool",
        target=TARGET,
        n=len(past),
        spread=f"{low:.1f} to {high:.1f} ms",
    )


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=11)
    arguments.add_argument("--blocks", type=int, default=32, help="of a load")
    arguments.add_argument("--segment-kib", type=int, default=64, help="of one layer in a block")
    arguments.add_argument("--device", default="cpu", help="cpu or cuda:0, of the readers")
    options: argparse.Namespace = arguments.parse_args()
    rng = random.Random(options.seed)
    binary = options.build_dir / "server" / "pegaflow-server"
    shape = {"layers": LAYERS, "segment_bytes": options.segment_kib << 10, "blocks": options.blocks}
    blocks = list(range(options.blocks))
    os.environ[TEST_VARIABLE] = "lo"
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pega-perf-")))
        listens = ("--peer-listen", "127.0.0.1:0", *PATIENT)
        owner = stack.enter_context(PegaServer(binary, directory / "owner", "1gb", listens))
        readers = {}
        for arm, direct_pool in ARMS.items():
            joins = ("--peers", owner.peer_listen, "--direct-pool", direct_pool, *PATIENT)
            server = stack.enter_context(PegaServer(binary, directory / arm, "1gb", joins))
            wait_until(
                lambda at=server: at.metrics().total("pegaflow_peer_lane", lane="rdma") == 1,
                "the nodes do not read over UCX",
            )
            readers[arm] = Reader(server, options.device, shape)
            stack.callback(readers[arm].close)
        writer = EngineProcess("cpu").open(str(owner.socket), "writer", **shape)
        stack.callback(writer.close)
        writer.call("wait_ready")
        for number in range(WARM_UP + options.rounds):
            origins = [number * options.blocks + block for block in blocks]
            writer.call("fill", blocks, origins)
            if writer.call("save", "perf", origins, blocks)["blocks"] != options.blocks:
                raise AssertionError("not all blocks were saved")
            for arm in rng.sample(list(ARMS), len(ARMS)):
                readers[arm].load(origins, blocks, past=arm == "past")
        past, through = (readers[arm] for arm in ("past", "through"))
        figures = [
            figure("time", past.seconds[WARM_UP:], through.seconds[WARM_UP:], options),
            figure("cpu", past.cpu[WARM_UP:], through.cpu[WARM_UP:], options),
        ]
    return 0 if publish(figures, options.json) else 1


if __name__ == "__main__":
    sys.exit(main())
