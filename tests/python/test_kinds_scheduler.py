"""Plans of saves and loads under vLLM's real scheduler: each block holds exactly its key's tokens.

kinds_engine.py checks every block that a save, a load or a layer uses.
"""

import collections
import os
import random

import pytest

from pegaflow.engine.kinds import BlockKind, BlockKinds, BlockRange, KindRule
from pegaflow.vllm.plans import load_plan
from pegaflow.vllm.plans.save_plan import SavePlan, Storable
from tests.python import kinds_engine
from tests.python.kinds_engine import SHAPES, KindsEngine

#: `./dev soak` sets more.
REQUESTS = int(os.environ.get("PEGA_KINDS_REQUESTS", "60"))


def converse(
    name: str, draw: random.Random, requests: int, asynchronous: bool = False
) -> collections.Counter[str]:
    """Random requests that share prefixes, with aborts, resets, preemptions, failed loads, evicted
    blocks and restarts of the server; what was counted.
    """
    keeps_all = name in ("llama4", "two of full")  # then vLLM accepts no interval
    engine = KindsEngine(
        SHAPES[name],
        retention=draw.choice([0, 0, None, 0 if keeps_all else 128]),
        # One long request fits in any case, and often several do not.
        blocks=draw.randint(48, 80) * len(SHAPES[name]),
        interval=draw.choice([0, 128, 192]),
        room=draw.choice([8, 40]),
        draw=draw,
        asynchronous=asynchronous,
        max_num_seqs=4,
    )
    engine.copy_chance = 0.5
    engine.fail_loads = 0.1
    most = 300 + 4 * SHAPES[name][0].block_size
    prompts = [[draw.randrange(10, 1000) for _ in range(draw.randint(30, most))] for _ in range(4)]
    try:
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
                engine.restart_server()
            if draw.random() < 0.1:
                for blocks in engine.store.blocks:
                    for key in draw.sample(sorted(blocks), len(blocks) // 4):
                        del blocks[key]
        engine.run()
        engine.check_at_rest()
        return engine.counts
    finally:
        engine.close()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "async"])
@pytest.mark.parametrize("name", SHAPES)
def test_random_requests_read_and_save_their_own_blocks(name, asynchronous, seed):
    draw = random.Random(f"{seed} {name} {asynchronous}")
    counts = converse(name, draw, REQUESTS, asynchronous)
    print(name, dict(counts))
    assert counts["loads"] > 2, counts
    assert not any(count.startswith("refused") for count in counts), counts


# ---- the engine of these tests finds mistakes


def save_states_by_position(monkeypatch):
    def states(self, offers, tokens, room):
        return [
            Storable(1, tokens // 64 - 1, tuple(self.tables[group][-1] for group in (0, 1, 2)))
            for _ in list(offers)[:1]
        ]

    original = SavePlan.step

    def step(self, tables, *arguments):
        self.tables = tables
        return original(self, tables, *arguments)

    monkeypatch.setattr(SavePlan, "_states", states)
    monkeypatch.setattr(SavePlan, "step", step)


def save_the_next_block(monkeypatch):
    def ids(self, kind, tables, number):
        return tuple(
            tables[group][min(number + 1, len(tables[group]) - 1)] for group in kind.members
        )

    monkeypatch.setattr(SavePlan, "_ids", ids)


def forget_a_member(monkeypatch):
    def ids(self, kind, tables, number):
        one = tables[kind.members[0]][number]
        return (one,) * len(kind.members) if one else ()

    monkeypatch.setattr(SavePlan, "_ids", ids)


def name_the_previous_unit(monkeypatch):
    monkeypatch.setattr(
        BlockKinds,
        "unit_of",
        lambda self, kind, block: max(0, (block + 1) * (kind.block_tokens // self.unit_tokens) - 2),
    )


def write_to_vllms_own_hit(monkeypatch):
    monkeypatch.setattr(
        load_plan,
        "_missing",
        lambda kind, tokens, local: (
            kind.needed(tokens) if kind.rule != KindRule.PREFIX else kind.wanted(tokens, local)
        ),
    )


def load_the_last_token(monkeypatch):
    monkeypatch.setattr(BlockKinds, "leaves_a_token", False)


def need_a_block_less(monkeypatch):
    original = BlockKind.needed

    def needed(self, tokens):
        blocks = original(self, tokens)
        if self.rule == KindRule.TRAILING and blocks.count > 1:
            return BlockRange(blocks.first + 1, blocks.count - 1)
        return blocks

    monkeypatch.setattr(BlockKind, "needed", needed)
    monkeypatch.setattr(load_plan, "_check_table", lambda *arguments: None)


def save_before_the_step_has_written(monkeypatch):
    original = SavePlan.step

    def step(self, tables, tokens, usable_units, *arguments):
        ahead = min(tokens + 16, len(tables[-1]) * 16)
        return original(self, tables, ahead, usable_units + 1, *arguments)

    monkeypatch.setattr(SavePlan, "step", step)


def swap_the_members(monkeypatch):
    original = kinds_engine.pair

    def pair(*arguments):
        return [one._replace(blocks=one.blocks[::-1]) for one in original(*arguments)]

    monkeypatch.setattr(kinds_engine, "pair", pair)


MISTAKES = {
    save_states_by_position: "qwen3-next",
    save_the_next_block: "gpt-oss",
    forget_a_member: "gemma3",
    name_the_previous_unit: "two windows",
    write_to_vllms_own_hit: "gemma3",
    load_the_last_token: "gpt-oss",
    need_a_block_less: "gpt-oss",
    save_before_the_step_has_written: "gpt-oss",
    swap_the_members: "gemma3",
}


@pytest.mark.parametrize("plant", MISTAKES, ids=lambda plant: plant.__name__)
def test_a_planted_mistake_is_found(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(Exception) as found:
        for attempt in range(40):
            converse(MISTAKES[plant], random.Random(attempt), 60)
    print(plant.__name__, repr(found.value)[:200])
