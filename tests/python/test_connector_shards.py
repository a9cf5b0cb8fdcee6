"""The share of a block that each rank holds, and merged reports of ranks; without a server."""

from collections.abc import Callable
from typing import Any

import pytest

from pegaflow.vllm import namespace, ranks
from pegaflow.vllm.build import hash_unit, instance_id, read_geometry
from pegaflow.vllm.messages import Outcome, WorkerReport
from pegaflow.vllm.support import unsupported
from tests.python.fake_model import FakeModel
from tests.python.harness import MODEL, content_of, kv_cache_configs, vllm_config


def configs(mla: bool = False, **changes: Any) -> list[tuple[Any, Any]]:
    """For each rank both of its configurations."""
    made = []
    config = vllm_config("unix:/nowhere.sock", distributed_executor_backend="mp", **changes)
    for number in range(config.parallel_config.world_size):
        own = vllm_config("unix:/nowhere.sock", distributed_executor_backend="mp", **changes)
        own.parallel_config.rank = number
        made.append((own, kv_cache_configs(own, 80, mla)[number]))
    return made


def shards(made: list[tuple[Any, Any]]) -> list[tuple[int, bool]]:
    places = [ranks.place(*one) for one in made]
    assert [place.rank for place in places] == list(range(len(made)))
    assert {place.ranks for place in places} == {len(made)}
    assert {place.shards for place in places} == {len({place.shard for place in places})}
    return [(place.shard, place.saves) for place in places]


def test_a_single_rank_holds_and_saves_the_whole_block():
    assert shards(configs()) == [(0, True)]


def test_each_tensor_parallel_rank_has_heads_of_its_own():
    assert shards(configs(tensor_parallel_size=2)) == [(0, True), (1, True)]


def test_ranks_that_share_a_kv_head_are_one_shard():
    made = configs(tensor_parallel_size=4)
    assert shards(made) == [(0, True), (0, False), (1, True), (1, False)]


def test_an_mla_latent_is_the_same_on_all_ranks_of_a_stage():
    made = configs(mla=True, tensor_parallel_size=2, pipeline_parallel_size=2)
    assert shards(made) == [(0, True), (0, False), (1, True), (1, False)]


def test_an_mla_latent_is_detected_in_releases_that_do_not_state_replicas():
    made = configs(mla=True, tensor_parallel_size=2)
    for _, kv_config in made:
        kv_config.kv_tp_replicas = None
    assert shards(made) == [(0, True), (0, False)]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda c: setattr(c, "num_global_key_value_heads", 1),
        lambda c: setattr(c, "num_key_value_heads", 1),
        lambda c: setattr(c, "block_configs", []),
    ],
)
def test_if_uncertain_each_rank_is_a_shard(spoil):
    made = configs(tensor_parallel_size=4)
    for config, _ in made:
        spoil(config.model_config.hf_text_config)
    assert shards(made) == [(i, True) for i in range(4)]


@pytest.mark.parametrize("mla", [False, True])
@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_ranks_of_one_shard_hold_the_same_bytes_and_others_do_not(mla, tensor, stages):
    made = configs(mla=mla, tensor_parallel_size=tensor, pipeline_parallel_size=stages)
    places = [ranks.place(*one) for one in made]
    contents = [content_of(config, number, mla) for number, (config, _) in enumerate(made)]
    for place, content in zip(places, contents, strict=True):
        same = [p.rank for p, c in zip(places, contents, strict=True) if c == content]
        assert same == [p.rank for p in places if p.shard == place.shard]
        assert place.saves == (place.rank == same[0])


@pytest.mark.parametrize(
    "changes",
    [
        {"tensor_parallel_size": 4},
        {"pipeline_parallel_size": 2},
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 3},
    ],
)
def test_all_ranks_of_an_engine_have_one_list_of_factors(changes):
    lists = []
    for config, kv_config in configs(**changes):
        where = read_geometry(kv_config, FakeModel(kv_config).tensors)
        lists.append(
            namespace.factors(
                config,
                kv_config,
                weights="named:x",
                instance=instance_id(config),
                hash_unit=hash_unit(config, kv_config),
                layers=where.layers,
                arrangements=where.arrangements,
            )
        )
        assert not unsupported(config, kv_config)
    assert all(one == lists[0] for one in lists)


def test_another_division_into_stages_is_another_namespace(monkeypatch):
    ((config, _), _) = configs(pipeline_parallel_size=2)
    assert ranks.stages(config) == f"stages:0-1,2-{MODEL['num_hidden_layers'] - 1}"
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1,2")
    assert ranks.stages(config) == "stages:0-0,1-2"


# ---- unsupported configurations


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda p: setattr(p, "nnodes", 2), "its 2 ranks are spread over 2 nodes"),
        (
            lambda p: setattr(p, "distributed_executor_backend", "ray"),
            "the executor ray does not report",
        ),
    ],
)
def test_ranks_that_may_be_on_other_nodes_run_without_the_cache(
    spoil: Callable[[Any], None], words
):
    config, kv_config = configs(tensor_parallel_size=2)[0]
    assert unsupported(config, kv_config) == ""
    spoil(config.parallel_config)
    assert words in unsupported(config, kv_config)


# ---- merged reports of ranks


def save(**fields: Any) -> WorkerReport:
    return WorkerReport(saves={7: Outcome(**fields)})


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_a_replicas_report_does_not_count_blocks(order):
    reports = [
        save(blocks=5, bytes=50, took_s=0.1),
        save(replica=True),
        save(blocks=4, failed=1, bytes=40, took_s=0.2, error="gone"),
    ]
    first, second, third = (reports[i] for i in order)
    outcome = first.aggregate(second).aggregate(third).saves[7]
    assert (outcome.ranks, outcome.blocks, outcome.failed) == (3, 4, 1)
    assert (outcome.bytes, outcome.took_s, outcome.error) == (90, 0.2, "gone")


def test_the_first_block_that_failed_on_any_rank_counts():
    reports = [
        WorkerReport(loads={3: Outcome(blocks=9)}),
        WorkerReport(loads={3: Outcome(blocks=4, failed=5, first_failed=4)}),
        WorkerReport(loads={3: Outcome(blocks=7, failed=2, first_failed=2)}),
    ]
    outcome = reports[0].aggregate(reports[1]).aggregate(reports[2]).loads[3]
    assert (outcome.ranks, outcome.first_failed, outcome.blocks) == (3, 2, 4)


def test_missing_ranks_are_distinguished():
    one, other = WorkerReport(away={0: ""}), WorkerReport(away={1: "refused"})
    assert one and other
    assert one.aggregate(other).away == {0: "", 1: "refused"}
