"""The connector with windows, chunks and states: a real scheduler, real bytes, hits as computed.

Each scenario runs against the double in Python (kinds_double.py), which copies as late as it may.
"""

import collections
import dataclasses
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored

from demo.expectations import ExpectedCache
from pegaflow.engine.kinds import BlockKind, BlockKinds, BlockRange, KindRule
from pegaflow.engine.rates import Computing
from pegaflow.vllm import support
from pegaflow.vllm.loads import COMING_PATIENCE_S
from pegaflow.vllm.plans import load_plan
from pegaflow.vllm.plans.save_plan import SavePlan
from pegaflow.vllm.worker_side import WorkerSide
from tests.python import kinds_double
from tests.python.fake_model import chain
from tests.python.kinds_double import Cache
from tests.python.kinds_engine import SHAPES, WrongBlock
from tests.python.kinds_pega import PegaKindsEngine
from tests.python.test_kinds_expectations import LAYERS, prompt_of

INTERVAL = 128
#: `./dev soak` sets more.
REQUESTS = int(os.environ.get("PEGA_KINDS_REQUESTS", "40"))


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "SERVES_KINDS", True)


@pytest.fixture
def cache(served: None, monkeypatch: pytest.MonkeyPatch) -> Cache:
    made = Cache()
    kinds_double.install(monkeypatch, made)
    return made


def engine_of(name: str, address: str = "unix:/nowhere.sock", **more: Any) -> PegaKindsEngine:
    made = PegaKindsEngine(
        SHAPES[name], address, **{"blocks": 1000, "interval": INTERVAL, "room": 50} | more
    )
    made.wait_ready()
    return made


Make = Callable[..., PegaKindsEngine]


@pytest.fixture
def make(cache: Cache) -> Iterator[Make]:
    """Makes engines, and checks at the end that nothing of them is in flight."""
    engines: list[PegaKindsEngine] = []

    def of(name: str, **more: Any) -> PegaKindsEngine:
        engines.append(engine_of(name, **more))
        return engines[-1]

    yield of
    for engine in engines:
        engine.run()
        engine.check_at_rest()
        engine.close()
    assert not cache.claims, "a claim is left"


# ---- the hits and the saved blocks are those of the calculator


class Both:
    """An engine and the calculator, which must agree on each request."""

    def __init__(self, name: str, engine: PegaKindsEngine, interval: int = INTERVAL) -> None:
        self.engine = engine
        unit, alignment = engine.kinds.unit_tokens, engine.kinds.alignment_tokens
        least = max(alignment, min(2 * unit, 64))
        self.expected = ExpectedCache(LAYERS[name], interval, least)
        self.asked = 0

    def ask(self, prompt: list[int], tokens: int = 20) -> tuple[int, list[int]]:
        self.engine.reset_local()
        self.asked += 1
        request, before = f"r{self.asked}", self.engine.saved()
        local, loaded = self.engine.ask(request, prompt, tokens)
        self.engine.run()
        whole = self.engine.answers[request]
        wanted = self.expected.ask(prompt, whole[len(prompt) :])
        added = {name: count - before[name] for name, count in self.engine.saved().items()}
        assert (local, loaded) == (0, wanted.loaded_tokens)
        assert added == wanted.stored_blocks
        return loaded, whole


#: Tokens that are loaded: of the same prompt, a longer one, a branch after 200 tokens, and the next
#: turn. The first prompt has 300 tokens, its answer 20.
HITS = {
    "gemma3": [288, 288, 128, 304],
    "gpt-oss": [288, 288, 128, 304],
    "mistral-window": [288, 288, 128, 304],
    "llama4": [288, 288, 192, 304],
    "qwen3-next": [256, 256, 0, 256],
    "two of full": [288, 288, 192, 304],
}


def resend_longer_branch_and_next_turn(name: str, engine: PegaKindsEngine) -> None:
    both, prompt = Both(name, engine), prompt_of(300)
    loaded, whole = both.ask(prompt)
    assert loaded == 0
    found = [
        both.ask(prompt)[0],
        both.ask(prompt + prompt_of(70, 2))[0],
        both.ask(prompt[:200] + prompt_of(90, 3))[0],
        both.ask(whole + prompt_of(40, 4))[0],
    ]
    assert found == HITS[name]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "async"])
