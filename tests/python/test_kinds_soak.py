"""Two engines of several kinds of blocks ask a small server for long, and are killed meanwhile.

Eight clients, engine caches that hold a few requests, aborts, resets and preemptions; every ten
seconds an engine or the server is killed. Each page that is restored is compared as a whole.

PEGA_KINDS_SOAK_SECONDS is the length for each shape, PEGA_TEST_SEED repeats the draws, and
PEGA_KINDS_SOAK_REPORT names a file that gets a line for each shape.
"""

import collections
import dataclasses
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest

from tests.python.soak_clients import SoakOptions, context, serve
from tests.python.test_connector_faults import wait_for_zero
from tests.support.vllm_server import PegaServer

#: `./dev soak` sets 600.
SECONDS = float(os.environ.get("PEGA_KINDS_SOAK_SECONDS", "12"))
SHAPES = ["gemma3", "gpt-oss", "mistral-window", "qwen3-next"]
#: A process has warmed up so long after its first request; shorter runs have no sizes.
WARM_S = 20.0
#: Growth of a process that lives on, for the allocator's noise.
MOST_GROWTH_MIB = 8.0
MOST_DESCRIPTORS = 4


@dataclasses.dataclass
class Size:
    """Private memory in MiB, and open descriptors."""

    memory: float
    descriptors: int

    @classmethod
    def of(cls, pid: int) -> "Size":
        status = Path(f"/proc/{pid}/status").read_text().split()
        memory = int(status[status.index("RssAnon:") + 1]) / 1024
        return cls(memory, len(os.listdir(f"/proc/{pid}/fd")))


class Sizes:
    """The sizes of one process, from its warm-up, which begins with the first look, to the last."""

    def __init__(self, pid: int) -> None:
        self.pid, self._warm_at = pid, 0.0
        self.first: Size | None = None
        self.last: Size | None = None

    def look(self) -> None:
        self._warm_at = self._warm_at or time.monotonic() + WARM_S
        if time.monotonic() > self._warm_at:
            self.last = Size.of(self.pid)
            self.first = self.first or self.last

    def __str__(self) -> str:
        if self.first is None or self.last is None:
            return "too short for sizes"
        return (
            f"{self.first.memory:.1f} -> {self.last.memory:.1f} MiB, "
            f"{self.first.descriptors} -> {self.last.descriptors} descriptors"
        )

    def check(self) -> None:
        if self.first is None or self.last is None:
            return
        assert self.last.memory < 1.1 * self.first.memory + MOST_GROWTH_MIB, str(self)
        assert self.last.descriptors <= self.first.descriptors + MOST_DESCRIPTORS, str(self)


class Engine:
    """One engine process after the other."""

    def __init__(self, options: SoakOptions) -> None:
        self.options = options
        self.ended: collections.Counter[str] = collections.Counter()  # of former processes
        self.counts: dict[str, float] = {}
        self.wrong: list[str] = []
        self._start()

    def _start(self) -> None:
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, self.options), daemon=True)
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.sizes = Sizes(self._process.pid)
        self.has_asked = False
        self._is_over = False

    def look(self) -> None:
        """Takes what the process has reported."""
        self._receive()
        assert not self._is_over, f"engine {self.options.number} has ended"
        if self.has_asked:  # before, a busy machine may take a minute to import vLLM
            self.sizes.look()

    def _receive(self) -> None:
        while not self._is_over and self._pipe.poll():
            try:
                self.counts, wrong, *ended = self._pipe.recv()
            except EOFError:
                self._is_over = True
                return
            self.wrong += [one for one in wrong if one not in self.wrong]
            self.has_asked = True
            assert not ended, f"engine {self.options.number}: {ended[0]}"

    def kill(self) -> None:
        """Another process takes its place."""
        self.look()
        self.close()
        self.ended.update(self.counts)
        self.counts = {}
        self.options = dataclasses.replace(self.options, lives=self.options.lives + 1)
        self._start()

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def finish(self) -> None:
        """Waits for the answers of all requests, and for the end of the process."""
        self.look()
        self._pipe.send(None)
        deadline = time.monotonic() + 150
        while not self._is_over:
            assert time.monotonic() < deadline, f"engine {self.options.number} does not end"
            self._pipe.poll(1.0)
            self._receive()
        self._process.join()
        assert self._process.exitcode == 0
        self.ended.update(self.counts)


