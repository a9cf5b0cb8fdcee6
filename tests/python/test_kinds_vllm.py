"""Models with windows and states in a real vLLM on the CPU.

Each answer must be that of an engine without a connector, and the blocks must be those of the
demo's calculator: with the plans and a dictionary that has copies of blocks, and with the whole
connector and a server.
"""

import functools
import os
from collections.abc import Sequence
from typing import Any

import pytest

from demo.expectations import MODEL_LAYERS, ExpectedCache
from tests.python import kinds_vllm
from tests.python.kinds_vllm import ALTERNATIVES, INTERVAL
from tests.support.vllm_server import ensure_hybrid

#: A prompt, the same again, a longer one, a branch, and the next turn of the first conversation.
REQUESTS = ["1400", "of,0,1400,0", "of,0,1400,100", "of,0,900,300", "of,0,0,60"]
#: The same with a server; then the first prompt again: it is preempted, is aborted and asked again,
#: its load is refused, fails with wrong bytes in the blocks, the server is gone, is another one,
#: and has the blocks again.
WITH_SERVER = [
    *REQUESTS,
    "preempt:of,0,1400,0",
    "abort:of,0,1400,0",
    "refuse:of,0,1400,0",
    "spoil:of,0,1400,0",
    "kill:of,0,1400,0",
    "start:of,0,1400,0",
    "of,0,1400,0",
]
#: The tokens that are loaded for them.
LOADED = {
    "gemma3": [0, 1376, 1376, 768, 1408],
    "gpt-oss": [0, 1376, 1376, 768, 1408],
    "mistral-window": [0, 1376, 1376, 768, 1408],
    "qwen3-next": [0, 1280, 1280, 0, 1280],
    "granite": [0, 1280, 1280, 0, 1280],
}
#: vLLM computes these states in no other type on a CPU.
DTYPES = {"qwen3-next": "bfloat16"}

# Engines inherit them from the process that forks them, which starts with the first engine.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}


def answers(family: str, mode: str, requests: Sequence[str] = REQUESTS) -> list[dict[str, Any]]:
    dtype = DTYPES.get(family, "float32")
    return kinds_vllm.run(ensure_hybrid(family), dtype, mode, requests)


@functools.cache
def plain_answers(family: str) -> list[dict[str, Any]]:
    """Of an engine without a connector; it answers orders to the others like plain requests."""
    return answers(family, "plain", WITH_SERVER)


@pytest.mark.parametrize("family", MODEL_LAYERS)
def test_loaded_windows_and_states_give_the_same_answers(family):
    expected = ExpectedCache(MODEL_LAYERS[family], INTERVAL)
    cached, plain = answers(family, "memory"), plain_answers(family)[: len(REQUESTS)]
    assert len(cached) == len(plain) == len(REQUESTS)
    for one, other in zip(cached, plain, strict=True):
        assert one["prompt"] == other["prompt"]
        assert one["answer"] == other["answer"]
        assert one["local"] == 0
        wanted = expected.ask(one["prompt"], one["answer"])
        assert one["loaded"] == wanted.loaded_tokens
        assert one["stored"] == expected.blocks()
    assert [one["loaded"] for one in cached] == LOADED[family]


@pytest.mark.parametrize("family", ["gemma3", "gpt-oss", "mistral-window", "qwen3-next"])
def test_with_a_server_the_answers_are_the_same(family):
    layers = MODEL_LAYERS[family]
    unit = max(one.block_tokens for one in layers)
    least = max(unit, min(2 * unit, 64))
    expected = ExpectedCache(layers, INTERVAL, least)
    cached, plain = answers(family, "pega", WITH_SERVER), plain_answers(family)
    assert len(cached) == len(plain) == len(WITH_SERVER)
    loaded = []
    for order, one, other in zip(WITH_SERVER, cached, plain, strict=True):
        assert one["prompt"] == other["prompt"], order
        assert one["answer"] == other["answer"], order
        what = order.rpartition(":")[0]
        if what in ("refuse", "spoil"):
            label = {"refuse": "gone", "spoil": "planted"}[what]
            assert one["failures"] == {label: 1}
            assert not any(one["added"].values()), "they are there"
            continue
        if what == "kill":
            assert one["cached"] == 0 and not any(one["added"].values())
            continue
        if what == "start":
            expected = ExpectedCache(layers, INTERVAL, least)
        wanted = expected.ask(one["prompt"], one["answer"])
        loaded.append(one["cached"])
        assert one["cached"] == wanted.loaded_tokens, order
        assert one["added"] == wanted.stored_blocks, order
        times = 2 if what in ("preempt", "abort") else 1  # vLLM's own cache is empty again
        blocks = {name: times * count for name, count in wanted.loaded_blocks.items() if count}
        assert one["blocks_loaded"] == (blocks if wanted.loaded_tokens else {}), order
        assert one["failures"] == {}
    again = LOADED[family][1]
    assert loaded == [*LOADED[family], again, again, 0, again]


def test_windows_that_are_saved_a_block_too_late_change_the_answers():
    requests = ["1400", "of,0,1400,0", "of,0,900,300"]
    wrong, plain = answers("gpt-oss", "shifted", requests), answers("gpt-oss", "plain", requests)
    assert [one["cached"] for one in wrong] == [0, 1376, 768]
    same = [one["answer"] == other["answer"] for one, other in zip(wrong, plain, strict=True)]
    assert same == [True, False, False]


#: A computed answer and a loaded one differ by less, also in bfloat16.
SAME = 0.02
#: A wiped state shifts a log-probability by more, 120 tokens behind it.
WIPED = 0.05


def shift(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest change of the log-probability of a probable token after the prompt."""
    common = one["first"].keys() & other["first"].keys()
    assert len(common) > ALTERNATIVES / 2
    return max(abs(one["first"][token] - other["first"][token]) for token in common)


@pytest.mark.parametrize("family", ["qwen3-next", "granite"])
def test_a_state_that_is_wiped_in_the_pool_shows_in_the_answer(family):
    computed, right, wrong = answers(family, "pega", ["1400", "of,0,1400,0", "wipe:of,0,1400,0"])
    assert [one["cached"] for one in (computed, right, wrong)] == [0, 1280, 1280]
    assert right["blocks_loaded"] == wrong["blocks_loaded"] == {"full": 5, "state": 1}
    assert right["failures"] == wrong["failures"] == {}
    assert shift(computed, right) < SAME
    assert shift(computed, wrong) > WIPED
