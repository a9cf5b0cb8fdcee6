"""An engine that sleeps copies nothing, and finds its blocks again if it kept its weights."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.engine.core import EngineCore

from pegaflow.engine.view import View
from pegaflow.vllm import build, saves, sleep, worker_side
from pegaflow.vllm.messages import LoadOrder, SaveOrder, StepPlan
from pegaflow.vllm.support import unsupported
from pegaflow.vllm.worker_side import WorkerSide
from tests.python import sleeping
from tests.python.harness import Engine, kv_cache_config, vllm_config
from tests.python.rank import Rank
from tests.python.sleeping import core_of, drain, nap, remap, unmap
from tests.python.test_connector_faults import (
    stopped,
    when_load_is_ordered,
    when_save_is_ordered,
)
from tests.python.test_connector_view import alone, loaded, reset


@pytest.fixture
def two(pega: Any, request: Any) -> Iterator[tuple[Engine, Engine]]:
    with Engine(pega.address) as a, Engine(pega.address) as b:
        for one in (a, b):
            one.wait_ready()
            one.connector._scheduler._view = View(named=getattr(request, "param", True))
        yield a, b
        for one in (a, b):
            one.run()
            one.check_at_rest()


by_files_or_name = pytest.mark.parametrize("two", [False, True], indirect=True)


# ---- the blocks that an engine finds after it woke


@by_files_or_name
def test_an_engine_that_kept_its_weights_finds_all_blocks_again(two, prompt):
    a, b = two
    tokens, later = prompt(300), prompt(300)
    loaded(a, "a", tokens)

    for count in (1, 2):
        nap(a)

        assert loaded(a, f"again {count}", tokens) == 288
        assert loaded(b, f"b {count}", tokens) == 288
    loaded(a, "later", later)
    assert loaded(b, "of a", later) == 288
    assert a.stats["private_view"] == 0 and a.stats["resets{local}"] == 2


@by_files_or_name
def test_new_weights_find_no_block_of_old_ones_and_a_second_engine_keeps_its_hits(two, prompt):
    a, b = two
    old, wrong, new = prompt(300), prompt(300), prompt(300)
    loaded(a, "old", old)

    core = sleeping.sleep(a, 2)
    core.wake_up(["weights"])
    core.wake_up(["kv_cache"])
    assert loaded(a, "old weights", old) == 0
    loaded(a, "before the weights are loaded", wrong)
    with alone(a):
        core.collective_rpc("reload_weights")

    assert loaded(a, "weights that were none", wrong) == 0
    loaded(a, "new", new)
    assert loaded(a, "its own", new) == 288
    assert loaded(b, "b's own", old) == 288
    assert loaded(b, "not a's", new) == 0
    assert b.stats["private_view"] == 0


def test_a_version_after_new_weights_ends_the_private_view(two, prompt):
    a, b = two
    new = prompt(300)
    for one in two:
        core = sleeping.sleep(one, 2)
        with alone(one):
            core.collective_rpc("reload_weights")
            core.wake_up()
            core.set_weight_version("step-1")
    loaded(a, "new", new)
    assert loaded(b, "of one version", new) == 288


def wake_in_parts(engine: Engine) -> None:
    core = sleeping.sleep(engine)
    with alone(engine):
        assert not core.wake_up(["weights"])
        assert core.wake_up(["kv_cache"])


def update_asleep(engine: Engine) -> None:
    core = sleeping.sleep(engine)
    with alone(engine):
        core.collective_rpc("update_weights")
    core.wake_up()


def pause_asleep(engine: Engine) -> None:
    core = sleeping.sleep(engine)
    core.pause_scheduler("abort")
    core.wake_up()


def pause_first(engine: Engine) -> None:
    core = core_of(engine)
    core.pause_scheduler("abort", clear_cache=False)
    core.sleep(1)
    core.wake_up()


def pause_while_the_sleep_waits(engine: Engine) -> None:
    engine.add("running", list(range(10, 60)), 5)
    core = core_of(engine)
    engine.run(lambda: bool(engine.scheduler.running))
    asleep, paused = core.sleep(1, "wait"), core.pause_scheduler("wait")
    drain(engine, core)
    for one in (asleep, paused):
        one.result(timeout=0)
    core.wake_up()


def release_kv_cache(engine: Engine) -> None:
    core = core_of(engine)
    core.pause_scheduler("abort", clear_cache=False)
    core.release_kv_cache_memory()
    core.model_executor.sleeping_tags |= {"kv_cache"}
    core.wake_up()


def in_one_process_with_the_caller(engine: Engine) -> None:
    core = core_of(engine, EngineCore)
    core.sleep(1)
    core.wake_up()


@pytest.mark.parametrize(
    "stop",
    [
        wake_in_parts,
        update_asleep,
        pause_asleep,
        pause_first,
        pause_while_the_sleep_waits,
        release_kv_cache,
        in_one_process_with_the_caller,
    ],
)
def test_weights_that_others_may_have_replaced_make_the_engine_private(two, prompt, stop):
    a, b = two
    tokens = prompt(300)
    loaded(a, "a", tokens)

    stop(a)

    assert loaded(a, "gone", tokens) == 0
    assert loaded(b, "b", tokens) == 288
    assert a.stats["private_view"] == 1


@pytest.mark.parametrize("part", ["worker", "extension", "executor", None])
def test_only_workers_of_vllm_alone_keep_their_weights(two, monkeypatch, part):
    a, _ = two
    core = core_of(a)
    if part == "worker":
        monkeypatch.setattr(a.config.parallel_config, "worker_cls", "trainer.Worker")
    if part == "extension":
        monkeypatch.setattr(a.config.parallel_config, "worker_extension_cls", "trainer.Updates")
    if part == "executor":
        core.model_executor = object()
    assert sleep.weights_stay(core) == (part is None)


def block_in_use(engine: Engine, core: EngineCore) -> Callable[[], None]:
    pool = engine.scheduler.kv_cache_manager.block_pool
    held = pool.get_new_blocks(1)
    return lambda: pool.free_blocks(held)


def worker_that_fails(engine: Engine, core: EngineCore) -> Callable[[], None]:
    """Before vLLM empties its caches."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("planted")

    working, core.model_executor.collective_rpc = core.model_executor.collective_rpc, fail
    return lambda: setattr(core.model_executor, "collective_rpc", working)


