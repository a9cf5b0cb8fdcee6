"""The fake model with a draft model, whose KV can be checked, too.

Its last layer is the draft's. As in EAGLE, the draft KV of a token is a function of the tokens up
to the *next* one, is written after the connector's save of a step (as in older releases), and holds
garbage behind the last accepted token. Rejected drafts leave garbage in the target's layers.
"""

from typing import Any

import numpy as np

from tests.python.fake_model import FakeModel, WrongKv, next_token

GARBAGE = 0xBADBADBADBADBAD


class DraftingModel(FakeModel):
    """Accepts 0 to all drafts of a step, as its tokens decide."""

    def __init__(self, kv_cache_config: Any, content: int = 0) -> None:
        super().__init__(kv_cache_config, content)
        self._draft_array = self.arrays.pop()
        self._draft_salt = np.uint64(len(self.arrays) << 32) + self._content
        self._written: dict[str, int] = {}
        #: Requests of this step, with the range of their new tokens, and the end of the drafts.
        self._step: dict[str, tuple[int, int, int]] = {}
        self._longest = 0  # tokens of a request of this step
        self.accepted = self.rejected = 0
        #: Last tokens of a block whose draft KV was computed with another next token: two requests
        #: differ after the block. That costs an accepted draft, in vLLM's own cache as well.
        self.stale_tokens = 0
        self.checked_ends = 0  #: Last tokens of blocks, of those that were checked.
        #: A request of more tokens in a step makes vLLM draft nothing for its whole batch.
        self.undrafted_from = 1 << 62
        # Places of tokens without draft KV, by block. Later requests may share the blocks.
        self._undrafted: dict[int, set[int]] = {}

    def poison(self, blocks: list[int]) -> None:
        super().poison(blocks)
        self._draft_array[blocks] = 0xDDDDDDDDDDDDDDDD
        for block in blocks:
            self._undrafted.pop(block, None)  # whatever fills it now has to be right

    def add(self, request_id: str, seed: int, tokens: list[int], blocks: list[int]) -> None:
        super().add(request_id, seed, tokens, blocks)
        self._written.pop(request_id, None)

    def forward(self, request_id: str, computed: int, scheduled: int, drafts: int = 0) -> list[int]:
        row = self._rows[request_id]
        # With asynchronous scheduling vLLM does not know yet how many drafts were accepted.
        start = self._written.get(request_id, computed)
        self.check(request_id, start)
        stop = start + scheduled - drafts
        sampled: list[int] = []
        accepted = 0
        if stop >= len(row.tokens):
            accepted = (row.values[-1] >> 9) % (drafts + 1)
            for _ in range(1 + accepted):
                row.tokens.append(next_token(row.values[-1]))
                row.extend()
                sampled.append(row.tokens[-1])
        self.accepted += accepted
        self.rejected += drafts - accepted
        self._arrays_at(row, start, stop + accepted, write=True)
        self._fill(self.arrays, row, stop + accepted, stop + drafts)
        self._written[request_id] = stop + accepted
        self._step[request_id] = start, stop + accepted, stop + 2 * drafts
        self._longest = max(self._longest, stop + drafts)
        return sampled

    def draft(self) -> None:
        longest, self._longest = self._longest, 0
        for request_id, (start, stop, end) in self._step.items():
            row = self._rows[request_id]
            if longest > self.undrafted_from:
                for token in range(start, stop):
                    block, place = self._place(row, token)
                    self._undrafted.setdefault(block, set()).add(place)
                continue
            where = self._where(row, start, stop)
            self._draft_array[where] = self._draft_values(row, start, stop)
            self._fill([self._draft_array], row, stop, end)
        # Requests of one step may share blocks that the step computes.
        for request_id, (start, _, _) in self._step.items():
            self._check_drafts(request_id, start)
        self._step = {}

    def _check_drafts(self, request_id: str, computed: int) -> None:
        """
        Raises:
            WrongKv: the draft KV of one of the first ``computed`` tokens is wrong.
        """
        row = self._rows[request_id]
        self.checked_ends += computed // self.block_size
        found = self._draft_array[self._where(row, 0, computed)]
        expected = self._draft_values(row, 0, computed)
        wrong = set(np.unique(np.argwhere(found != expected)[:, 0]).tolist())
        for token in wrong:
            block, place = self._place(row, token)
            if place in self._undrafted.get(block, ()):
                continue
            if (token + 1) % self.block_size != 0:
                raise WrongKv(
                    f"{request_id}: the draft of token {token} of {computed} in block "
                    f"{block} holds {int(found[token].flat[0]):#x}"
                )
            self.stale_tokens += 1

    def _place(self, row: Any, token: int) -> tuple[int, int]:
        return row.blocks[token // self.block_size], token % self.block_size

    def _where(self, row: Any, start: int, stop: int) -> Any:
        positions = np.arange(start, stop)
        blocks = np.asarray(row.blocks, dtype=int)[positions // self.block_size]
        return blocks, slice(None), positions % self.block_size

    def _draft_values(self, row: Any, start: int, stop: int) -> Any:
        """The draft KV of the tokens from ``start`` to ``stop`` - 1."""
        heads, content = self._draft_array.shape[1], self._draft_array.shape[3]
        salt = np.arange(heads * content, dtype=np.uint64).reshape(heads, content)
        values = np.asarray(row.values[start + 1 : stop + 1], dtype=np.uint64)
        return values[:, None, None] + salt + self._draft_salt

    def _fill(self, arrays: Any, row: Any, start: int, stop: int) -> None:
        stop = min(stop, len(row.blocks) * self.block_size)
        if start < stop:
            for array in arrays:
                array[self._where(row, start, stop)] = GARBAGE
