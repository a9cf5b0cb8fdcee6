"""Requests that read the blocks of a prompt out of the prefill engine's memory while it saves them.

Two engines of vLLM's real scheduler, the real connector and a real server; the router is the test.
The prefill engine's worker has a process of its own, which is stopped in the middle of a save.
"""

import contextlib
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.python.fake_model import _Row
from tests.python.harness import BLOCK, Engine
from tests.python.rank import RankProcess
from tests.python.test_connector_chunked import (
    CHUNK,
    LENGTH,
    check_reset,
    ended,
    held_blocks,
    loaded_blocks,
    state_of,
)
from tests.python.test_connector_early import CHUNKED, early, ends, forgets_all
from tests.python.test_connector_engine import KINDS
from tests.python.test_connector_faults import stopped
from tests.python.test_connector_handover import ASKED, LONG, engines, prefill
from tests.python.test_connector_hooks import plant
from tests.python.test_connector_tp_sizes import engine as engine_of_sizes
from tests.python.test_connector_two_engines import insertions, run_together
from tests.support.vllm_server import PegaServer
from tests.support.waiting import wait_until

GROUP = {"pegaflow.direct_group": "host"}
PREFILL = CHUNKED | {"process": True, "extra": GROUP}
DECODE = {"extra": LONG | GROUP}


def tasks(pid: int) -> list[str]:
    """The state of each thread of a process."""
    states = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            states.append((task / "stat").read_text().rpartition(")")[2].split()[0])
    return states


def wait_for_threads(pid: int, state: str) -> None:
    """Waits until each thread of a process sleeps, "S", or is stopped, "T"."""
    wait_until(lambda: set(tasks(pid)) == {state}, f"process {pid} has threads {tasks(pid)}")


@contextlib.contextmanager
def frozen(server: PegaServer, p: Engine) -> Iterator[None]:
    """The prefill engine computes a chunk and reserves its slots. Meanwhile it copies nothing."""
    workers = [one.pid for one in p.ranks if isinstance(one, RankProcess)]
    with stopped(server):
        wait_for_threads(server.pid, "T")
        scheduled: list[int] = []
        p.on_schedule = lambda output: scheduled.append(output.total_num_scheduled_tokens)
        p.step()
        assert scheduled[0] > 1
        for pid in workers:
            # Then the call to the server, which it cannot answer, was sent.
            wait_for_threads(pid, "S")
            os.kill(pid, signal.SIGSTOP)
            wait_for_threads(pid, "T")
    try:
        yield
    finally:
        for pid in workers:
            with contextlib.suppress(ProcessLookupError):  # a test has killed it
                os.kill(pid, signal.SIGCONT)


def send(p: Engine, d: Engine, tokens: list[int], output: int = 5, wait_ms: int = 60_000) -> None:
    """A router sends a prompt to both engines; none of its chunks is computed yet."""
    known = prefill(p, "known", [7] * 40)
    p.run()
    d.add("x", tokens, output, params=early(known, wait_ms))
    # The decode engine looks up what the cache has before the prefill.
    if d.connector._scheduler._waits._early.block_limit:
        d.run(lambda: state_of(d).early.cached is not None)
    session = p.connector._scheduler._session
    seen = session.events()
    p.add("x", tokens, 1, params=ASKED)
    # So the prefill engine computes in its next step.
    assert session.await_event(seen, 60.0)


def has_arrived(d: Engine, tokens: list[int], count: int) -> bool:
    """Whether the decode engine's memory has the KV of the first ``count`` tokens."""
    if held_blocks(d) * BLOCK < count:
        return False
    row = _Row(0, tokens, [], list(d.scheduler.kv_cache_manager.get_block_ids("x")[0]))
    row.extend()
    return d.model._arrays_at(row, 0, count, write=False) is None


@contextlib.contextmanager
def reading(
    server: PegaServer, tokens: list[int], decode: Any = None
) -> Iterator[tuple[Engine, Engine]]:
    """Both engines when the decode engine has read the first of four chunks, which was not saved
    then. The prefill engine continues.
    """
    with engines(server.address, PREFILL, DECODE | (decode or {})) as (p, d):
        send(p, d, tokens)
        with frozen(server, p):
            d.run(lambda: has_arrived(d, tokens, CHUNK))
            assert d.answers["x"].finish_reason == ""
        yield p, d


