"""A model whose KV can be checked: each token's KV is a function of all tokens up to it.

It replaces vLLM's model, in real KV memory that vLLM's own code lays out. Before a forward pass it
checks the KV of the whole context, so a block that was loaded from elsewhere, torn, stale or
overwritten is detected in the step that would have used it.
"""

import dataclasses
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_cache_interface import create_kv_cache_views
from vllm.v1.kv_cache_layout import KVCacheLayout

_MASK = (1 << 64) - 1


class WrongKv(AssertionError):
    """The memory differs from the KV of the tokens."""


def chain(seed: int, tokens: list[int], start: int = 0, state: int = 0) -> list[int]:
    """For each token from ``start`` on a number that depends on it and all tokens before."""
    value = state or ((seed * 0x9E3779B97F4A7C15 + 1) & _MASK)
    values = []
    for token in tokens[start:]:
        value = ((value ^ (token + 0x1234567)) * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & _MASK
        value ^= value >> 29
        values.append(value)
    return values


def next_token(value: int) -> int:
    """The token that the model samples after a token with this number; never below 10."""
    return 10 + (value >> 7) % 900


def answer(prompt: list[int], count: int, seed: int = 0) -> list[int]:
    """The tokens that the model must generate."""
    tokens = list(prompt)
    values = chain(seed, tokens)
    for _ in range(count):
        tokens.append(next_token(values[-1]))
        values += chain(seed, tokens, len(tokens) - 1, values[-1])
    return tokens[len(prompt) :]


def _words(view: torch.Tensor) -> Any:
    """The memory of a layer in words of 8 bytes, or of 4 where a token's bytes are no multiple."""
    # NumPy has no bfloat16; any type of two bytes will do.
    array = view.view(torch.int16 if view.dtype == torch.bfloat16 else view.dtype).numpy()
    wide = array.shape[-1] * array.itemsize % 8 == 0
    return array.view(np.uint64 if wide else np.uint32)


@dataclasses.dataclass
class _Row:
    """A worker's state of a request."""

    seed: int
    tokens: list[int]
    values: list[int]
    blocks: list[int]

    def extend(self) -> None:
        state = self.values[-1] if self.values else 0
        self.values += chain(self.seed, self.tokens, len(self.values), state)


class FakeModel:
    """KV memory of one worker, and the model that reads and writes it.

    Ranks with equal ``content`` hold the same bytes, other ranks never do.
    """

    def __init__(self, kv_cache_config: Any, content: int = 0) -> None:
        self._content = np.uint64(content << 48)
        (group,) = kv_cache_config.kv_cache_groups
        self.spec = group.kv_cache_spec
        self.block_size = self.spec.block_size
        # Layers of one group may differ in their bytes.
        by_layer = getattr(self.spec, "kv_cache_specs", None)
        layout = KVCacheLayout[kv_cache_config.kv_cache_layout]
        self.tensors: dict[str, torch.Tensor] = {}
        # One allocation, as in vLLM.
        places = kv_cache_config.kv_cache_tensors
        raw = torch.zeros(max(place.size for place in places), dtype=torch.int8)
        for tensor in places:
            spec = by_layer[tensor.layers[0]] if by_layer else self.spec
            views = create_kv_cache_views(raw, spec, kv_cache_config.num_blocks, layout, tensor)
            self.tensors |= dict(zip(tensor.layers, views, strict=True))
        self.arrays = [_words(view) for view in self.tensors.values()]
        self._rows: dict[str, _Row] = {}
        self.checked_tokens = 0
        self.first_head = 0  #: The number of the memory's first head among those of the model.

    def poison(self, blocks: list[int]) -> None:
        """vLLM zeroes blocks that it allocates; this is a zero that differs from any KV."""
        for array in self.arrays:
            array[blocks] = 0xDDDDDDDDDDDDDDDD & np.iinfo(array.dtype).max

    def add(self, request_id: str, seed: int, tokens: list[int], blocks: list[int]) -> None:
        row = _Row(seed, list(tokens), [], list(blocks))
        row.extend()
        self._rows[request_id] = row

    def append_blocks(self, request_id: str, blocks: list[int]) -> None:
        self._rows[request_id].blocks += blocks

    def seed_of(self, request_id: str) -> int:
        return self._rows[request_id].seed

    def remove(self, request_id: str) -> None:
        self._rows.pop(request_id, None)

    def forward(self, request_id: str, computed: int, scheduled: int, drafts: int = 0) -> list[int]:
        """Computes ``scheduled`` tokens behind ``computed``; returns the sampled token, if any."""
        assert drafts == 0, "this model verifies no drafts"
        row = self._rows[request_id]
        self.check(request_id, computed)
        self._arrays_at(row, computed, computed + scheduled, write=True)
        if computed + scheduled < len(row.tokens):
            return []  # a chunk of a longer prompt
        row.tokens.append(next_token(row.values[-1]))
        row.extend()
        return [row.tokens[-1]]

    def draft(self) -> None:
        """What a step does after the connector's save."""

    def check(self, request_id: str, computed: int) -> None:
        """Checks the KV of the first ``computed`` tokens.

        Raises:
            WrongKv: the KV of a token is wrong.
        """
        row = self._rows[request_id]
        bad = self._arrays_at(row, 0, computed, write=False)
        self.checked_tokens += computed
        if bad:
            layer, token, block, found = bad
            raise WrongKv(
                f"{request_id}: layer {layer}, token {token} of {computed} in block {block} "
                f"(of {row.blocks}) holds {found:#x}"
            )

    def _arrays_at(self, row: _Row, start: int, stop: int, write: bool) -> Any:
        if start == stop:
            return None
        positions = np.arange(start, stop)
        blocks = np.asarray(row.blocks)[positions // self.block_size]
        offsets = positions % self.block_size
        values = np.asarray(row.values[start:stop], dtype=np.uint64)
        for layer, array in enumerate(self.arrays):
            heads, content = array.shape[1], array.shape[3]
            # Each head and each part of the content has a number of its own.
            salt = np.arange(heads * content, dtype=np.uint64).reshape(heads, content)
            salt += np.uint64(self.first_head * content)
            expected = values[:, None, None] + salt + np.uint64(layer << 32) + self._content
            if array.dtype == np.uint32:
                expected = (expected ^ (expected >> np.uint64(32))).astype(np.uint32)
            if write:
                array[blocks, :, offsets, :] = expected
                continue
            found = array[blocks, :, offsets, :]
            if not np.array_equal(found, expected):
                token = int(np.argwhere(found != expected)[0][0])
                return layer, start + token, int(blocks[token]), int(found[token].flat[0])
        return None