@pytest.mark.parametrize("obstacle", [block_in_use, worker_that_fails])
@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_a_sleep_that_failed_lends_nothing_to_a_later_pause(two, prompt, obstacle, mode):
    a, b = two
    tokens = prompt(300)
    loaded(a, "a", tokens)
    core = core_of(a)
    remove = obstacle(a, core)
    if mode == "wait":
        a.add("running", prompt(40), 5)
        a.run(lambda: bool(a.scheduler.running))

    with pytest.raises(RuntimeError):
        pending = core.sleep(1, mode)
        drain(a, core)
        pending.result(timeout=0)
    core.wake_up()
    remove()
    core.pause_scheduler("abort")
    drain(a, core)
    core.resume_scheduler()

    assert loaded(a, "gone", tokens) == 0
    assert loaded(b, "b", tokens) == 288


def test_a_reset_and_a_sleep_of_one_engine_do_not_mix(two, prompt):
    a, b = two
    tokens = prompt(300)
    loaded(a, "a", tokens)
    nap(a)
    reset(a)
    assert loaded(b, "gone from b", tokens) == 0
    loaded(a, "a step", prompt(40))
    assert a.stats["resets{explicit}"] == 1


# ---- copies


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("mode", ["abort", "wait"])
@pytest.mark.parametrize("watch", [when_load_is_ordered, when_save_is_ordered])
def test_a_sleep_waits_for_copies_in_flight(pega, prompt, asynchronous, mode, watch):
    tokens = prompt(1000)
    with Engine(pega.address, asynchronous=asynchronous) as engine:
        engine.wait_ready()
        if watch is when_load_is_ordered:
            loaded(engine, "stored", tokens)
            engine.reset_local()
        seen: list[bool] = []
        watch(engine, lambda: seen.append(True))
        made = engine.add("x", tokens)
        engine.run(lambda: bool(seen))

        assert sleeping.sleep(engine, 1, mode).wake_up()

        if mode == "wait":
            made.check()
        assert engine.ask("y", tokens).local == 0
        assert loaded(engine, "z", tokens) == 992
        engine.run()
        engine.check_at_rest()


def test_a_kept_request_continues_although_its_kv_is_gone(pega, prompt):
    tokens = prompt(300)
    with Engine(pega.address) as engine:
        engine.wait_ready()
        made = engine.add("x", tokens, 60)
        engine.run(lambda: len(made.tokens) > 20)

        assert sleeping.sleep(engine, 1, "keep").wake_up()

        engine.run()
        made.check()
        assert loaded(engine, "y", tokens) == 288
        engine.run()
        engine.check_at_rest()


