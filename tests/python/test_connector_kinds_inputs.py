"""Images, adapters and salts with windows, chunks and states: other inputs never share a block.

The names of blocks come from vLLM's hashes, and for adapters from their files. As in
test_connector_kinds_server.py, the model checks each byte that its layers read, and its bytes
depend on these inputs.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core import kv_cache_utils

from pegaflow.vllm.adapters import Adapter
from tests.python.harness import adapter, train
from tests.python.kinds_engine import WrongBlock
from tests.python.kinds_inputs import PLAIN, Image, Inputs, allow_images
from tests.python.kinds_pega import PegaKindsEngine
from tests.python.test_connector_faults import wait_for_zero
from tests.python.test_connector_kinds import HITS, Make, engine_of, served
from tests.python.test_connector_kinds_server import own_namespace
from tests.python.test_kinds_expectations import prompt_of
from tests.support.vllm_server import PegaServer

__all__ = ["served"]

PROMPT = prompt_of(300)
#: The same tokens with each of these are another prompt. No whole block lies before the images.
VARIANTS = {
    "plain": lambda: PLAIN,
    "salt": lambda: Inputs(salt="a"),
    "other salt": lambda: Inputs(salt="b"),
    "adapter": lambda: Inputs(lora=adapter("x")),
    "other adapter": lambda: Inputs(lora=adapter("y")),
    "image": lambda: Inputs(images=(Image("red", 8),)),
    "other image": lambda: Inputs(images=(Image("blue", 8),)),
    "image elsewhere": lambda: Inputs(images=(Image("red", 9),)),
    "two images": lambda: Inputs(images=(Image("red", 8, 10), Image("blue", 20))),
    "the other order": lambda: Inputs(images=(Image("blue", 8, 10), Image("red", 20))),
    "image and adapter": lambda: Inputs(images=(Image("red", 8),), lora=adapter("x")),
}
#: Of requests with adapters no states are saved: their files are checked after the step that
#: computes a block, and vLLM's offer of a state ends with that step.
WITHOUT_STATES = ("adapter", "other adapter", "image and adapter")


def expected_hit(name: str, variant: str) -> int:
    return 0 if name == "qwen3-next" and variant in WITHOUT_STATES else HITS[name][0]


def engine(name: str, address: str, namespace: dict[str, str], **more: Any) -> PegaKindsEngine:
    made = engine_of(name, address, extra=namespace, **more)
    made.side._adapters.looks.patience_s = 20
    allow_images(made.scheduler)
    return made


@pytest.fixture
def make(served: None, pega: PegaServer) -> Iterator[Make]:
    """Makes engines of one namespace, and checks at the end that nothing is in flight."""
    engines: list[PegaKindsEngine] = []
    namespace = own_namespace()

    def of(name: str, **more: Any) -> PegaKindsEngine:
        engines.append(engine(name, pega.address, namespace, **more))
        return engines[-1]

    yield of
    for one in engines:
        one.run()
        one.check_at_rest()
        one.close()
    wait_for_zero(pega, "pegaflow_claims", "pegaflow_pins")


def ask(
    made: PegaKindsEngine, request: str, inputs: Inputs, prompt: list[int] = PROMPT
) -> tuple[int, int]:
    """The hits of a request in an engine that has forgotten all others."""
    made.reset_local()
    hits = made.ask(request, prompt, 3, inputs)
    made.run()
    made.check_answer(request, prompt)
    return hits


@pytest.mark.parametrize("name", HITS)
def test_other_inputs_share_no_block_and_equal_ones_share_all(make, name):
    first, second = make(name), make(name, asynchronous=True)
    for number, (variant, inputs) in enumerate(VARIANTS.items()):
        one = (first, second)[number % 2]
        assert ask(one, variant, inputs()) == (0, 0), variant
    for number, (variant, inputs) in enumerate(VARIANTS.items()):
        wanted = 0, expected_hit(name, variant)
        other = (second, first)[number % 2]
        assert ask(other, f"again {variant}", inputs()) == wanted, variant


@pytest.mark.parametrize("name", ["gemma3", "mistral-window", "llama4"])
def test_the_text_before_an_image_is_shared(make, name):
    one = make(name)
    inputs = {color: Inputs(images=(Image(color, 150),)) for color in ("red", "blue")}
    assert ask(one, "red", inputs["red"]) == (0, 0)
    # The last boundary before the image: all of it is saved each 128 tokens. A chunk of 64 ends
    # there, so that all multiples of a block behind it need blocks of that chunk only.
    assert ask(one, "blue", inputs["blue"]) == (0, 128)
    for color, given in inputs.items():
        assert ask(one, f"{color} again", given) == (0, 288)


def test_a_following_turn_with_another_image_keeps_what_precedes_it(make):
    one = make("gemma3")
    first = Inputs(images=(Image("red", 8),))
    assert ask(one, "first", first) == (0, 0)
    longer = PROMPT + prompt_of(100, 2)
    for color in ("blue", "green"):
        second = Inputs(images=(Image("red", 8), Image(color, 310)))
        assert ask(one, color, second, longer) == (0, 288)
    changed = Inputs(images=(Image("blue", 8), Image("green", 310)))
    assert ask(one, "changed", changed, longer) == (0, 0)


def test_a_retrained_adapter_gets_no_window_of_the_former_one(make, tmp_path):
    retrain(make, tmp_path)


def retrain(make: Make, directory: Path) -> None:
    """An adapter's files change between two starts of an engine; its name and path do not."""
    monday = Inputs(lora=train(directory / "x", "monday", name="x", number=1))
    one = make("gpt-oss")
    assert ask(one, "cold", monday) == (0, 0)
    assert ask(one, "again", monday) == (0, 288)
    tuesday = Inputs(lora=train(directory / "x", "tuesday", name="x", number=1))
    two = make("gpt-oss")
    assert ask(two, "other weights", tuesday) == (0, 0)
    assert ask(two, "its own", tuesday) == (0, 288)


