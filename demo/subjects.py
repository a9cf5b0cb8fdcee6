"""The models and drafts of --model and --draft."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from demo.compare import BFLOAT16_BOUND
from demo.expectations import DRAFTED_LAYERS, MODEL_LAYERS, Layers
from demo.prompts import PromptMaker
from tests.support import granite_on_cpu
from tests.support.vllm_server import ModelShape, ensure_eagle, ensure_hybrid, ensure_model


@dataclasses.dataclass(frozen=True)
class Subject:
    """What a run of --model or --draft is about."""

    name: str
    layers: tuple[Layers, ...]
    #: Creates the model at the first call.
    model: Callable[[], Path]
    dtype: str = "float32"
    block_size: int = 32
    #: The value of --speculative-config, once the model exists.
    speculation: Callable[[], dict[str, Any]] | None = None
    #: Blocks hold the KV of a draft model, which depends on the next token.
    drafts_have_kv: bool = False
    #: Lengths of the prompts that begin a conversation; on and off the block grid.
    lengths: tuple[int, ...] = (1400, 1536, 2500)
    #: Prompts repeat their first so many tokens; 0: they do not.
    period: int = 0
    #: Creates a change to vLLM in a new directory, and returns the PYTHONPATH for it.
    plugin: Callable[[Path], list[Path]] | None = None
    #: What that change is.
    change: str = ""

    @property
    def grid(self) -> int:
        """Tokens; a hit of all kinds is a multiple of it."""
        return max(one.block_tokens for one in self.layers)

    @property
    def bound(self) -> float:
        """The bound of log-probabilities for answers that are compared under teacher forcing; 0:
        the tokens must be equal.
        """
        return BFLOAT16_BOUND if self.dtype == "bfloat16" else 0.0

    def prompt(self, maker: PromptMaker, length: int) -> tuple[int, ...]:
        period = self.period or length
        return (maker.tokens(period) * (length // period + 1))[:length]

    def arguments(self) -> tuple[str, ...]:
        """Options of vllm serve."""
        arguments = ["--max-num-batched-tokens", "1024"]
        if any(one.name == "state" for one in self.layers):
            # vLLM's choice, and with it that of STATE_BLOCK, depends on the CPU's instructions.
            arguments += ["--mamba-ssm-cache-dtype", "float32"]
        if self.speculation is not None:
            arguments += ["--speculative-config", json.dumps(self.speculation())]
        return tuple(arguments)


def _hybrid(name: str, **more: Any) -> Subject:
    return Subject(name, MODEL_LAYERS[name], lambda: ensure_hybrid(name), **more)


#: What vLLM chooses for these states in float32. Without the option the scheduler of vLLM's CPU
#: build ends prompts at multiples of 128, where the states are those of no block.
STATE_BLOCK = 256
#: The first one ends a token behind a state, the others up to 256 tokens behind one.
STATE_LENGTHS = (5 * STATE_BLOCK + 1, 1400, 1536, 2500)

MODELS = {
    "gemma3": _hybrid("gemma3"),
    "gpt-oss": _hybrid("gpt-oss"),
    "mistral-window": _hybrid("mistral-window"),
    # "CPU GDN attention requires BF16"
    "qwen3-next": _hybrid(
        "qwen3-next", dtype="bfloat16", block_size=STATE_BLOCK, lengths=STATE_LENGTHS
    ),
    "granite": _hybrid(
        "granite",
        block_size=STATE_BLOCK,
        lengths=STATE_LENGTHS,
        plugin=granite_on_cpu.plugin,
        change=granite_on_cpu.STATEMENT,
    ),
}

DRAFTS = {
    "ngram": Subject(
        "ngram",
        DRAFTED_LAYERS,
        lambda: ensure_model(ModelShape(layers=4, hidden=256, heads=8, kv_heads=4, head_dim=32)),
        speculation=lambda: {
            "method": "ngram",
            "num_speculative_tokens": 4,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 3,
        },
        lengths=(320, 500, 640, 1000),
        # Text that repeats itself, from which drafts are made.
        period=40,
    ),
    "eagle": Subject(
        "eagle",
        DRAFTED_LAYERS,
        lambda: ensure_eagle() / "target",
        speculation=lambda: {
            "method": "eagle",
            "model": str(ensure_eagle() / "draft"),
            "num_speculative_tokens": 3,
        },
        drafts_have_kv=True,
        lengths=tuple(200 + 17 * number for number in range(8)),
    ),
}
