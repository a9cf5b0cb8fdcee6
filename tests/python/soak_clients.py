"""Clients of an engine of several kinds of blocks, in a process that may be killed at any time.

They ask conversations that follow from a seed, so that every engine of a run, and the successors of
those that were killed, find each other's blocks at the server.
"""

import dataclasses
import functools
import logging
import multiprocessing
import random
import time
import traceback
from collections.abc import Sequence
from typing import Any

from pegaflow.vllm.plans import load_plan, several_kinds
from tests.python.fake_model import answer
from tests.python.kinds_engine import SHAPES
from tests.python.soak_engine import SoakEngine

#: Far longer than any request takes on a busy machine, also while the server is away.
STUCK_S = 120.0
_REPORT_S = 0.25
_CONVERSATIONS = 48
_TURNS = 4
_MOST_TOKENS = 640

context = multiprocessing.get_context("forkserver")
# Importing vLLM takes 10 s of a core: once for all, in a process without threads.
context.set_forkserver_preload(["tests.python.soak_clients"])


@dataclasses.dataclass(frozen=True)
class SoakOptions:
    shape: str
    address: str
    seed: int
    number: int  #: Of the engine.
    lives: int  #: Predecessors of this process.
    clients: int = 4
    ranks: int = 2
    planted: str = ""  #: Jobs whose blocks are swapped, "saves" or "loads": it must be found.


@functools.cache
def conversation(seed: int, number: int, turn: int) -> tuple[tuple[int, ...], int]:
    """A prompt, and the length of its answer. A turn begins with the one before and its answer."""
    draw = random.Random(f"{seed}/{number}/{turn}")
    added = [draw.randrange(10, 1000) for _ in range(draw.choice([20, 60, 150]))]
    before: Sequence[int] = ()
    if turn:
        prompt, length = conversation(seed, number, turn - 1)
        before = (*prompt, *answer(list(prompt), length))
    return (*before, *added), draw.choice([1, 5, 20, 70])


def draw_request(seed: int, draw: random.Random) -> tuple[list[int], int]:
    """A turn of a conversation, a longer prompt, or a branch; and the length of the answer."""
    turn = draw.randrange(_TURNS)
    prompt, length = conversation(seed, draw.randrange(_CONVERSATIONS), turn)
    tokens = list(prompt)
    what = draw.choices(["again", "longer", "branch"], [5, 2, 2])[0]
    if what == "branch":
        tokens = tokens[: draw.randint(1, len(tokens))]
    if what != "again":
        tokens += [draw.randrange(10, 1000) for _ in range(draw.choice([1, 16, 60]))]
        length = draw.choice([1, 5, 40])
    return tokens[:_MOST_TOKENS], length


@dataclasses.dataclass
class _Client:
    request: str = ""  #: Empty: none.
    asked_at: float = 0.0
    aborted: bool = False


class Clients:
    """Each has one request in flight, and asks the next one when it has the answer."""

    def __init__(self, engine: SoakEngine, options: SoakOptions) -> None:
        self.engine, self.options = engine, options
        self.draw = random.Random(f"{options}")
        self._clients = [_Client() for _ in range(options.clients)]
        self._asked = 0

    def step(self) -> None:
        engine, draw = self.engine, self.draw
        for client in self._clients:
            if not client.request:
                self._ask(client)
        engine.step()
        for client in self._clients:
            self._look_at(client)
        if draw.random() < 0.005:
            engine.preempt_all()
        if draw.random() < 0.02:
            # Often refused, since requests have blocks.
            engine.scheduler.reset_prefix_cache()
        if draw.random() < 0.001:
            engine.counts["resets"] += 1
            engine.scheduler.reset_prefix_cache(reset_connector=True)

    def _ask(self, client: _Client) -> None:
        self._asked += 1
        client.request, client.asked_at, client.aborted = f"r{self._asked}", time.monotonic(), False
        self.engine.add(client.request, *draw_request(self.options.seed, self.draw))

    def _look_at(self, client: _Client) -> None:
        engine, request = self.engine, client.request
        if request not in engine.scheduler.requests:
            self._ended(client)
        elif not client.aborted and self.draw.random() < 0.002:
            client.aborted = True
            engine.counts["aborted"] += 1
            engine.abort(request)
        elif time.monotonic() - client.asked_at > STUCK_S:
            raise AssertionError(f"{request} has no answer after {STUCK_S:.0f} s")

    def _ended(self, client: _Client) -> None:
        engine, request = self.engine, client.request
        if not client.aborted:
            engine.counts["answers"] += 1
            if engine.reasons.get(request) != "length":
                engine.counts["failed requests"] += 1
            if engine.answers[request] != engine.expected[request][0]:
                engine.counts["wrong answers"] += 1
        engine.forget(request)
        client.request = ""

    def finish(self) -> None:
        self.engine.run()
        for client in self._clients:
            if client.request:
                self._ended(client)
        self.engine.check_at_rest()


