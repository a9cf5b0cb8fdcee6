"""The hit rate of the requests after the end of a server, beside a server that goes on.

Both servers get the same requests. Then one of them ends: by SIGTERM, by SIGKILL, or by SIGKILL and
a power cut, in which each sector of the disk that was written and not flushed is lost with a
probability of a half; and the next process at the same address and with the same disk, or with the
kept pool, serves the following requests. Prompts have a popularity by Zipf's law, and each tenth
request has a prompt of its own. Blocks have 16 KiB, and those of the popular prompts are together
three times as large as the pool. Exits with 1 when a target is missed, or when a block has wrong
bytes.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import random
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pegaflow.api import Cache, token_keys
from perf.support.figure import Figure, note, publish
from perf.support.power_cut import cut
from perf.support.servers import parser
from tests.support.vllm_server import PegaServer

PROMPTS = 240
NEW = 0.1  #: The share of requests whose prompt never recurs.
BLOCKS = 16  #: Of each prompt.
BLOCK = 16 << 10  #: Bytes.
TOKENS = 16
POOL = "20mb"
DISK = "128mb"
PATIENCE_S = 60.0


@dataclasses.dataclass(frozen=True)
class End:
    """One way in which a server ends, and the target of the hit rate after it."""

    name: str
    has_disk: bool
    target: float
    is_killed: bool = True
    is_power_cut: bool = False


ENDS = (
    End("SIGTERM, disk", has_disk=True, target=0.95, is_killed=False),
    End("SIGKILL, disk", has_disk=True, target=0.95),
    End("power cut, disk", has_disk=True, target=0.95, is_power_cut=True),
    End("SIGKILL, kept pool", has_disk=False, target=0.999),
)


class Engine:
    """Loads what the cache has of a prompt, compares it, and saves the rest."""

    def __init__(self, server: PegaServer) -> None:
        self.wrong = 0
        self._memory = np.zeros((BLOCKS, BLOCK), np.uint8)
        self._cache = Cache(
            [self._memory],
            factors={"model": "m"},
            endpoint=server.address,
            instance="engine",
            load_patience=PATIENCE_S,
            **dict.fromkeys(("lookup_deadline", "open_deadline", "reserve_deadline"), PATIENCE_S),
        )
        self._blocks = list(range(BLOCKS))

    def wait_ready(self) -> None:
        if not self._cache.wait_ready(timeout_s=PATIENCE_S):
            raise RuntimeError("the server does not serve the engine")

    def close(self) -> None:
        self._cache.close()

    def request(self, number: int) -> int:
        """Returns the blocks that were loaded."""
        tokens = BLOCKS * TOKENS
        keys = token_keys(range(number * tokens, (number + 1) * tokens), TOKENS)
        self._memory[:] = 0
        found = self._cache.load(keys, self._blocks).blocks
        for index, key in enumerate(keys):
            page = np.resize(np.frombuffer(hashlib.sha256(key).digest(), np.uint8), BLOCK)
            if index < found:
                self.wrong += not np.array_equal(self._memory[index], page)
            else:
                self._memory[index] = page
        if found < BLOCKS:
            self._cache.save(keys[found:], self._blocks[found:])
        return found


def requests(chance: random.Random, count: int) -> list[int]:
    """Numbers of prompts; those from PROMPTS on never recur."""
    weights = [1 / (rank + 1) ** 0.8 for rank in range(PROMPTS)]
    drawn = chance.choices(range(PROMPTS), weights, k=count)
    return [
        chance.randrange(PROMPTS, 1 << 40) if chance.random() < NEW else number for number in drawn
    ]


def rate(engine: Engine, prompts: Sequence[int]) -> float:
    return sum(engine.request(number) for number in prompts) / (BLOCKS * len(prompts))


@dataclasses.dataclass(frozen=True)
class Run:
    options: argparse.Namespace
    warm: Sequence[int]
    next: Sequence[int]
    chance: random.Random

    def hit_rate(self, has_disk: bool, end: End | None) -> float:
        """That of the next requests, after this end or none."""
        directory = Path(tempfile.mkdtemp(prefix="pega-restart-"))
        disk, log = directory / "pegaflow.ssd", directory / "unflushed"
        arguments = ["--keep", "yes"]
        if has_disk:
            arguments = ["--ssd-cache-path", str(disk), "--ssd-cache-capacity", DISK]
            arguments += ["--ssd-segment-size", "4mb", "--ssd-io", "threads"]
            arguments += ["--ssd-write-ahead", self.options.write_ahead]
        env = {}
        if end is not None and end.is_power_cut:
            library = self.options.build_dir / "tests" / "support" / "libunflushed_writes.so"
            env = {"LD_PRELOAD": str(library), "PEGA_TEST_UNFLUSHED": str(log)}
        binary = self.options.build_dir / "server" / "pegaflow-server"
        server = PegaServer(binary, directory, POOL, arguments, env)
        with server:
            engine = Engine(server)
            try:
                engine.wait_ready()
                rate(engine, self.warm)
                if end is not None:
                    self._end(server, end, disk, log)
                    engine.wait_ready()
                found = rate(engine, self.next)
            finally:
                engine.close()
            if engine.wrong:
                raise RuntimeError(f"{engine.wrong} blocks have wrong bytes")
        if not has_disk:
            release(server)
        shutil.rmtree(directory)
        return found

    def _end(self, server: PegaServer, end: End, disk: Path, log: Path) -> None:
        if not end.is_killed:
            server.stop()
        else:
            server.kill()
        if end.is_power_cut:
            unflushed, lost = cut(disk, log, self.chance)
            note(f"power cut: {lost} of {unflushed} unflushed sectors of 4 KiB are lost")
        server.start()


def release(server: PegaServer) -> None:
    """Ends the keeper."""
    command = [str(server.binary), "--release", "--addr", server.address]
    subprocess.run(command, check=True, capture_output=True)


def measure(options: argparse.Namespace) -> list[Figure]:
    ends = [end for end in ENDS if options.only in end.name]
    ratios: dict[End, list[tuple[float, float]]] = {end: [] for end in ends}
    for number in range(options.rounds):
        chance = random.Random(options.seed + number)
        run = Run(
            options, requests(chance, options.warm), requests(chance, options.requests), chance
        )
        on = {has_disk: run.hit_rate(has_disk, None) for has_disk in {e.has_disk for e in ends}}
        for end in ends:
            ratios[end].append((run.hit_rate(end.has_disk, end), on[end.has_disk]))
            after, before = ratios[end][-1]
            note(f"round {number}: {end.name}: {after:.4f} beside {before:.4f}")
    figures = []
    for end, found in ratios.items():
        each = [after / before for after, before in found]
        figures.append(
            Figure(
                run="restarts",
                params={"end": end.name, "requests": options.requests, "seed": options.seed},
                figure=statistics.median(after for after, _ in found),
                unit="hit rate",
                bound=statistics.median(before for _, before in found),
                bound_name="no end",
                target=end.target,
                n=len(found),
                spread=f"ratios {min(each):.4f} to {max(each):.4f}",
                at_least=True,
            )
        )
    return figures


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--warm", type=int, default=1000, help="requests before the end")
    arguments.add_argument("--requests", type=int, default=1000, help="requests after it")
    arguments.add_argument("--only", default="", help="a part of the names of the ends to measure")
    arguments.add_argument("--write-ahead", default="10mb", help="--ssd-write-ahead of the servers")
    options = arguments.parse_args()
    return 0 if publish(measure(options), options.json) else 1


if __name__ == "__main__":
    raise SystemExit(main())
