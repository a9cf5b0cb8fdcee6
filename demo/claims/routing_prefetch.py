"""--routing: a prefetch hides a pull: its blocks arrive while the engine does not serve yet."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from demo.client import Answer, complete
from demo.compare import computed_differences
from demo.expectations import full_blocks
from demo.prompts import BLOCK_TOKENS
from demo.report import Checks, Claim, Spread
from demo.routing_stage import ANSWER, Node, RoutingStage, Turn
from demo.stage import wait_until
from tests.support.vllm_server import RouterServer

#: Prompts that are loaded with a prefetch, and without one.
PREFETCHED = 3
#: Prompts that the claim needs.
PROMPTS = 2 * PREFETCHED


@dataclasses.dataclass(frozen=True)
class Load:
    """One prompt that another node has."""

    answer: Answer
    early: int  #: Blocks pulled before the engine could ask for them.
    late: int  #: Blocks pulled afterwards.
    loaded_tokens: int  #: As the engine counts them.
    pull_s: float  #: From the request to the last block, with a prefetch.
    first_token_s: float  #: From the engine's continuation to the first token.


def prefetch_hides_pull(stage: RoutingStage, prompts: Sequence[Turn]) -> Claim:
    """Engine b is stopped while prompts for it arrive, whose blocks only node a has."""
    checks = Checks()
    stage.mark("prompts that engine a has saved are sent to engine b, which is stopped meanwhile")
    loads: dict[bool, list[Load]] = {True: [], False: []}
    off = ("--prefetch-key-bytes", "0")
    with (
        stage.routed("kv-aware", "prefetching", [stage.b]) as prefetching,
        stage.routed("kv-aware", "pulling", [stage.b], off) as pulling,
    ):
        for number, turn in enumerate(prompts):
            has_prefetch = number % 2 == 0
            router = prefetching if has_prefetch else pulling
            blocks = full_blocks(len(turn.prompt) - 1, BLOCK_TOKENS)
            _save_at(stage, stage.a, turn, (prefetching, pulling))
            load = _load(stage, router, turn, has_prefetch)
            loads[has_prefetch].append(load)
            what = f"{turn.name}, {'with' if has_prefetch else 'without'} a prefetch"
            checks.none(what, computed_differences(load.answer, turn.baseline))
            checks.equal(f"{what}: tokens loaded", load.loaded_tokens, blocks * BLOCK_TOKENS)
            expected = (blocks, 0) if has_prefetch else (0, blocks)
            checks.equal(
                f"{what}: blocks pulled before and after the engine went on",
                (load.early, load.late),
                expected,
            )
    return checks.claim(
        "6   A prefetch hides a pull: the blocks arrive before the engine asks for them",
        _detail(stage, loads),
    )


def _detail(stage: RoutingStage, loads: dict[bool, list[Load]]) -> str:
    pull = Spread(tuple(one.pull_s for one in loads[True]))
    first = {
        has_prefetch: Spread(tuple(one.first_token_s for one in made))
        for has_prefetch, made in loads.items()
    }
    stage.figures["prefetch"] = {
        "pull_s": pull.as_json(),
        "first_token_with_s": first[True].as_json(),
        "first_token_without_s": first[False].as_json(),
    }
    early = statistics.median(one.early for one in loads[True])
    return (
        f"{early:.0f} blocks of each prompt came within {pull}, while the engine was stopped, and "
        f"none afterwards; the first token came {first[True]} after the engine went on; without a "
        f"prefetch all blocks came after that, and the first token after {first[False]}"
    )


def _save_at(stage: RoutingStage, node: Node, turn: Turn, routers: Sequence[RouterServer]) -> None:
    """The node's engine computes and saves the prompt, and the routers hear of it."""
    before = [stage.pool_blocks(router, node) for router in routers]
    complete(node.vllm.http, turn.prompt, ANSWER)
    new = full_blocks(len(turn.prompt), BLOCK_TOKENS)
    for router, known in zip(routers, before, strict=True):
        wait_until(
            f"the router knows {new} more blocks of node {node.name}'s pool",
            lambda r=router, k=known: stage.pool_blocks(r, node) >= k + new,
            30,
        )


@contextlib.contextmanager
def _stopped(node: Node) -> Iterator[None]:
    """The engine does not run meanwhile."""
    os.killpg(node.vllm.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(node.vllm.pid, signal.SIGCONT)


def _load(stage: RoutingStage, router: RouterServer, turn: Turn, has_prefetch: bool) -> Load:
    """The prompt's answer by engine b, which is stopped until the router has done its part."""
    server = stage.b.server

    def pulled() -> int:
        return int(server.metrics().total("pegaflow_fetch_blocks_total", result="whole"))

    def prefetched() -> int:
        return int(server.metrics().total("pegaflow_prefetches_total", result="finished"))

    counted, blocks, finished = stage.counted(), pulled(), prefetched()
    with ThreadPoolExecutor(1) as client:
        with _stopped(stage.b):
            began = time.monotonic()
            answering = client.submit(stage.ask_one_of, turn, router)
            wait_until(
                "the router has forwarded the request",
                lambda: router.metrics().total("pegaflow_router_engine_inflight") > 0,
                30,
            )
            if has_prefetch:
                wait_until("the prefetch has ended", lambda: prefetched() > finished, 30)
            pull_s = time.monotonic() - began
            early = pulled() - blocks
        resumed = time.monotonic()
        answer = answering.result()
    stage.wait_until_counted(counted, 1)
    return Load(
        answer,
        early,
        pulled() - blocks - early,
        (stage.counted() - counted).loaded_tokens,
        pull_s,
        answer.ttft_s - (resumed - began),
    )
