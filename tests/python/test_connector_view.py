"""An engine whose weights may have changed uses no blocks of its former weights.

vLLM's real EngineCore makes the calls; its scheduler and workers are those of the harness.
"""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCore

from pegaflow.engine.view import View, salted
from pegaflow.vllm import engine_calls
from tests.python.harness import Engine
from tests.python.test_connector_handover import ASKED

KEY = bytes(range(32))


def core_of(engine: Engine) -> EngineCore:
    """vLLM's engine core around a scheduler; calls to its workers do nothing."""
    core = object.__new__(EngineCore)
    core.scheduler = engine.scheduler
    core.mm_receiver_cache = None
    core.model_executor = SimpleNamespace(
        collective_rpc=lambda *args: [None],
        reset_mm_cache=lambda: None,
        reset_encoder_cache=lambda: None,
        sleep=lambda level: None,
        wake_up=lambda tags: None,
        is_sleeping=False,
    )
    return core


def pause(engine: Engine) -> None:
    engine.run()
    core = core_of(engine)
    core.pause_scheduler("abort")
    core.resume_scheduler()


def sleep(engine: Engine) -> None:
    engine.run()
    core = core_of(engine)
    core.sleep(1)
    core.wake_up()


def reset(engine: Engine) -> None:
    """POST /reset_prefix_cache?reset_external=true"""
    engine.run()
    assert core_of(engine).reset_prefix_cache(reset_connector=True)


def update(engine: Engine, version: str | None = None) -> None:
    """New weights, as by /start_weight_update and the following calls."""
    core = core_of(engine)
    for method in ("start_weight_update", "update_weights", "finish_weight_update"):
        core.collective_rpc(method)
    if version is not None:
        core.set_weight_version(version)


@contextlib.contextmanager
def alone(engine: Engine) -> Iterator[None]:
    """As if each engine had a process to itself, as in vLLM."""
    others = [one for one in engine_calls._listeners if one is not engine.connector]
    for one in others:
        engine_calls.unwatch(one)
    yield
    for one in others:
        engine_calls.watch(one)


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


def loaded(engine: Engine, name: str, tokens: list[int]) -> int:
    """The number of tokens of a prompt that the cache provides, if vLLM's own has none."""
    engine.reset_local()
    made = engine.ask(name, tokens)
    engine.run()
    return made.loaded


by_files_or_name = pytest.mark.parametrize("two", [False, True], indirect=True)


# ---- resets


@by_files_or_name
@pytest.mark.parametrize("stop", [pause, sleep])
def test_a_pause_is_local_and_a_second_engine_keeps_its_hits(two, prompt, stop):
    a, b = two
    tokens = prompt(300)
    loaded(a, "a", tokens)

    stop(a)

    assert loaded(b, "b", tokens) == 288
    assert loaded(a, "gone", tokens) == 0, "vLLM has emptied its caches"
    assert loaded(a, "its own", tokens) == 288
    assert a.stats["resets{local}"] == 1
    assert a.stats["resets{explicit}"] == 0
    other = prompt(300)
    loaded(a, "other", other)
    assert loaded(b, "not b's", other) == 0

    stop(a)

    assert loaded(a, "gone again", other) == 0


@by_files_or_name
def test_an_explicit_reset_applies_everywhere_even_in_a_pause(two, prompt):
    a, b = two
    tokens, others = prompt(300), prompt(300)
    loaded(a, "a", tokens)
    pause(a)
    loaded(a, "others", others)
    core_of(a).pause_scheduler("abort")

    reset(a)

    core_of(a).resume_scheduler()
    assert loaded(b, "gone from b", tokens) == 0
    assert loaded(a, "gone from a", others) == 0
    assert a.stats["resets{explicit}"] == 1


@pytest.mark.parametrize("two", [True], indirect=True)
def test_with_a_named_id_an_explicit_reset_ends_a_private_view(two, prompt):
    a, b = two
    tokens = prompt(300)
    pause(a)
    loaded(a, "private", prompt(300))
    reset(a)
    loaded(b, "b", tokens)
    assert loaded(a, "shared", tokens) == 288


