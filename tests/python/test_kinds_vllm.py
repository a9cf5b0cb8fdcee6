"""Models with windows and states in a real vLLM: the plans and the geometry, without a server.

kinds_vllm.py copies blocks to a dictionary and back. Each answer must be that of an engine without
a connector, and the blocks must be those of the demo's calculator.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from demo.expectations import MODEL_LAYERS, ExpectedCache
from tests.python.kinds_vllm import INTERVAL
from tests.support.vllm_server import ensure_hybrid

#: A prompt, the same again, a longer one, a branch, and the next turn of the first conversation.
REQUESTS = ["1400", "of,0,1400,0", "of,0,1400,100", "of,0,900,300", "of,0,0,60"]
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


def answers(family: str, mode: str) -> list[dict[str, Any]]:
    model = ensure_hybrid(family)
    command = [sys.executable, "-m", "tests.python.kinds_vllm", str(model)]
    command += [DTYPES.get(family, "float32"), mode, *REQUESTS]
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return [json.loads(line.removeprefix("RESULT ")) for line in lines]


@pytest.mark.parametrize("family", MODEL_LAYERS)
def test_loaded_windows_and_states_give_the_same_answers(family):
    expected = ExpectedCache(MODEL_LAYERS[family], INTERVAL)
    cached, plain = answers(family, "memory"), answers(family, "plain")
    assert len(cached) == len(plain) == len(REQUESTS)
    for one, other in zip(cached, plain, strict=True):
        assert one["prompt"] == other["prompt"]
        assert one["answer"] == other["answer"]
        assert one["local"] == 0
        wanted = expected.ask(one["prompt"], one["answer"])
        assert one["loaded"] == wanted.loaded_tokens
        assert one["stored"] == expected.blocks()
    assert [one["loaded"] for one in cached] == LOADED[family]
