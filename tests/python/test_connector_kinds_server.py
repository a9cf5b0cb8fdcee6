"""Windows, chunks and states from vLLM's real scheduler to a real server and back, byte by byte.

The scenarios of test_connector_kinds.py, with the native session and mover.
"""

import random
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from pegaflow.vllm.plans import load_plan
from tests.python.kinds_engine import SHAPES
from tests.python.kinds_pega import PegaKindsEngine, plant_failures
from tests.python.test_connector_faults import wait_for_zero
from tests.python.test_connector_hooks import plant
from tests.python.test_connector_kinds import (
    HITS,
    MISTAKES,
    REQUESTS,
    Make,
    a_failed_load_leaves_vllms_own_hit,
    converse,
    engine_of,
    random_conversations,
    resend_longer_branch_and_next_turn,
    served,
    small_engine,
)
from tests.python.test_kinds_expectations import prompt_of
from tests.support.vllm_server import PegaServer

__all__ = ["served"]


TWO_RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


def own_namespace() -> dict[str, str]:
    """Options of an engine that shares no block with another test's."""
    return {"pegaflow.weights_id": f"fake-model-{uuid.uuid4()}"}


@pytest.fixture
def make(served: None, pega: PegaServer) -> Iterator[Make]:
    """Makes engines, and checks at the end that nothing of them is in flight or claimed."""
    engines: list[PegaKindsEngine] = []
    namespace = own_namespace()

    def of(name: str, **more: Any) -> PegaKindsEngine:
        engines.append(engine_of(name, pega.address, extra=namespace, **more))
        return engines[-1]

    yield of
    for engine in engines:
        engine.run()
        engine.check_at_rest()
        engine.close()
    wait_for_zero(pega, "pegaflow_claims", "pegaflow_pins")


@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "async"])
@pytest.mark.parametrize("name", HITS)
def test_resend_longer_branch_and_next_turn(make, name, asynchronous):
    resend_longer_branch_and_next_turn(name, make(name, asynchronous=asynchronous))


@pytest.mark.parametrize("name", HITS)
def test_random_conversations(make, name, seed):
    random_conversations(name, make(name), random.Random(f"{seed} {name}"))


def test_another_engine_of_the_model_finds_windows_and_states(make):
    prompt = prompt_of(300)
    for name in ("gemma3", "qwen3-next"):
        first, second = make(name), make(name, asynchronous=True)
        first.ask("a", prompt)
        first.run()
        assert second.ask("a", prompt) == (0, HITS[name][0])


def test_after_a_reset_no_block_of_any_kind_is_found(make):
    engine, prompt = make("gemma3"), prompt_of(300)
    engine.ask("cold", prompt)
    engine.run()
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert engine.ask("after", prompt) == (0, 0)
    engine.reset_local()
    assert engine.ask("again", prompt) == (0, 288)


def test_a_restarted_server_gets_the_blocks_again(served, own_pega):
    prompt = prompt_of(300)
    engine = engine_of("gpt-oss", own_pega.address, extra=own_namespace())
    try:
        engine.ask("cold", prompt)
        engine.run()
        own_pega.kill()
        engine.reset_local()
        assert engine.ask("without", prompt) == (0, 0)
        own_pega.start()
        engine.wait_ready()
        engine.reset_local()
        assert engine.ask("empty", prompt) == (0, 0)
        engine.reset_local()
        assert engine.ask("again", prompt) == (0, 288)
        engine.run()
        engine.check_at_rest()
    finally:
        engine.close()


def converse_with_a_server(
    server: PegaServer, name: str, draw: random.Random, requests: int, **more: Any
) -> dict[str, float]:
    engine = small_engine(name, draw, address=server.address, **more)
    counted = plant_failures(engine, 0.1, 0.1)

    def disturb() -> None:
        if draw.random() < 0.02:
            server.kill()
            for _ in range(draw.randint(0, 5)):
                engine.step()
            server.start()
            if draw.random() < 0.7:
                engine.wait_ready()

    try:
        converse(engine, draw, requests, disturb)
        wait_for_zero(server, "pegaflow_claims", "pegaflow_pins")
        return engine.stats | vars(counted)
    finally:
        engine.close()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "async"])
@pytest.mark.parametrize("name", SHAPES)
def test_random_requests_read_their_own_bytes(served, own_pega, name, asynchronous, seed):
    draw = random.Random(f"{seed} {name} {asynchronous}")
    stats = converse_with_a_server(own_pega, name, draw, REQUESTS, asynchronous=asynchronous)
    print(name, stats)
    assert stats["loads"] > 0, stats


