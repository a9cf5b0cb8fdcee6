"""Quantized KV caches: blocks are shared by engines that compute with the same scales.

vLLM's own layer takes the scales from a checkpoint, or computes with 1.0. Up to 0.26 it can also
calculate them from the first request (--calculate-kv-scales), which is refused.
"""

import json
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.attention.attention import set_default_quant_scales
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

from pegaflow.engine.layout import Geometry
from pegaflow.vllm import agreement, build, support
from pegaflow.vllm.agreement import NoAgreement
from pegaflow.vllm.exchange import Exchange, NoExchange
from tests.python.harness import kv_cache_config, vllm_config
from tests.python.kinds_engine import SHAPES, cache_config, full
from tests.python.rank import context as rank_processes
from tests.python.test_connector_pages import tensors_of
from tests.python.test_connector_weights import model, of_files

LAYERS = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")
FP8 = "torch.uint8[1:2,2:16,3:32]"


def layer_of(scales: tuple[float, ...], dtype: str = "fp8") -> torch.nn.Module:
    """A layer whose scales vLLM's own code has taken from a checkpoint: none, or K's and V's."""
    layer = torch.nn.Module()
    layer.kv_cache_dtype = dtype
    set_default_quant_scales(layer, register_buffer=True)
    method = BaseKVCacheMethod(None)  # type: ignore[arg-type]
    method.create_weights(layer)
    for name, value in zip(("k_scale", "v_scale"), scales, strict=False):
        parameter = getattr(layer, name)
        parameter.weight_loader(parameter, torch.tensor(value))
    method.process_weights_after_loading(layer)
    return layer


def heads_layer(k: list[float], v: list[float] | None = None, **more: list[float]) -> Any:
    """A layer as vLLM's compressed-tensors makes it for the strategy attn_head."""
    values = {"_k_scale": k, "_v_scale": v or [1.0] * len(k), **more}
    return SimpleNamespace(**{name: torch.tensor(value) for name, value in values.items()})


def one_config(
    layers: dict[str, Any], rank: int, tensor: int, pipeline: int, dtype: str, heads: int
) -> Any:
    """``heads``: the KV heads of the whole model."""
    return SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(num_key_value_heads=heads),
            get_total_num_kv_heads=lambda: heads,
        ),
        compilation_config=SimpleNamespace(static_forward_context=layers),
        cache_config=SimpleNamespace(cache_dtype=dtype),
        parallel_config=SimpleNamespace(
            rank=rank,
            world_size=tensor * pipeline,
            tensor_parallel_size=tensor,
            pipeline_parallel_size=pipeline,
        ),
    )


def groups_of(layers: Any, heads: int, replicas: int = 1, mode: str = "fp8") -> Any:
    spec = FullAttentionSpec(
        block_size=16,
        num_kv_heads=heads,
        head_size=16,
        dtype=torch.uint8,
        kv_quant_mode=get_kv_quant_mode(mode),
    )
    group = SimpleNamespace(layer_names=list(layers), kv_cache_spec=spec)
    return SimpleNamespace(kv_cache_groups=[group], kv_tp_replicas=replicas)


def reach(
    by_rank: list[dict[str, Any]],
    *,
    heads: int = 1,
    pipeline: int = 1,
    replicas: int = 1,
    store: Any = None,
    dtype: str = "fp8",
    arrangement: str = FP8,
) -> list[Any]:
    """On each rank, given its layers, the agreement of all ranks, or the error."""
    ranks = len(by_rank)
    store = torch.distributed.HashStore() if store is None else store

    def one(rank: int) -> Any:
        layers = by_rank[rank]
        tensor = ranks // pipeline
        config = one_config(layers, rank, tensor, pipeline, dtype, heads * tensor // replicas)
        place = Geometry((), tuple(layers), 10, (arrangement,) * len(layers), "cpu")
        groups = groups_of(layers, heads, replicas)
        exchange = Exchange("engine", rank, ranks, store=lambda: store or None)
        try:
            return agreement.reach(config, groups, None, [place], None, exchange)
        except NoAgreement as error:
            return error

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, range(ranks)))


def factor_of(by_rank: list[dict[str, Any]], **options: Any) -> list[tuple[str, str]]:
    """The factor, which is equal on all ranks."""
    made = reach(by_rank, **options)
    for one in made:
        assert one == made[0]
    assert not isinstance(made[0], Exception), made[0]
    return made[0].scales


