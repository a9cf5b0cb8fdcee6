"""Decode requests that arrive together with their prefill: what they wait for, and how that ends.

Two engines of vLLM's real scheduler, the real connector and a real server; the router is the test.
"""

import functools
from typing import Any

import pytest

from pegaflow.vllm import handover
from tests.python import test_connector_handover
from tests.python.harness import BLOCK, Engine
from tests.python.test_connector_engine import KINDS
from tests.python.test_connector_handover import LONG, engines, prefill, waits
from tests.python.test_connector_nodes import at_both, nodes, own_nodes  # noqa: F401
from tests.python.test_connector_two_engines import run_together

#: Prefills in four steps, so that three saves end before the last one. The limit of pinned blocks
#: delays none of them.
CHUNKED = {"max_num_batched_tokens": 256, "blocks": 1024}


def early(params: dict[str, Any], wait_ms: Any = 60_000) -> dict[str, Any]:
    """A router's parameters, after an answer of the prefill engine to another request."""
    ours = params["pegaflow"]
    place = {name: ours[name] for name in ("node", "incarnation")}
    return {"pegaflow": place | {"job": ours["job"] + 1, "tokens": 0, "wait_ms": wait_ms}}


def ends(engine: Engine, result: str) -> int:
    return engine.stats[f"early_handovers{{{result}}}"]


is_waiting = functools.partial(test_connector_handover.is_waiting, kind="early")
wait_steps = functools.partial(test_connector_handover.wait_steps, kind="early")


