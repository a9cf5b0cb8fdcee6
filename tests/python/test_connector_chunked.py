"""Requests that load the chunks of a prompt while a prefill engine computes later ones.

Two engines of vLLM's real scheduler, the real connector and a real server; the router is the test.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.python.harness import BLOCK, Engine
from tests.python.test_connector_early import CHUNKED, early, ends, forgets_all
from tests.python.test_connector_engine import KINDS
from tests.python.test_connector_faults import when_load_is_ordered
from tests.python.test_connector_handover import ASKED, LONG, engines, prefill
from tests.python.test_connector_hooks import plant
from tests.python.test_connector_nodes import at_both, nodes  # noqa: F401
from tests.python.test_connector_two_engines import run_together
from tests.support.vllm_server import PegaServer

#: A prompt of four chunks, and the tokens of one.
LENGTH, CHUNK = 1000, 256


def state_of(engine: Engine, request_id: str = "x") -> Any:
    return engine.connector._scheduler._states[request_id]


def ended(engine: Engine, result: str) -> int:
    return engine.stats[f"chunked_loads{{{result}}}"]


def held_blocks(engine: Engine, request_id: str = "x") -> int:
    return len(engine.scheduler.kv_cache_manager.get_block_ids(request_id)[0])


def loaded_blocks(engine: Engine, request_id: str = "x") -> int:
    """Blocks of the parts that have ended."""
    loads = engine.connector._scheduler.loads
    chunked = state_of(engine, request_id).chunked
    if chunked is None:
        return 0
    return sum(part.units for part in chunked.parts if not loads.is_under_way(part))


def begin(p: Engine, d: Engine, tokens: list[int], output: int = 5) -> None:
    """A router sends a prompt to both engines; none of its chunks is computed yet."""
    known = prefill(p, "known", [7] * 40)
    p.run()
    d.add("x", tokens, output, params=early(known))
    # The decode engine looks up what the cache has before the prefill.
    d.run(lambda: state_of(d).early.cached is not None)
    p.add("x", tokens, 1, params=ASKED)


def compute_chunk(p: Engine, d: Engine, count: int = 1) -> None:
    """The prefill engine computes chunks, and the decode engine loads all that is there then."""
    computed = p.scheduler.requests["x"].num_computed_tokens
    p.run(lambda: p.scheduler.requests["x"].num_computed_tokens >= computed + count * CHUNK)
    wanted = p.scheduler.requests["x"].num_computed_tokens // BLOCK
    d.run(lambda: loaded_blocks(d) >= wanted)


@contextlib.contextmanager
def half_way(
    address: str, tokens: list[int], decode: Any = None
) -> Iterator[tuple[Engine, Engine]]:
    """Both engines after the first of four chunks, which the decode engine has loaded."""
    with engines(address, CHUNKED, decode) as (p, d):
        begin(p, d, tokens)
        compute_chunk(p, d)
        yield p, d


# ---- the prefill ends


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [LENGTH, 992, 993])
def test_chunks_are_loaded_while_later_ones_are_computed(pega, prompt, kind, length):
    tokens = prompt(length)
    with half_way(pega.address, tokens, KINDS[kind]) as (p, d):
        assert p.answers["x"].finish_reason == ""
        assert loaded_blocks(d) < length // BLOCK
        assert held_blocks(d) >= length // BLOCK

        run_together([p, d])

        answer = d.answers["x"]
        answer.check()
        assert answer.loaded == (length - 1 if length % BLOCK >= 2 else 992)
        assert ended(d, "over") == ends(d, "over") == 1
        assert d.stats["loads"] >= 2
        assert forgets_all(d)


def test_a_request_holds_no_block_before_its_prefill_has_begun(pega, prompt):
    tokens = prompt(LENGTH)
    with engines(pega.address, CHUNKED) as (p, d):
        # The cache has had the beginning of the prompt before.
        prefill(p, "earlier", tokens[: 20 * BLOCK])
        p.reset_local()
        known = prefill(p, "known", prompt(40))
        d.add("x", tokens, 5, params=early(known))
        d.run(lambda: state_of(d).early.cached is not None)
        assert state_of(d).early.cached == 20
        seen = state_of(d).early.watch.news
        prefill(p, "other", prompt(100))
        d.run(lambda: state_of(d).early.watch.news > seen)
        for _ in range(10):
            d.step()
            assert held_blocks(d) == 0
        p.add("x", tokens, 1, params=ASKED)
        run_together([p, d])
        assert d.answers["x"].loaded == LENGTH - 1
        assert not d.stats["load_failed_blocks"]


def test_all_chunks_may_be_there_before_the_first_is_loaded(pega, prompt):
    tokens = prompt(LENGTH)
    with engines(pega.address, CHUNKED) as (p, d):
        begin(p, d, tokens)
        p.run()
        d.run()
        d.answers["x"].check()
        assert d.answers["x"].loaded == LENGTH - 1
        assert ends(d, "over") == 1


def test_a_save_that_is_dropped_does_not_delay_the_request(pega, prompt):
    tokens = prompt(LENGTH)
    with engines(pega.address, CHUNKED) as (p, d):
        begin(p, d, tokens)
        state_of(p).progress.next_save = 30  # None of the first two chunks' blocks is saved.
        p.run()
        d.run()
        d.answers["x"].check()
        assert d.answers["x"].loaded == 0
        assert ends(d, "over") == 1


def test_a_chunk_that_is_not_saved_ends_the_load_with_the_prefill(pega, prompt):
    with half_way(pega.address, prompt(LENGTH)) as (p, d):
        state_of(p).progress.next_save = 40  # A part of the second and third chunk is not saved.
        p.run()
        d.run()
        check_short(d)
        assert ended(d, "not_saved") == ends(d, "over") == 1


def test_a_full_gpu_delays_the_load_and_nothing_else(pega, prompt):
    tokens = prompt(LENGTH)
    with engines(pega.address, CHUNKED, {"blocks": 90}) as (p, d):
        d.add("computed", prompt(40 * BLOCK), 60)
        d.run(lambda: held_blocks(d, "computed") > 0)
        begin(p, d, tokens)
        run_together([p, d])
        for answer in d.answers.values():
            answer.check()
        assert d.answers["x"].loaded in (0, LENGTH - 1)


def test_two_requests_load_at_the_same_time(pega, prompt):
    prompts = {"x": prompt(LENGTH), "y": prompt(LENGTH)}
    with engines(pega.address, CHUNKED, {"blocks": 1024}) as (p, d):
        begin(p, d, prompts["x"])
        d.add("y", prompts["y"], 5, params=early({"pegaflow": known_place(d)}))
        d.run(lambda: state_of(d, "y").early.cached is not None)
        p.add("y", prompts["y"], 1, params=ASKED)
        compute_chunk(p, d)
        p.run(lambda: p.scheduler.requests["y"].num_computed_tokens >= CHUNK)
        d.run(lambda: loaded_blocks(d, "y") >= CHUNK // BLOCK)
        run_together([p, d])
        for answer in d.answers.values():
            answer.check()
            assert answer.loaded == LENGTH - 1
        assert ends(d, "over") == 2
        assert ended(d, "over") == 2
        assert not d.stats["load_failed_blocks"]


def known_place(d: Engine) -> dict[str, Any]:
    handover = state_of(d).handover
    return {
        "node": handover.node.hex(),
        "incarnation": handover.scheduler.hex(),
        "job": handover.job - 1,
    }


def test_no_other_request_waits_for_a_part(pega, prompt):
    with half_way(pega.address, prompt(LENGTH)) as (p, d):
        found = []
        side = d.connector._scheduler
        chain = state_of(d).chain
        when_load_is_ordered(
            d, lambda: found.append(side.loads.overlapping(chain.key, 0, LENGTH // BLOCK))
        )
        p.run(lambda: p.scheduler.requests["x"].num_computed_tokens >= 2 * CHUNK)
        d.run(lambda: bool(found))
        assert found == [None]
        run_together([p, d])
        d.answers["x"].check()


def test_two_ranks_load_the_chunks(pega, prompt):
    tokens = prompt(LENGTH)
    ranks = {"tensor_parallel_size": 2}
    with engines(pega.address, CHUNKED | ranks, ranks) as (p, d):
        begin(p, d, tokens)
        compute_chunk(p, d)
        assert p.answers["x"].finish_reason == ""
        run_together([p, d])
        d.answers["x"].check()
        assert d.answers["x"].loaded == LENGTH - 1
        assert ended(d, "over") == 1


def test_chunks_come_from_another_node(nodes, prompt):  # noqa: F811
    tokens = prompt(LENGTH)
    with at_both(nodes, CHUNKED) as (p, d):
        begin(p, d, tokens)
        before = nodes.fetched()
        compute_chunk(p, d)
        assert nodes.fetched() > before
        assert p.answers["x"].finish_reason == ""
        run_together([p, d])
        d.answers["x"].check()
        assert d.answers["x"].loaded == LENGTH - 1
        assert ended(d, "over") == 1


# ---- requests that load nothing before the end


@pytest.mark.parametrize(
    "decode",
    [
        {"extra": {"pegaflow.early_load_percent": 0}},
        {"extra": {"pegaflow.early_load_percent": 24}},  # 61 of 255 blocks
        # What is too short to be loaded is held all the same.
        {"extra": {"pegaflow.early_load_percent": 24, "pegaflow.min_load_tokens": 256}},
        {"extra": {"pegaflow.keep_failure_policy": True}},
    ],
    ids=["off", "too many blocks", "too many short ones", "failing requests"],
)
def test_some_requests_wait_for_the_whole_prompt(pega, prompt, decode):
    tokens = prompt(LENGTH)
    with engines(pega.address, CHUNKED, decode) as (p, d):
        begin_without_lookup(p, d, tokens)
        seen = state_of(d).early.watch.news
        p.run(lambda: p.scheduler.requests["x"].num_computed_tokens == CHUNK)
        d.run(lambda: state_of(d).early.watch.news > seen)
        for _ in range(10):
            d.step()
            assert held_blocks(d) == 0
        run_together([p, d])
        assert d.answers["x"].loaded == LENGTH - 1
        assert not any("chunked_loads" in name for name in d.stats)
        assert ends(d, "over") == 1


def begin_without_lookup(p: Engine, d: Engine, tokens: list[int]) -> None:
    known = prefill(p, "known", [7] * 40)
    p.run()
    d.add("x", tokens, 5, params=early(known))
    for _ in range(5):
        d.step()
    p.add("x", tokens, 1, params=ASKED)


# ---- the prefill does not end


def check_short(d: Engine, loaded: int = CHUNK) -> None:
    """The request was answered from the chunks that came, and computed the rest."""
    d.answers["x"].check()
    assert d.stats["loaded_blocks"] == loaded // BLOCK
    assert forgets_all(d)


def test_a_prefill_that_stops_is_computed_from_there_on(pega, prompt):
    with half_way(pega.address, prompt(LENGTH)) as (p, d):
        p.abort("x")
        p.run()
        state_of(d).early.deadline = 0.0  # The time that the router has set is over.
        d.run()
        check_short(d)
        assert ended(d, "timeout") == ends(d, "timeout") == 1


def test_a_prefill_engine_that_ends_is_computed_from_there_on(own_pega, prompt):
    with Engine(own_pega.address, extra=LONG) as d:
        d.wait_ready()
        with Engine(own_pega.address, **CHUNKED) as p:
            p.wait_ready()
            begin(p, d, prompt(LENGTH))
            compute_chunk(p, d)
        d.run()
        check_short(d)
        assert ended(d, "gone") == 1
        d.check_at_rest()


def test_a_server_that_dies_leaves_the_loaded_chunks(own_pega, prompt):
    with Engine(own_pega.address, **CHUNKED) as p, Engine(own_pega.address, extra=LONG) as d:
        p.wait_ready()
        d.wait_ready()
        begin(p, d, prompt(LENGTH))
        compute_chunk(p, d)
        own_pega.kill()
        d.run()
        check_short(d)
        assert ended(d, "no_server") == 1


def test_blocks_that_are_evicted_before_their_load_are_computed(pega, prompt):
    tokens = prompt(LENGTH)
    with half_way(pega.address, tokens) as (p, d):
        loads = d.connector._scheduler.loads
        original = loads.begin

        def begin_and_lose(state: Any, claim: Any, start: int, blocks: Any) -> Any:
            d.connector._scheduler._session.unclaim(claim.token)
            load = original(state, claim, start, blocks)
            load.token = b"\1" * 16  # As after an eviction: nothing has this claim.
            return load

        loads.begin = begin_and_lose
        p.step()
        d.run(lambda: ended(d, "failed") == 1)
        loads.begin = original
        run_together([p, d])
        d.answers["x"].check()
        assert d.bad_blocks


def test_a_rank_that_leaves_the_cache_keeps_the_loaded_chunks(pega, prompt):
    with half_way(pega.address, prompt(LENGTH)) as (p, d):
        d.connector._scheduler._note_away(0, "planted")
        d.run()
        check_short(d)
        assert ended(d, "not_registered") == 1
        d.connector._scheduler._note_away(0, "")
        p.run()


# ---- the request ends first


@pytest.mark.parametrize("chunks", [0, 1, 2])
def test_an_aborted_request_frees_its_blocks(pega, prompt, chunks):
    with engines(pega.address, CHUNKED) as (p, d):
        begin(p, d, prompt(LENGTH))
        if chunks:
            compute_chunk(p, d, chunks)
        d.abort("x")
        d.run()
        d.check_at_rest()
        assert ends(d, "dropped") == 1
        assert forgets_all(d)
        p.run()
        d.ask("again", prompt(300), 3)


def hold_part(server: PegaServer, p: Engine, d: Engine) -> None:
    """Stops the server when the next part is ordered, so that the part stays in flight."""
    when_load_is_ordered(d, lambda: os.kill(server.pid, signal.SIGSTOP))
    p.step()
    d.run(lambda: bool(d.worker._worker.loads))


def test_a_request_is_aborted_while_a_part_is_loaded(own_pega, prompt):
    with half_way(own_pega.address, prompt(LENGTH)) as (p, d):
        hold_part(own_pega, p, d)
        d.abort("x")
        d.step()
        d.step()
        pool = d.scheduler.kv_cache_manager.block_pool
        free = pool.get_num_free_blocks()
        assert free < pool.num_gpu_blocks - 1 - LENGTH // BLOCK, "a copy may write to these blocks"
        os.kill(own_pega.pid, signal.SIGCONT)
        d.run()
        d.check_at_rest()
        p.run()


def test_a_reset_discards_chunks_that_were_loaded(pega, prompt):
    with half_way(pega.address, prompt(LENGTH)) as (p, d):
        held = d.scheduler.kv_cache_manager.get_block_ids("x")[0][: LENGTH // BLOCK]
        assert d.connector.reset_cache()
        d.run()
        check_reset(d, held)
        p.run()


def test_a_reset_discards_a_part_in_flight_and_those_before_it(own_pega, prompt):
    with half_way(own_pega.address, prompt(LENGTH)) as (p, d):
        hold_part(own_pega, p, d)
        held = d.scheduler.kv_cache_manager.get_block_ids("x")[0][: LENGTH // BLOCK]
        assert not d.scheduler.reset_prefix_cache(reset_connector=True)
        d.step()
        os.kill(own_pega.pid, signal.SIGCONT)
        d.run()
        check_reset(d, held)
        p.run()


def check_reset(d: Engine, held: list[int]) -> None:
    d.answers["x"].check()
    assert set(held) <= set(d.bad_blocks)
    assert ended(d, "reset") == 1


# ---- internal errors


@pytest.mark.parametrize("name", ["chunked._poll", "_lookups.take_next", "chunked._order"])
def test_an_error_in_the_middle_is_computed(pega, prompt, name):
    with half_way(pega.address, prompt(LENGTH)) as (p, d):
        plant(d.connector, f"_scheduler.{name}", 0)
        run_together([p, d])
        d.answers["x"].check()
        assert d.stats["internal_errors{scheduler}"] == 1
        d.check_at_rest(planted_errors=True)
        d.stats.clear()


@pytest.mark.parametrize("name", ["start_loads", "mover.load", "collect"])
def test_an_error_in_the_worker_is_computed(pega, prompt, name):
    with half_way(pega.address, prompt(LENGTH)) as (p, d):
        plant(d.worker, f"_worker.{name}", 0)
        run_together([p, d])
        d.answers["x"].check()
        d.stats.clear()
