"""Reports to vLLM's event consumers, mostly routers, which blocks the cache has.

An engine reports each block that it saved or loaded, once the cache has it, and again when that
block is gone. The source is the server's journal, in which seals and evictions are recorded in the
order in which they happened; so reports of workers, claims and evictions may overtake each other.
docs/kv_events.md describes the consumer's view.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pegaflow import _native
from pegaflow.vllm.metrics import Counts
from pegaflow.vllm.saves import IDLE_LIMIT_S

#: The interval of reading the journal, and the one while stored blocks wait to be reported.
READ_INTERVAL_S = 0.1
URGENT_INTERVAL_S = 0.01
#: A cache that has not responded for this long cannot be loaded from.
UNREACHABLE_S = 5.0
#: The number of hashes in one event that withdraws reported blocks.
BATCH = 4096
#: The attribute of vLLM's block pool with the events of a step.
QUEUE = "kv_event_queue"
#: The journal's keys, shorter ones padded with zeros.
KEY_BYTES = 32


def _name(key: bytes, kind: int = 0) -> bytes:
    """A block's name here: its key in the journal, and its kind. Kinds have equal keys."""
    return key.ljust(KEY_BYTES, b"\0") + bytes((kind,))


@dataclasses.dataclass(eq=False)
class _Block:
    """A block that is being saved or claimed: the data of its event, and whether to send it."""

    run: Any
    index: int
    waiting: int = 0  #: Its pending saves and claims.
    is_there: bool = False