def _engine(options: SoakOptions) -> SoakEngine:
    draw = random.Random(f"{options} engine")
    parallel = {"tensor_parallel_size": options.ranks, "distributed_executor_backend": "mp"}
    return SoakEngine(
        SHAPES[options.shape],
        options.address,
        extra={"pegaflow.weights_id": f"soak-{options.shape}-{options.seed}"},
        blocks=draw.randint(48, 80) * len(SHAPES[options.shape]),
        interval=draw.choice([0, 128, 192]),
        retention=draw.choice([0, None]),
        room=draw.choice([5, 30]),
        draw=draw,
        max_num_seqs=options.clients,
        asynchronous=options.number % 2 == 1,
        **(parallel if options.ranks > 1 else {}),
    )


def _swap(engine: SoakEngine, jobs: str) -> None:
    if jobs == "saves":
        for side in (worker._worker for worker in engine.workers):
            side.mover = _SwappedSaves(side.mover)
        return
    pair = load_plan.pair

    def swapped(*arguments: Any) -> Any:
        return [one._replace(blocks=one.blocks[::-1]) for one in pair(*arguments)]

    several_kinds.pair = swapped


class _SwappedSaves:
    """A mover that saves the blocks of a job under each other's keys."""

    def __init__(self, mover: Any) -> None:
        self._mover = mover

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mover, name)

    def save(
        self, scheduler: bytes, job: int, keys: bytes, size: int, blocks: Any, **more: Any
    ) -> None:
        self._mover.save(scheduler, job, keys, size, blocks[::-1], **more)


def _counts(engine: SoakEngine) -> dict[str, float]:
    failed = sum(n for name, n in engine.stats.items() if name.startswith("load_failures"))
    loads = {"loads": engine.stats.get("loads", 0), "failed loads": failed}
    return dict(engine.counts) | loads | {"saved blocks": engine.stats.get("saved_blocks", 0)}


def serve(pipe: Any, options: SoakOptions) -> None:
    """Asks until there is a message in the pipe; sends (counts, mistakes) now and then.

    A mistake that ends the engine is sent as (counts, mistakes, traceback).
    """
    logging.disable(logging.WARNING)  # of refused resets, and of the server that is away
    engine = _engine(options)
    if options.planted:
        _swap(engine, options.planted)
    clients = Clients(engine, options)
    try:
        engine.wait_ready()
        next_report = 0.0
        while not pipe.poll():
            clients.step()
            if time.monotonic() > next_report:
                next_report = time.monotonic() + _REPORT_S
                pipe.send((_counts(engine), engine.wrong))
        pipe.recv()  # what is unread at the end would break the pipe
        clients.finish()
        pipe.send((_counts(engine), engine.wrong))
    except Exception:
        pipe.send((_counts(engine), engine.wrong, traceback.format_exc()))
    finally:
        engine.close()
        pipe.close()