@pytest.mark.parametrize("name", HITS)
def test_resend_longer_branch_and_next_turn(make, name, asynchronous):
    # With asynchronous scheduling an answer's last block is complete a step later.
    resend_longer_branch_and_next_turn(name, make(name, asynchronous=asynchronous))


def random_conversations(name: str, engine: PegaKindsEngine, draw: random.Random) -> None:
    both = Both(name, engine)
    known = [prompt_of(draw.randint(20, 400), draw.random())]
    for _ in range(25):
        base = draw.choice(known)
        cut = draw.choice([len(base), draw.randint(1, len(base))])
        prompt = base[:cut] + prompt_of(draw.choice([0, 1, 60]), draw.random())
        known.append(both.ask(prompt[:900], draw.choice([1, 2, 30, 100]))[1])
    assert sum(engine.saved().values()) > 20


@pytest.mark.parametrize("name", HITS)
def test_random_conversations(make, name, seed):
    random_conversations(name, make(name), random.Random(f"{seed} {name}"))


# ---- everything at once


def converse(
    engine: PegaKindsEngine, draw: random.Random, requests: int, disturb: Callable[[], None]
) -> collections.Counter[str]:
    """Random requests that share prefixes, with aborts, resets, preemptions and what ``disturb``
    does; the engine checks each byte that it reads.
    """
    counted: collections.Counter[str] = collections.Counter()
    most = 300 + 4 * engine.kinds.alignment_tokens
    prompts = [[draw.randrange(10, 1000) for _ in range(draw.randint(30, most))] for _ in range(4)]
    for number in range(requests):
        base = draw.choice(prompts)
        prompt = base[: draw.choice([len(base), draw.randint(1, len(base))])]
        prompt = prompt + [draw.randrange(10, 1000) for _ in range(draw.choice([0, 1, 70]))]
        engine.add(f"r{number}", prompt, draw.choice([1, 5, 90]))
        if draw.random() < 0.3:
            prompts[draw.randrange(4)] = engine.answers[f"r{draw.randrange(number + 1)}"][:700]
        for _ in range(draw.randint(0, 12)):
            engine.step()
        if draw.random() < 0.1:
            engine.abort(f"r{draw.randrange(number + 1)}")
        if draw.random() < 0.3:
            engine.run()
            engine.scheduler.reset_prefix_cache()
        if draw.random() < 0.05:
            engine.preempt_all()
        if draw.random() < 0.03:
            engine.run()
            engine.scheduler.reset_prefix_cache(reset_connector=True)
            counted["resets"] += 1
        disturb()
    engine.run()
    engine.check_at_rest()
    return counted


def small_engine(name: str, draw: random.Random, **more: Any) -> PegaKindsEngine:
    """One long request fits in any case, and often several do not."""
    options = {
        "retention": draw.choice([0, 0, None]),
        "blocks": draw.randint(48, 80) * len(SHAPES[name]),
        "interval": draw.choice([0, 128, 192]),
        "room": draw.choice([5, 30]),
        "draw": draw,
        "max_num_seqs": 4,
    }
    return engine_of(name, **options | more)


def converse_with_the_double(
    cache: Cache, name: str, draw: random.Random, requests: int, asynchronous: bool = False
) -> dict[str, float]:
    cache.draw, cache.copy_chance, cache.failing_loads = draw, 0.5, 0.1
    engine = small_engine(name, draw, asynchronous=asynchronous)

    def disturb() -> None:
        store = cache.store
        assert store is not None
        if draw.random() < 0.03:
            cache.restart()
        if draw.random() < 0.1:
            for blocks in store.blocks:
                for key in draw.sample(sorted(blocks), len(blocks) // 4):
                    del blocks[key]

    try:
        converse(engine, draw, requests, disturb)
        assert not cache.claims, "a claim is left"
        return engine.stats
    finally:
        engine.close()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "async"])
@pytest.mark.parametrize("name", SHAPES)
def test_random_requests_read_their_own_bytes(cache, name, asynchronous, seed):
    draw = random.Random(f"{seed} {name} {asynchronous}")
    stats = converse_with_the_double(cache, name, draw, REQUESTS, asynchronous)
    print(name, stats)
    assert stats["loads"] > 0, stats
    reasons = {key for key in stats if key.startswith("load_failures")}
    assert reasons <= {"load_failures{planted}", "load_failures{gone}", "load_failures{discarded}"}


