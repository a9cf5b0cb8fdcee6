"""Several engines on one server: shared blocks, separate blocks, and the end of one engine."""

import contextlib
import json
import logging
import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.python import rank
from tests.python.harness import BLOCK, Engine
from tests.python.test_connector_faults import stopped, wait_for_zero
from tests.support.vllm_server import PegaServer
from tests.support.waiting import wait_until


def engines(address: str, count: int = 2, **options: Any) -> list[Engine]:
    """Engines whose workers are processes of their own."""
    made = [Engine(address, process=True, **options) for _ in range(count)]
    for one in made:
        one.wait_ready()
    return made


def close(*made: Engine) -> None:
    for one in made:
        one.close()


def run_together(made: list[Engine]) -> None:
    """Iterations of both in turn, until neither has work left."""
    while any(one.scheduler.has_requests() or one._queue for one in made):
        for one in made:
            if one.scheduler.has_requests() or one._queue:
                one.step()


@contextlib.contextmanager
def warnings() -> Iterator[list[str]]:
    """The warnings of the connector meanwhile, in this process.

    Without caplog: making the first engine reconfigures vLLM's logging, without its handler.
    """
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("vllm.pegaflow")
    log.addHandler(handler)
    try:
        yield said
    finally:
        log.removeHandler(handler)


def insertions(server: PegaServer) -> int:
    return int(server.metrics().total("pegaflow_cache_block_insertions_total"))


def foreign_blocks(server: PegaServer) -> int:
    """Blocks that a process has loaded and another one wrote."""
    return int(server.metrics().total("pegaflow_load_blocks_total", written_by="another_process"))


# ---- shared blocks


def test_one_engine_loads_the_blocks_that_the_other_computed(own_pega, prompt):
    tokens = prompt(300)
    a, b = engines(own_pega.address)
    a.ask("x", tokens)
    a.run()

    assert b.ask("x", tokens).loaded == 288
    b.run()

    assert foreign_blocks(own_pega) == 18
    # The first also finds the second's blocks, before and after it forgot its own.
    longer = tokens + prompt(200)
    b.ask("longer", longer)
    b.run()
    both = a.ask("longer", longer)
    assert (both.local, both.loaded) == (288, 496 - 288)
    for one in (a, b):
        one.run()
        one.check_at_rest()
    close(a, b)


def test_a_later_engine_finds_the_blocks_of_one_that_is_gone(own_pega, prompt):
    tokens = prompt(300)
    (a,) = engines(own_pega.address, 1)
    a.ask("x", tokens)
    a.run()
    close(a)

    (b,) = engines(own_pega.address, 1)
    assert b.ask("x", tokens).loaded == 288
    b.run()
    b.check_at_rest()
    close(b)
    assert foreign_blocks(own_pega) == 18


def test_data_parallel_ranks_share_blocks_and_are_distinguished(own_pega, prompt):
    tokens = prompt(300)
    made = []
    for index in range(2):
        made += engines(own_pega.address, 1, transfer=name("replica"), data_parallel=(index, 2))
    a, b = made
    a.ask("x", tokens)
    a.run()

    assert b.ask("x", tokens).loaded == 288
    b.run()
    assert names_of_instances(own_pega) == ["replica-dp0", "replica-dp1"]
    for one in made:
        one.check_at_rest()
    close(*made)


def names_of_instances(server: PegaServer) -> list[str]:
    return sorted(one["instance"] for one in instances(server))


def instances(server: PegaServer) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"http://{server.http}/instances", timeout=60) as answer:
        return json.loads(answer.read())["instances"]


def test_equal_request_ids_in_two_engines_are_two_requests(own_pega, prompt):
    made = engines(own_pega.address)
    tokens = [prompt(200), prompt(200)]
    for round_ in range(3):
        for one, text in zip(made, tokens, strict=True):
            one.add("same", text, 5 + round_)
        run_together(made)
        for one in made:
            one.answers["same"].check()
            one.reset_local()
    # The other engine's prompt under the same id.
    for one, text in zip(made, reversed(tokens), strict=True):
        assert one.ask("same", text).loaded == 192
        one.run()
        one.check_at_rest()
    close(*made)