class Soak:
    """The run of one shape. The server is killed only in its first two thirds, and one engine
    never, so that both have sizes over a longer time.
    """

    def __init__(self, server: PegaServer, shape: str, seed: int, planted: str = "") -> None:
        self.server, self.shape, self.seed = server, shape, seed
        self.draw = random.Random(f"{seed}/{shape}")
        self.killed: collections.Counter[str] = collections.Counter()
        self.engines = [
            Engine(SoakOptions(shape, server.address, seed, number, 0, planted=planted))
            for number in range(2)
        ]
        self.server_sizes = Sizes(server.pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        for engine in self.engines:
            engine.close()

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        while not all(engine.has_asked for engine in self.engines):
            self._look()
        begin = time.monotonic()
        pause = min(10.0, seconds / 4)
        next_kill = begin + pause
        while time.monotonic() < begin + seconds and not until():
            self._look()
            if time.monotonic() > next_kill:
                next_kill = time.monotonic() + pause * self.draw.uniform(0.7, 1.3)
                self._kill(may_be_the_server=time.monotonic() < begin + seconds * 2 / 3)

    def _look(self) -> None:
        for engine in self.engines:
            engine.look()
        self.server_sizes.look()
        time.sleep(0.1)  # between two readings of counts; nothing waits for it

    def _kill(self, may_be_the_server: bool) -> None:
        # Both, also in a short run.
        is_server = may_be_the_server and self.killed["engines"] > self.killed["servers"]
        if is_server or (may_be_the_server and self.draw.random() < 0.3):
            self.killed["servers"] += 1
            self.server.kill()
            time.sleep(self.draw.choice([0.0, 0.5, 2.0]))  # an outage; nothing waits for it
            self.server.start()
            self.server_sizes = Sizes(self.server.pid)
        else:
            self.killed["engines"] += 1
            self.engines[0].kill()

    def finish(self) -> None:
        for engine in self.engines:
            engine.finish()
        wait_for_zero(self.server, "pegaflow_claims", "pegaflow_pins")
        self.server_sizes.look()

    @property
    def counts(self) -> collections.Counter[str]:
        total: collections.Counter[str] = collections.Counter()
        for engine in self.engines:
            total.update(engine.ended)
        return total

    @property
    def wrong(self) -> list[str]:
        return [text for engine in self.engines for text in engine.wrong]

    def report(self, seconds: float) -> str:
        counts = self.counts
        names = ("answers", "restored pages", "wrong pages", "wrong reads", "wrong answers")
        more = ("failed requests", "loads", "failed loads", "aborted", "resets", "preemptions")
        numbers = ", ".join(f"{counts[name]:,.0f} {name}" for name in (*names, *more))
        return (
            f"{self.shape}, seed {self.seed}, {seconds:.0f} s: {numbers}; killed: "
            f"{self.killed['engines']} engines, {self.killed['servers']} servers; "
            f"server {self.server_sizes}; engine {self.engines[1].sizes}"
        )


def note(line: str) -> None:
    print(line)
    if path := os.environ.get("PEGA_KINDS_SOAK_REPORT"):
        with open(path, "a") as file:
            file.write(line + "\n")


@pytest.mark.timeout(SECONDS + 400)
@pytest.mark.pool_size("16mb")
@pytest.mark.parametrize("shape", SHAPES)
def test_every_restored_page_is_right_and_no_request_fails(own_pega, seed, shape):
    with Soak(own_pega, shape, seed) as soak:
        soak.run(SECONDS)
        soak.finish()
    note(soak.report(SECONDS))
    counts: Any = soak.counts
    assert not soak.wrong, soak.wrong
    for name in ("wrong pages", "wrong reads", "wrong answers", "failed requests"):
        assert counts[name] == 0, name
    assert counts["answers"] > 0
    assert counts["restored pages"] > 0
    assert soak.killed["engines"] and soak.killed["servers"]
    soak.server_sizes.check()
    soak.engines[1].sizes.check()


@pytest.mark.pool_size("16mb")
@pytest.mark.parametrize(("jobs", "mistakes"), [("saves", "wrong pages"), ("loads", "wrong reads")])
def test_blocks_that_are_swapped_are_found(own_pega, seed, jobs, mistakes):
    with Soak(own_pega, "gemma3", seed, planted=jobs) as soak:
        soak.run(60, until=lambda: bool(soak.wrong))
        soak.finish()
    print(soak.wrong)
    assert soak.counts[mistakes] > 0
