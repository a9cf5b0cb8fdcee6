"""DeepSeek V3.2: a latent and an index key for each token, in one cache group of two page sizes.

GLM-5 has the same layers. A block is one page of both, so they are saved, loaded and lost together.
"""

import ctypes
import dataclasses
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, get_kv_cache_configs
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

from pegaflow.engine import layout
from pegaflow.vllm import build, namespace
from pegaflow.vllm.kinds import read_kinds
from pegaflow.vllm.plans.one_kind import OneKind
from pegaflow.vllm.support import is_one_of_full_attention, unsupported
from tests.python.fake_model import FakeModel, WrongKv
from tests.python.harness import (
    BLOCK,
    INDEX_BYTES,
    LATENT_BYTES,
    MODEL,
    Engine,
    kv_cache_configs,
    vllm_config,
)

LAYERS = MODEL["num_hidden_layers"]
TOKEN_BYTES = LATENT_BYTES + INDEX_BYTES


def vllms_own_specs(config: Any) -> dict[str, Any]:
    """The specs of a layer as vLLM's own classes state them for DeepSeek V3.2 with fp8."""
    layer = SimpleNamespace(
        kv_cache_dtype="fp8_ds_mla",
        head_size=576,
        sliding_window=None,
        indexer=object(),
        non_causal_multi_token_decode=False,
    )
    with set_current_vllm_config(config):
        # 128 bytes of the key and 4 of its scale.
        index = DeepseekV32IndexerCache(
            head_dim=132,
            dtype=torch.uint8,
            prefix="model.layers.0.self_attn.indexer.k_cache",
            cache_config=config.cache_config,
        )
    return {
        "attn": MLAAttention.get_kv_cache_spec(layer, config),
        "indexer.k_cache": index.get_kv_cache_spec(config),
    }


# ---- one kind, of which a page has both


@pytest.mark.parametrize("block", [BLOCK, 64])
def test_both_caches_of_a_layer_are_one_group_and_one_kind(block):
    config = vllm_config("unix:/nowhere.sock")
    config.cache_config.block_size = block
    own = vllms_own_specs(config)
    specs = {
        f"model.layers.{i}.self_attn.{name}": spec
        for i in range(LAYERS)
        for name, spec in own.items()
    }
    config.cache_config.num_gpu_blocks_override = 100
    (made,) = get_kv_cache_configs(config, [specs], [1 << 26])

    (group,) = made.kv_cache_groups
    assert isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs)
    assert unsupported(config, made) == ""
    assert is_one_of_full_attention(made)
    assert read_kinds(made, config.cache_config).is_plain

    made.kv_cache_layout = "LBNHC"
    where = build.read_geometry(made, FakeModel(made).tensors)
    assert where.page_bytes == LAYERS * block * TOKEN_BYTES
    # The latents of all layers, then the index keys: in the order of vLLM's memory.
    names = list(where.layers)
    assert names == [name for kind in own for name in specs if name.endswith(f".{kind}")]
    sizes = [segment.size for segment in where.segments]
    assert sizes == [block * LATENT_BYTES] * LAYERS + [block * INDEX_BYTES] * LAYERS


def test_the_harness_has_vllms_own_specs():
    config = vllm_config("unix:/nowhere.sock")
    (made,) = kv_cache_configs(config, 256, indexer=True)
    expected = vllms_own_specs(config)
    for layer, spec in made.kv_cache_groups[0].kv_cache_spec.kv_cache_specs.items():
        assert spec == expected[layer.partition("self_attn.")[2]]


def test_the_scheduler_whose_copy_has_one_spec_serves_the_same_blocks():
    config = vllm_config("unix:/nowhere.sock")
    (worker,) = kv_cache_configs(config, 256, indexer=True)
    scheduler = generate_scheduler_kv_cache_config([worker])
    assert not hasattr(scheduler.kv_cache_groups[0].kv_cache_spec, "kv_cache_specs")
    assert unsupported(config, scheduler) == unsupported(config, worker) == ""
    rules = [build.block_rules(config, one, SimpleNamespace()) for one in (scheduler, worker)]
    for one in rules:
        assert isinstance(one, OneKind)
        assert one.unit_tokens == BLOCK


