"""The jobs of a linker: loads in batches, saves in order. Bound to the scheduler's thread.

Every job ends by the mover's own deadlines, whatever the server does.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import select
from collections.abc import Callable, Sequence
from typing import Any

from pegaflow import _native


@dataclasses.dataclass
class Batch:
    """The loads that one forward pass waits for."""

    pending: set[int] = dataclasses.field(default_factory=set)
    followed: set[int] = dataclasses.field(default_factory=set)
    failed: bool = False
    tokens: list[bytes] = dataclasses.field(default_factory=list)  #: Claims to end.


@dataclasses.dataclass
class _Offload:
    pending: set[int] = dataclasses.field(default_factory=set)
    good: bool = True


#: (kind, keys back to back, pages of the engine)
Part = tuple[int, bytes, Sequence[int]]


class Transfers:
    """Starts jobs of a mover and collects their reports."""

    def __init__(self, mover: Any, key_bytes: int) -> None:
        self._mover = mover
        self._key_bytes = key_bytes
        self._scheduler = _native.random_id()
        self._numbers = itertools.count(1)
        self._batches: dict[int, Batch] = {}
        self._batch_of: dict[int, Batch] = {}
        self._next_batch = 0
        self._offloads: collections.deque[_Offload] = collections.deque()
        self._offload_of: dict[int, _Offload] = {}

    # ---- loads

    def begin(self) -> tuple[int, Batch]:
        """A new batch and its index."""
        index, self._next_batch = self._next_batch, self._next_batch + 1
        batch = self._batches[index] = Batch()
        return index, batch

    def load(self, batch: Batch, start: Callable[[int], None]) -> None:
        """Adds a load to a batch; ``start`` gives the mover the job with this number."""
        number = next(self._numbers)
        try:
            start(number)
        except _native.PegaFlowError:
            batch.failed = True
            return
        batch.pending.add(number)
        self._batch_of[number] = batch

    def batch(self, index: int) -> Batch | None:
        return self._batches.get(index)

    def wait(self, batch: Batch) -> None:
        """Returns when no copy of the batch is in flight."""
        while batch.pending:
            self._collect(None)

    def order(self, batch: Batch, queue: int) -> None:
        """Work on the GPU's ``queue`` from here on waits for the batch's copies, on the device."""
        while batch.pending - batch.followed:
            followed = self._mover.follow(60.0, queue)
            for one in followed:
                if (owner := self._batch_of.get(one.load)) is not None:
                    owner.followed.add(one.load)
            if batch.pending - batch.followed:
                self._collect(1)

    def finish(self, index: int) -> tuple[bool, list[bytes]]:
        """Whether all pages of a batch were loaded, and the claims to end; waits for it."""
        batch = self._batches.pop(index, None)
        if batch is None:
            return True, []
        self.wait(batch)
        return not batch.failed, batch.tokens

    # ---- saves

    def save(self, parts: Sequence[Part], queue: int) -> bool:
        """Saves pages of several pools; its result comes after those of earlier calls.

        Returns:
            False if nothing was started.
        """
        offload = _Offload()
        for kind, keys, pages in parts:
            number = next(self._numbers)
            try:
                self._mover.save(self._scheduler, number, keys, self._key_bytes, pages, queue, kind)
            except _native.PegaFlowError:
                offload.good = False
                if not offload.pending:
                    return False
                break
            offload.pending.add(number)
            self._offload_of[number] = offload
        self._offloads.append(offload)
        return True

    def saved_elsewhere(self) -> None:
        """The next result is that of pages that another rank saves."""
        self._offloads.append(_Offload())

    def completed_saves(self) -> int:
        """How many results can be taken."""
        self._collect(0)
        return sum(1 for _ in itertools.takewhile(lambda one: not one.pending, self._offloads))

    def take_save(self) -> bool:
        """The oldest result."""
        return self._offloads.popleft().good

    # ---- both

    def quiesce(self) -> list[bytes]:
        """Ends all jobs and forgets their results; the claims to end."""
        for number in self._batch_of:
            self._mover.cancel_load(number)
        while self._batch_of or self._offload_of:
            self._collect(None)
        tokens = [token for batch in self._batches.values() for token in batch.tokens]
        self._batches.clear()
        self._offloads.clear()
        return tokens

    def _collect(self, timeout_ms: int | None) -> None:
        """Takes reports, after waiting for one at most ``timeout_ms``; None: without a limit."""
        if timeout_ms != 0:
            poll = select.poll()
            poll.register(self._mover.finished_fd(), select.POLLIN)
            poll.poll(timeout_ms)
        for done in self._mover.take_finished():
            bad = done.error is not None or bool(done.failed_blocks)
            if done.kind == "load":
                if (batch := self._batch_of.pop(done.id, None)) is not None:
                    batch.pending.discard(done.id)
                    batch.failed |= bad
            elif (offload := self._offload_of.pop(done.id, None)) is not None:
                offload.pending.discard(done.id)
                offload.good &= not bad