def factor(*layers: Any, arrangement: str = FP8) -> list[tuple[str, str]]:
    """Of one rank."""
    return factor_of([dict(zip(LAYERS, layers, strict=True))], arrangement=arrangement)


# ---- the scales with which an engine computes


def test_scales_of_a_checkpoint_are_a_factor_and_those_of_1_are_not():
    plain = layer_of(())
    assert plain._k_scale == plain._v_scale == 1.0
    assert factor(plain, plain) == []
    assert factor(layer_of((1.0, 1.0)), plain) == []

    scaled = layer_of((0.5, 0.25))
    assert (scaled._k_scale, scaled._v_scale) == (0.5, 0.25)
    ((name, text),) = factor(scaled, scaled)
    assert name == "kv_scales" and len(text) == 64
    assert factor(layer_of((0.5, 0.25)), layer_of((0.5, 0.25))) == [(name, text)]
    # A single kv_scale is that of both.
    assert factor(layer_of((0.5,)), scaled) != factor(scaled, scaled)


def test_a_scale_of_any_layer_changes_the_factor():
    one, other = layer_of((0.5, 0.25)), layer_of((0.5, 0.125))
    texts = {
        str(factor(*pair)) for pair in ((one, one), (one, other), (other, one), (other, other))
    }
    assert len(texts) == 4


def test_a_release_that_drops_a_checkpoints_scales_has_another_namespace():
    """With the same files some releases compute with 1.0, and others with the checkpoint's."""
    assert factor(layer_of(()), layer_of(())) != factor(layer_of((0.5, 0.25)), layer_of(()))


def test_a_cache_that_needs_no_scales_has_no_such_factor():
    scaled = layer_of((0.5, 0.25))
    assert factor(scaled, scaled, arrangement="torch.bfloat16[1:2,2:16,3:32]") == []


def test_scales_of_queries_and_probabilities_are_a_factor_too():
    """They change what deeper layers compute."""
    plain = layer_of((0.5, 0.25))
    texts = {str(factor(plain, plain))}
    for name in ("_q_scale", "_prob_scale"):
        other = layer_of((0.5, 0.25))
        getattr(other, name).fill_(0.125)
        texts.add(str(factor(other, plain)))
    assert len(texts) == 3


def test_layers_whose_scales_vllm_does_not_show_are_refused_by_name():
    """In doubt they are not 1.0."""
    for layers in ({LAYERS[0]: None}, {LAYERS[0]: SimpleNamespace()}):
        (error,) = reach([layers])
        assert str(error) == (
            f"the KV scales of {LAYERS[0]} are unknown: this vLLM does not show them; use "
            "--kv-cache-dtype bfloat16"
        )


# ---- the scales of several ranks


