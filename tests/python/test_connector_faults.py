"""Failures around the connector cost the cache, never an answer; the engine never waits long."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.python.harness import BLOCK, Engine
from tests.support.vllm_server import PegaServer
from tests.support.waiting import wait_until


@contextmanager
def stopped(server: PegaServer) -> Iterator[None]:
    """The server is stopped, though its socket exists."""
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


def when_load_is_ordered(engine: Engine, act: Callable[[], None]) -> None:
    """Calls ``act`` once, between the scheduler's plan for a load and the worker that gets it."""
    _when_ordered("loads", engine, act)


def when_save_is_ordered(engine: Engine, act: Callable[[], None]) -> None:
    """Calls ``act`` once, between the scheduler's plan for a save and the worker that gets it."""
    _when_ordered("saves", engine, act)


def _when_ordered(what: str, engine: Engine, act: Callable[[], None]) -> None:
    def watch(output: Any) -> None:
        if getattr(output.kv_connector_metadata, what):
            engine.on_schedule = lambda output: None
            act()

    engine.on_schedule = watch


def store(engine: Engine, tokens: list[int]) -> None:
    engine.ask("stored", tokens)
    engine.reset_local()


def state_of(engine: Engine, request_id: str) -> Any:
    return engine.connector._scheduler._states.get(request_id)


# ---- aborts, in each phase of a load


def phases(engine: Engine, server: PegaServer) -> dict[str, Callable[[], None]]:
    """For each phase the function that brings request "x" into it."""

    def never_scheduled() -> None:
        return None

    def question_pending() -> None:
        engine.run(lambda: getattr(state_of(engine, "x").claim, "ticket", None) is not None)

    def ordered() -> None:
        # On a busy machine it may end in the very step that starts it.
        seen: list[str] = []
        when_load_is_ordered(engine, lambda: seen.append("x"))
        engine.run(lambda: bool(seen))

    def arrived() -> None:
        ids = engine.scheduler.finished_recving_kv_req_ids
        engine.run(lambda: "x" in ids)

    def decoding() -> None:
        engine.run(lambda: len(engine.answers["x"].tokens) >= 2)

    return {f.__name__: f for f in (never_scheduled, question_pending, ordered, arrived, decoding)}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    "phase", ["never_scheduled", "question_pending", "ordered", "arrived", "decoding"]
)
def test_an_abort_leaves_nothing_behind(own_pega, prompt, phase, asynchronous):
    tokens = prompt(300)
    extra = {"pegaflow.claim_wait_ms": 0} if phase == "question_pending" else {}
    with Engine(own_pega.address, asynchronous=asynchronous, extra=extra) as engine:
        engine.wait_ready()
        store(engine, tokens)
        stop = phase == "question_pending"
        if stop:
            os.kill(own_pega.pid, signal.SIGSTOP)
        engine.add("x", tokens, 30)
        phases(engine, own_pega)[phase]()
        engine.abort("x")
        if stop:
            os.kill(own_pega.pid, signal.SIGCONT)
        engine.run()
        engine.check_at_rest()

        assert engine.ask("y", tokens).loaded + engine.answers["y"].local >= 288 - BLOCK
        engine.run()
        engine.check_at_rest()
    wait_for_zero(own_pega, "pegaflow_claims", "pegaflow_pins")


def wait_for_zero(server: PegaServer, *names: str) -> None:
    """Waits until the server has received the end of each claim and pin."""
    deadline = time.monotonic() + 60
    while True:
        metrics = server.metrics()
        left = {name: metrics.total(name) for name in names}
        if not any(left.values()):
            return
        assert time.monotonic() < deadline, left


def test_a_follower_takes_over_when_the_first_request_is_aborted(own_pega, prompt):
    tokens = prompt(300)
    with Engine(own_pega.address) as engine:
        engine.wait_ready()
        store(engine, tokens)
        for name in ("leader", "one", "two"):
            engine.add(name, tokens)
        engine.run(lambda: state_of(engine, "two").followed is not None)
        engine.abort("leader")
        engine.run()

        for name in ("one", "two"):
            engine.answers[name].check()
        loaded = sorted(engine.answers[name].loaded for name in ("one", "two"))
        assert loaded in ([0, 288], [0, 0]), "one of them loads, or the leader's load was done"
        engine.check_at_rest()


# ---- loads that fail


def test_a_failed_load_is_computed_and_not_tried_again(own_pega, prompt):
    tokens = prompt(300)
    with Engine(own_pega.address, blocks=100) as engine:
        engine.wait_ready()
        store(engine, tokens)
        when_load_is_ordered(engine, own_pega.kill)

        made = engine.add("x", tokens, 20)
        engine.run(lambda: getattr(state_of(engine, "x"), "load_failed", False))
        asked = []
        lookups = engine.connector._scheduler._lookups
        lookups.blocks_beyond = lambda state, local: asked.append(state.request_id) or 0
        # It is preempted, starts again, and must not send a lookup.
        engine.run(lambda: bool(made.tokens))
        engine.preempt_all()
        engine.run()

        made.check()
        assert engine.stats["load_failed_blocks"] == 18
        assert sum(v for k, v in engine.stats.items() if k.startswith("load_failures")) == 1
        assert asked == []
        engine.check_at_rest()


