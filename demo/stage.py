"""The stage of all claims: the two servers, the prompts, and the answers so far."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from demo.client import Answer, complete, post
from demo.diagnosis import describe
from demo.expectations import full_blocks
from demo.progress import Progress
from demo.prompts import BLOCK_TOKENS, Prompt, PromptMaker
from demo.report import PromptRow
from tests.support.child_process import ChildProcess
from tests.support.prometheus import Metrics
from tests.support.vllm_server import (
    ModelShape,
    PegaServer,
    VllmOptions,
    VllmServer,
    ensure_model,
)

OUTPUT_TOKENS = 32

#: Room for every block that the demo stores, so that none is evicted: about 1,300 x 1.5 MiB.
POOL_SIZE = "3gb"
#: The same for the small model: about 600 x 128 KiB.
SMALL_POOL_SIZE = "256mb"

#: For several ranks, which share the machine's few cores.
SMALL = ModelShape(layers=4, hidden=256, heads=8, kv_heads=4, head_dim=32)

#: The connector's deadlines are for engines that do not compute on the server's cores. Here vLLM
#: takes every core for each step, and a server that wakes up 20 ms late does not hang.
PATIENT = {
    "pegaflow.claim_limit_ms": 500,
    "pegaflow.lookup_deadline_ms": 1000,
    "pegaflow.open_deadline_ms": 1000,
    "pegaflow.reserve_deadline_ms": 1000,
    "pegaflow.load_patience_ms": 2000,
}

#: For small models, which compute a prompt sooner than a busy machine answers, and where no request
#: is repeated.
LONG_DEADLINES = dict.fromkeys(PATIENT, 5000)

#: The limit of repetitions for a request that nevertheless missed one of the connector's deadlines:
#: an engine never waits for the cache, so on a busy machine it sometimes computes instead. The
#: report has the number of repetitions.
MAX_ASKED_AGAIN = 3

_POLL_S = 0.02


class Late(RuntimeError):
    """An expected event did not happen in time."""


def wait_until(
    what: str, condition: Callable[[], bool], timeout_s: float, poll_s: float = _POLL_S
) -> None:
    """Returns as soon as the condition holds.

    Raises:
        Late: it did not within ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise Late(f"after {timeout_s:.0f} s still not: {what}")
        time.sleep(poll_s)  # the polling interval, not a wait for a result


@dataclasses.dataclass(frozen=True)
class Counters:
    """The counters of engine and server; the difference of two belongs to one request."""

    external_hit_tokens: int
    local_hit_tokens: int
    loaded_bytes: int
    loaded_own_blocks: int
    loaded_foreign_blocks: int
    missed_deadlines: int

    def __sub__(self, earlier: Counters) -> Counters:
        return Counters(
            *(
                getattr(self, field.name) - getattr(earlier, field.name)
                for field in dataclasses.fields(self)
            )
        )

    @property
    def loaded_blocks(self) -> int:
        return self.loaded_own_blocks + self.loaded_foreign_blocks


def forget_local(vllm: VllmServer, maker: PromptMaker) -> None:
    """Empties vLLM's own prefix cache, and only that."""

    def is_empty() -> bool:
        return post(vllm.http, "/reset_prefix_cache")[1] == {"success": True}

    # vLLM rejects it while blocks are in use, which includes those that wait for their save.
    tries = 6
    for number in range(tries):
        try:
            wait_until("POST /reset_prefix_cache returns true", is_empty, 5)
            return
        except Late:
            if number + 1 == tries:
                raise
            # An idle vLLM steps for 10 s to receive the reports of its saves; on a very busy
            # machine these take longer, and arrive with the next request. This one is too short to
            # be stored.
            complete(vllm.http, maker.tokens(8), max_tokens=1)


def kill_in_a_load(
    pega: PegaServer, vllm: VllmServer, pins: Callable[[], int], all_done: Callable[[], bool]
) -> int:
    """Kills pegaflow-server as soon as a load holds pins; returns their number.

    The engine is stopped meanwhile: a load lasts milliseconds, and would end before the kill. If
    all requests are done before a load was seen, the server is killed all the same.
    """
    held = 0
    while not held and not all_done():
        if pins():
            os.killpg(vllm.pid, signal.SIGSTOP)
            try:
                held = pins()
                if held:
                    pega.kill()
            finally:
                os.killpg(vllm.pid, signal.SIGCONT)
    if not held:
        pega.kill()
    return held