def test_a_sleep_that_keeps_requests_fails_while_one_is_loaded(pega, prompt):
    tokens = prompt(1000)
    with Engine(pega.address) as engine:
        engine.wait_ready()
        loaded(engine, "stored", tokens)
        engine.reset_local()
        seen: list[bool] = []
        when_load_is_ordered(engine, lambda: seen.append(True))
        made = engine.add("x", tokens)
        engine.run(lambda: bool(seen))

        with pytest.raises(RuntimeError):
            sleeping.sleep(engine, 1, "keep")
        core_of(engine).resume_scheduler()

        engine.run()
        made.check()
        engine.check_at_rest()


def test_a_save_that_does_not_end_prevents_the_sleep(own_pega, prompt, monkeypatch):
    monkeypatch.setattr(saves, "IDLE_LIMIT_S", 0.2)
    tokens = prompt(300)
    with Engine(own_pega.address) as engine:
        engine.wait_ready()
        with contextlib.ExitStack() as stack:
            when_save_is_ordered(engine, lambda: stack.enter_context(stopped(own_pega)))
            engine.ask("x", tokens)

            with pytest.raises(RuntimeError):
                sleeping.sleep(engine)
        monkeypatch.undo()
        core_of(engine).resume_scheduler()
        assert loaded(engine, "y", tokens) == 288
        nap(engine)
        assert loaded(engine, "z", tokens) == 288
        engine.run()
        engine.check_at_rest()


@pytest.mark.parametrize("what", ["load", "save"])
def test_jobs_that_hang_are_given_up_before_the_memory_is_gone(own_pega, prompt, monkeypatch, what):
    monkeypatch.setattr(worker_side, "UNMAP_PATIENCE_S", 0.2)
    tokens = prompt(300)
    extra = {"pegaflow.reserve_deadline_ms": 3000, "pegaflow.open_deadline_ms": 3000}
    with Engine(own_pega.address, extra=extra) as engine:
        engine.wait_ready()
        if what == "load":
            loaded(engine, "stored", tokens)
            engine.reset_local()
        (rank,) = engine.ranks
        side = rank.worker._worker
        mover = side.mover
        with contextlib.ExitStack() as stack:
            watch = when_load_is_ordered if what == "load" else when_save_is_ordered
            watch(engine, lambda: stack.enter_context(stopped(own_pega)))
            engine.add("x", tokens, 1)
            engine.run(lambda: bool(side.loads or side.saves))
            engine.abort("x")

            unmap(rank)

            assert side.mover is None and mover.status()["state"] == "retired"
            assert not side.loads and not side.saves
        remap(rank)

        engine.wait_ready()
        engine.reset_local()
        loaded(engine, "y", tokens)
        assert loaded(engine, "z", tokens) == 288
        engine.run()
        engine.check_at_rest()


def test_a_sleeping_worker_refuses_jobs_and_reports_each(pega, prompt):
    with Engine(pega.address) as engine:
        engine.wait_ready()
        (rank,) = engine.ranks
        unmap(rank)
        unmap(rank)
        side = rank.worker._worker
        load = LoadOrder(5, "r", b"t" * 16, 0, [3, 4])
        save = SaveOrder(6, b"k" * 32, 32, [5])

        side.start_loads(StepPlan(loads=[load]))
        side.submit_saves(StepPlan(saves=[save]))

        assert side.reports.take_received() == {"r"}
        assert side.reports.take_bad_blocks() == {3, 4}
        report = side.reports.take_report()
        assert (report.loads[5].error, report.saves[6].error) == ("asleep", "asleep")
        remap(rank)
        remap(rank)
        assert engine.ask("x", prompt(300)).loaded == 0


def test_a_server_that_restarts_meanwhile_is_used_after_the_wake_up(own_pega, prompt):
    tokens = prompt(300)
    with Engine(own_pega.address) as engine:
        engine.wait_ready()
        loaded(engine, "x", tokens)
        core = sleeping.sleep(engine)
        own_pega.kill()
        own_pega.start()
        engine.wait_ready()
        core.wake_up()
        loaded(engine, "y", tokens)
        assert loaded(engine, "z", tokens) == 288


def test_all_ranks_sleep_and_wake(own_pega, prompt):
    tokens = prompt(300)
    with Engine(own_pega.address, tensor_parallel_size=2) as engine:
        engine.wait_ready()
        loaded(engine, "x", tokens)
        nap(engine)
        assert loaded(engine, "y", tokens) == 288
        engine.run()
        engine.check_at_rest()


def _break(rank: Rank) -> None:
    def fail() -> None:
        raise ValueError("planted")

    rank.worker._worker._take_finished = fail


