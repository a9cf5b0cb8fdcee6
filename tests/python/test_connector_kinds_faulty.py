"""Models and engines that do not fit: a miss, plain vLLM or a refusal that names the reason.

The model checks each byte that its layers read, so that none of these can be a wrong byte.
"""

import copy
import dataclasses
import json
import random
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.kv_cache_interface import FullAttentionSpec, RSWASpec

from pegaflow.vllm import build, namespace, saves
from pegaflow.vllm.off import SchedulerOff, WorkerOff
from pegaflow.vllm.plans.several_kinds import SeveralKindsProgress
from tests.python.harness import Engine, vllm_config
from tests.python.kinds_engine import (
    HEADS,
    SHAPES,
    WrongBlock,
    cache_config,
    chunked,
    full,
    state,
    window,
)
from tests.python.kinds_pega import PegaKindsEngine
from tests.python.test_connector_faults import wait_for_zero
from tests.python.test_connector_kinds import INTERVAL, served
from tests.python.test_connector_kinds_server import TWO_RANKS, own_namespace
from tests.python.test_kinds_expectations import prompt_of
from tests.support.vllm_server import PegaServer
from tests.support.waiting import wait_until

__all__ = ["served"]

PROMPT = prompt_of(300)


class Made:
    """Makes engines of one weights id on one server."""

    def __init__(self, server: PegaServer) -> None:
        self.server = server
        self.extra = own_namespace()
        self.engines: list[Any] = []

    def __call__(
        self, groups: Sequence[Any], of: type[PegaKindsEngine] = PegaKindsEngine, **more: Any
    ) -> PegaKindsEngine:
        options = {"blocks": 1000, "interval": INTERVAL, "room": 50, "extra": self.extra} | more
        self.engines.append(of(groups, self.server.address, **options))
        return self.engines[-1]

    def ready(self, groups: Sequence[Any], **more: Any) -> PegaKindsEngine:
        made = self(groups, **more)
        made.wait_ready()
        return made


@pytest.fixture
def made(served: None, pega: PegaServer) -> Iterator[Made]:
    factory = Made(pega)
    yield factory
    for one in factory.engines:
        one.run()
        one.check_at_rest()
        one.close()
    wait_for_zero(pega, "pegaflow_claims", "pegaflow_pins")


def ask(made: PegaKindsEngine, request: str) -> tuple[int, int]:
    made.reset_local()
    hits = made.ask(request, PROMPT, 5)
    made.run()
    made.check_answer(request, PROMPT)
    return hits


def instances(server: PegaServer) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"http://{server.http}/instances", timeout=20) as answer:
        found: list[dict[str, Any]] = json.load(answer)["instances"]
        return found


def reasons(server: PegaServer) -> set[str]:
    """Why engines of this server run without the cache."""
    return {row["detail"] for one in instances(server) for row in one["not_served"]}


# ---- specs of an unknown class


@dataclasses.dataclass(frozen=True, kw_only=True)
class TomorrowsSpec(FullAttentionSpec):
    """What a later release may bring: it looks like a class that is served."""


@pytest.mark.parametrize(
    "spec",
    [TomorrowsSpec(block_size=16, **HEADS), RSWASpec(block_size=16, rswa_window=64, **HEADS)],
    ids=lambda spec: type(spec).__name__,
)
@pytest.mark.parametrize("others", [[], [full(16)]], ids=["alone", "beside others"])
def test_an_engine_with_an_unknown_class_runs_plain_and_names_it(declined, spec, others):
    reason = f"layers of kind {type(spec).__name__} are not supported yet"
    assert declined(cache_config([*others, spec], 100)) == [reason]


def test_an_engine_whose_groups_share_a_layer_runs_plain_and_names_it(declined):
    kv_config = cache_config(SHAPES["gpt-oss"], 100)
    kv_config.kv_cache_groups[1].layer_names.append("layer.0")
    assert declined(kv_config) == ["cache groups that share layer layer.0 are not supported"]


@pytest.fixture
def declined(served: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[str]]:
    """What the sides of an engine that run without the cache report to the server."""
    said: list[str] = []
    monkeypatch.setattr(
        build, "decline", lambda config, side, why, rank=0: said.append(str(why)) or None
    )

    def of(kv_config: Any) -> list[str]:
        config = vllm_config("unix:/nowhere.sock", extra={"pegaflow.untested": True})
        scheduler = build.scheduler_side(config, kv_config)
        worker = build.worker_side(config, kv_config)
        assert isinstance(scheduler, SchedulerOff) and isinstance(worker, WorkerOff)
        scheduler.close()
        worker.close()
        return said

    return of