def check_short(d: Engine, loaded: int = CHUNK) -> None:
    """The request was answered from the blocks that came, and computed the rest."""
    d.answers["x"].check()
    assert loaded // BLOCK <= d.stats["loaded_blocks"] < LENGTH // BLOCK
    assert forgets_all(d)


def check_followed(d: Engine, length: int) -> None:
    """The request was answered from one load that followed its prefill to the end, and that read at
    least one chunk out of the other engine's memory.
    """
    answer = d.answers["x"]
    answer.check()
    assert answer.loaded == (length - 1 if length % BLOCK >= 2 else 992)
    assert d.stats["direct_bytes"] >= CHUNK // BLOCK * d.connector._scheduler.rules.block_bytes
    assert ended(d, "over") == ends(d, "over") == 1
    assert not d.stats["load_failed_blocks"]
    assert forgets_all(d)


# ---- the prefill ends


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [240, 241, 242, 250])
def test_a_prompt_is_answered_before_it_is_saved(own_pega, prompt, kind, length):
    tokens = prompt(length)
    with engines(own_pega.address, PREFILL, KINDS[kind] | DECODE) as (p, d):
        send(p, d, tokens, 2)
        with frozen(own_pega, p):
            d.run()
        answer = d.answers["x"]
        answer.check()
        assert answer.loaded == (length - 1 if length % BLOCK >= 2 else 240)
        assert d.stats["direct_bytes"] == d.stats["loaded_bytes"] > 0
        assert ended(d, "over") == ends(d, "over") == 1
        assert d.stats["loads"] == 1
        assert forgets_all(d)
        p.run()