class BlockEvents:
    """Bound to the scheduler's thread; no call waits.

    Saves and claims offer() blocks before they call the server and conclude() them when they have
    ended. A concluded block is reported by the first reading of the journal that began afterwards.
    """

    def __init__(
        self,
        session: Any,
        events: Any,
        *,
        counts: Counts,
        clock: Callable[[], float],
        of_kinds: bool = False,
    ) -> None:
        """``events`` is an EventFormat; ``of_kinds``: the journal states the kind of each block."""
        self._take_journal = session.take_journal_of_kinds if of_kinds else session.take_journal
        self._session = session
        self._format = events
        self._counts = counts
        self._clock = clock
        self._blocks: dict[bytes, _Block] = {}
        self._concluded: collections.deque[tuple[int, Sequence[bytes]]] = collections.deque()
        self._reported: dict[bytes, bytes] = {}  # vLLM's hash of each block
        self._events: list[Any] = []
        self._space = 0
        self._position: int = _native.JOURNAL_END
        self._ticket: int | None = None
        self._reading = 0  # the number of readings begun
        self._asked_at: float | None = None
        self._more = False
        self._failing_since: float | None = None
        self._concluded_at = 0.0
        self._pool: Any = None
        self.paused = False  #: While the server has not confirmed a reset.

    # ---- what saves and claims do

    def run(self, kind: int, request: Any, names: Any, first: int, stop: int) -> Any:
        """The data of these blocks of a request for events."""
        return self._format.run(kind, request, names, first, stop)

    def offer(self, run: Any, index: int) -> bytes:
        """Begins a save or a claim of this block of a run; conclude() must follow with the returned
        name.
        """
        name = _name(run.keys[index], run.kind)
        block = self._blocks.get(name)
        if block is None:
            block = self._blocks[name] = _Block(run, index)
        block.waiting += 1
        return name

    def offer_unreported(
        self, request: Any, claimable: Iterable[tuple[int, Any, int, int]]
    ) -> Sequence[bytes]:
        """The same for the blocks of a claim; reported blocks need no event.

        ``claimable``: their kind, its keys (a KeyChain or KeysOfKind), the first block, and the one
        after the last.
        """
        self.begin_step()  # the scheduler claims before it makes the step's plan
        offered: list[bytes] = []
        for kind, names, first, stop in claimable:
            keys = names.keys(first, stop)
            news = [i for i, key in enumerate(keys) if _name(key, kind) not in self._reported]
            if news:
                run = self.run(kind, request, names, first + news[0], stop)
                offered += [self.offer(run, i - news[0]) for i in news]
        return offered

    def conclude(self, names: Sequence[bytes]) -> None:
        """Ends saves or claims, successful or not; in the order of their chain."""
        if names:
            self._concluded.append((self._reading + 1, names))
            self._concluded_at = self._clock()

    # ---- a step

    def bind_pool(self, pool: Any) -> None:
        """vLLM's block pool, which has events of its own."""
        self._pool = pool

    def begin_step(self) -> None:
        """Called before vLLM publishes the events since the last step.

        AllBlocksCleared reports that vLLM has emptied its own cache, and a consumer then also
        forgets the blocks of this cache. So reports start over: a block is reported again once a
        client requests it.
        """
        if any(self._format.clears_all(event) for event in getattr(self._pool, QUEUE, ())):
            self._take_back()

    def listen(self) -> None:
        """Starts the journal, if it has not been started: before an engine's first claim."""
        if self._position == _native.JOURNAL_END:
            self._turn()

    def take(self) -> list[Any]:
        """The events since the last call."""
        self._turn()
        events, self._events = self._events, []
        return events

    def keep_stepping(self) -> bool:
        """Whether an idle engine should continue stepping, because blocks wait to be reported."""
        if self.paused or self._failing_since is not None:
            return False
        return bool(self._concluded) and self._clock() - self._concluded_at < IDLE_LIMIT_S

    def reset(self) -> None:
        """Nothing that was stored before is ever found again."""
        self._forget_answer()
        self._lost()

    def give_up(self) -> list[Any]:
        """Withdraws all reported blocks: the cache is off."""
        self._take_back()
        events, self._events = self._events, []
        return events

    # ---- the journal

    def _turn(self) -> None:
        now = self._clock()
        if self._ticket is not None:
            self._take_answer(now)
        if self._ticket is not None or self.paused or not self._is_due(now):
            return
        try:
            self._ticket = self._session.journal(self._space, self._position)
        except _native.PegaFlowError:
            self._failed(now)
        else:
            self._reading += 1
        self._asked_at = now

    def _is_due(self, now: float) -> bool:
        if self._asked_at is None or self._more:
            return True
        return now - self._asked_at >= (URGENT_INTERVAL_S if self._concluded else READ_INTERVAL_S)

    def _take_answer(self, now: float) -> None:
        try:
            answer = self._take_journal(self._ticket, 0.0)
        except _native.PegaFlowError:
            self._ticket = None
            self._failed(now)
            return
        if answer is None:
            return
        self._ticket = None
        self._failing_since = None
        self._space, self._position, lost, self._more, said = answer
        if lost:
            self._lost()
        self._hear((_name(key, *kind), is_there) for key, is_there, *kind in said)
        while not self._more and self._concluded and self._concluded[0][0] <= self._reading:
            self._report(self._concluded.popleft()[1])

    def _failed(self, now: float) -> None:
        """The next reading continues here, whichever server answers it."""
        if self._failing_since is None:
            self._failing_since = now
        elif now - self._failing_since >= UNREACHABLE_S:
            self._take_back()

    def _forget_answer(self) -> None:
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            self._session.forget(ticket)

    def _hear(self, said: Iterable[tuple[bytes, bool]]) -> None:
        removed = {}
        for name, is_there in said:
            if block := self._blocks.get(name):
                block.is_there = is_there
            if not is_there and (block_hash := self._reported.pop(name, b"")):
                removed[name] = block_hash
        self._removed(removed)

    def _report(self, names: Sequence[bytes]) -> None:
        """The concluded blocks that are present, one event for each run without a gap."""
        run, first, stop = None, 0, 0
        for name in names:
            block = self._blocks[name]
            block.waiting -= 1
            if block.waiting == 0:
                del self._blocks[name]
            if not block.is_there or name in self._reported:
                continue
            self._reported[name] = block.run.hashes[block.index]
            if block.run is not run or block.index != stop:
                self._stored(run, first, stop)
                run, first = block.run, block.index
            stop = block.index + 1
        self._stored(run, first, stop)

    def _stored(self, run: Any, first: int, stop: int) -> None:
        if run is not None:
            self._events.append(self._format.stored(run, first, stop))
            self._counts.add("event_stored_blocks", stop - first)

    def _removed(self, blocks: Mapping[bytes, bytes]) -> None:
        """``blocks``: vLLM's hashes of blocks, by name."""
        by_kind: dict[int, list[bytes]] = {}
        for name, block_hash in blocks.items():
            by_kind.setdefault(name[-1], []).append(block_hash)
        for kind, hashes in sorted(by_kind.items()):
            for first in range(0, len(hashes), BATCH):
                self._events.append(self._format.removed(kind, hashes[first : first + BATCH]))
        self._counts.add("event_removed_blocks", len(blocks))

    def _lost(self) -> None:
        """Discards all earlier entries of the journal."""
        for block in self._blocks.values():
            block.is_there = False
        self._take_back()

    def _take_back(self) -> None:
        """Reports each reported block as removed.

        Not AllBlocksCleared, which would take vLLM's own blocks with it.
        """
        reported, self._reported = self._reported, {}
        self._counts.add("event_take_backs", bool(reported))
        self._removed(reported)