def test_a_revoked_claim_is_computed(own_pega, prompt):
    tokens = prompt(300)
    with Engine(own_pega.address) as engine:
        engine.wait_ready()
        store(engine, tokens)
        session = engine.connector._scheduler._session

        def revoke() -> None:
            (load,) = engine.connector._scheduler.loads.under_way()
            session.unclaim(load.token)
            session.reset_cache(5.0)  # behind the abandoned claim, and answered: the claim is gone

        when_load_is_ordered(engine, revoke)
        engine.ask("x", tokens, 20)

        assert engine.stats["load_failures{gone}"] == 1
        engine.run()
        engine.check_at_rest()


def test_a_failed_load_of_windows_is_reported_as_the_requests(own_pega, prompt):
    tokens = prompt(300)
    with Engine(own_pega.address) as engine:
        engine.wait_ready()
        store(engine, tokens)
        engine.worker._worker.reports.by_request = True
        session = engine.connector._scheduler._session

        def revoke() -> None:
            (load,) = engine.connector._scheduler.loads.under_way()
            session.unclaim(load.token)
            session.reset_cache(5.0)

        when_load_is_ordered(engine, revoke)
        made = engine.ask("x", tokens, 20)

        assert engine.stats["load_failures{gone}"] == 1
        assert engine.bad_blocks == []
        # vLLM has started it again.
        assert (made.loaded, made.local) == (0, 0)
        engine.run()
        engine.check_at_rest()
        # Its blocks are saved again, and loaded without a failure.
        engine.reset_local()
        assert engine.ask("y", tokens, 4).loaded == 300 // BLOCK * BLOCK


def test_a_server_that_stops_in_a_load_costs_its_deadline_and_no_more(own_pega, prompt):
    tokens = prompt(300)
    with Engine(own_pega.address, patient=False) as engine:
        engine.wait_ready()
        store_patiently(engine, tokens)
        when_load_is_ordered(engine, lambda: os.kill(own_pega.pid, signal.SIGSTOP))
        try:
            engine.ask("x", tokens, 20)  # Answered while the server is stopped.
        finally:
            os.kill(own_pega.pid, signal.SIGCONT)
        assert engine.stats["load_failures{timeout}"] == 1
        engine.run()
        engine.check_at_rest()


def store_patiently(engine: Engine, tokens: list[int]) -> None:
    """Repeats until the cache has it: a busy machine may miss the real deadlines."""
    for i in range(50):
        engine.ask(f"store-{i}", tokens)
        engine.reset_local()
        if engine.ask(f"check-{i}", tokens, 1).loaded >= len(tokens) // BLOCK * BLOCK:
            engine.reset_local()
            return
        engine.reset_local()
        wait_until(lambda: engine.states() == ("ready", "ready"), "the links are not back")
    raise AssertionError("never stored")


# ---- a server that is absent, stops, dies, returns