class PatientSession:
    """A session at an older server, whose answers are there when they are asked for."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def take_wait(self, ticket: int) -> int | None:
        return None if self._session.take_wait(ticket, 10.0) is None else 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


def forgets_all(engine: Engine) -> bool:
    waits_ = engine.connector._scheduler._waits
    return not waits_._early._watches and waits_._open == 0


# ---- the prefill ends


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [288, 289, 290, 303])
def test_a_request_that_arrives_first_loads_all_but_its_last_token(pega, prompt, kind, length):
    tokens = prompt(length)
    with engines(pega.address, KINDS[kind], KINDS[kind]) as (p, d):
        known = prefill(p, "known", prompt(40))
        assert known["pegaflow"]["early"] is True
        d.add("x", tokens, 40, params=early(known))
        wait_steps(d, "x")

        prefill(p, "x", tokens)
        run_together([p, d])

        answer = d.answers["x"]
        answer.check()
        assert answer.loaded == (length - 1 if length % BLOCK >= 2 else 288)
        assert ends(d, "over") == 1
        assert not waits(d, "over")
        assert forgets_all(d)


def test_a_save_of_a_part_of_the_prompt_does_not_end_the_wait(pega, prompt):
    tokens = prompt(1000)
    whole = {"extra": {"pegaflow.early_load_percent": 0}}
    with engines(pega.address, CHUNKED, whole) as (p, d):
        known = prefill(p, "known", prompt(40))
        d.add("x", tokens, 5, params=early(known))
        wait_steps(d, "x")
        p.add("x", tokens, 1, params={"pegaflow": {"save_tail": True}})
        p.step()
        p.step()
        seen = d.connector._scheduler._states["x"].early.watch.news
        d.run(lambda: d.connector._scheduler._states["x"].early.watch.news > seen)
        wait_steps(d, "x")

        run_together([p, d])

        assert d.answers["x"].loaded == 999


def test_a_router_may_know_of_much_older_saves(pega, prompt):
    tokens = prompt(300)
    with engines(pega.address) as (p, d):
        known = prefill(p, "known", prompt(40))
        for number in range(37):
            prefill(p, f"other-{number}", prompt(40))
        p.run()
        d.add("x", tokens, 5, params=early(known))
        wait_steps(d, "x", 50)

        prefill(p, "x", tokens)
        run_together([p, d])

        assert d.answers["x"].loaded == 299
        assert ends(d, "over") == 1


def test_old_saves_of_an_older_server_are_passed_over_in_a_few_steps_however_slow_they_are(
    pega, prompt
):
    with engines(pega.address) as (p, d):
        known = prefill(p, "known", prompt(40))
        for number in range(37):
            last = prefill(p, f"other-{number}", prompt(40))
        p.run()
        now, waits_ = [0.0], d.connector._scheduler._waits._early
        waits_._clock, waits_._session = lambda: now[0], PatientSession(waits_._session)
        d.add("x", prompt(300), 5, params=early(known))
        wait_steps(d, "x", 1)
        watch = d.connector._scheduler._states["x"].early.watch
        for _ in range(24):
            if watch._over >= last["pegaflow"]["job"]:
                break
            now[0] += 0.02  # As a step of a large model.
            wait_steps(d, "x", 1)
        assert watch._over >= last["pegaflow"]["job"]
        d.abort("x")
        d.run()


def test_a_prompt_without_a_full_block_does_not_wait(pega, prompt):
    with engines(pega.address) as (p, d):
        known = prefill(p, "known", prompt(40))
        p.run()
        d.ask("x", prompt(BLOCK - 1), 2, params=early(known))
        assert ends(d, "unable") == 1
        assert forgets_all(d)


def test_a_prompt_that_is_cached_waits_for_no_save(pega, prompt):
    tokens = prompt(300)
    with engines(pega.address) as (p, d):
        known = prefill(p, "x", tokens)
        p.run()
        # No further save follows.
        assert d.ask("x", tokens, 5, params=early(known)).loaded == 299
        assert ends(d, "over") == 1


def test_requests_that_wait_for_one_engine_share_a_call(own_pega, prompt):
    prompts = [prompt(300) for _ in range(3)]
    with engines(own_pega.address) as (p, d):
        known = prefill(p, "known", prompt(40))
        for number, tokens in enumerate(prompts):
            d.add(f"x{number}", tokens, 3, params=early(known))
        for number in range(3):
            wait_steps(d, f"x{number}")
        assert own_pega.metrics().total("pegaflow_job_waits") == 1

        for number, tokens in enumerate(prompts):
            prefill(p, f"x{number}", tokens)
        run_together([p, d])

        assert [d.answers[f"x{number}"].loaded for number in range(3)] == [299] * 3
        assert forgets_all(d)
        assert own_pega.metrics().total("pegaflow_job_waits") <= 1


def test_a_request_on_another_node_waits_through_both_servers(nodes, prompt):  # noqa: F811
    tokens = prompt(300)
    with at_both(nodes) as (p, d):
        known = prefill(p, "known", prompt(40))
        before = nodes.fetched()
        d.add("x", tokens, 5, params=early(known))
        wait_steps(d, "x")

        prefill(p, "x", tokens)
        run_together([p, d])

        assert d.answers["x"].loaded == 299
        assert nodes.fetched() > before
        assert ends(d, "over") == 1


# ---- the prefill does not end


def test_a_prefill_engine_that_ends_is_not_waited_for(own_pega, prompt):
    tokens = prompt(300)
    with Engine(own_pega.address, extra=LONG) as d:
        d.wait_ready()
        with Engine(own_pega.address) as p:
            p.wait_ready()
            known = prefill(p, "known", prompt(40))
            p.run()
            d.add("x", tokens, 5, params=early(known))
            wait_steps(d, "x")
        d.run()
        d.answers["x"].check()
        assert d.answers["x"].loaded == 0
        assert ends(d, "gone") == 1
        assert forgets_all(d)
        d.check_at_rest()


def test_a_killed_node_of_the_prefill_engine_ends_the_wait(own_nodes, prompt):  # noqa: F811
    tokens = prompt(300)
    with Engine(own_nodes.p.address) as p, Engine(own_nodes.d.address, extra=LONG) as d:
        p.wait_ready()
        d.wait_ready()
        known = prefill(p, "known", prompt(40))
        p.run()
        d.add("x", tokens, 5, params=early(known))
        wait_steps(d, "x")

        own_nodes.p.kill()

        d.run()
        d.answers["x"].check()
        assert d.answers["x"].loaded == 0
        assert ends(d, "gone") == 1


def test_a_server_that_dies_ends_every_early_wait(own_pega, prompt):
    with Engine(own_pega.address) as p, Engine(own_pega.address, extra=LONG) as d:
        p.wait_ready()
        d.wait_ready()
        known = prefill(p, "known", prompt(40))
        p.run()
        for number in range(2):
            d.add(f"x{number}", prompt(300), 3, params=early(known))
        wait_steps(d, "x1")

        own_pega.kill()

        d.run()
        for number in range(2):
            d.answers[f"x{number}"].check()
        assert ends(d, "no_server") == 2
        assert forgets_all(d)


@pytest.mark.parametrize("patience_ms", [50, 10_000])
def test_a_prefill_that_never_comes_is_waited_for_as_long_as_the_router_says(
    pega, prompt, patience_ms
):
    extra = {"extra": {"pegaflow.handover_wait_ms": patience_ms}}
    with engines(pega.address, None, extra) as (p, d):
        known = prefill(p, "known", prompt(40))
        p.run()
        assert d.ask("x", prompt(300), 5, params=early(known, 200)).loaded == 0
        assert ends(d, "timeout") == 1
        assert forgets_all(d)


def test_an_aborted_request_waits_no_longer(own_pega, prompt):
    with engines(own_pega.address) as (p, d):
        known = prefill(p, "known", prompt(40))
        d.add("x", prompt(300), 5, params=early(known))
        wait_steps(d, "x")

        d.abort("x")

        d.run()
        d.check_at_rest()
        assert ends(d, "dropped") == 1
        assert forgets_all(d)
        d.ask("x", prompt(300), 5)
        run_together([p, d])


def test_a_reset_ends_the_wait(pega, prompt):
    with engines(pega.address) as (p, d):
        known = prefill(p, "known", prompt(40))
        p.run()
        d.add("x", prompt(300), 3, params=early(known))
        wait_steps(d, "x")
        assert d.connector.reset_cache()
        d.run()
        d.answers["x"].check()
        assert d.answers["x"].loaded == 0
        assert ends(d, "dropped") == 1
        assert forgets_all(d)


def test_the_number_of_early_waits_is_limited(pega, prompt, monkeypatch):
    monkeypatch.setattr(handover, "MAX_WAITS", 1)
    with engines(pega.address) as (p, d):
        known = prefill(p, "known", prompt(40))
        d.add("x", prompt(300), 5, params=early(known))
        wait_steps(d, "x")

        d.add("too many", prompt(300), 5, params=early(known))
        d.run(lambda: d.answers["too many"].finish_reason != "")

        assert is_waiting(d, "x")
        assert ends(d, "busy") == 1
        assert not waits(d, "busy")
        d.abort("x")
        d.run()


@pytest.mark.parametrize("wait_ms", ["50", True, -1, 1 << 63, 1.5, None])
def test_an_invalid_time_is_no_handover(pega, prompt, wait_ms):
    with engines(pega.address) as (p, d):
        known = prefill(p, "known", prompt(40))
        p.run()
        assert d.ask("x", prompt(300), 2, params=early(known, wait_ms)).loaded == 0
        assert not any("handovers" in name for name in d.stats)


def test_without_patience_no_request_waits_early(pega, prompt):
    with engines(pega.address, None, {"extra": {"pegaflow.handover_wait_ms": 0}}) as (p, d):
        known = prefill(p, "known", prompt(40))
        p.run()
        d.ask("x", prompt(300), 2, params=early(known))
        assert not any("handovers" in name for name in d.stats)