# ---- offers of states


def offer_other_blocks(engine: PegaKindsEngine, draw: random.Random) -> None:
    """vLLM's offers name blocks that were freed, or given to another group or request."""
    manager = engine.scheduler.kv_cache_manager
    original = manager.take_boundary_state_offloads

    def take() -> dict[str, list[tuple[int, int, int]]]:
        return {
            request: [(group, draw.randrange(1, 200), at) for group, _, at in offers]
            for request, offers in original().items()
        }

    manager.take_boundary_state_offloads = take


@pytest.mark.parametrize("name", ["qwen3-next", "states with checkpoints"])
def test_offers_of_other_blocks_are_not_saved(made, name):
    engine = made.ready(SHAPES[name], draw=random.Random(1))
    other = prompt_of(250, 7)
    engine.ask("other", other, 5)
    engine.run()
    before = engine.saved()["state"]
    assert before > 0
    offer_other_blocks(engine, random.Random(2))
    assert ask(engine, "cold") == (0, 0)
    assert engine.saved()["state"] == before
    assert engine.stats["save_dropped_blocks{offer}"] > 0
    assert ask(engine, "again") == (0, 0)


def test_an_engine_whose_states_end_no_block_logs_the_option_that_it_needs(made, monkeypatch):
    """vLLM 0.32 on a CPU without --block-size offers them at multiples of 128, beside 256."""
    warnings = []
    monkeypatch.setattr(saves.log, "warning", lambda text, *values: warnings.append(text % values))
    engine = made.ready(SHAPES["qwen3-next"])
    manager = engine.scheduler.kv_cache_manager
    original = manager.take_boundary_state_offloads
    manager.take_boundary_state_offloads = lambda: {
        request: [(group, block, at - 32) for group, block, at in offers]
        for request, offers in original().items()
    }
    for number in range(2 * saves.FIRST_STATES):
        engine.ask(f"r{number}", prompt_of(200, number), 2)
    assert engine.saved()["state"] == 0
    (warning,) = [text for text in warnings if "no state" in text]
    assert warning.endswith("no multiple of a block's 64; start vLLM with --block-size 64")


def test_offers_of_other_blocks_that_are_trusted_are_found(served, own_pega, monkeypatch):
    monkeypatch.setattr(
        SeveralKindsProgress, "_checked", lambda self, saves, offers, usable: offers
    )
    engine = Made(own_pega).ready(SHAPES["qwen3-next"], draw=random.Random(1))
    try:
        offer_other_blocks(engine, random.Random(2))
        with pytest.raises(WrongBlock):
            for number in range(10):
                ask(engine, f"r{number}")
    finally:
        engine.close()


# ---- allocations that vLLM has shrunk


def shrink(engine: PegaKindsEngine, tokens: int) -> None:
    """vLLM accepts fewer tokens than were offered, as it may from 0.33 on."""
    connector = engine.connector
    original = connector.get_num_new_matched_tokens

    def matched(request: Any, local: int) -> tuple[int | None, bool]:
        found, later = original(request, local)
        return (max(0, found - tokens) if found else found), later

    connector.get_num_new_matched_tokens = matched


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss", "mistral-window", "llama4"])
def test_a_shrunk_load_of_windows_is_refused_and_computed(made, name):
    engine = made.ready(SHAPES[name])
    assert ask(engine, "cold") == (0, 0)
    shrink(engine, 80)
    ask(engine, "again")
    assert engine.reasons["again"] == "length"
    assert engine.stats["load_failures{not_claimed}"] == 1
    assert "loads" not in engine.stats


def test_a_shrunk_load_of_full_attention_is_a_part_of_the_claim(made):
    engine = made.ready(SHAPES["two of full"])
    assert ask(engine, "cold") == (0, 0)
    shrink(engine, 80)
    assert ask(engine, "again") == (0, 208)
    assert engine.stats["loaded_blocks{full}"] == 13


# ---- a kind that is missing on one rank


class WithoutAGroup(PegaKindsEngine):
    """The second rank has no layer of the first group, as a pipeline stage may have none."""

    def _add_worker(self, rank: int, specs: list[Any]) -> None:
        whole = self.kv_config
        if rank == 1:
            self.kv_config = copy.deepcopy(whole)
            self.kv_config.kv_cache_groups[0].layer_names = []
        super()._add_worker(rank, specs)
        self.kv_config = whole


