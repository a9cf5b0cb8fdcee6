"""Kinds of blocks out of vLLM's cache groups, and plans over them, against vLLM's own classes."""

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
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHashListWithBlockSize,
    generate_scheduler_kv_cache_config,
    get_kv_cache_configs,
    get_request_block_hasher,
    init_none_hash,
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
from vllm.v1.request import Request

from pegaflow.engine.kinds import BlockKind, BlockKinds, BlockRange, KindRule
from pegaflow.vllm import namespace, ranks, support
from pegaflow.vllm.build import Unservable, instance_id, read_geometries
from pegaflow.vllm.keys import KeyChain, KindKeys
from pegaflow.vllm.kinds import UnservedGroups, read_kinds, saved_blocks
from pegaflow.vllm.plans.load_plan import (
    ClaimedRange,
    LoadRefused,
    offered_tokens,
    pair,
    units_to_ask,
)
from pegaflow.vllm.plans.save_plan import SavePlan, SaveRules, Storable
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


# ---- keys


def test_a_block_of_each_kind_has_vllms_hash_at_its_end():
    kinds = kinds_of(SHAPES["two windows"])
    hash_fn = get_hash_fn_by_name("sha256_cbor")
    init_none_hash(hash_fn)
    hasher = get_request_block_hasher(kinds.unit_tokens, hash_fn)
    tokens = random.Random(1).choices(range(1000), k=333)
    request = Request("r", tokens, SamplingParams(max_tokens=9), None, block_hasher=hasher)
    keys = KindKeys(KeyChain(request, kinds.unit_tokens, kinds.unit_tokens), kinds)
    assert keys.usable_units() == 333 // 16
    assert keys.units(20) == list(request.block_hashes)
    for index, kind in enumerate(kinds.kinds):
        expected = BlockHashListWithBlockSize(
            request.block_hashes, kinds.unit_tokens, kind.block_tokens
        )
        blocks = BlockRange(0, 333 // kind.block_tokens)
        assert keys.keys(index, blocks) == [expected[i] for i in blocks.numbers()]
    # A finer hash than vLLM's own count is another conversation's.
    request.block_hashes.extend([b"x" * 32] * 2)
    assert KindKeys(KeyChain(request, 16, 16), kinds).usable_units() == 0


# ---- saves


def rules(groups: list[Any], interval: int = 0) -> SaveRules:
    return SaveRules.of(kinds_of(groups), cache_config(groups, 100), interval)


def table(blocks: int, first: int = 1, nulls: int = 0) -> list[int]:
    return [0] * nulls + list(range(first + nulls, first + blocks))


def test_windows_are_saved_in_front_of_the_prompts_end_and_each_interval():
    plan = SavePlan(rules([full(16), window(16, 33)], interval=100), prompt_tokens=416)
    assert rules([full(16), window(16, 33)], interval=100).interval_tokens == 112
    found = plan.step([table(26), table(26, 50)], 416, 26, 1000)
    windows = [one.block for one in found if one.kind == 1]
    # 33 - 1 tokens are two blocks: in front of 112, 224, 336, of 400 and of 416.
    assert windows == [5, 6, 12, 13, 19, 20, 23, 24, 25]
    assert [one.ids for one in found if one.kind == 1] == [(50 + n,) for n in windows]
    assert [one.block for one in found if one.kind == 0] == list(range(26))
    assert plan.step([table(26), table(26, 50)], 416, 26, 1000) == []


def test_null_blocks_and_blocks_of_one_member_are_not_saved():
    plan = SavePlan(rules(SHAPES["gemma3"]), prompt_tokens=160)
    tables = [table(10), table(10, 20), table(10, 40)]
    tables[0][7] = tables[1][8] = tables[2][3] = 0
    found = plan.step(tables, 160, 10, 1000)
    assert [one.block for one in found if one.kind == 1] == [5, 6, 9]
    assert [one.block for one in found if one.kind == 0] == [0, 1, 2, 4, 5, 6, 7, 8, 9]


def test_without_room_windows_are_dropped_and_the_prefix_waits():
    plan = SavePlan(rules([full(16), window(16, 33)]), prompt_tokens=65)
    tables = [table(5), table(5, 50)]
    assert plan.step(tables, 65, 4, 1) == [Storable(1, 2, (52,))]
    assert plan.dropped() == 1
    assert [one.block for one in plan.step(tables, 65, 4, 3)] == [0, 1, 2]
    found, late = plan.finish(tables, 70, 4, 0)
    # The end of the request has the same window, which finds no room either.
    assert (found, [one.block for one in late]) == ([], [3])
    assert plan.dropped() == 1, "a block that finds no room twice is one block"
    found, _ = plan.finish(tables, 70, 4, 2)
    assert [(one.kind, one.block) for one in found] == [(1, 3)]
    assert plan.dropped() == 0


def test_the_end_of_a_request_is_a_boundary():
    plan = SavePlan(rules([full(16), window(16, 33)]), prompt_tokens=33)
    plan.step([table(3), table(3, 50)], 33, 2, 100)
    for tokens in range(34, 100):
        tables = [table(7), table(7, 50, nulls=max(0, tokens - 1 - 32) // 16)]
        found = plan.step(tables, tokens, tokens // 16, 100)
        assert all(one.kind == 0 for one in found)
    found, late = plan.finish([table(7), table(7, 50, nulls=(99 - 32) // 16)], 99, 6, 100)
    assert (found, late) == ([Storable(1, 4, (54,)), Storable(1, 5, (55,))], [])


def test_states_are_saved_only_from_offers_of_all_members():
    plan = SavePlan(rules(SHAPES["qwen3-next"]), prompt_tokens=300)
    tables = [[0, 0, 0, 7], [0, 0, 0, 8], [0, 0, 0, 9], table(4)]
    offers = [(0, 7, 256), (1, 8, 256)]
    assert all(one.kind == 0 for one in plan.step(tables, 256, 4, 100, offers))
    offers.append((2, 9, 256))
    assert plan.step(tables, 256, 4, 100, offers) == [Storable(1, 3, (7, 8, 9))]
    assert plan.step(tables, 256, 4, 100, offers) == []
    inside = [(group, 7 + group, 280) for group in range(3)]
    assert plan.step(tables, 290, 4, 100, inside) == []


def test_a_restarted_server_gets_what_is_still_there():
    plan = SavePlan(rules([full(16), window(16, 33)]), prompt_tokens=65)
    tables = [table(5), table(5, 50)]
    first = plan.step(tables, 65, 4, 100)
    assert plan.step(tables, 66, 4, 100) == []
    plan.forget()
    assert plan.step(tables, 66, 4, 100) == first


def test_windows_of_a_failed_load_are_saved_again():
    plan = SavePlan(rules([full(16), window(16, 33)]), prompt_tokens=65)
    tables = [table(5), table(5, 50)]
    first = plan.step(tables, 65, 4, 100)
    assert {one.kind for one in first} == {0, 1}
    plan.admit(0, 64)
    plan.loaded(64)
    assert plan.step(tables, 65, 4, 100) == [], "the cache has them"
    plan.admit(0, 64)
    plan.load_failed(0)
    assert plan.step(tables, 65, 4, 100) == first


def test_a_failed_load_behind_a_local_hit_saves_what_is_behind_it_again():
    plan = SavePlan(rules([full(16), window(16, 33)], interval=32), prompt_tokens=97)
    tables = [table(7), table(7, 50)]
    first = plan.step(tables, 97, 6, 100)
    assert {one.block for one in first if one.kind == 1} == set(range(6))
    plan.admit(48, 96)
    plan.load_failed(48)
    assert plan.step(tables, 97, 6, 100) == [one for one in first if one.block >= 3]


def test_only_the_last_admission_counts():
    plan = SavePlan(rules([full(16), window(16, 33)]), prompt_tokens=200)
    plan.admit(96, 0)
    plan.admit(48, 0, junction=64)
    found = plan.step([table(8), table(8, 50, nulls=1)], 100, 6, 100)
    assert [one.block for one in found if one.kind == 1] == [1, 2, 3]


def test_a_request_that_was_never_admitted_has_nothing_to_save():
    plan = SavePlan(rules([full(16), window(16, 33)]), prompt_tokens=200)
    assert plan.finish((), 0, 12, 100) == plan.finish(([], []), 0, 12, 100) == ([], [])


def test_an_own_hit_that_the_cache_cannot_restore_is_a_boundary():
    groups = [full(16), window(16, 33)]
    for known, expected in ((64, []), (0, [2, 3])):
        plan = SavePlan(rules(groups), prompt_tokens=200)
        plan.admit(64, known)
        found = plan.step([table(8), table(8, 50, nulls=2)], 100, 6, 100)
        assert [one.block for one in found if one.kind == 1] == expected


# ---- loads


def test_only_whole_hits_are_asked_for_and_a_token_is_left_for_windows():
    plain, windows = kinds_of([full(16)]), kinds_of(SHAPES["gemma3"])
    assert (units_to_ask(plain, 64, 4), units_to_ask(windows, 64, 4)) == (4, 3)
    assert (units_to_ask(plain, 65, 4), units_to_ask(windows, 65, 4)) == (4, 4)
    two = kinds_of(SHAPES["two windows"])
    assert (units_to_ask(two, 97, 5), units_to_ask(two, 97, 5, most_units=3)) == (4, 2)


WINDOWS = kinds_of([full(16), window(16, 33)])
CLAIM = [ClaimedRange(0, 2, 4), ClaimedRange(1, 4, 2)]
TABLES = [table(6), table(6, 50, nulls=4)]


def test_claimed_blocks_are_paired_with_vllms_by_position():
    assert offered_tokens(WINDOWS, 6, CLAIM, 32, 100) == 64
    prefix, trailing = pair(WINDOWS, CLAIM, TABLES, 32, 64)
    assert prefix == (0, 2, 4, (3, 4, 5, 6))
    assert trailing == (1, 4, 2, (54, 55))


def test_members_follow_each_other_block_by_block():
    kinds = kinds_of([window(16, 33), window(16, 33)])
    tables = [table(6, 10, nulls=4), table(6, 50, nulls=4)]
    (load,) = pair(kinds, [ClaimedRange(0, 4, 2)], tables, 0, 96)
    assert load.blocks == (14, 54, 15, 55)


def test_blocks_of_vllms_own_hit_are_not_written():
    (prefix, trailing) = pair(WINDOWS, [ClaimedRange(0, 2, 4), CLAIM[1]], TABLES, 80, 16)
    assert (prefix.blocks, trailing.blocks) == ((6,), (55,))


@pytest.mark.parametrize(
    ("local", "external", "tables", "reason"),
    [
        (32, 60, TABLES, "allocation"),  # it ends inside of a block
        (16, 80, TABLES, "not_claimed"),  # vLLM's own hit has shrunk
        (32, 48, [table(5), table(5, 50, nulls=3)], "not_claimed"),  # another window
        (32, 64, [table(6), table(6, 50, nulls=5)], "allocation"),
        (32, 64, [table(6), table(6, 50, nulls=3)], "allocation"),
        (32, 64, [table(5), table(6, 50, nulls=4)], "allocation"),
        (32, 64, [table(6, nulls=3), table(6, 50, nulls=4)], "allocation"),
        (32, 64, [table(6), [0, 0, 0, 0, 3, 3]], "allocation"),
    ],
)
def test_other_allocations_are_refused(local, external, tables, reason):
    with pytest.raises(LoadRefused, match=reason):
        pair(WINDOWS, CLAIM, tables, local, external)


def test_a_shorter_hit_of_full_attention_is_a_part_of_the_claim():
    kinds = kinds_of(SHAPES["two of full"])
    (load,) = pair(kinds, [ClaimedRange(0, 0, 6)], [table(4), table(4, 50)], 0, 64)
    assert load == (0, 0, 4, (1, 50, 2, 51, 3, 52, 4, 53))


@pytest.mark.parametrize(
    ("units", "ranges", "local", "prompt"),
    [
        (0, [], 0, 100),
        (2, CLAIM, 32, 100),  # vLLM has as much
        (6, CLAIM, 16, 100),  # its own hit has shrunk since
        (6, CLAIM, 40, 100),
        (6, CLAIM, 32, 96),  # the last token could not be computed
        (6, CLAIM[:1], 32, 100),
        (6, [CLAIM[0], ClaimedRange(1, 5, 1)], 32, 100),
    ],
)
def test_answers_that_do_not_fit_are_not_offered(units, ranges, local, prompt):
    assert offered_tokens(WINDOWS, units, ranges, local, prompt) == 0


def test_a_table_with_any_change_is_refused_or_pairs_the_same_blocks(seed):
    draw = random.Random(seed)
    for _ in range(2000):
        name = draw.choice(sorted(SHAPES))
        kinds = kinds_of(SHAPES[name])
        blocks = draw.randint(1, 9)
        tokens, local = blocks * kinds.alignment_tokens, 0
        local = draw.randrange(blocks) * kinds.alignment_tokens
        claim = [
            ClaimedRange(index, *kind.wanted(tokens, local))
            for index, kind in enumerate(kinds.kinds)
        ]
        tables: list[list[int]] = [[] for _ in range(kinds.groups)]
        for kind in kinds.kinds:
            needed = kind.needed(tokens)
            for number in kind.members:
                tables[number] = [
                    1 + 1000 * number + i if i in needed.numbers() else 0 for i in range(needed.end)
                ]
        right = pair(kinds, claim, tables, local, tokens - local)
        changed = copy.deepcopy(tables)
        one = draw.choice([t for t in changed if t])
        place = draw.randrange(len(one))
        kind = next(k for k in kinds.kinds for g in k.members if changed[g] is one)
        own = local // kind.block_tokens
        if kind.rule != PREFIX and kind.needed(tokens).first <= place < own:
            continue  # vLLM's own hit
        one[place] = 0 if one[place] else 999_999
        with pytest.raises(LoadRefused):
            pair(kinds, claim, changed, local, tokens - local)
        assert pair(kinds, claim, [[*t, 77] for t in tables], local, tokens - local) == right


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
