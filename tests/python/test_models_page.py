"""docs/models.md: what the connector does with each family, on each kind of device.

The groups of each family are made by vLLM's own code from the specs of its layers. So the page's
rows follow from the support check: a family that is verified there needs another row.
"""

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_configs,
    resolve_cache_hit_alignment_tokens,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    SparseCacheRole,
)

from pegaflow.vllm import support
from tests.python import kinds_engine
from tests.python.harness import vllm_config
from tests.python.kinds_engine import cache_config, full

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "models.md"

# ---- layers, with the sizes of the published models where they decide about groups

BF16 = {"dtype": torch.bfloat16}
HEADS = {"block_size": 16, "num_kv_heads": 8, "head_size": 64, **BF16}
FULL = FullAttentionSpec(**HEADS)
#: With states, vLLM makes blocks of attention as large as a state.
LONG = FullAttentionSpec(block_size=528, num_kv_heads=2, head_size=256, **BF16)
LATENT = MLAAttentionSpec(
    block_size=64, num_kv_heads=1, max_tp_shards=1, head_size=576, dtype=torch.uint8
)


def window(tokens: int, **more: Any) -> SlidingWindowSpec:
    return SlidingWindowSpec(sliding_window=tokens, **HEADS | more)


def state(attention: Any) -> MambaSpec:
    """A state in a page of the attention layers beside it."""
    return MambaSpec(
        block_size=attention.block_size,
        shapes=((4, 1024), (16, 64, 64)),
        dtypes=(torch.bfloat16, torch.float32),
        mamba_cache_mode="align",
        page_size_padded=attention.page_size_bytes,
    )


LONG_LATENT = dataclasses.replace(LATENT, block_size=528, dtype=torch.bfloat16)
INDEX = dataclasses.replace(LATENT, head_size=132, cache_role=SparseCacheRole.INDEXER)
GEMMA4_FULL = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=512, **BF16)
CHUNK = ChunkedLocalAttentionSpec(attention_chunk_size=8192, **HEADS)
KEYS_AND_VALUES = FullAttentionSpec(block_size=128, num_kv_heads=4, head_size=128, **BF16)
KEYS = MLAAttentionSpec(
    block_size=128,
    num_kv_heads=1,
    head_size=128,
    dtype=torch.bfloat16,
    cache_role=SparseCacheRole.INDEXER,
)

#: The layers of each row of the page, and the labels of their kinds.
FAMILIES: dict[str, tuple[list[Any], list[str]]] = {
    "Llama, Qwen 2 and 3, Mistral without windows, other dense and MoE models": (
        [FULL] * 32,
        ["full"],
    ),
    "DeepSeek V2, V3, R1, Kimi K2": ([LATENT] * 4, ["full"]),
    "DeepSeek V3.2, GLM-5": ([LATENT, INDEX] * 4, ["full"]),
    "MiniMax M3": ([KEYS_AND_VALUES] * 2 + [KEYS_AND_VALUES, KEYS] * 4, ["full"]),
    "Llama 4, vLLM's default": (
        # vLLM's specs of its chunked layers without the hybrid manager.
        ([dataclasses.replace(FULL, attention_chunk_size=8192)] * 3 + [FULL]) * 12,
        ["full"],
    ),
    "Llama 4 with chunks": (([CHUNK] * 3 + [FULL]) * 12, ["chunk", "full"]),
    "gpt-oss": ([window(128), FULL] * 12, ["full", "window"]),
    "Gemma 3": (([window(1024)] * 5 + [FULL]) * 10 + [window(1024)] * 2, ["full", "window"]),
    "Gemma 4": (([window(1024, head_size=256)] * 5 + [GEMMA4_FULL]) * 5, ["full", "window"]),
    "Mistral 7B v0.1": ([window(4096)] * 32, ["window"]),
    "Qwen3-Next, Qwen3.5": (([state(LONG)] * 3 + [LONG]) * 12, ["full", "state"]),
    "Granite 4": (([state(LONG)] * 9 + [LONG]) * 4, ["full", "state"]),
    "Nemotron-H": (([state(LONG)] * 12 + [LONG]) * 4, ["full", "state"]),
    "Kimi K3": (([state(LONG_LATENT)] * 3 + [LONG_LATENT]) * 6, ["full", "state"]),
    "DeepSeek V4": ([], []),
    "GLM-5.3-Flash": ([], []),
}
#: Groups that vLLM packs in another way: one layer of each.
PACKED: dict[str, list[Any]] = {
    "DeepSeek V4": [
        dataclasses.replace(LATENT, block_size=256, tokens_per_state=4),
        SlidingWindowMLASpec(
            block_size=64, num_kv_heads=1, head_size=512, sliding_window=128, dtype=torch.uint8
        ),
    ],
    "GLM-5.3-Flash": [
        LONG_LATENT,
        state(LONG_LATENT),
        CircularBufferSpec(
            block_size=4, num_kv_heads=2, head_size=128, head_size_v=0, dtype=torch.bfloat16
        ),
    ],
}