@pytest.mark.parametrize("name", ["gpt-oss", "gemma3", "qwen3-next"])
def test_a_rank_without_layers_of_a_group_runs_plain_and_names_it(made, monkeypatch, name):
    monkeypatch.setattr(build, "read_geometries", without_unknown_layers(build.read_geometries))
    engine = made(SHAPES[name], WithoutAGroup, **TWO_RANKS)
    for request in ("cold", "again"):
        assert ask(engine, request) == (0, 0)
    reason = "a pipeline stage without layers of cache group 0 is not supported yet"
    wait_until(lambda: reason in reasons(made.server), "the notice does not arrive")


def without_unknown_layers(original: Any) -> Any:
    """The stage's tensors are those of its layers."""

    def read(kv_config: Any, tensors: Any) -> Any:
        known = {layer for one in kv_config.kv_cache_groups for layer in one.layer_names}
        return original(kv_config, {layer: tensors[layer] for layer in tensors if layer in known})

    return read


# ---- engines that differ, on one server


HALF = {"dtypes": (torch.bfloat16,), "shapes": ((8, 4),)}
#: Models whose blocks have as many bytes, and equal keys.
DIFFERENT: dict[str, tuple[list[Any], list[Any]]] = {
    "window": ([window(16, 64), full(16)], [window(16, 48), full(16)]),
    "window alone": ([window(16, 64)], [window(16, 48)]),
    "chunk": ([chunked(16, 64), full(16)], [chunked(16, 128), full(16)]),
    "window and chunk": ([window(16, 65), full(16)], [chunked(16, 64), full(16)]),
    "dtype of a state": (
        [state(64), full(64)],
        [dataclasses.replace(state(64), **HALF), full(64)],
    ),
    "shape of a state": (
        [state(64), full(64)],
        [dataclasses.replace(state(64), shapes=((2, 8),)), full(64)],
    ),
    "number of groups": ([window(16, 64), full(16)], [window(16, 64), window(16, 64), full(16)]),
    "another group's layers": ([window(16, 64), full(16)], [full(16), window(16, 64)]),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_models_that_differ_share_no_block(made, what):
    one, other = (made.ready(groups) for groups in DIFFERENT[what])
    assert ask(one, "cold") == (0, 0)
    assert ask(other, "cold") == (0, 0)
    for engine in (one, other):
        local, loaded = ask(engine, "again")
        assert local == 0 and loaded >= 256
    names = {row["namespace"] for row in instances(made.server)}
    assert len(names) == 2


def test_a_model_without_the_hybrid_manager_shares_no_block_with_one_that_has_it(made, pega):
    """The same keys and weights, and one group of full attention."""
    hybrid = made.ready(SHAPES["gpt-oss"])
    with Engine(pega.address, extra=made.extra) as plain:
        plain.wait_ready()
        plain.ask("cold", PROMPT)
        plain.run()
        assert ask(hybrid, "cold") == (0, 0)
        assert ask(hybrid, "again") == (0, 288)
        plain.reset_local()
        assert plain.ask("again", PROMPT).loaded == 288


def test_under_one_name_the_server_refuses_other_windows(made, monkeypatch):
    """If a release forgot the window in the name of a namespace."""
    one_name = [("weights", made.extra["pegaflow.weights_id"])]
    monkeypatch.setattr(namespace, "factors_of_kinds", lambda *arguments, **more: one_name)
    one, other = DIFFERENT["window"]
    first = made.ready(one)
    assert ask(first, "cold") == (0, 0)
    second = made(other)
    mover = second.worker._worker.mover
    wait_until(lambda: mover.status()["state"] == "refused", "the server accepts the engine")
    assert "window 47 of 16 tokens" in mover.status()["detail"]
    for request in ("cold", "again"):
        assert ask(second, request) == (0, 0)
    assert ask(first, "again") == (0, 288)


# ---- several releases on one server


def test_a_release_that_cannot_report_failed_loads_runs_plain_beside_one_that_can(
    made, monkeypatch
):
    newer = made.ready(SHAPES["gemma3"])
    assert ask(newer, "cold") == (0, 0)
    monkeypatch.delattr(KVConnectorBase_V1, "get_transfer_results")
    older = made(SHAPES["gemma3"])
    for request in ("cold", "again"):
        assert ask(older, request) == (0, 0)
    reason = "this vLLM cannot report a failed load of several cache groups or of windows"
    wait_until(
        lambda: any(reason in text for text in reasons(made.server)), "the notice does not arrive"
    )
    assert ask(newer, "again") == (0, 288)
