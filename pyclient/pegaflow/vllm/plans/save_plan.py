"""Which blocks of a request are saved, and when, where a model has several kinds of blocks.

Blocks of the prefix kind are saved one after another, as soon as they are complete. Those of
windows and chunks are worth their room only in front of a boundary at which some later request
continues, and vLLM frees them when the window has passed. So they are saved in the step that
completes them, in front of these boundaries:

- the prompt's end, for the same prompt and for a longer one;
- where a shared prefix ends (``Request.shared_prefix_boundary``);
- each ``pegaflow.window_interval`` tokens, for branches that vLLM does not know of;
- the end of the request, for the next turn of its conversation;
- the end of a hit of vLLM's own cache that this cache cannot restore.

States exist at no other boundaries than those that vLLM offers in the step that computes them; then
windows are saved in front of these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from pegaflow.engine.kinds import BlockKind, BlockKinds, KindRule
from pegaflow.vllm.kinds import saved_blocks


class Storable(NamedTuple):
    """One block of a kind, complete when the step's forward pass has ended."""

    kind: int  #: Its index in BlockKinds.
    block: int  #: Its number in the prompt.
    ids: tuple[int, ...]  #: vLLM's blocks: one of each member.


@dataclasses.dataclass(frozen=True)
class SaveRules:
    """What an engine's requests have in common. Immutable."""

    kinds: BlockKinds
    specs: tuple[Any, ...]  #: vLLM's spec of each kind's first member.
    interval_tokens: int = 0  #: A boundary for windows each so many tokens; 0: none.

    @classmethod
    def of(cls, kinds: BlockKinds, kv_cache_config: Any, window_interval: int) -> SaveRules:
        """``window_interval`` is rounded up to the alignment."""
        groups = kv_cache_config.kv_cache_groups
        specs = (groups[kind.members[0]].kv_cache_spec for kind in kinds.kinds)
        has_states = any(kind.rule == KindRule.STATE for kind in kinds.kinds)
        unit = kinds.alignment_tokens
        interval = 0 if has_states else -(-window_interval // unit) * unit
        return cls(kinds, tuple(_one_layer(spec) for spec in specs), interval)

    @property
    def has_states(self) -> bool:
        return any(kind.rule == KindRule.STATE for kind in self.kinds.kinds)


def _one_layer(spec: Any) -> Any:
    by_layer = getattr(spec, "kv_cache_specs", None)
    return next(iter(by_layer.values())) if by_layer else spec


class SavePlan:
    """The saves of one request. Bound to the scheduler's thread.

    It grows with the request's blocks: one number for each saved block of a window or chunk. All
    calls take ``usable_units``, the number of the prompt's units that have a key by now, and
    ``room``, the number of vLLM's blocks that may still be pinned. Blocks of the prefix kind wait
    for room, because vLLM keeps them; all others are dropped without it, and so come first.
    """

    def __init__(self, rules: SaveRules, prompt_tokens: int) -> None:
        self._rules = rules
        self._kinds = rules.kinds
        self._prompt_tokens = prompt_tokens
        # Boundaries beside the prompt's end and the interval: of the last admission, and others.
        self._admitted: tuple[int, ...] = ()
        self._extra: set[int] = set()
        # By kind: the blocks before this one were decided.
        self._next = [0] * len(self._kinds.kinds)
        self._saved: list[set[int]] = [set() for _ in self._kinds.kinds]
        # By kind: the blocks that found no room. A later step, or the end, may still save them.
        self._without_room: list[set[int]] = [set() for _ in self._kinds.kinds]
        self._smallest = min(kind.block_tokens for kind in self._kinds.kinds)
        self._seen = 0  # tokens, rounded to the smallest block, that were looked at

    # ---- what becomes of the request

    def admit(self, local_tokens: int, known_tokens: int, junction: int = 0) -> None:
        """vLLM starts the request, or starts it again, behind its own hit of ``local_tokens``.

        ``known_tokens`` is the longest prefix that the cache can restore, ``junction`` the
        request's shared_prefix_boundary. The last call counts, if vLLM admits the request later.
        """
        own = local_tokens if local_tokens > known_tokens and not self._rules.has_states else 0
        self._admitted = (junction, own)
        for index, kind in enumerate(self._kinds.kinds):
            if kind.rule != KindRule.PREFIX:
                # Its table starts over; blocks before the hit's window are not in it.
                self._next[index] = kind.needed(local_tokens).first
            else:
                self._next[index] = max(self._next[index], known_tokens // kind.block_tokens)
        self._seen = 0

    def loaded(self, tokens: int) -> None:
        """The prefix of ``tokens`` has come from the cache."""
        for index, kind in enumerate(self._kinds.kinds):
            self._next[index] = max(self._next[index], tokens // kind.block_tokens)

    def load_failed(self, local_tokens: int) -> None:
        """vLLM computes the prompt from ``local_tokens`` on, and the cache may have lost it."""
        for index, kind in enumerate(self._kinds.kinds):
            blocks = local_tokens // kind.block_tokens
            self._next[index] = min(self._next[index], blocks)
            self._saved[index] = {number for number in self._saved[index] if number < blocks}
        self._seen = 0

    def forget(self) -> None:
        """The cache has none of the blocks that it was given."""
        self._next = [0] * len(self._kinds.kinds)
        self._saved = [set() for _ in self._kinds.kinds]
        self._without_room = [set() for _ in self._kinds.kinds]
        self._seen = 0

    def saved_tokens(self) -> int:
        """The tokens of the prefix kind's leading blocks that were saved or need not be."""
        prefix = self._kinds.kinds[0]
        if prefix.rule != KindRule.PREFIX:
            return 0
        return self._next[0] * prefix.block_tokens

    # ---- what is saved

    def has_work(self, tokens: int) -> bool:
        """Whether ``tokens`` complete blocks that no step has looked at. Cheap, for each step."""
        return tokens // self._smallest * self._smallest > self._seen

    def step(
        self,
        tables: Sequence[Sequence[int]],
        tokens: int,
        usable_units: int,
        room: int,
        offers: Iterable[tuple[int, int, int]] = (),
    ) -> list[Storable]:
        """The blocks to save after the step that completes ``tokens`` tokens.

        ``tables`` has the blocks of each of vLLM's groups by position, 0 for none. ``offers`` are
        the request's of this step: (group, block id, tokens). They are valid in this call only.
        """
        tokens = min(tokens, usable_units * self._kinds.unit_tokens)
        states = self._states(offers, tokens, room)
        room -= sum(len(one.ids) for one in states)
        if not self.has_work(tokens) and not states:
            return states
        found = states + self._windows(tables, tokens, room)
        room -= sum(len(one.ids) for one in found[len(states) :])
        complete, prefix = self._prefix(tables, tokens, room)
        if complete:
            self._seen = tokens // self._smallest * self._smallest
        return found + prefix

    def finish(
        self, tables: Sequence[Sequence[int]], tokens: int, usable_units: int, room: int
    ) -> tuple[list[Storable], list[Storable]]:
        """The last blocks, those in front of the request's end included; and those of the prefix
        kind that found no room.
        """
        tokens = min(tokens, usable_units * self._kinds.unit_tokens)
        if not tables:
            return [], []  # it was never admitted
        if not self._rules.has_states:
            self._extra.add(self._kinds.aligned(tokens))
            for index, kind in enumerate(self._kinds.kinds):
                if kind.rule != KindRule.PREFIX:
                    # Those that were passed over when no boundary was known behind them.
                    first = kind.needed(self._kinds.aligned(tokens)).first
                    self._next[index] = min(self._next[index], first)
        found = self._windows(tables, tokens, room)
        room -= sum(len(one.ids) for one in found)
        _, prefix = self._prefix(tables, tokens, room)
        _, late = self._prefix(tables, tokens, 1 << 62)
        return found + prefix, late

    def dropped(self) -> int:
        """The number of the cache's blocks that have found no room so far."""
        return sum(len(numbers) for numbers in self._without_room)

    def _prefix(
        self, tables: Sequence[Sequence[int]], tokens: int, room: int
    ) -> tuple[bool, list[Storable]]:
        """The next blocks of the prefix kind, and whether none is left for lack of room."""
        found: list[Storable] = []
        kind = self._kinds.kinds[0]
        if kind.rule != KindRule.PREFIX:
            return True, found
        stop = min(tokens // kind.block_tokens, *(len(tables[group]) for group in kind.members))
        while self._next[0] < stop:
            number = self._next[0]
            ids = tuple(tables[group][number] for group in kind.members)
            if 0 not in ids:
                if len(ids) > room:
                    return False, found
                room -= len(ids)
                found.append(Storable(0, number, ids))
            self._next[0] = number + 1
        return True, found

    def _windows(self, tables: Sequence[Sequence[int]], tokens: int, room: int) -> list[Storable]:
        found: list[Storable] = []
        for index, kind in enumerate(self._kinds.kinds):
            if kind.rule not in (KindRule.TRAILING, KindRule.CHUNK):
                continue
            first, stop = self._next[index], tokens // kind.block_tokens
            if stop <= first:
                continue
            mask = saved_blocks(
                kind,
                self._rules.specs[index],
                first,
                stop,
                self._kinds.alignment_tokens,
                self._boundaries(kind, first, stop),
            )
            for number in (first + i for i, wanted in enumerate(mask) if wanted):
                ids = self._ids(kind, tables, number)
                if not ids or number in self._saved[index]:
                    continue
                if len(ids) > room:
                    self._without_room[index].add(number)
                    continue
                room -= len(ids)
                self._note_saved(index, number)
                found.append(Storable(index, number, ids))
            self._next[index] = stop
        return found

    def _note_saved(self, index: int, number: int) -> None:
        self._saved[index].add(number)
        self._without_room[index].discard(number)

    def _ids(
        self, kind: BlockKind, tables: Sequence[Sequence[int]], number: int
    ) -> tuple[int, ...]:
        """The blocks of all members, or none of them."""
        if any(number >= len(tables[group]) for group in kind.members):
            return ()
        ids = tuple(tables[group][number] for group in kind.members)
        return () if 0 in ids else ids

    def _boundaries(self, kind: BlockKind, first: int, stop: int) -> list[int]:
        """The boundaries that may need one of the blocks ``first`` to ``stop`` - 1."""
        begin = first * kind.block_tokens
        # A boundary farther behind them needs none of them.
        end = stop * kind.block_tokens + kind.tokens + self._kinds.alignment_tokens
        known = {self._prompt_tokens - 1, self._prompt_tokens, *self._admitted, *self._extra}
        found = {boundary for boundary in known if begin < boundary <= end}
        if interval := self._rules.interval_tokens:
            found.update(range((begin // interval + 1) * interval, end + 1, interval))
        return sorted(found)

    def _states(
        self, offers: Iterable[tuple[int, int, int]], tokens: int, room: int
    ) -> list[Storable]:
        """The states that vLLM offers at a block's end, if it does so for all members."""
        by_boundary: dict[int, dict[int, int]] = {}
        for group, block_id, boundary in offers:
            if block_id != 0 and 0 < boundary <= tokens:
                by_boundary.setdefault(boundary, {})[group] = block_id
        found: list[Storable] = []
        for boundary, by_group in sorted(by_boundary.items()):
            if boundary % self._kinds.alignment_tokens != 0:
                continue  # inside of a block: its key would be that of no block
            for index, kind in enumerate(self._kinds.kinds):
                number = boundary // kind.block_tokens - 1
                whole = all(group in by_group for group in kind.members)
                if kind.rule != KindRule.STATE or not whole or number in self._saved[index]:
                    continue
                if len(kind.members) > room:
                    self._without_room[index].add(number)
                    continue
                room -= len(kind.members)
                self._note_saved(index, number)
                self._extra.add(boundary)
                found.append(
                    Storable(index, number, tuple(by_group[group] for group in kind.members))
                )
        return found