# ---- messages


def test_a_step_has_one_job_for_each_kind_and_a_load_names_its_ranges(make, cache):
    engine = make("gpt-oss")
    prompt = prompt_of(300)
    engine.ask("a", prompt)
    engine.run()
    jobs = [(kind, count) for what, kind, count in cache.asked if what == "save"]
    assert {kind for kind, _ in jobs} == {0, 1}
    assert sum(count for kind, count in jobs if kind == 0) == 18
    assert engine.stats["saves"] == len(jobs)
    engine.reset_local()
    cache.asked.clear()

    assert engine.ask("again", prompt) == (0, 288)

    assert ("claim", 18, 0) in cache.asked
    # The window of 32 tokens before token 288 begins with block 16.
    assert ("load", [(0, 0, 18), (1, 16, 2)]) in cache.asked
    assert engine.stats["loaded_blocks{full}"] == 18
    assert engine.stats["loaded_blocks{window}"] == 2
    assert engine.stats["loaded_blocks"] == 20


def test_behind_vllms_own_hit_only_new_blocks_are_written(make, cache):
    engine = make("gemma3")
    prompt = prompt_of(300)
    engine.ask("whole", prompt)
    engine.reset_local()
    engine.ask("head", prompt[:259])  # vLLM's own cache has a window at 256
    cache.asked.clear()

    assert engine.ask("again", prompt) == (256, 32)

    assert ("claim", 18, 16) in cache.asked
    # The claim has the window's blocks 14 and 15 as well, which vLLM has itself.
    assert ("load", [(0, 16, 2), (1, 16, 2)]) in cache.asked


def test_a_load_is_compared_with_computing_in_pages_of_the_first_kind(make, cache):
    engine = make("gemma3")
    prompt = prompt_of(300)
    engine.ask("cold", prompt)
    engine.reset_local()
    seen: list[tuple[int, float]] = []
    policy, original = engine.side.policy, engine.side.policy.slower_source

    def slower(blocks: int, coming: int, last_s: float, held_to: Any, pages: float) -> str:
        seen.append((blocks, pages))
        return original(blocks, coming, last_s, held_to, pages)

    policy.slower_source = slower
    assert engine.ask("again", prompt) == (0, 288)
    # 18 blocks of full attention, and 4 of windows, which have two members.
    assert seen == [(18, 18 + 4 * 2)]

    engine.reset_local()
    policy.slower_source = lambda *arguments: "pool"
    assert engine.ask("slower", prompt) == (0, 0)
    assert engine.stats["declined{pool}"] == 1


def test_blocks_of_another_node_are_loaded_if_they_arrive_before_they_are_computed(make, cache):
    engine = make("gemma3")
    prompt = prompt_of(300)
    engine.ask("cold", prompt)
    engine.side.policy.computing = lambda *_: Computing(0.0, 0.001)  # 18 blocks in 18 ms

    engine.reset_local()
    cache.coming = True, 0.5, 2.0
    assert engine.ask("late", prompt) == (0, 0)
    assert engine.stats["declined{peer}"] == 1
    assert not cache.claims, "the server would keep its blocks until they expire"

    engine.reset_local()
    cache.coming = True, 0.0001, 0.0002
    assert engine.ask("soon", prompt) == (0, 288)


def test_a_load_that_waits_for_another_node_has_time_for_it(make, cache):
    engine = make("gemma3")
    prompt = prompt_of(300)
    engine.ask("cold", prompt)
    deadlines = []
    begin = engine.side.loads.mark_handed_out

    def mark(loads: Any) -> None:
        begin(loads)
        deadlines.extend(load.deadline - load.handed_at for load in loads)

    engine.side.loads.mark_handed_out = mark
    for coming in (False, True):
        engine.reset_local()
        cache.coming = coming, 0.0, 0.0
        assert engine.ask(f"r{coming}", prompt) == (0, 288)
    here, coming_s = deadlines
    assert coming_s == pytest.approx(here + COMING_PATIENCE_S)