def test_a_failure_while_falling_asleep_ends_the_copies_and_disables_the_cache(pega, prompt):
    tokens = prompt(300)
    with Engine(pega.address) as engine:
        engine.wait_ready()
        loaded(engine, "x", tokens)
        (rank,) = engine.ranks
        mover = rank.worker._worker.mover
        _break(rank)

        nap(engine)

        assert mover.status()["state"] == "retired"
        assert loaded(engine, "y", tokens) == 0
        engine.run()
        engine.check_at_rest(planted_errors=True)


@dataclasses.dataclass
class _Done:
    """A load that has succeeded, as the native module reports it."""

    id: int
    kind: str = "load"
    blocks: int = 2
    bytes: int = 8192
    direct_bytes: int = 0
    took_s: float = 0.01
    copying_s: float = 0.0
    error: str | None = None
    error_code: str | None = None
    cut: str = ""
    failed_blocks: tuple[int, ...] = ()
    verified: int = 0
    corrupt: int = 0


class _Mover:
    """Ends a load when it is cancelled, too late to stop it."""

    def __init__(self) -> None:
        self.closed = False
        self._done: list[_Done] = []

    def load(self, *args: Any, **kwargs: Any) -> None: ...

    def cancel_load(self, load: int) -> None:
        self._done.append(_Done(load))

    def finished_fd(self) -> int:
        return 0

    def take_finished(self) -> list[_Done]:
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        self.closed = True


def test_a_load_that_ends_while_the_engine_falls_asleep_counts_as_failed():
    side = WorkerSide(lambda _: _Mover())
    side.register({})
    side.start_loads(StepPlan(loads=[LoadOrder(5, "r", b"t" * 16, 0, [7, 9])]))

    side.unregister()

    assert not side.mover.closed
    assert side.reports.take_received() == {"r"}
    assert side.reports.take_bad_blocks() == {7, 9}
    assert side.reports.take_report().loads[5].error == "discarded"


def test_tensors_that_moved_are_registered_again():
    made: list[tuple[_Mover, list[int]]] = []

    def make(kv_caches: dict[str, Any]) -> _Mover:
        made.append((_Mover(), worker_side._addresses(kv_caches)))
        return made[-1][0]

    caches = {"a": torch.zeros(8), "b": [torch.zeros(8), (torch.zeros(8),)]}
    side = WorkerSide(make)
    side.register(caches)
    side.unregister()
    side.restore()
    assert len(made) == 1 and not made[0][0].closed

    side.unregister()
    other = torch.ones(8)
    caches["b"][0].data = other
    side.restore()

    assert len(made) == 2 and made[0][0].closed and side.mover is made[1][0]
    assert made[1][1][1] == other.data_ptr()


# ---- engines that are not served


@pytest.fixture
def asleep_able(tmp_path) -> tuple[Any, Any]:
    config = vllm_config(f"unix://{tmp_path}/none.sock")
    kv_config = kv_cache_config(config, 256)
    object.__setattr__(config.model_config, "enable_sleep_mode", True)
    return config, kv_config


def test_a_release_that_informs_no_connector_is_refused_by_name(asleep_able):
    if hasattr(KVConnectorBase_V1, "unregister_kv_caches"):
        pytest.skip("this release informs them")
    assert "does not inform connectors before its sleep mode" in unsupported(*asleep_able)


def test_no_other_engine_reads_memory_that_sleeps(asleep_able):
    config, kv_config = asleep_able
    extra = config.kv_transfer_config.kv_connector_extra_config
    extra["pegaflow.direct_group"] = "group"
    settings = build._settings(config)
    assert build._direct_group(config, kv_config, settings, None) == ""
    object.__setattr__(config.model_config, "enable_sleep_mode", False)
    assert build._direct_group(config, kv_config, settings, None) == "group"


def test_sleep_mode_is_served_where_it_was_verified_or_on_request(asleep_able, monkeypatch):
    config, _ = asleep_able
    monkeypatch.setattr(KVConnectorBase_V1, "unregister_kv_caches", lambda: None, raising=False)
    assert "pegaflow.untested=true serves it" in unsupported(*asleep_able)

    monkeypatch.setattr(sleep, "VERIFIED", frozenset({"cpu"}))
    assert unsupported(*asleep_able) == ""

    monkeypatch.setattr(sleep, "VERIFIED", frozenset())
    config.kv_transfer_config.kv_connector_extra_config["pegaflow.untested"] = True
    assert unsupported(*asleep_able) == ""

    object.__setattr__(config.model_config, "sleep_mode_backend", "criu")
    assert "backend criu" in unsupported(*asleep_able)