def groups_of(family: str) -> tuple[Any, Any]:
    """A configuration, and the cache groups that vLLM makes for the family."""
    config = vllm_config("unix:/nowhere.sock")
    if specs := PACKED.get(family):
        groups = [KVCacheGroupSpec([f"layer.{i}"], spec) for i, spec in enumerate(specs)]
        return config, KVCacheConfig(100, [], groups)
    layers, _ = FAMILIES[family]
    config.cache_config.block_size = layers[0].block_size
    config.cache_config.mamba_cache_mode = "align"
    config.cache_config.num_gpu_blocks_override = 2000
    named = {f"model.layers.{i}.attn": spec for i, spec in enumerate(layers)}
    (made,) = get_kv_cache_configs(config, [named], [1 << 36])
    return config, made


def reason(family: str, device: str) -> str:
    config, kv_config = groups_of(family)
    if isinstance(kv_config, KVCacheConfig) and family not in PACKED:
        # Both roles must come to the same result.
        scheduler = generate_scheduler_kv_cache_config([kv_config])
        assert support.unsupported(config, scheduler) == support.unsupported(config, kv_config)
    parts = (
        "parallel_config",
        "model_config",
        "cache_config",
        "scheduler_config",
        "speculative_config",
        "kv_transfer_config",
    )
    others = {part: getattr(config, part) for part in parts}
    on = SimpleNamespace(device_config=SimpleNamespace(device_type=device), **others)
    return support.unsupported(on, kv_config)


# ---- the page


def rows() -> dict[str, list[str]]:
    """The cells of the table of families, by the first."""
    table = PAGE.read_text().partition("<!-- families -->")[2].partition("<!-- end -->")[0]
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table.strip().splitlines()
        if line.startswith("|")
    ]
    return {row[0]: row[1:] for row in cells[2:]}


def listed_reasons() -> dict[str, str]:
    """The reasons that the page quotes, by their letter."""
    return dict(re.findall(r"^\| \((\w)\) \| `([^`]+)` \|$", PAGE.read_text(), re.MULTILINE))


def test_the_page_has_a_row_for_each_family_and_no_other():
    assert list(rows()) == list(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layers_of_a_family_have_the_kinds_of_its_row(family):
    found = re.findall(r"`(\w+)`", rows()[family][0])
    assert sorted(found) == FAMILIES[family][1]
    _, kv_config = groups_of(family)
    if family not in PACKED:
        kinds = support.read_kinds(kv_config, SimpleNamespace(prefix_match_unit=None))
        assert sorted({kind.rule.label for kind in kinds.kinds}) == FAMILIES[family][1]


@pytest.mark.parametrize(("column", "device"), [(1, "cuda"), (2, "cpu")])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_row_says_what_the_connector_does(family, column, device):
    cell, why = rows()[family][column], reason(family, device)
    if cell.startswith("no vLLM"):
        return  # nothing to serve on this kind of device
    if not why:
        assert cell.startswith("**served**"), f"{family} on {device} is served"
        return
    letters = re.findall(r"\((\w)\)$", cell)
    assert letters, f"{family} on {device}: {why}"
    assert listed_reasons()[letters[0]] == why
    words = "off" if "pegaflow.untested=true" in why else "refused"
    assert cell.startswith(f"**{words}**")


def test_every_reason_of_the_page_is_used():
    used = {letter for row in rows().values() for letter in re.findall(r"\((\w)\)", " ".join(row))}
    assert used == set(listed_reasons())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_checks_of_a_row_exist(family):
    names = re.findall(r"`(test_\w+\.py)(?:\[([\w -]+)\])?`", rows()[family][4])
    assert names, "a row names the check that shows it"
    for name, case in names:
        path = ROOT / "tests" / "python" / name
        assert path.is_file(), name
        if case:
            sources = [path, path.parent / "kinds_engine.py"]
            assert any(f'"{case}"' in source.read_text() for source in sources), case


# ---- options of vLLM

INSIDE = (
    "with --prefix-match-unit 16 hits of vLLM end inside of blocks of 64 tokens with a state, "
    "which is not supported; remove the option"
)


@pytest.mark.parametrize("stated", [False, True])
@pytest.mark.parametrize(
    ("groups", "option", "reason"),
    [
        ([kinds_engine.state(64), full(64)], 16, INSIDE),
        ([kinds_engine.state(64), full(32)], 16, INSIDE),
        ([kinds_engine.state(64), full(64)], 64, ""),
        ([kinds_engine.state(64), full(64)], None, ""),
        ([kinds_engine.window(64, 100), full(64)], 16, ""),
        # vLLM looks windows up by whole blocks, and then states too.
        ([kinds_engine.state(64), kinds_engine.window(64, 100), full(64)], 16, ""),
    ],
)
def test_hits_inside_of_blocks_with_states_are_refused_by_name(groups, option, reason, stated):
    config = vllm_config("unix:/nowhere.sock", extra={"pegaflow.untested": True})
    config.cache_config.prefix_match_unit = option
    made = cache_config(groups, 100)
    if stated:  # by vLLM 0.32 and later
        block, made.hash_block_size = resolve_kv_cache_block_sizes(made, config)
        made.cache_hit_alignment_tokens = resolve_cache_hit_alignment_tokens(
            made, config, block, made.hash_block_size
        )
    assert support.unsupported(config, made) == reason
    if reason:
        assert support.kind_of_refusal(config, made) == "model"
        assert f"`{reason}`" in re.sub(r"\s+", " ", PAGE.read_text())