def test_an_engine_starts_and_serves_without_a_server(short_path, prompt):
    with Engine(f"unix:{short_path}/absent.sock") as engine:
        tokens = prompt(300)
        for name in ("a", "b"):
            engine.ask(name, tokens, 20)
            engine.reset_local()
        assert engine.stats["misses{no_server}"] >= 1
        assert engine.stats["saves"] == 0
        assert engine.stats["save_dropped_blocks{no_server}"] == 2 * (319 // BLOCK)
        engine.check_at_rest()


def test_a_server_that_starts_later_is_used(short_path, prompt):
    from tests.python.conftest import server_binary

    server = PegaServer(server_binary(), short_path / "later", pool_size="64mb")
    with Engine(server.address) as engine:
        tokens = prompt(300)
        engine.ask("before", tokens)
        with server:
            engine.wait_ready()
            engine.ask("computed", tokens)  # vLLM's own cache has it; the new server has nothing
            engine.reset_local()
            assert engine.ask("after", tokens).loaded == 288
            engine.run()
            engine.check_at_rest()


def test_a_stopped_server_delays_no_step_and_no_answer(own_pega, prompt):
    with Engine(own_pega.address, patient=False) as engine:
        engine.wait_ready()
        with stopped(own_pega):
            for i in range(20):
                assert engine.ask(f"r{i}", prompt(100), 5).loaded == 0
            missed = {name: n for name, n in engine.stats.items() if name.startswith("misses{")}
        # All were answered while the server was stopped, and most of them without a wait: after the
        # first deadlines it receives no more lookups.
        assert sum(missed.values()) == 20, missed
        assert missed.get("misses{timeout}", 0) < 10, missed
        engine.run()
        engine.check_at_rest()


def test_hits_return_after_the_server_was_killed_and_restarted(own_pega, prompt):
    tokens, running = prompt(300), prompt(64)
    with Engine(own_pega.address, asynchronous=True) as engine:
        engine.wait_ready()
        store(engine, tokens)
        for _ in range(3):
            alive = engine.add("running", running, 200)
            engine.run(lambda alive=alive: len(alive.tokens) > 5)
            own_pega.kill()
            engine.run(lambda alive=alive: len(alive.tokens) > 60)
            own_pega.start()
            engine.wait_ready()
            engine.run()
            alive.check()
            engine.reset_local()
            # The running request's blocks were saved to the new server; the old prompt is gone.
            assert engine.ask("again", running + alive.tokens, 2).loaded > 0
            engine.reset_local()
            engine.ask("stored", tokens)
            engine.reset_local()
            assert engine.ask("after", tokens).loaded == 288
            engine.reset_local()
        engine.check_at_rest()


def test_a_server_killed_under_many_requests(own_pega, prompt):
    head = prompt(160)
    prompts = [head + prompt(100) for _ in range(12)]
    with Engine(own_pega.address, asynchronous=True) as engine:
        engine.wait_ready()
        for _ in range(2):
            for i, tokens in enumerate(prompts):
                engine.add(f"cold-{i}", tokens, 20)
            engine.run()
            engine.reset_local()
            for i, tokens in enumerate(prompts):
                engine.add(f"again-{i}", tokens, 20)
            when_load_is_ordered(engine, own_pega.kill)
            engine.run()
            for i in range(len(prompts)):
                engine.answers[f"again-{i}"].check()
            engine.reset_local()
            own_pega.start()
            engine.wait_ready()
        engine.check_at_rest()


@pytest.mark.pool_size("2mb")
def test_a_pool_smaller_than_one_request_keeps_a_part_of_it(own_pega, prompt):
    # 12 KiB for each block: room for some 170 blocks in total, and fewer in extents of one size.
    with Engine(own_pega.address, blocks=512, max_model_len=4096) as engine:
        engine.wait_ready()
        for i in range(3):
            tokens = prompt(4000)
            engine.ask(f"cold-{i}", tokens, 2)
            engine.reset_local()
            engine.ask(f"again-{i}", tokens, 2)
            engine.reset_local()
        engine.run()
        engine.check_at_rest()


# ---- reset


def test_nothing_is_loaded_until_a_server_has_confirmed_a_reset(own_pega, prompt):
    tokens = prompt(300)
    with Engine(own_pega.address, patient=False) as engine:
        engine.wait_ready()
        store_patiently(engine, tokens)
        with stopped(own_pega):
            assert engine.scheduler.reset_prefix_cache(reset_connector=True)
            assert engine.ask("in doubt", tokens).loaded == 0
            engine.reset_local()
        # The server runs again; it may have received the first request by now, or receives the next
        # one.
        for i in range(100):
            made = engine.ask(f"after-{i}", tokens, 1)
            confirmed = not engine.connector._scheduler._resets.is_owed
            assert confirmed or made.loaded == 0, "in doubt"
            engine.reset_local()
            if confirmed:
                break
            wait_until(lambda: engine.states() == ("ready", "ready"), "the links are not back")
        assert confirmed
        store_patiently(engine, tokens)
        engine.run()
        engine.check_at_rest()


def test_loads_in_flight_at_a_reset_are_discarded(own_pega, prompt):
    tokens = prompt(300)
    with Engine(own_pega.address) as engine:
        engine.wait_ready()
        store(engine, tokens)
        when_load_is_ordered(engine, lambda: os.kill(own_pega.pid, signal.SIGSTOP))
        made = engine.add("x", tokens, 5)
        engine.run(lambda: bool(engine.worker._worker.loads))
        # vLLM cannot empty its own cache while the load holds blocks, and reports that.
        assert not engine.scheduler.reset_prefix_cache(reset_connector=True)
        engine.step()
        os.kill(own_pega.pid, signal.SIGCONT)
        engine.run()

        made.check()
        assert engine.stats["load_failures{discarded}"] == 1
        assert engine.stats["loaded_blocks"] == 0
        engine.check_at_rest()


# ---- vLLM's policy for failed loads


@pytest.mark.parametrize(
    ("policy", "extra", "recomputes"),
    [
        ("fail", {}, True),
        ("recompute", {}, True),
        ("fail", {"pegaflow.keep_failure_policy": True}, False),
        ("recompute", {"pegaflow.keep_failure_policy": True}, True),
    ],
)
def test_the_scheduler_uses_the_connectors_policy(own_pega, prompt, policy, extra, recomputes):
    tokens = prompt(300)
    transfer = {"kv_load_failure_policy": policy}
    with Engine(own_pega.address, transfer=transfer, extra=extra) as engine:
        assert engine.scheduler.recompute_kv_load_failures == recomputes
        engine.wait_ready()
        store(engine, tokens)
        when_load_is_ordered(engine, own_pega.kill)
        made = engine.add("x", tokens)
        engine.run()
        if recomputes:
            made.check()
        else:
            assert made.finish_reason == "error"
        engine.check_at_rest()


def test_the_policy_is_vllms_default() -> None:
    from vllm.config import KVTransferConfig

    assert KVTransferConfig().kv_load_failure_policy == "fail"
