"""Models with sliding windows in a real vLLM that keeps all their KV: one cache group."""

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.python.vllm_cases import BLOCK, SMALL, ask, serve
from tests.support.vllm_server import PegaServer, VllmServer, ensure_model

#: Far longer than the window, so that a token after it would be wrong if the window were lost.
LENGTH = 500
WHOLE = LENGTH // BLOCK * BLOCK
WINDOW = 64

COMMON = {
    "vocab_size": SMALL.vocabulary,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "pad_token_id": 2,
}
MODELS = {
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {"query_pre_attn_scalar": 32}),
}

#: In a process of its own, to keep the model out of this one's memory.
MAKE = """
import json, sys, torch, transformers
config, model, fields, directory = json.loads(sys.argv[1])
torch.manual_seed(1)
made = getattr(transformers, model)(getattr(transformers, config)(**fields))
with torch.no_grad():
    for name, tensor in made.named_parameters():
        if tensor.ndim > 1:  # larger than a start of training has it: answers depend on the prompt
            tensor.normal_(std=tensor.shape[-1] ** -0.5)
made.to(torch.float32).save_pretrained(directory)
"""


def make(name: str, directory: Path) -> Path:
    config, model, fields = MODELS[name]
    arguments = json.dumps([config, model, COMMON | fields, str(directory)])
    made = subprocess.run(
        [sys.executable, "-c", MAKE, arguments], capture_output=True, text=True, timeout=300
    )
    assert made.returncode == 0, made.stderr[-3000:]
    for file in ensure_model(SMALL).glob("tokenizer*"):
        shutil.copy(file, directory)
    return directory


#: vLLM's CPU build itself answers with token 0, that of NaN, in about one start of 40 with this
#: model, also without a connector, for as long as that process lives.
STARTS = 5
NAN_TOKEN = 0


@contextlib.contextmanager
def serve_sound(
    model: Path, directory: Path, pega: PegaServer | None, probe: list[int], *arguments: str
) -> Iterator[VllmServer]:
    """A vLLM that computes numbers: one that does not, before it has loaded any block, is replaced.

    ``probe``: tokens that it computes first, and that no other engine is sent.
    """
    for start in range(STARTS):
        with serve(model, directory / str(start), pega, *arguments) as vllm:
            answer, loaded = ask(vllm, [10 + start, *probe[1:]])
            assert loaded == 0
            if NAN_TOKEN not in answer:
                yield vllm
                return
            print(f"vLLM computed NaN: {answer}; it is started again")
    pytest.fail(f"vLLM computed NaN in each of {STARTS} starts")


@pytest.mark.parametrize("name", MODELS)
def test_windows_whose_whole_kv_is_kept_are_saved_and_loaded(
    own_pega: PegaServer, short_path: Path, prompt: Any, name: str
) -> None:
    tokens = prompt(LENGTH)
    model = make(name, short_path / name)
    whole = "--disable-hybrid-kv-cache-manager"

    with serve_sound(model, short_path / f"{name}-a", own_pega, prompt(LENGTH), whole) as vllm:
        answer, loaded = ask(vllm, tokens)
        assert loaded == 0
        assert ask(vllm, tokens) == (answer, WHOLE)
        # A prefix of it, so that the answer's first token attends to loaded blocks of all layers.
        head, loaded = ask(vllm, tokens[:300])
        assert loaded == 300 // BLOCK * BLOCK
    with serve_sound(model, short_path / f"{name}-b", own_pega, prompt(LENGTH), whole) as vllm:
        assert ask(vllm, tokens) == (answer, WHOLE)
        assert ask(vllm, tokens[:300]) == (head, 300 // BLOCK * BLOCK)
    with serve_sound(model, short_path / f"{name}-plain", None, prompt(LENGTH), whole) as vllm:
        assert ask(vllm, tokens)[0] == answer
        assert ask(vllm, tokens[:300])[0] == head
    assert head != answer
