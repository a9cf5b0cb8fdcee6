"""--sglang: exactly the expected pages, with the bytes that their tokens determine."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from typing import Any

from demo.report import Checks, Claim
from demo.sglang_stage import PAGE, ROUTES, Conversation, Route, SglangStage
from tests.support.sglang_process import EngineProcess
from tests.support.stray_client import pool_of


def run_sglang(stage: SglangStage) -> Iterator[Claim]:
    """The claims in order."""
    with stage.running(stage.pega):
        for number, route in enumerate(ROUTES, 1):
            yield from _route(stage, number, route)
        yield _damage(stage, len(ROUTES) + 1)
    stage.end()


def expected_pages(route: Route, stored: Sequence[list[int]], tokens: list[int]) -> int:
    """How many leading pages of a prompt the cache has, by the prompts that were stored whole.

    A recurrent state exists at the end of a stored prompt only. Windows were stored with all of
    their pages, so they limit nothing here.
    """
    best = 0
    for one in stored:
        common = 0
        while one[common : common + PAGE] and (
            one[common : common + PAGE] == tokens[common : common + PAGE]
        ):
            common += PAGE
        if not route.has_states or common == len(one):
            best = max(best, common // PAGE)
    return best


def _store(engine: EngineProcess, route: Route, tokens: list[int]) -> None:
    engine.do("put", tokens)
    if not route.is_hicache:
        engine.do("drain")


def _found(answer: dict[str, Any]) -> int:
    return answer["found"] if "found" in answer else answer["loaded"]


def _load(
    stage: SglangStage, checks: Checks, engine: EngineProcess, route: Route,
    stored: Sequence[list[int]], asked: Sequence[list[int]],
) -> int:  # fmt: skip
    """Loads prompts into an engine whose own caches are empty; the pages that were expected."""
    before, sum_expected = stage.loaded_bytes(), 0
    for tokens in asked:
        engine.do("empty")
        answer = engine.do("get", tokens)
        expected = expected_pages(route, stored, tokens)
        sum_expected += expected
        checks.equal(f"pages of a prompt of {len(tokens) // PAGE}", _found(answer), expected)
        checks.equal("pages with other bytes than their tokens determine", answer["wrong"], 0)
    if route.page_bytes:
        copied = stage.loaded_bytes() - before
        checks.equal("bytes loaded, by the server", copied, sum_expected * route.page_bytes)
    return sum_expected


def _route(stage: SglangStage, number: int, route: Route) -> Iterator[Claim]:
    talks: list[Conversation] = stage.conversations()
    stored = [talk.first for talk in talks]
    asked = [tokens for talk in talks for tokens in (talk.first, talk.longer, talk.branch)]
    name = f"{number}   {route.name}"
    with stage.engine(route) as two:
        with stage.engine(route) as one:
            for tokens in stored:
                _store(one, route, tokens)
            checks = Checks()
            pages = _load(stage, checks, two, route, stored, asked)
            yield checks.claim(
                f"{name}: a second process loads what the first has computed",
                f"{pages} pages of {len(asked)} prompts, as expected, with their bytes",
            )
            checks = Checks()
            pages = _load(stage, checks, one, route, stored, asked)
            yield checks.claim(
                f"{name}: an engine loads its pages after its own caches were emptied",
                f"{pages} pages, as expected",
            )
            one.kill()
        with stage.engine(route) as again:
            checks = Checks()
            pages = _load(stage, checks, again, route, stored, asked)
            yield checks.claim(
                f"{name}: an engine that was killed finds its pages after its restart",
                f"{pages} pages, as expected",
            )
        yield _server_killed(stage, name, route, two, stored)


def _server_killed(
    stage: SglangStage, name: str, route: Route, engine: EngineProcess, stored: list[list[int]]
) -> Claim:
    checks = Checks()
    aborted = 0
    calls = ["batch_exists"] if route.is_hicache else ["lookup", "start_layer_wise_loading"]
    for call in calls:
        for tokens in stored:
            _store(engine, route, tokens)
        engine.do("empty")
        if route.is_hicache:
            stage.pega.kill()
        else:
            engine.do("trap", call, stage.pega.pid, signal.SIGKILL)
        answer = engine.do("get", stored[-1])
        checks.equal(f"{call}: pages with other bytes", answer["wrong"], 0)
        failed = bool(answer.get("failed"))
        aborted += failed
        expects_abort = call == "start_layer_wise_loading"
        checks.equal(f"{call}: the request is aborted", failed, expects_abort)
        if not failed:
            checks.equal(f"{call}: pages from a killed server", _found(answer), 0)
        checks.equal(f"{call}: the cache is off because of", engine.do("status")["off"], "")
        stage.pega.kill()
        stage.pega.start()
        checks.require(engine.do("ready"), f"{call}: the engine is not served after the restart")
        engine.do("empty")
        if not route.is_hicache:
            engine.do("forget_the_missed_deadline")
        for tokens in stored:
            _store(engine, route, tokens)
        _load(stage, checks, engine, route, stored, stored)
    return checks.claim(
        f"{name}: a killed server is a miss, and is used again after its restart",
        f"killed at {', '.join(calls)}; no exception, no wrong page; "
        f"{aborted} requests aborted, between a lookup and its load",
    )


def _damage(stage: SglangStage, number: int) -> Claim:
    """Without it, a comparison that never fails would pass."""
    checks = Checks()
    route = ROUTES[1]
    tokens = stage.conversations()[0].first
    with stage.engine(route) as engine:
        _store(engine, route, tokens)
        engine.do("empty")
        with pool_of(stage.pega) as pool:
            at = pool.find(engine.do("bytes_of", tokens, 2))
            checks.require(at >= 0, "the pool does not have this page")
            pool[at + 5] ^= 1
        checks.equal("wrong pages after one byte was changed", engine.do("get", tokens)["wrong"], 1)
    return checks.claim(
        f"{number}   The comparison of bytes notices one changed bit of the pool",
        f"one of {len(tokens) // PAGE} pages differs",
    )