def test_a_failed_load_is_the_requests_and_all_of_it_is_computed(make, cache):
    engine = make("gemma3")
    prompt = prompt_of(300)
    engine.ask("cold", prompt)
    engine.reset_local()
    cache.failing_loads = 1.0

    engine.ask("again", prompt, 5)  # the model checks what it reads

    assert engine.reasons["again"] == "length"
    assert engine.stats["load_failures{planted}"] == 1
    assert engine.stats["load_failed_blocks"] == 18 + 4
    assert "loaded_blocks" not in engine.stats


def a_failed_load_leaves_vllms_own_hit(
    engine: PegaKindsEngine, fail_all: Callable[[], Any]
) -> None:
    """vLLM has 256 tokens itself, and the cache 32 more, whose window begins within them."""
    prompt = prompt_of(300)
    engine.ask("whole", prompt)
    engine.reset_local()
    engine.ask("head", prompt[:259])
    fail_all()  # what such a load has written is garbage
    engine.ask("tail", prompt)
    engine.run()
    assert sum(count for name, count in engine.stats.items() if "load_failures" in name) == 1


def test_a_failed_load_leaves_vllms_own_hit(make, cache):
    a_failed_load_leaves_vllms_own_hit(make("gemma3"), lambda: setattr(cache, "failing_loads", 1.0))


@pytest.mark.parametrize("reset", ["explicit", "local", "weights"])
@pytest.mark.parametrize("name", ["gemma3", "two of full"])
def test_a_load_that_vllm_allocates_after_a_reset_is_computed(make, name, reset):
    """vLLM 0.33 allocates a deferred load steps after its query."""
    engine, prompt = make(name), prompt_of(300)
    engine.ask("cold", prompt)
    engine.reset_local()
    connector, original = engine.connector, engine.connector.update_state_after_alloc
    resets = {
        "explicit": connector.reset_cache,
        "local": lambda: engine.side.reset_cache(local=True),
        "weights": lambda: connector.weights_may_change("update_weights"),
    }

    def allocated_late(request: Any, blocks: Any, tokens: int) -> None:
        if tokens:
            resets[reset]()
        original(request, blocks, tokens)

    connector.update_state_after_alloc = allocated_late
    engine.ask("late", prompt, 5)  # the model checks what it reads
    assert engine.reasons["late"] == "length"
    assert engine.stats["load_failures{reset}"] == 1
    assert not any("internal_errors" in name for name in engine.stats), "it is switched off"


def test_an_allocation_that_does_not_fit_the_claim_is_refused_and_computed(
    make, cache, monkeypatch
):
    engine = make("gpt-oss")
    prompt = prompt_of(300)
    engine.ask("cold", prompt)
    engine.reset_local()
    original = load_plan._check_table

    def check(kind: Any, table: Any, *more: int) -> None:
        original(kind, [0, *table[1:]] if kind.rule == KindRule.PREFIX else table, *more)

    monkeypatch.setattr(load_plan, "_check_table", check)

    engine.ask("again", prompt, 5)

    assert engine.reasons["again"] == "length"
    assert engine.stats["load_failures{allocation}"] == 1
    assert "loads" not in engine.stats
    assert not cache.claims


def test_requests_that_share_a_load_wait_for_it_only_if_they_can_use_all_of_it(make, cache):
    engine = make("gpt-oss")
    prompt = prompt_of(300)
    engine.ask("cold", prompt)
    engine.reset_local()
    cache.copy_chance = 0.3
    engine.add("one", prompt)
    engine.add("longer", prompt + prompt_of(30, 2))
    engine.add("branch", prompt[:200] + prompt_of(90, 3))
    engine.run()
    assert engine.hits["one"] == (0, 288)
    assert engine.hits["longer"] == (288, 0)
    assert engine.hits["branch"] == (0, 128)
    assert engine.stats["followed"] == 1


def test_blocks_of_a_request_that_ends_are_saved_later_if_pins_are_short(make, cache):
    engine = make("gemma3", blocks=200, room=1)
    engine.ask("a", prompt_of(300), 2)
    engine.run()
    saved = engine.saved()
    assert saved["full"] == 18
    assert engine.stats["save_dropped_blocks{pin_limit}"] > 0, "windows have no second chance"


