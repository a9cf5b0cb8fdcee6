"""Plans of saves and loads over several kinds of blocks, and the keys of their blocks."""

import copy
import random
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    BlockHashListWithBlockSize,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.request import Request

from pegaflow.engine.kinds import BlockRange, KindRule
from pegaflow.vllm.keys import KeyChain, KindKeys
from pegaflow.vllm.plans.load_plan import (
    ClaimedRange,
    LoadRefused,
    offered_tokens,
    pair,
    units_to_ask,
)
from pegaflow.vllm.plans.save_plan import SavePlan, SaveRules, Storable
from tests.python.kinds_engine import SHAPES, cache_config, full, window
from tests.python.test_kinds_groups import kinds_of

PREFIX = KindRule.PREFIX

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
