"""An engine that simulates computing: vLLM's scheduler, PegaFlow's connector, no model.

vLLM's scheduler and KV-cache manager, both sides of the connector, the KV memory and all copies are
real. In place of a forward pass the worker sleeps for the time that its tokens take at a given
rate, as a GPU would keep it waiting.
"""

from __future__ import annotations

import json
import logging
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from vllm.sampling_params import SamplingParams

from tests.python.fake_model import FakeModel, WrongKv
from tests.python.harness import BLOCK, MODEL, Answer, Engine

#: Tokens that one step computes at most.
STEP_TOKENS = 8192
_LAYERS, _HEADS, _DTYPE_BYTES = 8, 8, 4


def model_directory(directory: Path, token_bytes: int, longest: int) -> Path:
    """A model configuration with ``token_bytes`` of KV cache per token, over all layers."""
    shape = {
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "head_dim": token_bytes // (2 * _LAYERS * _HEADS * _DTYPE_BYTES),
        "max_position_embeddings": longest,
    }
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(MODEL | shape))
    return directory


class TimedModel(FakeModel):
    """Sleeps in place of computing; writes a word into each block, and checks it in loaded ones.

    The word depends on all tokens up to the block's end, so a block of another prompt is detected.
    """

    #: 0: computing takes no time.
    tokens_per_second = 0.0
    #: Tokens computed so far.
    computed = 0

    def __init__(self, kv_cache_config: Any, content: int = 0) -> None:
        super().__init__(kv_cache_config, content)
        for array in self.arrays:
            array.fill(0)  # the first use of a page should not count as a copy

    def poison(self, blocks: list[int]) -> None:
        """Does nothing: it would take the time of a copy."""

    def add(self, request_id: str, seed: int, tokens: list[int], blocks: list[int]) -> None:
        self._prompts[request_id] = (_words(tokens), list(blocks), len(tokens))

    def append_blocks(self, request_id: str, blocks: list[int]) -> None:
        self._prompts[request_id][1].extend(blocks)

    def seed_of(self, request_id: str) -> int:
        return 0

    def remove(self, request_id: str) -> None:
        self._prompts.pop(request_id, None)

    def forward(self, request_id: str, computed: int, scheduled: int) -> list[int]:
        words, blocks, length = self._prompts[request_id]
        self.computed += scheduled
        if self.tokens_per_second:
            time.sleep(scheduled / self.tokens_per_second)
        first, end = computed // BLOCK, min((computed + scheduled) // BLOCK, len(words))
        for array in (self.arrays[0], self.arrays[-1]):
            found = array[blocks[:first], 0, 0, 0]
            if not np.array_equal(found, words[:first]):
                raise WrongKv(f"{request_id}: blocks hold another prompt's KV")
            array[blocks[first:end], 0, 0, 0] = words[first:end]
        return [10] if computed + scheduled >= length else []

    @property
    def _prompts(self) -> dict[str, Any]:
        return self._rows


def _words(tokens: Sequence[int]) -> np.ndarray:
    """For each full block, a number that depends on all tokens up to its end."""
    raw = np.asarray(tokens[: len(tokens) // BLOCK * BLOCK], dtype=np.uint32).reshape(-1, BLOCK)
    word, words = 1, []
    for block in raw:
        word = zlib.crc32(block.tobytes(), word)
        words.append(word)
    return np.asarray(words, dtype=np.uint64)


class PrefillEngine(Engine):
    """Measures the time to the first token of each prompt of a burst."""

    def __init__(
        self, address: str, model: Path, *, tokens: int, longest: int, rate: float, policy: str
    ) -> None:
        """
        Args:
            tokens: Limit for all prompts in flight together.
            longest: Limit for one prompt.
            rate: Tokens per second that it computes; 0: unlimited.
            policy: `pegaflow.load_policy`.
        """
        logging.getLogger("vllm").setLevel(logging.WARNING)
        self._first: dict[str, float] = {}
        self._number = 0
        super().__init__(
            address,
            patient=False,
            model_class=TimedModel,
            model=str(model),
            # At most half of the blocks wait for their saves.
            blocks=(1 if rate else 2) * tokens // BLOCK + 256,
            max_model_len=longest,
            max_num_batched_tokens=STEP_TOKENS,
            extra={"pegaflow.load_policy": policy, "pegaflow.max_pinned_percent": 50},
        )
        self.model.tokens_per_second = rate
        self.scheduler.needs_kv_cache_zeroing = False

    def burst(
        self,
        prompts: Sequence[list[int]],
        skip_reading: bool | None = None,
        begun: Callable[[], None] = lambda: None,
    ) -> list[float]:
        """Seconds to the first token of each prompt, all sent at once.

        Args:
            skip_reading: Load nothing.
            begun: Called when the clock starts.
        """
        self._first.clear()
        parameters = SamplingParams(
            max_tokens=1, ignore_eos=True, skip_reading_prefix_cache=skip_reading
        )
        requests = []
        for prompt in prompts:
            self._number += 1
            name = f"r{self._number}"
            requests.append(self._request(name, prompt, parameters))
            self.answers[name] = Answer(prompt, 0, 1)
        begun()
        began = time.monotonic()
        for request in requests:
            self.scheduler.add_request(request)
        while len(self._first) < len(requests):
            self.step()
        return [self._first[request.request_id] - began for request in requests]

    def settle(self) -> None:
        """Waits until all saves have ended."""
        self.run()
        self.answers.clear()

    def _update(self, output: Any, result: Any) -> None:
        super()._update(output, result)
        now = time.monotonic()
        for name, answer in self.answers.items():
            if answer.tokens:
                self._first.setdefault(name, now)
