"""An internal error in any hook disables the cache and nothing else; vLLM sees no exception."""

from typing import Any

import pytest

from pegaflow import _native
from pegaflow.engine.errors import error_code
from tests.python.fake_model import FakeModel
from tests.python.harness import Engine
from tests.python.test_connector_faults import when_load_is_ordered

SCHEDULER = [
    "_scheduler.new_request",
    "_scheduler.matched_tokens",
    "_scheduler.allocated",
    "_scheduler.plan",
    "_scheduler.report",
    "_scheduler.finished",
    "_scheduler.take_counts",
    "_scheduler.keep_stepping",
    "_scheduler.chunked.waiting",
    "_scheduler._idle.end_step",
    "_scheduler._lookups.blocks_beyond",
    "_scheduler._lookups._take_claim",
    "_scheduler._lookups._session.claim",
    "_scheduler._lookups._session.take",
    "_scheduler.loads.begin",
    "_scheduler.loads.take_ends",
    "_scheduler.loads.order",
    "_scheduler.loads.report",
    "_scheduler.saves.add",
    "_scheduler.saves.orders",
    "_scheduler.saves.report",
]
WORKER = [
    "_worker.start_loads",
    "_worker.submit_saves",
    "_worker.collect",
    "_worker.take_counts",
    "_worker.mover.load",
    "_worker.mover.save",
    "_worker.mover.take_finished",
    "_worker.mover.status",
    "_worker._load_ended",
    "_worker._save_ended",
]


def is_error(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, _native.PegaFlowError)


class Planted(RuntimeError):
    """An error that the connector expects nowhere."""


class _Failing:
    """Wraps an object of the connector, and fails in one of its methods."""

    def __init__(self, behind: Any, name: str, skip: int) -> None:
        self._behind, self._name, self._left = behind, name, skip

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._behind, name)
        if name != self._name:
            return value

        def fail(*args: Any, **kwargs: Any) -> Any:
            if self._left:
                self._left -= 1
                return value(*args, **kwargs)
            raise Planted(name)

        return fail


def plant(connector: Any, path: str, skip: int) -> None:
    *way, name = path.split(".")
    owner = connector
    for step in way[:-1]:
        owner = getattr(owner, step)
    holder = getattr(owner, way[-1])
    failing = _Failing(holder, name, skip)
    try:
        setattr(holder, name, getattr(failing, name))
    except AttributeError:  # a native object; its owner gets the wrapper
        setattr(owner, way[-1], failing)


#: Called in each step: the second failure happens while loads and saves are in flight.
OFTEN = [
    "_scheduler.plan",
    "_scheduler.chunked.waiting",
    "_scheduler._idle.end_step",
    "_scheduler.loads.take_ends",
    "_scheduler.saves.orders",
    "_worker.start_loads",
    "_worker.submit_saves",
    "_worker.collect",
    "_worker.mover.take_finished",
]
CASES = [(path, 0) for path in SCHEDULER + WORKER] + [(path, 3) for path in OFTEN]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("path", "skip"), CASES)
def test_a_failing_hook_costs_the_cache_only(pega, prompt, path, skip, asynchronous):
    stored = [prompt(300) for _ in range(4)]
    with Engine(pega.address, asynchronous=asynchronous) as engine:
        engine.wait_ready()
        for i, tokens in enumerate(stored):
            engine.ask(f"stored-{i}", tokens)
        engine.reset_local()
        worker = path.startswith("_worker")
        plant(engine.worker if worker else engine.connector, path, skip)

        for round_ in range(2):
            for i, tokens in enumerate(stored):
                engine.add(f"{round_}-{i}", tokens + prompt(40), 20)
            engine.run()
            for i in range(len(stored)):
                engine.answers[f"{round_}-{i}"].check()

        side = "worker" if worker else "scheduler"
        assert engine.stats[f"serving{{{side}}}"] == 0
        assert engine.stats[f"internal_errors{{{side}}}"] == 1
        engine.run()
        engine.check_at_rest(planted_errors=True)


@pytest.mark.parametrize("kind", [e for e in vars(_native).values() if is_error(e)])
@pytest.mark.parametrize("call", ["lookup", "claim", "take", "ask_reset", "take_reset"])
def test_any_error_of_the_server_is_a_miss_and_not_an_internal_error(pega, prompt, kind, call):
    tokens = prompt(300)
    with Engine(pega.address) as engine:
        engine.wait_ready()
        engine.ask("stored", tokens)
        engine.reset_local()
        side = engine.connector._scheduler
        answering = _Answering(side._session, call, kind)
        side._session = side._lookups._session = side._resets._session = answering
        if call.endswith("reset"):
            assert engine.scheduler.reset_prefix_cache(reset_connector=True)
            assert side._resets.is_owed

        made = engine.ask("x", tokens)

        assert made.loaded == 0
        if not call.endswith("reset"):
            reason = "no_server" if kind is _native.PeerLost else error_code(kind())
            assert engine.stats[f"misses{{{reason}}}"] >= 1
        engine.run()
        engine.check_at_rest()