@pytest.mark.parametrize("two", [False], indirect=True)
def test_with_an_id_of_files_a_private_view_is_permanent(two, prompt):
    a, b = two
    tokens = prompt(300)
    pause(a)
    reset(a)
    loaded(b, "b", tokens)
    assert loaded(a, "private", tokens) == 0
    with alone(a):
        update(a, "v1")
    reset(a)
    loaded(b, "b again", tokens)
    assert loaded(a, "still", tokens) == 0


def test_earlier_requests_are_not_saved_and_waiting_ones_get_new_keys(two, prompt):
    a, b = two
    first, second = prompt(300), prompt(300)
    running = a.add("running", first, 60)
    a.run(lambda: len(running.tokens) > 2)
    saved = a.stats["saved_blocks"]
    waiting = a.add("waiting", second, 4)

    with alone(a):
        update(a)
    a.run()

    running.check()
    waiting.check()
    a.run()
    assert a.stats["saved_blocks"] - saved <= 2 * 18
    assert loaded(b, "second", second) == 0
    assert loaded(a, "second", second) == 288


# ---- weights


@by_files_or_name
@pytest.mark.parametrize("method", ["reload_weights", "load_my_weights", lambda worker: None])
def test_a_call_that_may_change_weights_makes_the_engine_private(two, prompt, method):
    a, b = two
    old, new = prompt(300), prompt(300)
    loaded(a, "old", old)
    with alone(a):
        core_of(a).collective_rpc(method)
    assert loaded(a, "old weights", old) == 0
    loaded(a, "new weights", new)
    assert loaded(b, "b's own", old) == 288
    assert loaded(b, "not a's", new) == 0
    assert a.stats["private_view"] == 1 and b.stats["private_view"] == 0


def test_a_call_that_does_not_change_weights_has_no_effect(two, prompt):
    a, b = two
    tokens = prompt(300)
    loaded(a, "a", tokens)
    with alone(a):
        assert core_of(a).compute_weight_checksums() == [None]
    assert loaded(a, "again", tokens) == loaded(b, "again", tokens) == 288


def test_engines_with_one_weight_version_share_and_others_do_not(two, prompt):
    a, b = two
    old, new = prompt(300), prompt(300)
    loaded(a, "old", old)
    for one in two:
        pause(one)
        with alone(one):
            update(one, "step-1")
    assert loaded(a, "old", old) == 0
    loaded(a, "new", new)
    assert loaded(b, "of one version", new) == 288

    pause(b)
    with alone(b):
        update(b, "step-2")
    assert loaded(b, "of another", new) == 0
    assert loaded(a, "unaffected", new) == 288


def test_a_version_takes_effect_when_vllm_holds_no_kv_of_other_weights(two, prompt):
    a, b = two
    tokens = prompt(300)
    pause(b)
    with alone(b):
        update(b, "step-1")
    loaded(a, "old", tokens)
    with alone(a):
        update(a, "step-1")  # in progress, without a pause
    made = a.ask("from vLLM's own cache", tokens + prompt(60))
    assert made.local == 288
    a.run()
    assert loaded(b, "not that", tokens) == 0

    reset(a)

    other = prompt(300)
    loaded(a, "clean", other)
    assert loaded(b, "clean", other) == 288


def test_a_version_of_one_of_several_engines_in_a_process_is_ignored(two, prompt):
    a, b = two
    core_of(a).set_weight_version("step-1")
    for one in two:
        one.ask("x", prompt(40))
        one.run()
        assert one.stats["private_view"] == 1


def test_a_private_engine_hands_over_nothing(two, prompt):
    a, _ = two
    assert a.ask("x", prompt(300), 1, params=ASKED).params is not None
    a.run()
    pause(a)
    assert a.ask("y", prompt(300), 1, params=ASKED).params is None


def test_a_version_is_the_same_view_everywhere_and_long_keys_keep_their_length():
    one, two, other = View(True), View(True), View(True)
    for view, version in ((one, "1"), (two, "1"), (other, "2")):
        assert view.set_version(version)
    keys = {salted(view.salt, KEY) for view in (one, two, other, View(True))}
    assert len(keys) == 3 and {len(key) for key in keys} == {32}
    assert salted(one.salt, KEY[:16]) != salted(other.salt, KEY[:16])
    assert len(salted(one.salt, KEY[:16])) == 16
    empty = View(True)
    assert empty.set_version("") and empty.salt not in (b"", one.salt)
