"""Kinds of blocks, read from vLLM's cache groups and compared with vLLM's own classes; also the
support check, and the namespace of an engine that has them."""

import copy
import dataclasses
import os
import random
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_configs,
    resolve_cache_hit_alignment_tokens,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.single_type_kv_cache_manager import get_manager_for_kv_cache_spec
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from pegaflow.engine.kinds import BlockKind, BlockKinds, KindRule
from pegaflow.vllm import namespace, ranks, support
from pegaflow.vllm.build import Unservable, instance_id, read_geometries
from pegaflow.vllm.kinds import UnservedGroups, read_kinds, saved_blocks
from tests.python.harness import vllm_config
from tests.python.kinds_engine import (
    HEADS,
    SHAPES,
    Store,
    cache_config,
    chunked,
    full,
    state,
    window,
)

PREFIX, TRAILING, CHUNK, STATE = KindRule
CACHE = SimpleNamespace(prefix_match_unit=None)


def kinds_of(groups: list[Any], **fields: Any) -> BlockKinds:
    config = cache_config(groups, 100)
    for name, value in fields.items():
        setattr(config, name, value)
    return read_kinds(config, CACHE)


def group(*specs: Any, **fields: Any) -> KVCacheGroupSpec:
    layers = [f"layer.{id(fields)}.{i}" for i in range(len(specs))]
    whole = specs[0]
    if len(specs) > 1:
        by_layer = dict(zip(layers, specs, strict=True))
        whole = UniformTypeKVCacheSpecs(block_size=specs[0].block_size, kv_cache_specs=by_layer)
    return KVCacheGroupSpec(layers, whole, **fields)


# ---- from groups to kinds


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gemma3", [(PREFIX, 0, 16, (2,)), (TRAILING, 63, 16, (0, 1))]),
        ("gpt-oss", [(PREFIX, 0, 16, (1,)), (TRAILING, 32, 16, (0,))]),
        ("mistral-window", [(TRAILING, 63, 16, (0,))]),
        (
            "two windows",
            [(PREFIX, 0, 16, (0,)), (TRAILING, 49, 32, (1,)), (TRAILING, 19, 16, (2,))],
        ),
        ("llama4", [(PREFIX, 0, 16, (2,)), (CHUNK, 64, 16, (0, 1))]),
        ("qwen3-next", [(PREFIX, 0, 64, (3,)), (STATE, 0, 64, (0, 1, 2))]),
        ("two of full", [(PREFIX, 0, 16, (0, 1))]),
    ],
)
def test_groups_of_equal_rule_are_one_kind_and_the_prefix_kind_is_the_first(name, expected):
    made = kinds_of(SHAPES[name])
    assert [dataclasses.astuple(kind) for kind in made.kinds] == expected
    assert made.unit_tokens == min(kind.block_tokens for kind in made.kinds)
    assert made.alignment_tokens == max(kind.block_tokens for kind in made.kinds)
    assert made.groups == len(SHAPES[name])
    assert not made.is_plain


def test_one_group_of_full_attention_is_plain():
    assert kinds_of([full(16)]).is_plain


def test_tokens_that_vllm_retains_behind_a_window_belong_to_it():
    spec = SlidingWindowSpec(block_size=16, sliding_window=64, extra_retained_tokens=3, **HEADS)
    assert kinds_of([full(16), spec]).kinds[1].tokens == 66