class Stage:
    """One run's servers and results. Belongs to the main thread; ask() is thread-safe."""

    def __init__(
        self, build_dir: Path, logs: Path, sockets: Path, seed: int, *, tp: int = 1
    ) -> None:
        """
        Args:
            logs: Gets a directory for each server.
            sockets: An empty directory with a short path.
            tp: Tensor-parallel ranks of each vLLM; with several the model is small.
        """
        self.tp = tp
        self.shape = SMALL if tp > 1 else ModelShape()
        model = ensure_model(self.shape)
        self.progress = Progress()
        self.maker = PromptMaker(seed, self.shape.vocabulary)
        self.prompts = self.maker.prompt_set()
        self.rows = {prompt.name: PromptRow(prompt.name, len(prompt)) for prompt in self.prompts}
        self.baseline: dict[str, Answer] = {}
        self.local_hits: dict[str, Answer] = {}
        self.figures: dict[str, Any] = {}
        self.asked_again = 0
        self.diagnosis = ""
        pool_size = SMALL_POOL_SIZE if tp > 1 else POOL_SIZE
        self.pega = PegaServer(build_dir / "server" / "pegaflow-server", sockets, pool_size)
        self.pega.log_file = logs / "pegaflow-server.log"
        several = ("--tensor-parallel-size", str(tp), "--distributed-executor-backend", "mp")
        # Each rank spins on its threads while it waits for the others: 60 times slower otherwise.
        env = {"OMP_NUM_THREADS": "1"} if tp > 1 else {}
        plain = VllmOptions(model, arguments=several if tp > 1 else ())
        self.vllm = VllmServer(plain, sockets / "plain", env)
        self.vllm.log_file = logs / "vllm-without-connector.log"
        self._plain = self.vllm
        # With several ranks a page of one is overwritten, which only checksums detect.
        verify = {"pegaflow.verify": "all"} if tp > 1 else {}
        options = dataclasses.replace(
            plain,
            connector=self.pega.address,
            extra_config=PATIENT | verify,
            python_path=[build_dir / "python"],
        )
        self._connected = VllmServer(options, sockets / "pega", env)
        self._connected.log_file = logs / "vllm-with-connector.log"
        smaller = dataclasses.replace(options, kv_cache_bytes=1 << 30)
        self._second = VllmServer(smaller, sockets / "second")
        self._second.log_file = logs / "vllm-second.log"

    # -- servers

    @contextlib.contextmanager
    def plain_vllm(self) -> Iterator[None]:
        """A vLLM without the connector."""
        self.vllm = self._plain
        try:
            self.start(self.vllm, "a vLLM without the connector starts")
            yield
        except Exception:
            self.diagnose()
            raise
        finally:
            self.vllm.stop()

    @contextlib.contextmanager
    def connected_servers(self) -> Iterator[None]:
        """A pegaflow-server, and a vLLM with the connector."""
        self.vllm = self._connected
        try:
            self.start(self.pega, "pegaflow-server starts")
            self.start(self.vllm, "a vLLM with the connector starts")
            yield
        except Exception:
            self.diagnose()
            raise
        finally:
            self.vllm.stop()
            self.pega.stop()

    @contextlib.contextmanager
    def second_vllm(self) -> Iterator[None]:
        """Another vLLM with the connector beside the first; it receives the requests meanwhile."""
        first, self.vllm = self.vllm, self._second
        try:
            self.start(self.vllm, "a second vLLM starts beside the first")
            yield
        except Exception:
            self.diagnose()
            raise
        finally:
            self.vllm.stop()
            self.vllm = first

    def start(self, child: ChildProcess, text: str) -> float:
        """Starts a server and prints a line; returns the seconds until it was ready."""
        begin = time.monotonic()
        self.progress.say(text)
        with self.progress.step(text):
            child.start()
        seconds = time.monotonic() - begin
        self.progress.say(f"{child.name} is ready after {seconds:.1f} s")
        return seconds

    def diagnose(self) -> None:
        """Keeps the servers' counters and logs at the first failure.

        It does so while they run: the many lines of their shutdown would hide the cause.
        """
        self.diagnosis = self.diagnosis or describe(self.vllm, self.pega)

    # -- requests

    def ask(self, prompt: Prompt, max_tokens: int = OUTPUT_TOKENS) -> Answer:
        return complete(self.vllm.http, prompt.tokens, max_tokens)

    def ask_counted(
        self, prompt: Prompt, max_tokens: int = OUTPUT_TOKENS
    ) -> tuple[Answer, Counters]:
        """Answers a prompt, with the counts of engine and server; it must be the only one."""
        before, answered = self.counters(), self._answered()
        answer = self.ask(prompt, max_tokens)
        # The answer's last event may arrive before vLLM has added up that step's statistics.
        wait_until("vLLM counts the request", lambda: self._answered() > answered, 10)
        return answer, self.counters() - before

    def forget_local(self) -> None:
        """Empties vLLM's own prefix cache, and only that."""
        forget_local(self.vllm, self.maker)

    def ask_emptied(
        self, prompt: Prompt, max_tokens: int = OUTPUT_TOKENS
    ) -> tuple[Answer, Counters]:
        """Empties vLLM's own cache and asks a stored prompt; again if a deadline was missed."""
        for _ in range(MAX_ASKED_AGAIN):
            self.forget_local()
            answer, counted = self.ask_counted(prompt, max_tokens)
            if not counted.missed_deadlines:
                return answer, counted
            self.asked_again += 1
        self.forget_local()
        return self.ask_counted(prompt, max_tokens)

    def store(self, prompt: Prompt, already_stored_blocks: int = 0) -> Answer:
        """Asks for one token and waits until all of the prompt's new blocks are in the pool.

        With one token no block is filled by decoding: what is stored is the prompt alone.
        """
        new = full_blocks(len(prompt), BLOCK_TOKENS) - already_stored_blocks
        return self.store_until(prompt, self.insertions() + new)

    def store_until(self, prompt: Prompt, insertions: int) -> Answer:
        """Asks for one token until the server has sealed so many blocks in all.

        Returns the first answer, the one that was cold.
        """
        what = f"all blocks of prompt {prompt.name} are stored"
        first: Answer | None = None
        for _ in range(MAX_ASKED_AGAIN + 1):
            unsaved = self._unsaved()
            answer = self.ask(prompt, max_tokens=1)
            first = first or answer
            wait_until(
                what,
                lambda before=unsaved: self.insertions() >= insertions or self._unsaved() > before,
                30,
            )
            if self.insertions() >= insertions:
                return first
            self.asked_again += 1
            self.forget_local()
        raise Late(f"asked {MAX_ASKED_AGAIN + 1} times and still not: {what}")

    # -- what is counted

    @property
    def page_bytes(self) -> int:
        """Bytes of one block in the pool, on all ranks: all layers, K and V."""
        return BLOCK_TOKENS * self.shape.kv_bytes_per_token()

    def insertions(self) -> int:
        return int(self.pega.metrics().total("pegaflow_cache_block_insertions_total"))

    def counters(self) -> Counters:
        engine, server = self.vllm.metrics(), self.pega.metrics()
        loaded = "pegaflow_load_blocks_total"
        return Counters(
            external_hit_tokens=int(engine.total("vllm:external_prefix_cache_hits_total")),
            local_hit_tokens=int(engine.total("vllm:prefix_cache_hits_total")),
            loaded_bytes=int(server.total("pegaflow_load_bytes_total")),
            # Each rank loads its share of a block, and counts.
            loaded_own_blocks=int(server.total(loaded, written_by="this_process")) // self.tp,
            loaded_foreign_blocks=int(server.total(loaded, written_by="another_process"))
            // self.tp,
            missed_deadlines=sum(
                int(engine.total("vllm:pegaflow_misses_total", reason=reason))
                for reason in ("late", "timeout", "busy")
            )
            + int(engine.total("vllm:pegaflow_load_failures_total", error="timeout")),
        )

    def _unsaved(self) -> int:
        """Blocks that the connector wanted to save and could not."""
        metrics = self.vllm.metrics()
        return sum(
            int(metrics.total(f"vllm:pegaflow_save_{what}_blocks_total"))
            for what in ("failed", "dropped")
        )

    def _answered(self) -> float:
        metrics: Metrics = self.vllm.metrics()
        return metrics.total("vllm:request_success_total")
