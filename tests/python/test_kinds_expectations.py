"""The demo's calculator for several kinds of blocks, against vLLM's scheduler and the plans."""

import random

import pytest

from demo.expectations import Expected, ExpectedCache, Layers
from pegaflow.engine.kinds import KindRule
from tests.python.kinds_engine import SHAPES, KindsEngine

#: The layers of the shapes, written down once more.
LAYERS = {
    "gemma3": [Layers("full", 16), Layers("window", 16, 64, copies=2)],
    "gpt-oss": [Layers("full", 16), Layers("window", 16, 33)],
    "mistral-window": [Layers("window", 16, 64)],
    "llama4": [Layers("full", 16), Layers("chunk", 16, 64, copies=2)],
    "qwen3-next": [Layers("full", 64), Layers("state", 64, copies=3)],
    "two of full": [Layers("full", 16, copies=2)],
}
INTERVAL = 128


class Both:
    """An engine and the calculator, which must agree on each request."""

    def __init__(self, name: str, interval: int = INTERVAL) -> None:
        self.name = name
        self.engine = KindsEngine(SHAPES[name], blocks=2000, interval=interval, room=2000)
        self.cache = ExpectedCache(LAYERS[name], interval)
        self.labels = [kind.rule.label for kind in self.engine.kinds.kinds]
        self.asked = 0

    def ask(self, prompt: list[int], tokens: int = 20) -> tuple[Expected, list[int]]:
        """The expectation, which was checked, and the prompt with its answer."""
        self.engine.reset_local()
        self.asked += 1
        request = f"r{self.asked}"
        before = self.engine.store.counts()
        local, loaded = self.engine.ask(request, prompt, tokens)
        assert local == 0
        added = [after - one for one, after in zip(before, self.engine.store.counts(), strict=True)]
        whole = self.engine.answers[request]
        expected = self.cache.ask(prompt, whole[len(prompt) :])
        assert loaded == expected.loaded_tokens
        assert dict(zip(self.labels, added, strict=True)) == expected.stored_blocks
        return expected, whole


@pytest.fixture(params=LAYERS)
def both(request):
    made = Both(request.param)
    yield made
    made.engine.close()


def prompt_of(length: int, seed: int = 1) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(10, 1000) for _ in range(length)]


#: Tokens that are loaded: of the same prompt, a longer one, a branch after 200 tokens, and the next
#: turn. The first prompt has 300 tokens, its answer 20.
HITS = {
    "gemma3": (288, 288, 128, 304),
    "gpt-oss": (288, 288, 128, 304),
    "mistral-window": (288, 288, 128, 304),
    # In front of 192, the end of a chunk, no block of it is needed.
    "llama4": (288, 288, 192, 304),
    "qwen3-next": (256, 256, 0, 256),
    "two of full": (288, 288, 192, 304),
}


def test_resend_longer_branch_and_next_turn(both):
    prompt = prompt_of(300)
    resend, longer, branch, turn = HITS[both.name]
    first, whole = both.ask(prompt)
    assert first.loaded_tokens == 0
    again, _ = both.ask(prompt)
    assert again.loaded_tokens == resend
    assert both.ask(prompt + prompt_of(70, 2))[0].loaded_tokens == longer
    assert both.ask(prompt[:200] + prompt_of(90, 3))[0].loaded_tokens == branch
    assert both.ask(whole + prompt_of(40, 4))[0].loaded_tokens == turn


def test_a_window_costs_a_few_blocks_for_each_boundary():
    cache = ExpectedCache([Layers("full", 16), Layers("window", 16, 128)], 2048)
    made = cache.ask(prompt_of(16 * 1024 + 5), prompt_of(1))
    # In front of each of 8 multiples of the interval, one of which is the prompt's end.
    assert made.stored_blocks == {"full": 1024, "window": 8 * 8}
    # Equal layers of both kinds: the windows add a sixteenth.
    assert made.stored_blocks["window"] / made.stored_blocks["full"] < 0.07


@pytest.mark.parametrize("name", LAYERS)
def test_random_conversations(name, seed):
    draw = random.Random(f"{seed} {name}")
    both = Both(name, interval=draw.choice([0, 128, 100]))
    known = [prompt_of(draw.randint(20, 400), draw.random())]
    try:
        for _ in range(40):
            base = draw.choice(known)
            cut = draw.choice([len(base), draw.randint(1, len(base))])
            prompt = base[:cut] + prompt_of(draw.choice([0, 1, 60]), draw.random())
            _, whole = both.ask(prompt[:900], draw.choice([1, 2, 30, 100]))
            known.append(whole)
        assert sum(both.engine.store.counts()) > 20
    finally:
        both.engine.close()


def test_the_labels_are_those_of_the_rules():
    assert {one.name for layers in LAYERS.values() for one in layers} == {
        rule.label for rule in KindRule
    }