MLA = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=16, dtype=torch.float32)


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([], "0 cache groups"),
        ([group(full(16)), group(SinkFullAttentionSpec(block_size=16, **HEADS))], "SinkFull"),
        ([group(RSWASpec(block_size=16, rswa_window=64, **HEADS))], "kind RSWASpec"),
        ([group(CrossAttentionSpec(block_size=16, **HEADS))], "kind CrossAttentionSpec"),
        (
            [
                group(full(16)),
                group(SlidingWindowMLASpec(block_size=16, sliding_window=64, **HEADS)),
            ],
            "kind SlidingWindowMLASpec",
        ),
        ([group(full(16)), group(window(16, 8), is_eagle_group=True)], "draft model"),
        ([group(full(16)), group(MLA, host_resident=True)], "may not transfer"),
        ([group(full(16)), group(MLA, enable_kv_transfer=False)], "may not transfer"),
        ([group(full(32)), group(chunked(16, 64))], "beside blocks of another size"),
        ([group(chunked(16, 40))], "chunks of 40 tokens do not fit blocks of 16"),
        ([group(full(16)), group(window(16, 1))], "window of 1 token"),
        ([group(window(16, 64), window(16, 32))], "layers with different windows"),
        (
            [group(full(64)), group(dataclasses.replace(state(64), mamba_cache_mode="none"))],
            "--mamba-cache-mode align",
        ),
        (
            [group(full(64)), group(dataclasses.replace(state(64), num_speculative_blocks=2))],
            "states with speculative decoding",
        ),
        ([group(window(16, n + 2)) for n in range(17)], "17 kinds of blocks; 1 to 16"),
    ],
)
def test_unserved_groups_are_refused_by_name(groups, words):
    config = KVCacheConfig(num_blocks=100, kv_cache_tensors=[], kv_cache_groups=groups)
    for number, one in enumerate(groups):
        one.layer_names = [f"layer.{number}.{i}" for i in range(len(one.layer_names))]
        if by_layer := getattr(one.kv_cache_spec, "kv_cache_specs", None):
            specs = dict(zip(one.layer_names, by_layer.values(), strict=True))
            one.kv_cache_spec = dataclasses.replace(one.kv_cache_spec, kv_cache_specs=specs)
    with pytest.raises(UnservedGroups, match=words):
        read_kinds(config, CACHE)


def test_groups_that_share_a_layer_are_refused():
    config = cache_config([full(16), window(16, 64)], 100)
    config.kv_cache_groups[1].layer_names.append("layer.0")
    with pytest.raises(UnservedGroups, match="share layer layer.0"):
        read_kinds(config, CACHE)


def test_a_group_outside_of_the_prefix_cache_is_refused():
    config = cache_config([full(16), window(16, 64)], 100)
    config.prefix_cacheable_group_ids = (0,)
    with pytest.raises(UnservedGroups, match="group 1 is outside of vLLM's prefix cache"):
        read_kinds(config, CACHE)


def test_both_roles_derive_the_same_kinds():
    """The scheduler has the spec of one layer where a worker has those of all."""
    wide = dataclasses.replace(full(16), head_size=32, head_size_v=32)
    worker = KVCacheConfig(100, [], [group(full(16), wide), group(window(16, 64))])
    worker.kv_cache_groups[1].layer_names = ["other"]
    scheduler = generate_scheduler_kv_cache_config([worker])
    assert type(scheduler.kv_cache_groups[0].kv_cache_spec) is type(full(16))
    assert read_kinds(worker, CACHE) == read_kinds(scheduler, CACHE)


def test_units_and_alignment_are_those_of_vllm_in_each_release(seed):
    draw = random.Random(seed)
    config = vllm_config("unix:/nowhere.sock")
    for _ in range(200):
        specs = [
            draw.choice(
                [
                    full(16 * draw.choice([1, 2, 4])),
                    window(16 * draw.choice([1, 2]), draw.randint(2, 200)),
                    state(16 * draw.choice([2, 4])),
                ]
            )
            for _ in range(draw.randint(2, 4))
        ]
        made = cache_config(specs, 100)
        scheduler_block, unit = resolve_kv_cache_block_sizes(made, config)
        alignment = resolve_cache_hit_alignment_tokens(made, config, scheduler_block, unit)
        # Older releases state neither of them.
        for stated in ({}, {"hash_block_size": unit, "cache_hit_alignment_tokens": alignment}):
            kinds = kinds_of(specs, **stated)
            assert kinds.unit_tokens == unit
            assert kinds.alignment_tokens == scheduler_block
            assert kinds.alignment_tokens % alignment == 0


