"""vLLM's blocks whose draft KV was not computed, which the cache must never be given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


class UndraftedBlocks:
    """The ids of these blocks. Bound to the scheduler's thread.

    In a step with a request near the longest length vLLM computes no draft KV at all. Its own cache
    keeps the blocks of the step and offers them to later requests, which must not save them either.
    A block stays here until vLLM allocates it again, for other tokens or for the same ones: then
    each of its tokens is computed anew, or loaded.

    At most as many ids as vLLM has blocks; mostly none.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._ids: set[int] = set()

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._ids

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, table: Sequence[int], start: int, stop: int) -> None:
        """The tokens ``start`` to ``stop`` - 1 of a request with these blocks get no draft KV."""
        size = self._block_tokens
        self._ids.update(table[max(0, start) // size : -(-stop // size)])

    def allocated(self, block_ids: Iterable[int]) -> None:
        """Whatever these blocks had is overwritten."""
        self._ids.difference_update(block_ids)

    def allocated_in(self, output: Any) -> None:
        """The same for the blocks that a step allocates."""
        if not self._ids:
            return
        size = self._block_tokens
        for new in output.scheduled_new_reqs:
            self.allocated(new.block_ids[0][new.num_computed_tokens // size :])
        cached = output.scheduled_cached_reqs
        rows = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for request_id, ids, computed in rows:
            if ids is not None:
                # A request that resumes has blocks of vLLM's own cache in front.
                first = computed // size if request_id in cached.resumed_req_ids else 0
                self.allocated(ids[0][first:])

    def tokens_before(self, table: Sequence[int]) -> int | None:
        """The number of tokens in front of the first such block of a request; None: it has none."""
        if not self._ids:
            return None
        for index, block_id in enumerate(table):
            if block_id in self._ids:
                return index * self._block_tokens
        return None
