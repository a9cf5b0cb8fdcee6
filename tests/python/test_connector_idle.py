"""Steps in which every request waits for the cache: what they sleep for, and what ends the sleep.

Two engines of vLLM's real scheduler, the real connector and a real server.
"""

import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCore

from pegaflow.vllm import engine_calls
from pegaflow.vllm.early import SaveWatch
from pegaflow.vllm.idle import BRIEF_S, IdleSteps
from pegaflow.vllm.metrics import Counts
from tests.python.harness import Engine
from tests.python.test_connector_early import early
from tests.python.test_connector_faults import when_load_is_ordered
from tests.python.test_connector_handover import LONG, engines, is_waiting, next_job, prefill

#: A sleep that ends only by its limit fails its test.
FOREVER_S = 600.0


class SleepingSession:
    """Notes for each sleep of a session that is not brief whether an event ended it."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self.ended: list[bool] = []
        self.is_asleep = threading.Event()
        self.begins: Callable[[], Any] = lambda: None

    def await_event(self, seen: int, patience_s: float) -> bool:
        self.begins()
        if patience_s <= BRIEF_S:
            return self._session.await_event(seen, patience_s)
        self.is_asleep.set()
        self.ended.append(self._session.await_event(seen, patience_s))
        return self.ended[-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


def sleeper(engine: Engine, limit_s: float = FOREVER_S) -> SleepingSession:
    idle = engine.connector._scheduler._idle
    idle._session, idle.limit_s = SleepingSession(idle._session), limit_s
    return idle._session


def meanwhile(sleeping: SleepingSession, action: Callable[[], Any]) -> threading.Thread:
    """Starts a thread that acts once a step sleeps."""

    def act() -> None:
        assert sleeping.is_asleep.wait(60)
        action()

    thread = threading.Thread(target=act)
    thread.start()
    return thread


@pytest.mark.parametrize("is_early", [True, False], ids=["early", "serial"])
def test_the_end_of_the_prefill_ends_the_sleep(pega, prompt, is_early):
    tokens = prompt(250)  # one chunk, as a request that names a save waits for no later one
    with engines(pega.address) as (p, d):
        known = prefill(p, "known", prompt(40))
        p.run()
        sleeping = sleeper(d)
        d.add("x", tokens, 5, params=early(known) if is_early else next_job(known))

        def end_prefill() -> None:
            prefill(p, "x", tokens)
            p.run()

        thread = meanwhile(sleeping, end_prefill)
        d.run()
        thread.join()

        assert d.answers["x"].loaded >= 240
        assert sleeping.ended and all(sleeping.ended)
        assert d.stats["idle_steps"] >= len(sleeping.ended)
        assert d.stats["idle_seconds"] < FOREVER_S


def test_a_new_request_ends_the_sleep(pega, prompt):
    with engines(pega.address) as (p, d):
        known = prefill(p, "known", prompt(40))
        p.run()
        sleeping = sleeper(d)
        d.add("x", prompt(300), 5, params=early(known))

        # vLLM's thread that receives requests makes this call.
        thread = meanwhile(sleeping, d.connector.request_arrives)
        d.run(lambda: bool(sleeping.ended))
        thread.join()

        assert all(sleeping.ended)
        assert is_waiting(d, "x", "early")
        d.add("other", prompt(100), 3)
        d.run(lambda: d.answers["other"].finish_reason != "")
        d.abort("x")
        d.run()


def test_vllm_reports_each_request_that_it_receives(pega):
    received = []

    class Listener:
        def request_arrives(self) -> None:
            received.append("request")

    listener = Listener()
    engine_calls.watch(listener)
    core = object.__new__(EngineCore)
    try:
        with pytest.raises(AttributeError):  # There is no engine behind it.
            core.preprocess_add_request(None)
        assert not received
        core.mm_receiver_cache = core.request_block_hasher = None
        core.preprocess_add_request(_engine_core_request())
        assert received == ["request"]
    finally:
        engine_calls.unwatch(listener)


def _engine_core_request() -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    return EngineCoreRequest(
        request_id="x",
        prompt_token_ids=[1, 2, 3],
        mm_features=None,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def test_an_engine_that_computes_does_not_sleep(pega, prompt):
    with engines(pega.address) as (p, d):
        known = prefill(p, "known", prompt(40))
        p.run()
        sleeping = sleeper(d, 2 * BRIEF_S)
        d.add("computed", prompt(100), 40)
        d.add("x", prompt(300), 5, params=early(known))

        d.run(lambda: d.answers["computed"].finish_reason != "")
        assert not sleeping.ended
        # A step in which the last save is reported has nothing else to do, and sleeps.
        reports_saves: list[bool] = []
        sleeping.begins = lambda: reports_saves.append(d.connector.has_pending_push_work())
        d.run(lambda: bool(sleeping.ended))

        assert not any(reports_saves)
        d.abort("x")
        d.run()


def test_an_engine_that_loads_does_not_sleep(pega, prompt):
    tokens = prompt(300)
    with engines(pega.address) as (p, d):
        known = prefill(p, "cached", tokens)
        p.run()
        sleeping = sleeper(d, 2 * BRIEF_S)
        d.add("x", prompt(300), 5, params=early(known))
        d.add("cached", tokens, 2)
        counts = []
        when_load_is_ordered(d, lambda: counts.append(len(sleeping.ended)))
        d.run(lambda: d.answers["cached"].finish_reason != "")

        assert counts == [len(sleeping.ended)]
        d.abort("x")
        d.run()


@pytest.mark.parametrize(
    "changes", [{"data_parallel": (0, 2)}, {"extra": {"pegaflow.idle_step_ms": 0}}]
)
def test_some_engines_never_sleep(pega, prompt, changes):
    """Other engine cores wait for each step, or the option is off."""
    decode = {**changes, "extra": LONG | changes.get("extra", {})}
    with engines(pega.address, None, decode) as (p, d):
        known = prefill(p, "known", prompt(40))
        p.run()
        d.add("x", prompt(300), 5, params=early(known))
        sleeping = SleepingSession(d.connector._scheduler._idle._session)
        d.connector._scheduler._idle._session = sleeping
        for _ in range(20):
            d.step()
        assert is_waiting(d, "x", "early")
        assert not sleeping.ended
        assert d.stats["idle_steps"] == 20
        assert d.stats["idle_seconds"] == 0
        d.abort("x")
        d.run()


# ---- the questions of a request that waits, in time


class TimedSession:
    """Answers about saves, one of which ends in each interval; time passes in sleeps only."""

    def __init__(self, interval_s: float, reports: bool, over: int) -> None:
        """``over``: the number of saves that have ended before. ``reports``: with each answer how
        far the saves are, as servers do that are not older.
        """
        self.now = over * interval_s
        self.asked: list[int] = []
        self._interval_s = interval_s
        self._reports = reports
        self._ends_at = 0.0  # of the job of the pending question
        self._events = 0

    def clock(self) -> float:
        return self.now

    def await_job(self, node: bytes, scheduler: bytes, job: int, patience_s: float) -> int:
        self.asked.append(job)
        self._ends_at = max(self.now, job * self._interval_s)
        assert self._ends_at <= self.now + patience_s, "asked too far ahead"
        return job

    def take_wait(self, ticket: int) -> int | None:
        if self.now < self._ends_at:
            return None
        self._events += 1
        return max(ticket, int(self.now / self._interval_s)) if self._reports else 0

    def events(self) -> int:
        return self._events

    def await_event(self, seen: int, patience_s: float) -> bool:
        is_woken = self._ends_at <= self.now + patience_s
        self.now = min(self.now + patience_s, max(self.now, self._ends_at))
        return is_woken


@pytest.mark.parametrize("step_s", [0.0001, 0.001])
@pytest.mark.parametrize("interval_s", [0.004, 0.006, 0.009, 0.015, 0.1])
@pytest.mark.parametrize(("reports", "over"), [(False, 0), (True, 50)], ids=["older", "reports"])
def test_an_engine_that_sleeps_asks_for_each_save_of_a_busy_prefill_engine(
    interval_s, step_s, reports, over
):
    """An answer about a save that was in flight shows that there is no older news to pass over.
    One that reports the number of the last save passes over the older ones at once.
    """
    session = TimedSession(interval_s, reports, over)
    handover = types.SimpleNamespace(node=b"n", scheduler=b"s", job=1)
    watch = SaveWatch(session, handover, patience_s=2.0, clock=session.clock)
    idle = IdleSteps(session, limit_s=0.01, counts=Counts(), clock=session.clock)
    steps = 0
    while len(session.asked) < 20:
        watch.poll()
        idle.add_waiting("x")
        idle.end_step(1, is_idle=True)
        session.now += step_s
        steps += 1
    latest = max(over, 1)
    assert session.asked == [1, *range(latest + 1, latest + 20)]
    # It sleeps nevertheless.
    assert steps <= 20 * (4 + interval_s / 0.01)