def test_a_finer_hash_unit_is_used():
    assert kinds_of([full(32), window(32, 64)], hash_block_size=16).unit_tokens == 16
    cache = SimpleNamespace(prefix_match_unit=16)
    made = read_kinds(cache_config([full(32), window(32, 64)], 100), cache)
    assert made.unit_tokens == 16
    with pytest.raises(UnservedGroups, match="hashes every 24 tokens do not fit blocks of 32"):
        kinds_of([full(32), window(32, 64)], hash_block_size=24)


# ---- the rules are vLLM's and the server's


@pytest.mark.parametrize(
    "spec", [full(16), window(16, 50), window(16, 2), chunked(16, 64), state(16)]
)
def test_a_hit_needs_the_blocks_that_vllm_allocates_for_it(spec):
    kind = kinds_of([spec]).kinds[0]
    for tokens in range(16, 400, 16):
        pool = BlockPool(100, True, 16)
        manager = get_manager_for_kv_cache_spec(
            kv_cache_spec=spec,
            max_in_flight_tokens=4096,
            max_model_len=4096,
            block_pool=pool,
            enable_caching=True,
            kv_cache_group_id=0,
            scheduler_block_size=16,
        )
        manager.add_local_computed_blocks("r", [], 0, tokens)
        manager.allocate_external_computed_blocks("r", 0, tokens)
        kept = [i for i, block in enumerate(manager.req_to_blocks["r"]) if not block.is_null]
        assert kept == list(kind.needed(tokens).numbers())