def test_a_late_block_that_another_group_has_by_now_is_not_saved(make):
    engine = make("gemma3")
    engine.ask("a", prompt_of(300))
    engine.run()
    pool, blocks = engine.scheduler.kv_cache_manager.block_pool, engine.side.saves.blocks
    by_hash = collections.defaultdict(dict)
    for block in pool.blocks:
        if block.block_hash is not None:
            group = int.from_bytes(block.block_hash[-4:], "big")
            by_hash[block.block_hash[:-4]][group] = block.block_id
    # Tokens of which vLLM has the blocks of both windows and of full attention.
    held = {name: ids for name, ids in by_hash.items() if len(ids) == 3}
    assert held
    for name, ids in held.items():
        assert blocks.hold([ids[0], ids[1]], name, [0, 1])
        assert blocks.hold([ids[2]], name, [2])
        # As if the block of full attention had been reallocated to a window over the same tokens.
        assert not blocks.hold([ids[0]], name, [2])
        assert not blocks.hold([ids[1], ids[0]], name, [0, 1])
        assert not blocks.hold([ids[2]], b"another" + name, [2])


def test_a_single_group_of_full_attention_uses_no_call_for_kinds(served, monkeypatch):
    """The rules of such an engine are OneKind's, whatever is served."""
    from pegaflow.engine.config import read_settings
    from pegaflow.vllm.build import block_rules
    from pegaflow.vllm.plans.one_kind import OneKind
    from tests.python.harness import kv_cache_config, vllm_config

    config = vllm_config("unix:/nowhere.sock")
    rules = block_rules(config, kv_cache_config(config, 256), read_settings({}, {}))
    assert isinstance(rules, OneKind)


# ---- KV events


def test_events_have_the_group_of_the_kind_and_are_taken_back_by_kind(make, cache):
    config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    engine = make("gpt-oss", kv_events_config=config)
    events: list[Any] = []
    take = engine.connector.take_events

    def taken() -> list[Any]:
        found = list(take())
        events.extend(found)
        return found

    engine.connector.take_events = taken
    prompt = prompt_of(300)
    engine.ask("a", prompt, 2)
    engine.run()

    stored = collections.Counter[int]()
    for event in events:
        assert isinstance(event, BlockStored) and event.medium == "CPU"
        assert len(event.token_ids) == 16 * len(event.block_hashes)
        stored[event.group_idx] += len(event.block_hashes)
    saved = engine.saved()
    # The first of vLLM's groups has the windows.
    assert stored == {1: saved["full"], 0: saved["window"]}
    kinds = {event.group_idx: event.kv_cache_spec_kind for event in events}
    assert kinds == {1: "full_attention", 0: "sliding_window"}
    whole = [event for event in events if event.group_idx == 1]
    assert whole[0].parent_block_hash is None
    assert [token for event in whole for token in event.token_ids] == prompt[:288]

    # The window's last block has the key of a block of full attention; only the window is evicted.
    events.clear()
    keys = sorted(cache.store.blocks[1])
    assert set(keys) <= set(cache.store.blocks[0])
    cache.journal += [(key.ljust(32, b"\0"), False, 1) for key in keys]
    engine.ask("b", prompt_of(40, 2), 2)
    engine.poke()
    removed = [event for event in events if isinstance(event, BlockRemoved)]
    assert {event.group_idx for event in removed} == {0}
    assert sum(len(event.block_hashes) for event in removed) == len(keys)


# ---- planted mistakes are found


@pytest.mark.parametrize("name", ["gemma3", "llama4", "two of full", "qwen3-next"])
def test_each_wrong_byte_that_is_read_is_found(make, name):
    engine = make(name)
    engine.add("r", prompt_of(200), 40)
    while len(engine.answers["r"]) < 210:
        engine.step()
    tables = engine.scheduler.kv_cache_manager.get_block_ids("r")
    start = engine.scheduler.requests["r"].num_computed_tokens
    values = chain(0, engine.answers["r"])
    for group, table in enumerate(tables):
        kind = engine.rules[group]
        last, slot = divmod(start - 1, kind.block_tokens)
        place = engine._place(group, table[last], 0 if kind.rule == KindRule.STATE else slot)
        engine._read("r", group, table, start, values)
        for at in range(place.start, place.stop):
            engine.memories[0][at] ^= 1
            with pytest.raises(WrongBlock, match=f"group {group} .* of block {table[last]}$"):
                engine._read("r", group, table, start, values)
            engine.memories[0][at] ^= 1
        wrong = [*table[:last], 0, *table[last + 1 :]]
        with pytest.raises(WrongBlock, match="of block 0$"):
            engine._read("r", group, wrong, start, values)