@pytest.mark.pool_size("64mb")
def test_1000_requests_of_two_engines_on_one_cold_prefix_store_it_once(own_pega, prompt):
    head = prompt(640)
    made = engines(own_pega.address, blocks=1024)
    for i in range(1000):
        # Shorter than a block: only the prefix is stored.
        made[i % 2].add(f"r{i}", head + prompt(3), 2)
    run_together(made)

    assert insertions(own_pega) == 640 // BLOCK
    for one in made:
        for answer in one.answers.values():
            answer.check()
        one.run()
        one.check_at_rest()
    saved = [one.stats["saved_blocks"] for one in made]
    assert sum(saved) == 640 // BLOCK, saved
    close(*made)


# ---- separate blocks


#: Pages of equal sizes, so that only the names distinguish them.
DIFFERENT = {
    "model": ({"extra": {"pegaflow.weights_id": name}} for name in ("one", "other")),
    "dtype": ({"dtype": name} for name in ("float16", "bfloat16")),
    "layout": ({"layout": name} for name in ("LBHNC", "LBNHC")),
    "hash": ({"prefix_caching_hash_algo": name} for name in ("sha256", "sha256_cbor")),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_different_engines_share_no_block(own_pega, prompt, what):
    tokens = prompt(300)
    made = [Engine(own_pega.address, process=True, **changes) for changes in DIFFERENT[what]]
    for one in made:
        one.wait_ready()
    for one in made:
        assert one.ask("cold", tokens).loaded == 0
        one.reset_local()
    for one in made:
        assert one.ask("again", tokens).loaded == 288
        one.run()
        one.check_at_rest()
    assert foreign_blocks(own_pega) == 0
    assert len({one["namespace"] for one in instances(own_pega)}) == 2
    close(*made)


def test_tenants_share_no_block_across_engines(own_pega, prompt):
    tokens = prompt(300)
    a, b = engines(own_pega.address)
    a.ask("x", tokens, salt="one")
    a.run()

    assert b.ask("none", tokens).loaded == 0
    b.reset_local()
    assert b.ask("other", tokens, salt="two").loaded == 0
    b.reset_local()
    assert b.ask("same", tokens, salt="one").loaded == 288
    for one in (a, b):
        one.run()
        one.check_at_rest()
    close(a, b)


# ---- instances


def name(instance: str) -> dict[str, str]:
    return {"engine_id": instance}


def test_an_instance_returns_after_its_process_was_killed(own_pega, prompt):
    tokens = prompt(300)
    (former,) = engines(own_pega.address, 1, transfer=name("one"))
    former.ask("x", tokens)
    former.run()
    former.ranks[0].kill()
    former.close()

    (again,) = engines(own_pega.address, 1, transfer=name("one"))
    assert again.ask("x", tokens).loaded == 288
    again.run()
    again.check_at_rest()
    close(again)
    assert foreign_blocks(own_pega) == 18


def test_a_second_process_of_an_instance_is_rejected_and_runs_without_the_cache(
    own_pega, prompt, caplog
):
    tokens = prompt(300)
    (first,) = engines(own_pega.address, 1, transfer=name("one"))
    first.ask("x", tokens)
    first.run()

    second = Engine(own_pega.address, process=True, transfer=name("one"))
    second.wait_states({"ready", "refused"})
    assert second.states() == ("ready", "refused")
    assert "instance one is served by another process" in second.ranks[0].do(rank.detail)
    with warnings() as said:
        second.ask("short", prompt(10))  # the scheduler learns of it with its step
        for i in range(3):
            assert second.ask(f"x{i}", tokens).loaded == 0
            second.reset_local()
    assert len(said) == 1 and "served by another process" in said[0], said
    assert second.stats["loads"] == second.stats["saves"] == 0
    assert second.stats["misses{not_registered}"] == 3
    assert second.stats["save_dropped_blocks{not_registered}"] == 3 * (303 // BLOCK)
    first.reset_local()
    assert first.ask("again", tokens).loaded == 288

    # The first one ends, and the second takes its place.
    first.run()
    first.check_at_rest()
    close(first)
    second.wait_states({"ready"}, 60)
    second.ask("also short", prompt(10))
    assert second.ask("at last", tokens).loaded == 288
    second.run()
    second.check_at_rest()
    close(second)


# ---- faults


def test_a_server_that_is_killed_while_two_engines_load_costs_no_answer(own_pega, prompt):
    prompts = [prompt(300) for _ in range(6)]
    made = engines(own_pega.address)
    for round_ in range(2):
        for i, tokens in enumerate(prompts):
            made[i % 2].ask(f"store-{round_}-{i}", tokens)
        for one in made:
            one.reset_local()
        for one in made:
            for i, tokens in enumerate(prompts):
                one.add(f"again-{round_}-{i}", tokens, 20)
        orders: list[int] = []

        def kill_at_the_second(output: Any, orders: list[int] = orders) -> None:
            if output.kv_connector_metadata.loads:
                orders.append(1)
                if len(orders) == 2:
                    own_pega.kill()

        for one in made:
            one.on_schedule = kill_at_the_second
        run_together(made)
        assert len(orders) >= 2
        own_pega.start()
        for one in made:
            one.on_schedule = lambda output: None
            for i in range(len(prompts)):
                one.answers[f"again-{round_}-{i}"].check()
            one.wait_ready()
            one.reset_local()
            one.check_at_rest()
    # Then they share blocks again.
    made[0].ask("x", prompts[0])
    made[0].run()
    made[1].reset_local()
    assert made[1].ask("x", prompts[0]).loaded == 288
    close(*made)


def test_a_server_that_stops_while_two_engines_load_costs_their_deadlines(own_pega, prompt):
    prompts = [prompt(300) for _ in range(4)]
    made = engines(own_pega.address)
    for i, tokens in enumerate(prompts):
        made[i % 2].ask(f"store-{i}", tokens)
    close(*made)
    # Real deadlines, as configured in production.
    made = engines(own_pega.address, patient=False)
    for one in made:
        for i, tokens in enumerate(prompts):
            one.add(f"again-{i}", tokens, 20)
        one.step()
    started = time.monotonic()
    with stopped(own_pega):
        run_together(made)
    assert time.monotonic() - started < 30
    for one in made:
        for i in range(len(prompts)):
            one.answers[f"again-{i}"].check()
        wait_until(lambda one=one: set(one.states()) == {"ready"}, "the links are not back")
        one.run()
        one.check_at_rest()
    wait_for_zero(own_pega, "pegaflow_claims", "pegaflow_pins")
    close(*made)


def test_an_engine_that_is_killed_in_a_load_does_not_affect_the_other(own_pega, prompt):
    prompts = [prompt(300) for _ in range(3)]
    a, b = engines(own_pega.address)
    for i, tokens in enumerate(prompts):
        a.ask(f"store-{i}", tokens)
    a.reset_local()
    # Stopped first, so that it is killed with its load and its save in flight.
    os.kill(a.ranks[0].pid, signal.SIGSTOP)
    for i, tokens in enumerate(prompts):
        a.add(f"again-{i}", tokens)
    a.add("cold", prompt(300))
    a.ranks[0].begin(a.scheduler.schedule(), {"cold": 0} | {f"again-{i}": 0 for i in range(3)})
    a.ranks[0].kill()

    for i, tokens in enumerate(prompts):
        assert b.ask(f"again-{i}", tokens).loaded == 288
    b.run()
    b.check_at_rest()
    a.close()
    wait_for_zero(own_pega, "pegaflow_claims", "pegaflow_pins")
    close(b)


def test_a_reset_by_one_engine_applies_to_its_whole_namespace(own_pega, prompt):
    tokens = prompt(300)
    a, b = engines(own_pega.address)
    a.ask("x", tokens)
    a.run()
    assert b.ask("x", tokens).loaded == 288
    b.run()
    assert b.scheduler.reset_prefix_cache(reset_connector=True)

    a.reset_local()
    assert a.ask("after", tokens).loaded == 0
    for one in (a, b):
        one.run()
        one.check_at_rest()
    close(a, b)