def ranks_of(layer: list[float], ranks: int, replicas: int = 1) -> list[dict[str, Any]]:
    """The layers of each rank, of those of the whole model."""
    each = len(layer) * replicas // ranks
    return [
        {LAYERS[0]: heads_layer(layer[rank // replicas * each :][:each])} for rank in range(ranks)
    ]


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_with_different_heads_agree_on_a_factor_of_all_heads(ranks):
    heads, others = [0.5, 0.25, 2.0, 1.0], [0.5, 0.25, 2.0, 4.0]
    made = factor_of(ranks_of(heads, ranks), heads=4 // ranks)

    assert made and made != factor_of(ranks_of(others, ranks), heads=4 // ranks)
    # Tensor-parallel sizes may share cells: the factor is that of the model.
    assert made == factor_of(ranks_of(heads, 1), heads=4)


def test_a_rank_whose_scales_are_all_1_has_the_factor_of_the_others():
    made = factor_of(ranks_of([1.0, 0.5], 2))
    assert made == factor_of(ranks_of([1.0, 0.5], 1), heads=2)
    assert made != factor_of(ranks_of([0.5, 1.0], 2))
    assert factor_of(ranks_of([1.0, 1.0], 2)) == []


def test_one_scale_for_all_heads_is_that_of_every_size():
    one = layer_of((0.5, 0.25))
    by_rank = [dict.fromkeys(LAYERS, one)] * 2
    assert factor_of(by_rank, heads=4) == factor(one, one)


def test_a_release_that_drops_the_scales_of_heads_shares_no_blocks():
    """Formerly both had the same text, since the ranks could not agree on one."""
    loaded = factor_of(ranks_of([0.5, 0.25], 2))
    assert loaded != factor_of(ranks_of([1.0, 1.0], 2))
    stages = [{LAYERS[0]: layer_of((0.5, 0.25))}, {LAYERS[1]: layer_of((0.5, 0.25))}]
    without = [{LAYERS[0]: layer_of(())}, {LAYERS[1]: layer_of((0.5, 0.25))}]
    made = [factor_of(one, pipeline=2) for one in (stages, without)]
    assert made[0] and made[1] and made[0] != made[1]
    assert made[0] == factor_of([stages[0] | stages[1]]), "the stages are another factor"


def test_replicas_with_equal_scales_count_once_and_with_different_ones_are_refused():
    by_rank = ranks_of([0.5, 0.25], 4, replicas=2)
    assert factor_of(by_rank, replicas=2) == factor_of(ranks_of([0.5, 0.25], 2))
    by_rank[3] = {LAYERS[0]: heads_layer([0.75])}
    for error in reach(by_rank, replicas=2):
        assert str(error) == (
            f"ranks that hold the same KV heads of {LAYERS[0]} compute with different values of "
            "k_scale; use --kv-cache-dtype bfloat16"
        )


def test_a_problem_of_one_rank_is_the_reason_of_all():
    by_rank = ranks_of([0.5, 0.25], 2)
    by_rank[1] = {LAYERS[0]: heads_layer([0.5, 0.25, 0.75])}
    errors = {str(error) for error in reach(by_rank, heads=2)}
    assert errors == {
        f"{LAYERS[0]} has 3 values of k_scale for 2 KV heads; use --kv-cache-dtype bfloat16"
    }


def test_ranks_that_are_not_connected_are_refused_with_the_fix():
    for store, why in (
        (False, "torch.distributed does not connect its ranks"),
        (Broken(), "the store of torch.distributed failed: it is closed"),
    ):
        for error in reach(ranks_of([0.5, 0.25], 2), store=store):
            assert str(error) == (
                f"the KV scales of the engine's 2 ranks are not comparable: {why}; restart it, or "
                "use --kv-cache-dtype bfloat16"
            )


class Broken:
    """A store whose server has ended."""

    def set(self, *_: Any) -> None:
        raise RuntimeError("it is closed")


def test_an_unquantized_cache_of_several_ranks_needs_no_exchange():
    by_rank = [dict.fromkeys(LAYERS, layer_of(()))] * 2
    assert factor_of(by_rank, dtype="auto", store=False) == []
    scaled = [dict.fromkeys(LAYERS, layer_of((0.5, 0.25)))] * 2
    for error in reach(scaled, dtype="auto", store=False):
        assert "set --kv-cache-dtype fp8" in str(error)


def test_stages_with_different_formats_of_kv_agree_on_those_of_all():
    stages = [{LAYERS[0]: layer_of(())}, {LAYERS[1]: layer_of(())}]
    for pair in reach(stages, pipeline=2), reach(stages, pipeline=2, dtype="auto"):
        assert pair[0] == pair[1]
        ((arrangements, specs),) = pair[0].formats
        assert arrangements == [FP8, FP8] and len(specs) == 2


# ---- the exchange


def test_a_rank_that_is_missing_costs_the_deadline_and_is_named():
    now = [0.0]

    def pause(seconds: float) -> None:
        now[0] += seconds

    store = torch.distributed.HashStore()
    exchange = Exchange("e", 1, 4, store=lambda: store, clock=lambda: now[0], pause=pause)
    Exchange("other engine", 0, 4, store=lambda: store, clock=lambda: 1e9, pause=pause)
    store.set("pegaflow/e/2", "x")
    with pytest.raises(NoExchange, match="no text of rank 0, 3 within 10 s"):
        exchange.texts("mine")
    assert 10.0 <= now[0] < 10.1


def test_a_later_exchange_returns_the_first_result():
    """vLLM makes a rank register again after a sleep."""
    store = torch.distributed.HashStore()
    store.set("pegaflow/e/1", "theirs")
    exchange = Exchange("e", 0, 2, store=lambda: store)
    assert exchange.texts("mine") == ["mine", "theirs"]
    store.set("pegaflow/e/1", "changed")
    assert exchange.texts("mine") == ["mine", "theirs"]
    with pytest.raises(NoExchange, match="those of rank 0 have changed since its start"):
        exchange.texts("changed")


def test_processes_that_torch_connects_exchange_their_texts():
    """As vLLM connects its workers."""
    listener = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with rank_processes.Pool(2) as pool:
        made = pool.starmap(connected_texts, [(rank, listener.port) for rank in range(2)])
    assert made == [["text 0", "text 1"]] * 2


def connected_texts(rank: int, port: int) -> list[str]:
    store = torch.distributed.TCPStore("127.0.0.1", port)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    try:
        return Exchange("e", rank, 2).texts(f"text {rank}")
    finally:
        torch.distributed.destroy_process_group()


# ---- weights and factors


def test_the_scales_are_in_the_files_that_the_weights_id_names(tmp_path):
    ids = {weights_id(tmp_path / name, scale) for name, scale in (("a", 0.5), ("b", 0.25))}
    assert len(ids) == 2
    assert weights_id(tmp_path / "c", 0.5) in ids


def weights_id(directory: Path, k_scale: float) -> str:
    """The id of a checkpoint that has nothing but one scale."""
    header = {f"{LAYERS[0]}.k_scale": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}
    text = json.dumps(header).encode()
    content = struct.pack("<Q", len(text)) + text + struct.pack("<f", k_scale)
    return of_files(model(directory, content))


def test_the_factors_of_a_worker_have_the_scales_of_its_layers():
    config = vllm_config("unix:/nowhere.sock", kv_cache_dtype="fp8")
    spec = FullAttentionSpec(
        block_size=16,
        num_kv_heads=2,
        head_size=16,
        dtype=torch.uint8,
        kv_quant_mode=get_kv_quant_mode("fp8"),
    )
    specs = dict.fromkeys(LAYERS, spec)
    made = kv_cache_config(config, 80, specs)
    place = build.read_geometry(made, tensors_of(made, specs))
    settings = SimpleNamespace(weights_id="named")

    def listed() -> list[tuple[str, str]]:
        exchange = Exchange("engine", 0, 1)
        agreed = agreement.reach(config, made, None, [place], None, exchange)
        return build._factors(config, made, settings, None, [place], None, agreed)

    context = config.compilation_config.static_forward_context
    context |= dict.fromkeys(LAYERS, layer_of(()))
    plain = listed()
    assert "kv_scales" not in dict(plain)
    context |= dict.fromkeys(LAYERS, layer_of((0.5, 0.25)))
    assert listed() == [*plain, ("kv_scales", dict(listed())["kv_scales"])]


# ---- scales that are in the cache


@pytest.mark.parametrize("dtype", ["fp8_per_token_head", "int8_per_token_head"])
def test_scales_for_each_token_and_head_are_a_part_of_the_page(dtype):
    """The layer has none: a kernel computes them when it writes a token."""
    layer = layer_of((0.5, 0.25), dtype)
    assert layer._k_scale == layer._v_scale == 1.0
    # 16 bytes of K and of V, and a scale of 4 bytes for each.
    spec = FullAttentionSpec(
        block_size=16,
        num_kv_heads=2,
        head_size=16,
        dtype=torch.int8,
        kv_quant_mode=get_kv_quant_mode(dtype),
        state_content_bytes=2 * (16 + 4),
    )
    config = vllm_config("unix:/nowhere.sock")
    specs = dict.fromkeys(LAYERS, spec)
    made = kv_cache_config(config, 80, specs)
    assert support.unsupported(config, made) == ""
    place = build.read_geometry(made, tensors_of(made, specs))
    assert place.page_bytes == len(LAYERS) * 2 * 16 * 2 * (16 + 4)


# ---- scales that are calculated at run time


class Calculating:
    """A CacheConfig of vLLM 0.26 with --calculate-kv-scales."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped

    calculate_kv_scales = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)


@pytest.mark.parametrize("name", ["dense", *SHAPES])
def test_scales_calculated_at_run_time_are_refused_with_the_fix(name):
    config = vllm_config("unix:/nowhere.sock", extra={"pegaflow.untested": True})
    groups = cache_config(SHAPES.get(name, [full(16)]), 100)
    assert support.unsupported(config, groups) == ""
    parts = ("parallel_config", "model_config", "scheduler_config", "speculative_config")
    calculating = SimpleNamespace(
        cache_config=Calculating(config.cache_config),
        **{one: getattr(config, one) for one in parts},
    )
    assert support.unsupported(calculating, groups) == (
        "with --calculate-kv-scales each process calculates KV scales from its first request, so "
        "its blocks mean nothing to another; remove the option, and use a checkpoint that has "
        "k_scale and v_scale"
    )
    assert support.kind_of_refusal(calculating, groups) == "model"


def test_the_newest_release_cannot_calculate_them():
    """If this fails, vLLM has such an option again: see whether the support check knows it."""
    config = vllm_config("unix:/nowhere.sock")
    assert not [name for name in vars(config.cache_config) if "scale" in name]