def test_a_block_is_moved_with_the_bytes_of_both_caches():
    config = vllm_config("unix:/nowhere.sock")
    (made,) = kv_cache_configs(config, 256, indexer=True)
    model = FakeModel(made)
    where = build.read_geometry(made, model.tensors)
    draw = random.Random(0)
    pages = {}
    for block in (1, 2, 3):
        pages[block] = [draw.randbytes(piece.size) for piece in where.segments]
        for (address, stride, _), page in zip(where.segments, pages[block], strict=True):
            ctypes.memmove(address + block * stride, page, len(page))

    for address, stride, size in where.segments:
        ctypes.memmove(address + 7 * stride, ctypes.string_at(address + 2 * stride, size), size)

    for tensor in model.tensors.values():
        assert torch.equal(tensor[7], tensor[2])
        assert not torch.equal(tensor[2], tensor[3])
        assert not tensor[8].any()
    moved = b"".join(tensor[7].numpy().tobytes() for tensor in model.tensors.values())
    assert sorted(moved) == sorted(b"".join(pages[2]))
    assert len(moved) == where.page_bytes


def test_the_format_of_either_cache_is_in_the_namespace():
    config = vllm_config("unix:/nowhere.sock")
    (made,) = kv_cache_configs(config, 256, indexer=True)
    where = build.read_geometry(made, FakeModel(made).tensors)

    def group() -> str:
        listed = namespace.factors(
            config,
            made,
            weights="named:x",
            instance="i",
            hash_unit=BLOCK,
            layers=where.layers,
            arrangements=where.arrangements,
        )
        return dict(listed)["group"]

    first = group()
    assert first.count(f"{LAYERS}x MLAAttentionSpec(block_size={BLOCK}, ") == 2
    by_layer = made.kv_cache_groups[0].kv_cache_spec.kv_cache_specs
    for name, field, value in (("attn", "state_content_bytes", 352), ("k_cache", "head_size", 68)):
        changed = {layer: spec for layer, spec in by_layer.items() if layer.endswith(name)}
        for layer, spec in changed.items():
            by_layer[layer] = dataclasses.replace(spec, **{field: value})
        assert group() != first
        by_layer.update(changed)
    assert group() == first


# ---- in an engine, with a server


@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "async"])
def test_saved_and_loaded_bytes_are_equal(pega, prompt, asynchronous):
    tokens = prompt(200)
    with Engine(pega.address, indexer=True, asynchronous=asynchronous) as engine:
        engine.wait_ready()
        assert engine.ask("cold", tokens).loaded == 0
        engine.reset_local()
        # The fake model checks each byte of both caches before it reads a block.
        before = engine.model.checked_tokens
        assert engine.ask("again", tokens, 5).loaded == 192
        assert engine.ask("longer", tokens + prompt(50), 5).local == 192
        engine.reset_local()
        assert engine.ask("branch", tokens[:100] + prompt(60), 5).loaded == 96
        assert engine.model.checked_tokens > before
        engine.run()
        assert engine.stats["loaded_bytes"] == (192 + 96) * LAYERS * TOKEN_BYTES
        engine.check_at_rest()


def test_two_ranks_share_one_copy_of_the_latent_and_its_index(pega, prompt):
    """Each rank has all heads' latent, so only one of them saves it."""
    tokens = prompt(200)
    changes = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with Engine(pega.address, indexer=True, **changes) as engine:
        engine.wait_ready()
        engine.ask("cold", tokens)
        engine.reset_local()
        assert engine.ask("again", tokens, 5).loaded == 192
        engine.run()
        engine.check_at_rest()


def without_index_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    original = layout._merge
    monkeypatch.setattr(
        layout,
        "_merge",
        lambda pieces: original([piece for piece in pieces if piece.size != BLOCK * INDEX_BYTES]),
    )


def with_the_latents_stride(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if all layers of the group had the page of the first."""
    original = layout._merge

    def merge(pieces: Any) -> Any:
        stride = pieces[0].stride
        return original([piece._replace(stride=min(stride, piece.stride + 8)) for piece in pieces])

    monkeypatch.setattr(layout, "_merge", merge)


@pytest.mark.parametrize("plant", [without_index_keys, with_the_latents_stride])
def test_a_planted_mistake_is_found(pega, prompt, plant, monkeypatch):
    plant(monkeypatch)
    tokens = prompt(200)
    with Engine(pega.address, indexer=True, extra={"pegaflow.weights_id": plant.__name__}) as one:
        one.wait_ready()
        one.ask("cold", tokens)
        one.reset_local()
        with pytest.raises(WrongKv, match="layer [345], "):
            one.ask("again", tokens, 5)
