"""Equal factors mean equal pages: random layers, laid out by vLLM, parsed as by the connector."""

import dataclasses
import random
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVQuantMode,
    MLAAttentionSpec,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from pegaflow.vllm import namespace
from pegaflow.vllm.build import Unservable, hash_unit, read_geometry
from pegaflow.vllm.support import unsupported
from tests.python.harness import kv_cache_config, vllm_config

BLOCKS = 80  # vLLM rejects fewer than one request may need
CASES = 400
LAYOUTS = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")


@pytest.fixture(scope="module")
def config() -> Any:
    return vllm_config("unix:/nowhere.sock")


def random_specs(rand: random.Random) -> dict[str, Any]:
    """The layers of one model. Few shapes, so that many cases differ in their order only."""
    count = rand.choice([3, 4])
    common = {"block_size": 16, "num_kv_heads": 2, "head_size": 16}
    full = FullAttentionSpec(**common, dtype=torch.bfloat16)
    fp8 = FullAttentionSpec(**common, dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)
    kind = rand.choice(["plain", "skip", "heads", "window", "mla", "index", "alternating"])
    if kind == "plain":
        specs = [rand.choice([full, fp8])] * count
    elif kind == "skip":  # --kv-cache-dtype-skip-layers
        skipped = set(rand.sample(range(count), rand.randint(1, count - 1)))
        specs = [full if layer in skipped else fp8 for layer in range(count)]
    elif kind == "heads":
        wide = dataclasses.replace(full, num_kv_heads=4)
        specs = [rand.choice([full, wide]) for _ in range(count)]
    elif kind == "window":  # without the hybrid manager
        window = dataclasses.replace(full, sliding_window=64)
        specs = [rand.choice([full, window]) for _ in range(count)]
    elif kind == "mla":
        latent = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
        index = dataclasses.replace(latent, head_size=32, dtype=torch.uint8)
        specs = [rand.choice([latent, index]) for _ in range(count)]
    elif kind == "index":  # keys, values and index keys, as in MiniMax M3
        index = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=32, dtype=torch.bfloat16)
        specs = [rand.choice([full, index]) for _ in range(count)]
    else:
        # Pages of one size with different bytes.
        other = dataclasses.replace(full, num_kv_heads=1, head_size=32)
        specs = [rand.choice([full, other]) for _ in range(count)]
    return {f"model.layers.{i}.self_attn.attn": spec for i, spec in enumerate(specs)}


def tensors_of(kv_config: Any, specs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """One allocation, divided by vLLM's own code."""
    layout = KVCacheLayout[kv_config.kv_cache_layout]
    raw = torch.zeros(max(place.size for place in kv_config.kv_cache_tensors), dtype=torch.int8)
    tensors = {}
    for place in kv_config.kv_cache_tensors:
        spec = specs[place.layers[0]]
        views = create_kv_cache_views(raw, spec, kv_config.num_blocks, layout, place)
        tensors |= dict(zip(place.layers, views, strict=True))
    return tensors


def test_equal_factors_imply_equal_pages(config, seed):
    rand = random.Random(seed)
    pages: dict[Any, Any] = {}
    served = 0
    for _ in range(CASES):
        specs, layout = random_specs(rand), rand.choice(LAYOUTS)
        config.cache_config.kv_cache_layout = layout
        kv_config = kv_cache_config(config, BLOCKS, specs)
        if unsupported(config, kv_config):
            continue
        try:
            where = read_geometry(kv_config, tensors := tensors_of(kv_config, specs))
        except Unservable:
            continue
        served += 1
        listed = namespace.factors(
            config,
            kv_config,
            weights="named:x",
            instance="i",
            hash_unit=hash_unit(config, kv_config),
            layers=where.layers,
            arrangements=where.arrangements,
        )
        base = min(segment.address for segment in where.segments)
        page = (
            [(address - base, stride, size) for address, stride, size in where.segments],
            # The meaning of the bytes: their layer, type and shape.
            [
                (layer, tensors[layer].dtype, tuple(tensors[layer].shape[1:]))
                for layer in where.layers
            ],
        )
        before = pages.setdefault(tuple(listed), page)
        assert before == page, f"seed {seed}: {specs} in {layout}"
    # Some cases share a namespace, and not all of them share one.
    assert served > CASES // 2
    assert 20 < len(pages) < served
