"""An engine of several kinds of blocks for long runs: fast, and with an oracle of restored pages.

All tokens are known beforehand, since the model is deterministic. So each page that a load has
restored is compared as a whole, before the engine uses it: also the bytes that no layer reads.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from pegaflow.engine.kinds import KindRule
from tests.python.fake_model import answer, chain, next_token
from tests.python.kinds_engine import WrongBlock
from tests.python.kinds_inputs import PLAIN, Inputs
from tests.python.kinds_pega import PegaKindsEngine

#: With asynchronous scheduling the model may run a few tokens beyond the last one.
_BEYOND = 8
#: Descriptions of mistakes that are kept.
_MOST_SHOWN = 5


@functools.lru_cache(maxsize=4_000)
def _page(seed: int, values: tuple[int, ...], slot_bytes: int) -> bytes:
    """The slots of these tokens, as PegaKindsEngine._slot has them one by one."""
    words = np.arange(slot_bytes // 8, dtype=np.uint64)
    first = np.array(values, dtype=np.uint64) ^ np.uint64(seed)
    return bytes((first[:, None] + words).tobytes())


class _Oracle:
    """Compares each page that a rank's mover has restored."""

    def __init__(self, engine: "SoakEngine", rank: int) -> None:
        self._engine, self._rank = engine, rank
        self._side = engine.workers[rank]._worker
        self._mover = self._side.mover

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mover, name)

    def take_finished(self) -> list[Any]:
        finished: list[Any] = self._mover.take_finished()
        for done in finished:
            if done.kind == "load" and not done.error and not done.failed_blocks:
                job = self._side.loads[done.id]
                if not job.discarded:
                    self._engine.check_load(self._rank, job.order)
        return finished


class SoakEngine(PegaKindsEngine):
    """``wrong`` has descriptions of the first wrong pages and reads, ``counts`` all of them."""

    def connect(self, store: Any) -> None:
        super().connect(store)
        self.wrong: list[str] = []
        #: By request: all tokens that it will have, and their values.
        self.expected: dict[str, tuple[list[int], list[int]]] = {}
        for rank, worker in enumerate(self.workers):
            worker._worker.mover = _Oracle(self, rank)

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        tokens: int = 4,
        params: Any = None,
        inputs: Inputs = PLAIN,
    ) -> None:
        assert inputs == PLAIN, "a soak has no images, adapters or salts"
        whole = list(prompt) + answer(list(prompt), tokens + _BEYOND)
        self.expected[request_id] = (whole[: len(prompt) + tokens], chain(0, whole))
        super().add(request_id, prompt, tokens, params, inputs)

    def forget(self, request_id: str) -> None:
        """The request has ended, and its results were read."""
        for one in (
            self.expected,
            self.answers,
            self.hits,
            self.reasons,
            self.params,
            self.inputs,
        ):
            one.pop(request_id, None)  # type: ignore[attr-defined]

    # ---- the oracle

    def check_load(self, rank: int, order: Any) -> None:
        if order.request_id not in self.expected:
            return  # aborted: no request reads the blocks
        values = self.expected[order.request_id][1]
        for part in order.ranges:
            kind = self.kinds.kinds[part.kind]
            ids = iter(part.blocks)
            for number in range(part.first, part.first + part.count):
                for group in kind.members:
                    block = next(ids)
                    self.counts["restored pages"] += 1
                    if not self._holds(rank, group, block, number, values):
                        self._wrong(
                            "wrong pages",
                            f"{order.request_id}: block {number} of group {group} was restored to "
                            f"{block} of rank {rank} with other bytes",
                        )

    def _wrong(self, what: str, text: str) -> None:
        self.counts[what] += 1
        if len(self.wrong) < _MOST_SHOWN:
            self.wrong.append(text)

    def _bytes_of(self, rank: int, group: int, values: Sequence[int]) -> bytes:
        seed = (16 * rank + group + 1) * 0x9E3779B97F4A7C15 & (1 << 64) - 1
        return _page(seed, tuple(values), self._slot_bytes[group])

    def _holds(self, rank: int, group: int, block: int, number: int, values: Sequence[int]) -> bool:
        """Whether a block has the bytes of the prompt's block with this number, as far as there are
        values.
        """
        kind = self.rules[group]
        first, end = number * kind.block_tokens, (number + 1) * kind.block_tokens
        if kind.rule == KindRule.STATE:
            first = end - 1
        start = block * self._stride
        wanted = self._bytes_of(rank, group, values[first:end])
        return block != 0 and self.memories[rank][start : start + len(wanted)] == wanted

    # ---- the model, block by block

    def _forward(self, output: Any) -> dict[str, list[int]]:
        for copy in output.kv_cache_block_copies or ():
            self._copy_block(copy.src_block_id, copy.dst_block_id)
        sampled = {}
        for request_id, scheduled in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            tables = self.scheduler.kv_cache_manager.get_block_ids(request_id)
            end = request.num_computed_tokens
            values = self.expected[request_id][1]
            try:
                for group, table in enumerate(tables):
                    self._read(request_id, group, table, end - scheduled, values)
            except WrongBlock as error:
                self._wrong("wrong reads", str(error))
            for group, table in enumerate(tables):
                self._compute(group, table, end - scheduled, end, values)
            is_known = end < request.num_tokens
            sampled[request_id] = [] if is_known else [next_token(values[end - 1])]
        return sampled

    def _read(
        self, request_id: str, group: int, table: list[int], start: int, values: list[int]
    ) -> None:
        kind = self.rules[group]
        if kind.rule == KindRule.STATE or start == 0:
            return super()._read(request_id, group, table, start, values)
        spec = self.kv_config.kv_cache_groups[group].kv_cache_spec
        first = {
            KindRule.PREFIX: 0,
            KindRule.TRAILING: max(0, start + 1 - (getattr(spec, "sliding_window", None) or 0)),
            KindRule.CHUNK: start // kind.tokens * kind.tokens if kind.tokens else 0,
        }[kind.rule]
        written = values[:start]
        for number in range(first // kind.block_tokens, -(-start // kind.block_tokens)):
            for rank in range(len(self.memories)):
                if not self._holds(rank, group, table[number], number, written):
                    raise WrongBlock(
                        f"{request_id}: rank {rank}, group {group} reads block {table[number]}"
                    )
        return None

    def _compute(
        self, group: int, table: list[int], start: int, end: int, values: list[int]
    ) -> None:
        kind, size = self.rules[group], self._slot_bytes[group]
        if kind.rule == KindRule.STATE:
            return super()._compute(group, table, start, end, values)
        while start < end:
            number, slot = divmod(start, kind.block_tokens)
            stop = min(end, (number + 1) * kind.block_tokens)
            assert table[number] != 0
            if slot == 0:
                self.poison(table[number], 0xDD)
            place = table[number] * self._stride + slot * size
            for rank, memory in enumerate(self.memories):
                made = self._bytes_of(rank, group, values[start:stop])
                memory[place : place + len(made)] = made
            start = stop
        return None
