"""Plans of saves and loads under vLLM's real scheduler: each block holds exactly its key's tokens.

kinds_engine.py checks every block that a save, a load or a layer uses.
"""

import os
import random

import pytest

from tests.python.kinds_engine import SHAPES, KindsEngine

#: `./dev soak` sets more.
REQUESTS = int(os.environ.get("PEGA_KINDS_REQUESTS", "60"))


@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "async"])
@pytest.mark.parametrize("name", SHAPES)
def test_random_requests_read_and_save_their_own_blocks(name, asynchronous, seed):
    draw = random.Random(f"{seed} {name} {asynchronous}")
    engine = KindsEngine(
        SHAPES[name],
        blocks=draw.randint(48, 110) * len(SHAPES[name]),
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
        for number in range(REQUESTS):
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
            if draw.random() < 0.1:
                for blocks in engine.store.blocks:
                    for key in draw.sample(sorted(blocks), len(blocks) // 4):
                        del blocks[key]
        engine.run()
        engine.check_at_rest()
        print(name, dict(engine.counts))
        assert engine.counts["loads"] > 2, engine.counts
        assert engine.counts["failed loads"] > 0 or engine.counts["loads"] < 30
        assert not any(count.startswith("refused") for count in engine.counts), engine.counts
    finally:
        engine.close()