def drop_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SavePlan, "_windows", lambda *arguments: [])


def shift_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    def ids(self: Any, kind: BlockKind, tables: Any, number: int) -> tuple[int, ...]:
        found = tuple(tables[g][min(number + 1, len(tables[g]) - 1)] for g in kind.members)
        return () if 0 in found else found

    monkeypatch.setattr(SavePlan, "_ids", ids)


def write_to_vllms_own_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        load_plan,
        "_missing",
        lambda kind, tokens, local: (
            kind.needed(tokens) if kind.rule != KindRule.PREFIX else kind.wanted(tokens, local)
        ),
    )


def swap_the_members(monkeypatch: pytest.MonkeyPatch) -> None:
    original = kinds_double.Mover.load_ranges

    def load_ranges(self: Any, load: int, token: bytes, ranges: Any, claimed: Any) -> None:
        swapped = [one._replace(blocks=one.blocks[::-1]) for one in ranges]
        original(self, load, token, swapped, claimed)

    monkeypatch.setattr(kinds_double.Mover, "load_ranges", load_ranges)


def load_the_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockKinds, "leaves_a_token", False)


def need_a_block_less(monkeypatch: pytest.MonkeyPatch) -> None:
    original = BlockKind.needed

    def needed(self: BlockKind, tokens: int) -> BlockRange:
        blocks = original(self, tokens)
        if self.rule == KindRule.TRAILING and blocks.count > 1:
            return BlockRange(blocks.first + 1, blocks.count - 1)
        return blocks

    monkeypatch.setattr(BlockKind, "needed", needed)
    monkeypatch.setattr(load_plan, "_check_table", lambda *arguments: None)


def unpin_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from pegaflow.vllm.saves import GpuBlocks

    def pin(self: Any, block_id: int) -> Any:
        block = self._pool.blocks[block_id]
        self._pool.touch([block])
        self._pool.free_blocks([block])
        return block

    monkeypatch.setattr(GpuBlocks, "pin", pin)
    monkeypatch.setattr(GpuBlocks, "unpin", lambda self, blocks: None)


def save_as_the_first_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    original = WorkerSide._save
    monkeypatch.setattr(
        WorkerSide,
        "_save",
        lambda self, scheduler, order: original(
            self, scheduler, dataclasses.replace(order, kind=0)
        ),
    )


MISTAKES = {
    drop_a_kind: "gpt-oss",
    save_as_the_first_kind: "gpt-oss",
    shift_a_window: "gpt-oss",
    write_to_vllms_own_hit: "gemma3",
    swap_the_members: "gemma3",
    load_the_last_token: "gpt-oss",
    need_a_block_less: "gpt-oss",
    unpin_at_once: "gpt-oss",
}


@pytest.mark.parametrize("plant", MISTAKES, ids=lambda plant: plant.__name__)
def test_a_planted_mistake_is_found(cache, plant, monkeypatch):
    def fail_behind_vllms_own_hit(name: str, engine: PegaKindsEngine) -> None:
        a_failed_load_leaves_vllms_own_hit(engine, lambda: setattr(cache, "failing_loads", 1.0))

    plant(monkeypatch)
    name = MISTAKES[plant]
    with pytest.raises(AssertionError) as found:
        for scenario in (resend_longer_branch_and_next_turn, fail_behind_vllms_own_hit):
            engine = engine_of(name)
            try:
                scenario(name, engine)
            finally:
                engine.close()
            cache.store = None
            cache.claims.clear()
        cache.failing_loads = 0.0
        for attempt in range(30):
            cache.store = None
            cache.claims.clear()
            converse_with_the_double(cache, name, random.Random(attempt), 50)
    print(plant.__name__, repr(found.value)[:200])