@pytest.mark.parametrize("name", [*HITS, "two windows", "states and windows"])
def test_random_requests_with_other_inputs_read_their_own_bytes(make, name, seed):
    draw = random.Random(f"{seed} {name}")
    asynchronous = draw.random() < 0.5
    one = make(name, asynchronous=asynchronous, draw=draw, blocks=600, max_num_seqs=4)
    prompts = [prompt_of(draw.randint(200, 420), draw.random()) for _ in range(2)]
    variants = [inputs() for inputs in VARIANTS.values()]
    asked = {}
    for number in range(30):
        prompt = list(draw.choice(prompts))
        prompt = prompt[: draw.choice([len(prompt), draw.randint(160, len(prompt))])]
        asked[f"r{number}"] = prompt
        one.add(f"r{number}", prompt, draw.choice([1, 5, 40]), inputs=draw.choice(variants))
        for _ in range(draw.randint(0, 8)):
            one.step()
        if draw.random() < 0.4:
            one.run()
            one.scheduler.reset_prefix_cache()
        if draw.random() < 0.05:
            one.preempt_all()
    one.run()
    for request, prompt in asked.items():
        one.check_answer(request, prompt)
    assert one.stats["loads"] > 0, one.stats


# ---- planted mistakes are found


@pytest.fixture
def planted(served: None, own_pega: PegaServer) -> Iterator[Make]:
    """Makes engines of one namespace; a step that fails leaves its blocks pinned."""
    engines: list[PegaKindsEngine] = []
    namespace = own_namespace()

    def of(name: str, **more: Any) -> PegaKindsEngine:
        engines.append(engine(name, own_pega.address, namespace, **more))
        return engines[-1]

    yield of
    for one in engines:
        one.close()


@pytest.mark.parametrize("name", ["gemma3", "mistral-window", "qwen3-next"])
def test_blocks_named_without_images_are_found(planted, name, monkeypatch):
    monkeypatch.setattr(kv_cache_utils, "_gen_mm_extra_hash_keys", lambda *arguments: ([], 0))
    one = planted(name)
    assert ask(one, "red", VARIANTS["image"]()) == (0, 0)
    with pytest.raises(WrongBlock):
        ask(one, "blue", VARIANTS["other image"]())


def test_blocks_named_without_the_adapters_files_are_found(planted, tmp_path, monkeypatch):
    monkeypatch.setattr(Adapter, "key", lambda self, block_hash: block_hash)
    with pytest.raises(WrongBlock):
        retrain(planted, tmp_path)


def test_blocks_named_without_salt_are_found(planted, monkeypatch):
    original = kv_cache_utils.generate_block_hash_extra_keys

    def without_salt(request: Any, *more: Any) -> Any:
        keys, next_index = original(request, *more)
        kept = tuple(key for key in keys or () if key[0] != "cache_salt")
        return kept or None, next_index

    monkeypatch.setattr(kv_cache_utils, "generate_block_hash_extra_keys", without_salt)
    one = planted("gpt-oss")
    assert ask(one, "a", VARIANTS["salt"]()) == (0, 0)
    with pytest.raises(WrongBlock):
        ask(one, "b", VARIANTS["other salt"]())