class _Answering:
    """A session that answers one of its calls with an error."""

    def __init__(self, session: Any, call: str, kind: type[Exception]) -> None:
        self._session, self._call, self._kind = session, call, kind

    def __getattr__(self, name: str) -> Any:
        if name != self._call:
            return getattr(self._session, name)

        def fail(*args: Any) -> Any:
            raise self._kind("planted")

        return fail


def test_a_hook_that_fails_twice_is_logged_once(pega, prompt, caplog):
    with Engine(pega.address) as engine:
        engine.wait_ready()
        plant(engine.connector, "_scheduler.matched_tokens", 0)
        engine.ask("a", prompt(100))
        off = engine.connector._scheduler

        def fail(*args: Any) -> None:
            raise Planted

        off.matched_tokens = fail
        for i in range(5):
            engine.ask(f"b{i}", prompt(100))

        lines = [r for r in caplog.records if "get_num_new_matched_tokens failed" in r.getMessage()]
        assert len(lines) == 1
        assert all(line.exc_info for line in lines)
        engine.check_at_rest(planted_errors=True)


def test_the_thread_that_receives_requests_never_disables_the_cache(pega, prompt):
    """The scheduler's thread may be in the middle of a plan."""
    with Engine(pega.address) as engine:
        engine.wait_ready()
        plant(engine.connector, "_scheduler.request_arrives", 0)
        with pytest.raises(Planted):
            engine.connector._scheduler.request_arrives()
        engine.connector.request_arrives()
        tokens = prompt(100)
        engine.ask("stored", tokens)
        engine.reset_local()
        assert engine.ask("x", tokens).loaded > 0
        engine.check_at_rest()


def test_a_load_that_was_offered_before_the_failure_is_rejected(pega, prompt):
    tokens = prompt(300)
    with Engine(pega.address) as engine:
        engine.wait_ready()
        engine.ask("stored", tokens)
        engine.reset_local()
        # Between vLLM's allocation and the plan that would have contained the load.
        side = engine.connector._scheduler
        begin = side.loads.begin

        def begin_and_fail_soon(*args: Any) -> Any:
            plant(engine.connector, "_scheduler.loads.take_ends", 0)
            return begin(*args)

        side.loads.begin = begin_and_fail_soon
        engine.ask("x", tokens)

        assert len(engine.bad_blocks) == 18, "vLLM received a report of the missing blocks"
        engine.check_at_rest(planted_errors=True)


def test_a_worker_that_fails_during_a_load_reports_it_after_the_last_copy(pega, prompt):
    tokens = prompt(300)
    with Engine(pega.address) as engine:
        engine.wait_ready()
        engine.ask("stored", tokens)
        engine.reset_local()
        closed = []
        mover = engine.worker._worker.mover
        when_load_is_ordered(engine, lambda: plant(engine.worker, "_worker.mover.take_finished", 0))
        engine.worker._worker.mover = _Watched(mover, closed)
        engine.ask("x", tokens)

        assert closed == ["close"]
        engine.run()
        engine.check_at_rest(planted_errors=True)


class _Watched:
    """Records when a mover is closed."""

    def __init__(self, mover: Any, calls: list[str]) -> None:
        self._mover, self._calls = mover, calls

    def __getattr__(self, name: str) -> Any:
        if name == "close":
            self._calls.append(name)
        return getattr(self._mover, name)


def test_unsupported_tensors_disable_the_cache_only(pega, prompt, caplog):
    class Odd(FakeModel):
        def __init__(self, config: Any, content: int) -> None:
            super().__init__(config, content)
            self.tensors["model.layers.9.attn"] = next(iter(self.tensors.values()))

    with Engine(pega.address, model_class=Odd) as engine:
        tokens = prompt(100)
        for name in ("a", "b"):
            engine.ask(name, tokens)
            engine.reset_local()
            assert engine.answers[name].loaded == 0
        engine.run()
        engine.check_at_rest()
        assert engine.stats["serving{worker}"] == 0
        # The scheduler received the report, and sends the server no lookup.
        assert engine.stats["misses{not_registered}"] >= 1
    said = [r.getMessage() for r in caplog.records if "share the KV of others" in r.getMessage()]
    assert len(said) == 2, said
    assert "this engine runs without the cache" in said[0]
    assert "the cache is unavailable, rank 0 cannot use it" in said[1]
