"""Quantized KV caches: blocks are shared by engines that compute with the same scales.

vLLM's own layer takes the scales from a checkpoint, or computes with 1.0. Up to 0.26 it can also
calculate them from the first request (--calculate-kv-scales), which is refused.
"""

import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.attention.attention import set_default_quant_scales
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

from pegaflow.engine.layout import Geometry
from pegaflow.vllm import build, kv_scales, support
from pegaflow.vllm.kv_scales import FROM_CHECKPOINT
from tests.python.harness import kv_cache_config, vllm_config
from tests.python.kinds_engine import SHAPES, cache_config, full
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


def factor(
    *layers: Any, arrangement: str = FP8, pipeline: int = 1, tensor: int = 1
) -> list[tuple[str, str]]:
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(
            static_forward_context=dict(zip(LAYERS, layers, strict=True))
        ),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=pipeline, tensor_parallel_size=tensor
        ),
    )
    place = Geometry((), LAYERS, 10, (arrangement,) * len(LAYERS), "cpu")
    return kv_scales.factor(config, [place])


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
    assert factor(SimpleNamespace(), SimpleNamespace()) == [], "states"
    nothing = SimpleNamespace(parallel_config=None)
    assert kv_scales.factor(nothing, [Geometry((), LAYERS, 10, (FP8,) * 2, "cpu")]) == []


def test_scales_of_each_head_are_a_factor_and_one_for_all_ranks():
    heads = SimpleNamespace(_k_scale=torch.tensor([0.5, 0.25]), _v_scale=torch.tensor([1.0, 1.0]))
    others = SimpleNamespace(_k_scale=torch.tensor([0.5, 0.5]), _v_scale=torch.tensor([1.0, 1.0]))
    assert factor(heads, heads) != factor(others, others)
    # The ranks of an instance must have equal factors, but have other heads, or other layers.
    assert factor(heads, heads, tensor=2) == factor(others, others, tensor=2)
    assert factor(heads, heads, tensor=2) == [("kv_scales", FROM_CHECKPOINT)]
    one = layer_of((0.5, 0.25))
    assert factor(one, one, pipeline=2) == [("kv_scales", FROM_CHECKPOINT)]
    assert factor(one, one, tensor=2) == factor(one, one)


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
        return build._factors(config, made, settings, None, [place], None)

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