@pytest.mark.parametrize("name", ["gemma3", "qwen3-next"])
def test_both_ranks_of_an_engine_read_their_own_bytes(served, own_pega, name, seed):
    draw = random.Random(f"{seed} {name}")
    stats = converse_with_a_server(own_pega, name, draw, REQUESTS, **TWO_RANKS)
    print(name, stats)
    assert stats["loads"] > 0, stats


def test_a_load_that_fails_on_one_rank_is_computed_on_both(make):
    engine, prompt = make("gemma3", **TWO_RANKS), prompt_of(300)
    engine.ask("cold", prompt)
    engine.reset_local()
    plant_failures(engine, 1.0, 0.0)

    engine.ask("again", prompt, 5)

    assert engine.reasons["again"] == "length"
    assert engine.stats["load_failures{gone}"] == 1
    # Each rank has a block's bytes of its own; they count as one block.
    assert engine.saved() == {"full": 19, "window": 11}


# ---- other parts of the connector


#: Calls of several kinds, in which an unexpected error disables the cache and costs no request.
HOOKS = [
    "_scheduler.rules.take_claim",
    "_scheduler.rules.begin_load",
    "_scheduler.loads.begin_ranges",
    "_scheduler.loads.report",
    "_scheduler.saves.add",
    "_scheduler.saves.report",
    "_worker.mover.load_ranges",
    "_worker.mover.save",
    "_worker._load_ended",
    "_worker._save_ended",
]


@pytest.mark.parametrize("path", HOOKS)
def test_a_failing_hook_costs_the_cache_only(served, pega, path):
    engine = engine_of("gemma3", pega.address, extra=own_namespace())
    stored = [prompt_of(300, number) for number in range(4)]
    try:
        for i, prompt in enumerate(stored):
            engine.ask(f"stored-{i}", prompt)
        engine.reset_local()
        worker = path.startswith("_worker")
        plant(engine.worker if worker else engine.connector, path, 0)

        for round_ in range(2):
            for i, prompt in enumerate(stored):
                engine.add(f"{round_}-{i}", prompt + prompt_of(40, 10 * round_ + i), 20)
            engine.run()

        asked = [f"{round_}-{i}" for round_ in range(2) for i in range(len(stored))]
        assert {engine.reasons[request] for request in asked} == {"length"}
        side = "worker" if worker else "scheduler"
        assert engine.stats[f"internal_errors{{{side}}}"] == 1
        engine.check_at_rest(planted_errors=True)
    finally:
        engine.close()


@pytest.mark.parametrize("room", [50, 1])
def test_a_decode_engine_waits_for_the_windows_of_a_prefill_engine(make, room):
    """``room``: percent of the GPU's blocks that may be pinned for prompts that stay there."""
    prefill, decode = make("gemma3", blocks=200, room=room), make("gemma3")
    prompt = prompt_of(300)
    prefill.add("p", prompt, 1, params={"pegaflow": {"save_tail": True}})
    prefill.run()
    params = prefill.params["p"]
    # The partial block at the end belongs to one kind of full attention.
    assert params["pegaflow"]["tokens"] == 288
    decode.add("d", prompt, 5, params=params)
    decode.run()
    assert decode.hits["d"] == (0, 288)
    assert decode.stats["handovers{over}"] == 1


# ---- planted mistakes are found


def swap_the_members(monkeypatch: pytest.MonkeyPatch) -> None:
    original = load_plan.pair

    def pair(*arguments: Any) -> Any:
        return [one._replace(blocks=one.blocks[::-1]) for one in original(*arguments)]

    monkeypatch.setattr("pegaflow.vllm.plans.several_kinds.pair", pair)


def fail_behind_vllms_own_hit(name: str, engine: PegaKindsEngine) -> None:
    a_failed_load_leaves_vllms_own_hit(engine, lambda: plant_failures(engine, 0.0, 1.0))


def test_a_failed_load_leaves_vllms_own_hit(served, own_pega):
    engine = engine_of("gemma3", own_pega.address, extra=own_namespace())
    try:
        fail_behind_vllms_own_hit("gemma3", engine)
        engine.check_at_rest()
    finally:
        engine.close()


PLANTED = {
    plant: name for plant, name in MISTAKES.items() if plant.__name__ != "swap_the_members"
} | {swap_the_members: "gemma3"}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_mistake_is_found(served, own_pega, plant, monkeypatch):
    plant(monkeypatch)
    name = PLANTED[plant]
    with pytest.raises(AssertionError) as found:
        for scenario in (resend_longer_branch_and_next_turn, fail_behind_vllms_own_hit):
            engine = engine_of(name, own_pega.address, extra=own_namespace())
            try:
                scenario(name, engine)
            finally:
                engine.close()
        for attempt in range(20):
            converse_with_a_server(own_pega, name, random.Random(attempt), 50)
    print(plant.__name__, repr(found.value)[:200])