@pytest.mark.parametrize("length", [LENGTH, 992, 993])
def test_one_load_follows_the_whole_prefill(own_pega, prompt, length):
    tokens = prompt(length)
    with reading(own_pega, tokens) as (p, d):
        run_together([p, d])
        check_followed(d, length)
        assert d.stats["loads"] == 1
        assert d.stats["loaded_blocks"] == -(-d.answers["x"].loaded // BLOCK)


def test_each_chunk_is_read_before_it_is_saved(own_pega, prompt):
    tokens = prompt(LENGTH)
    with engines(own_pega.address, PREFILL, DECODE) as (p, d):
        send(p, d, tokens)
        for chunk in range(1, 5):
            with frozen(own_pega, p):
                if chunk < 4:
                    d.run(lambda count=chunk * CHUNK: has_arrived(d, tokens, count))
                else:
                    d.run(lambda: d.answers["x"].finish_reason != "")
        d.run()
        d.answers["x"].check()
        assert d.answers["x"].loaded == LENGTH - 1
        assert d.stats["direct_bytes"] == d.stats["loaded_bytes"] > 0
        p.run()


def test_blocks_that_the_cache_has_come_from_there(own_pega, prompt):
    tokens = prompt(LENGTH)
    with engines(own_pega.address, PREFILL, DECODE) as (p, d):
        prefill(p, "earlier", tokens[: 20 * BLOCK])
        send(p, d, tokens)
        with frozen(own_pega, p):
            d.run(lambda: has_arrived(d, tokens, 20 * BLOCK + CHUNK))
        run_together([p, d])
        d.answers["x"].check()
        assert d.answers["x"].loaded == LENGTH - 1
        assert d.stats["loads"] == 2
        assert 0 < d.stats["direct_bytes"] < d.stats["loaded_bytes"]
        assert not d.stats["load_failed_blocks"]


def test_a_load_that_has_begun_in_the_pool_goes_on_in_the_prefill_engines_memory(own_pega, prompt):
    tokens = prompt(LENGTH)
    with engines(own_pega.address, PREFILL, DECODE) as (p, d):
        send(p, d, tokens)
        saved = insertions(own_pega)
        p.run(lambda: p.scheduler.requests["x"].num_computed_tokens >= CHUNK)
        wait_until(lambda: insertions(own_pega) >= saved + CHUNK // BLOCK, "no chunk was saved")
        d.run(lambda: loaded_blocks(d) >= CHUNK // BLOCK)
        with frozen(own_pega, p):
            computed = p.scheduler.requests["x"].num_computed_tokens
            d.run(lambda: has_arrived(d, tokens, computed))
        run_together([p, d])
        d.answers["x"].check()
        assert d.answers["x"].loaded == LENGTH - 1
        assert d.stats["direct_bytes"] > 0
        assert ended(d, "over") == 1


def test_two_ranks_read_the_memory_of_their_peers(own_pega, prompt):
    tokens = prompt(250)
    two = {"tensor_parallel_size": 2}
    with engines(own_pega.address, PREFILL | two, DECODE | two) as (p, d):
        send(p, d, tokens)
        with frozen(own_pega, p):
            d.run(lambda: d.answers["x"].finish_reason != "")
        run_together([p, d])
        d.answers["x"].check()
        assert d.answers["x"].loaded == 249
        assert d.stats["direct_bytes"] == d.stats["loaded_bytes"] > 0


def test_an_engine_waits_without_steps_for_the_prefill(own_pega, prompt):
    tokens = prompt(LENGTH)
    with engines(own_pega.address, PREFILL, DECODE) as (p, d):
        send(p, d, tokens)
        with frozen(own_pega, p):
            d.run(lambda: has_arrived(d, tokens, CHUNK))
            before, idle = d.steps, d.stats["idle_steps"]
            d.run(lambda: d.steps >= before + 20)
            assert d.stats["idle_steps"] >= idle + 10
        run_together([p, d])
        d.answers["x"].check()


def test_two_requests_follow_their_prefills(own_pega, prompt):
    first, second = prompt(LENGTH), prompt(250)
    with reading(own_pega, first, {"blocks": 1024}) as (p, d):
        handover = state_of(d).handover
        place = {"node": handover.node.hex(), "incarnation": handover.scheduler.hex()}
        params = {"pegaflow": place | {"job": handover.job, "tokens": 0, "wait_ms": 60_000}}
        d.add("y", second, 5, params=params)
        p.add("y", second, 1, params=ASKED)
        run_together([p, d])
        for name in ("x", "y"):
            d.answers[name].check()
            assert d.answers[name].loaded == len(d.answers[name].prompt) - 1
        assert ends(d, "over") == 2


def test_no_other_request_waits_for_a_load_that_follows_its_prefill(own_pega, prompt):
    tokens = prompt(LENGTH)
    with reading(own_pega, tokens) as (p, d):
        side, chain = d.connector._scheduler, state_of(d).chain
        assert side.loads.under_way()
        assert side.loads.overlapping(chain.key, 0, LENGTH // BLOCK) is None
        run_together([p, d])


# ---- requests that read nothing directly


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"pegaflow.direct_group": "another"},
        GROUP | {"pegaflow.early_load_percent": 0},
        GROUP | {"pegaflow.keep_failure_policy": True},
    ],
    ids=["no group", "another group", "no early loads", "failing requests"],
)
def test_some_engines_read_only_saved_blocks(own_pega, prompt, extra):
    tokens = prompt(LENGTH)
    with engines(own_pega.address, PREFILL, {"extra": LONG | extra}) as (p, d):
        send(p, d, tokens)
        with frozen(own_pega, p):
            for _ in range(30):
                d.step()
                assert held_blocks(d) == 0
        run_together([p, d])
        d.answers["x"].check()
        assert d.answers["x"].loaded == LENGTH - 1
        assert not d.stats["direct_bytes"]
        assert ends(d, "over") == 1


def test_a_group_has_no_effect_where_sizes_share_blocks(own_pega, prompt):
    with engine_of_sizes(own_pega.address, 1, extra=GROUP) as engine:
        engine.wait_ready()
        assert not engine.connector._scheduler._settings.direct_group
        engine.ask("x", prompt(100))
        engine.run()
        engine.check_at_rest()


# ---- the prefill does not end


def test_a_killed_prefill_engine_leaves_what_was_read(own_pega, prompt):
    tokens = prompt(LENGTH)
    with Engine(own_pega.address, **DECODE) as d:
        d.wait_ready()
        with Engine(own_pega.address, **PREFILL) as p:
            p.wait_ready()
            send(p, d, tokens)
            with frozen(own_pega, p):
                d.run(lambda: has_arrived(d, tokens, CHUNK))
                (worker,) = p.ranks
                worker.kill()
                d.run()
        check_short(d, 0)
        assert ended(d, "gone") + ended(d, "failed") == 1
        d.check_at_rest()


def test_a_prefill_that_stops_is_computed_from_there_on(own_pega, prompt):
    with reading(own_pega, prompt(LENGTH)) as (p, d):
        p.abort("x")
        p.run()
        state_of(d).early.deadline = 0.0  # The time that the router has set is over.
        d.run()
        check_short(d)
        assert ended(d, "timeout") == ends(d, "timeout") == 1


def test_a_chunk_that_is_not_saved_ends_the_load_with_the_prefill(own_pega, prompt):
    with reading(own_pega, prompt(LENGTH)) as (p, d):
        state_of(p).progress.next_save = 40  # A part of the second and third chunk is not saved.
        p.run()
        d.run()
        check_short(d)
        assert ended(d, "not_saved") == ends(d, "over") == 1


def test_a_server_that_dies_leaves_what_was_read(own_pega, prompt):
    tokens = prompt(LENGTH)
    with Engine(own_pega.address, **PREFILL) as p, Engine(own_pega.address, **DECODE) as d:
        p.wait_ready()
        d.wait_ready()
        send(p, d, tokens)
        with frozen(own_pega, p):
            d.run(lambda: has_arrived(d, tokens, CHUNK))
        own_pega.kill()
        d.run()
        check_short(d, 0)
        assert ended(d, "no_server") + ended(d, "failed") == 1
        d.check_at_rest()
        p.run()


def test_a_rank_that_leaves_the_cache_keeps_what_was_read(own_pega, prompt):
    with reading(own_pega, prompt(LENGTH)) as (p, d):
        d.connector._scheduler._note_away(0, "planted")
        d.run()
        check_short(d, 0)
        assert ended(d, "not_registered") == 1
        d.connector._scheduler._note_away(0, "")
        p.run()


def test_a_load_that_hangs_is_cancelled_at_its_deadline(own_pega, prompt):
    with reading(own_pega, prompt(LENGTH)) as (p, d):
        (load,) = d.connector._scheduler.loads.under_way()
        load.deadline = 0.0
        d.run()
        check_short(d)
        assert ended(d, "failed") == 1
        p.run()


# ---- the request ends first


@pytest.mark.parametrize("while_frozen", [True, False])
def test_an_aborted_request_frees_its_blocks(own_pega, prompt, while_frozen):
    tokens = prompt(LENGTH)
    with engines(own_pega.address, PREFILL, DECODE) as (p, d):
        send(p, d, tokens)
        with frozen(own_pega, p):
            d.run(lambda: has_arrived(d, tokens, CHUNK))
            if while_frozen:
                d.abort("x")
                d.run()
                d.check_at_rest()
        if not while_frozen:
            d.abort("x")
            d.run()
            d.check_at_rest()
        assert ends(d, "dropped") == ended(d, "dropped") == 1
        assert forgets_all(d)
        p.run()
        d.ask("again", prompt(300), 3)


def test_a_request_may_be_aborted_in_the_step_that_orders_its_load(own_pega, prompt):
    tokens = prompt(LENGTH)
    with engines(own_pega.address, PREFILL, DECODE) as (p, d):
        send(p, d, tokens)
        with frozen(own_pega, p):
            d.run(lambda: bool(d.connector._scheduler.chunked.following))
            d.abort("x")
            d.run()
            d.check_at_rest()
        assert ends(d, "dropped") == 1
        p.run()


def test_a_reset_discards_what_was_read(own_pega, prompt):
    with reading(own_pega, prompt(LENGTH)) as (p, d):
        held = d.scheduler.kv_cache_manager.get_block_ids("x")[0][: LENGTH // BLOCK]
        assert d.connector.reset_cache()
        d.run()
        check_reset(d, held)
        p.run()


def test_a_reset_discards_also_the_part_that_came_from_the_pool(own_pega, prompt):
    tokens = prompt(LENGTH)
    with engines(own_pega.address, PREFILL, DECODE) as (p, d):
        prefill(p, "earlier", tokens[: 20 * BLOCK])
        send(p, d, tokens)
        with frozen(own_pega, p):
            d.run(lambda: has_arrived(d, tokens, 20 * BLOCK + CHUNK))
            held = d.scheduler.kv_cache_manager.get_block_ids("x")[0][: LENGTH // BLOCK]
            assert d.connector.reset_cache()
            d.run()
        check_reset(d, held)
        p.run()


# ---- internal errors


@pytest.mark.parametrize("name", ["chunked._watch", "chunked.ended", "_waits.poll"])
def test_an_error_in_the_middle_is_computed(own_pega, prompt, name):
    with reading(own_pega, prompt(LENGTH)) as (p, d):
        plant(d.connector, f"_scheduler.{name}", 0)
        run_together([p, d])
        d.answers["x"].check()
        assert d.stats["internal_errors{scheduler}"] == 1
        d.check_at_rest(planted_errors=True)
        d.stats.clear()


@pytest.mark.parametrize("name", ["start_loads", "mover.load_following", "collect"])
def test_an_error_in_the_worker_is_computed(own_pega, prompt, name):
    tokens = prompt(LENGTH)
    with engines(own_pega.address, PREFILL, DECODE) as (p, d):
        send(p, d, tokens)
        plant(d.worker, f"_worker.{name}", 0)
        with frozen(own_pega, p):
            d.run(lambda: d.stats["internal_errors{worker}"] == 1)
        run_together([p, d])
        d.answers["x"].check()
        d.stats.clear()


def test_a_refused_load_is_computed(own_pega, prompt):
    tokens = prompt(LENGTH)
    with engines(own_pega.address, PREFILL, DECODE) as (p, d):
        send(p, d, tokens)
        refuse_following(d)
        with frozen(own_pega, p):
            d.run(lambda: ended(d, "failed") == 1)
        run_together([p, d])
        d.answers["x"].check()
        assert d.stats["load_failures{refused}"] == 1


def refuse_following(d: Engine) -> None:
    """The mover behaves as one without a direct group."""
    mover = d.worker._worker.mover

    class Refusing:
        def __getattr__(self, name: str) -> Any:
            return getattr(mover, name)

        def load_following(self, *arguments: Any) -> None:
            from pegaflow import _native

            raise _native.Refused("planted")

    d.worker._worker.mover = Refusing()


# ---- everything at once


def test_random_requests_are_answered_from_right_bytes(own_pega, prompt, seed):
    """Both engines have few blocks, so each is overwritten soon after its last use."""
    rng = random.Random(seed)
    few = {"blocks": 150, "max_num_batched_tokens": 128, "max_model_len": 512}
    prefill_options = few | {"extra": GROUP}
    with engines(own_pega.address, prefill_options, few | DECODE) as (p, d):
        known = prefill(p, "known", [7] * 40)["pegaflow"]
        place = {name: known[name] for name in ("node", "incarnation")}
        params = {"pegaflow": place | {"job": known["job"] + 1, "tokens": 0, "wait_ms": 300}}
        for number in range(150):
            name, tokens = f"r{number}", prompt(rng.randrange(40, 400))
            d.add(name, tokens, 3, params=params)
            if rng.random() < 0.95:
                p.add(name, tokens, 1, params=ASKED)
            for engine in rng.sample([p, d], 2):
                for _ in range(rng.randrange(4)):
                    if engine.scheduler.has_requests() or engine._queue:
                        engine.step()
            for engine, odds in ((p, 0.05), (d, 0.1)):
                if rng.random() < odds and name in engine.scheduler.requests:
                    engine.abort(name)
            if rng.random() < 0.02:
                d.connector.reset_cache()
        run_together([p, d])
        for answer in d.answers.values():
            if answer.finish_reason == "length":
                answer.check()
        assert d.stats["loaded_blocks"] > 0