def test_the_servers_search_finds_the_same_prefixes(seed):
    """Store.claim, the server of these tests, against the server's own search."""
    draw = random.Random(seed)
    lines, expected = [], []
    for _ in range(1500):
        kinds = kinds_of(SHAPES[draw.choice(sorted(SHAPES))])
        store = Store(kinds)
        units = draw.randrange(40)
        keys = [(i + 1).to_bytes(32, "big") for i in range(units)]
        local = draw.choice([0, kinds.aligned(draw.randrange(units + 1) * kinds.unit_tokens)])
        fields: list[Any] = [kinds.unit_tokens, kinds.alignment_tokens, units, local]
        for index, kind in enumerate(kinds.kinds):
            digits = ""
            holes = 2 ** -draw.randint(1, 8)
            for number in range(units * kinds.unit_tokens // kind.block_tokens):
                present = draw.random() >= holes
                digits += str(int(present))
                if present:
                    store.blocks[index][keys[kinds.unit_of(kind, number)]] = 1
            fields += [int(kind.rule), kind.tokens, kind.block_tokens, digits or "-"]
        lines.append(" ".join(map(str, fields)))
        expected.append(store.claim(keys, local // kinds.unit_tokens)[0] * kinds.unit_tokens)
    program = Path(os.environ["PEGA_BUILD_DIR"]) / "tests" / "support" / "restorable_search"
    done = subprocess.run(
        [program], input="\n".join(lines) + "\n", text=True, capture_output=True, check=True
    )
    found = [int(line) for line in done.stdout.splitlines()]
    assert found == expected
    assert sum(tokens > 0 for tokens in found) > 100


def test_the_mask_of_a_window_is_the_rule_at_its_boundaries(seed):
    draw = random.Random(seed)
    for _ in range(500):
        block = 16
        spec = SlidingWindowSpec(
            block_size=block,
            sliding_window=draw.randint(2, 100),
            extra_retained_tokens=draw.choice([0, 3]),
            **HEADS,
        )
        kind = kinds_of([spec]).kinds[0]
        alignment = block * draw.choice([1, 2, 4])
        first, end = sorted(draw.sample(range(60), 2))
        boundaries = [draw.randrange(1, 60 * block) for _ in range(draw.randint(0, 4))]
        mask = saved_blocks(kind, spec, first, end, alignment, boundaries)
        needed = {
            number
            for boundary in boundaries
            for number in kind.needed(boundary // alignment * alignment).numbers()
        }
        assert mask == [number in needed for number in range(first, end)]


# ---- the support check


@pytest.fixture
def served(monkeypatch):
    monkeypatch.setattr(support, "SERVES_KINDS", True)
    return vllm_config("unix:/nowhere.sock", extra={"pegaflow.untested": True})


@pytest.mark.parametrize("name", SHAPES)
def test_kinds_are_served_if_they_were_verified_or_the_operator_says_so(served, monkeypatch, name):
    kv_config = cache_config(SHAPES[name], 100)
    assert support.unsupported(served, kv_config) == ""
    plain = vllm_config("unix:/nowhere.sock")
    monkeypatch.setitem(support.VERIFIED, "cpu", frozenset())
    reason = support.unsupported(plain, kv_config)
    assert "not verified" in reason and "pegaflow.untested=true" in reason
    could_be_one = name != "mistral-window" and not kv_config.has_mamba_layers
    assert ("--disable-hybrid-kv-cache-manager" in reason) == could_be_one
    labels = tuple(sorted({kind.rule.label for kind in kinds_of(SHAPES[name]).kinds}))
    monkeypatch.setitem(support.VERIFIED, "cpu", frozenset({labels}))
    assert support.unsupported(plain, kv_config) == ""


def test_one_group_of_full_attention_needs_no_verification(monkeypatch):
    monkeypatch.setattr(support, "SERVES_KINDS", True)
    monkeypatch.delattr(KVConnectorBase_V1, "get_transfer_results")
    config = vllm_config("unix:/nowhere.sock")
    assert support.unsupported(config, cache_config([full(16)], 100)) == ""
    assert support.unsupported(config, cache_config([MLA], 100)) == ""


def test_releases_that_cannot_report_a_failed_load_of_windows_are_refused(served, monkeypatch):
    monkeypatch.delattr(KVConnectorBase_V1, "get_transfer_results")
    for name in SHAPES:
        reason = support.unsupported(served, cache_config(SHAPES[name], 100))
        assert "cannot report a failed load" in reason


def test_unserved_groups_have_their_reason(served):
    kv_config = cache_config([full(16), RSWASpec(block_size=16, rswa_window=64, **HEADS)], 100)
    assert support.unsupported(served, kv_config) == "layers of kind RSWASpec are not supported yet"
    assert support.kind_of_refusal(served, kv_config) == "model"


def test_ranks_of_several_groups_are_replicas_only_if_vllm_says_so(served):
    kv_config = cache_config(SHAPES["gemma3"], 100)
    served.parallel_config.tensor_parallel_size = 4
    assert ranks.replicas(served, kv_config) == 1
    kv_config.kv_tp_replicas = 2
    assert ranks.replicas(served, kv_config) == 2


# ---- bytes and names


def layers_of(shape: str) -> dict[str, Any]:
    """Specs by layer, which vLLM makes groups of."""
    pattern = {
        "gemma3": [window(16, 64), window(16, 64), full(16)] * 2,
        "gpt-oss": [window(16, 33), full(16)] * 2,
        "qwen3-next": [state(64)] * 3 + [full(64)],
        "llama4": [chunked(16, 64), chunked(16, 64), full(16)] * 2,
    }[shape]
    return {f"model.layers.{i}.attn": spec for i, spec in enumerate(pattern)}


@pytest.fixture(scope="module", params=["gemma3", "gpt-oss", "qwen3-next"])
def real(request) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """A configuration of vLLM's own making, with the tensors of its memory."""
    config = vllm_config("unix:/nowhere.sock")
    if request.param == "qwen3-next":
        config.cache_config.mamba_cache_mode = "align"
        config.cache_config.block_size = 64
    config.cache_config.num_gpu_blocks_override = 400
    (made,) = get_kv_cache_configs(config, [layers_of(request.param)], [1 << 26])
    made.kv_cache_layout = "LBHNC"
    specs = {layer: one.kv_cache_spec for one in made.kv_cache_groups for layer in one.layer_names}
    raw = torch.zeros(max(t.size for t in made.kv_cache_tensors), dtype=torch.int8)
    tensors: dict[str, torch.Tensor] = {}
    for tensor in made.kv_cache_tensors:
        spec = specs[tensor.layers[0]]
        views = create_kv_cache_views(raw, spec, made.num_blocks, KVCacheLayout.LBHNC, tensor)
        tensors |= dict(zip(tensor.layers, views, strict=True))
    return config, made, tensors


def names(config: Any, kv_config: Any, tensors: Any) -> dict[str, str]:
    listed = namespace.factors_of_kinds(
        config,
        kv_config,
        read_kinds(kv_config, config.cache_config),
        read_geometries(kv_config, tensors),
        weights="named:x",
        instance=instance_id(config),
    )
    assert len({name for name, _ in listed}) == len(listed)
    assert all(isinstance(text, str) for pair in listed for text in pair)
    return dict(listed)


def test_each_group_has_its_own_bytes_without_padding(real):
    _, kv_config, tensors = real
    places = read_geometries(kv_config, tensors)
    for place, one in zip(places, kv_config.kv_cache_groups, strict=True):
        assert set(place.layers) == set(one.layer_names)
        assert place.page_bytes == len(place.layers) * one.kv_cache_spec.real_page_size_bytes
    first = {place.segments[0].address for place in places}
    assert len(first) == 1, "vLLM's groups lie in the same memory"


def test_a_group_without_layers_has_no_bytes(real):
    _, kv_config, tensors = real
    changed = copy.deepcopy(kv_config)
    gone = changed.kv_cache_groups[0].layer_names
    changed.kv_cache_groups[0].layer_names = []
    left = {layer: tensor for layer, tensor in tensors.items() if layer not in gone}
    places = read_geometries(changed, left)
    assert (places[0].page_bytes, places[0].block_count) == (0, 400)
    with pytest.raises(Unservable, match="share the KV of others"):
        read_geometries(changed, tensors)


def test_equal_models_have_equal_names_and_kinds_are_in_them(real):
    config, kv_config, tensors = real
    listed = names(config, kv_config, tensors)
    assert names(config, copy.deepcopy(kv_config), tensors) == listed
    kinds = read_kinds(kv_config, config.cache_config)
    for kind, text in zip(kinds.kinds, listed["group"].split(" || "), strict=True):
        assert text.startswith(f"{kind.rule.label} {kind.tokens}: ")
    assert listed["alignment_tokens"] == str(kinds.alignment_tokens)
    if STATE in {kind.rule for kind in kinds.kinds}:
        assert "shapes=((4, 4),)" in listed["group"]
        assert "dtypes=(torch.float32,)" in listed["group"]


def test_each_change_of_a_kind_changes_the_name(real):
    config, kv_config, tensors = real
    first = names(config, kv_config, tensors)
    changed = copy.deepcopy(kv_config)
    for one in changed.kv_cache_groups:
        spec = one.kv_cache_spec
        if isinstance(spec, SlidingWindowSpec):
            one.kv_cache_spec = dataclasses.replace(spec, sliding_window=spec.sliding_window + 1)
        elif not isinstance(spec, ChunkedLocalAttentionSpec) and hasattr(spec, "shapes"):
            one.kv_cache_spec = dataclasses.replace(spec, shapes=((2, 8),))
    assert names(config, changed, tensors)["group"] != first["group"]
    changed = copy.deepcopy(kv_config)
    changed.hash_block_size = 8
    other = names(config, changed, tensors)
    assert {name for name in first if first[name] != other[name]} == {"hash_unit_tokens"}


def test_kinds_have_a_limit_and_a_rule_each():
    wide = BlockKinds((BlockKind(PREFIX, 0, 32),), 16, 48)
    assert wide.problem() == "an alignment of 48 tokens does not fit blocks of 32"
    assert BlockKinds((), 16, 16).problem() == "0 kinds of blocks; 1 to 16 are supported"
