"""The schedule of saves, and the pins that keep GPU blocks in place meanwhile."""

from __future__ import annotations

import collections
import dataclasses
import inspect
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pegaflow import _native
from pegaflow.vllm.handover import tail_key
from pegaflow.vllm.messages import Outcome, SaveOrder
from pegaflow.vllm.metrics import Counts
from pegaflow.vllm.requests import RequestState

log = logging.getLogger("vllm.pegaflow")

#: The time for which an idle engine continues stepping to receive the reports of its last saves.
#: Copies take milliseconds; a worker without a report for this long is stuck, and an engine must
#: not spin for it.
IDLE_LIMIT_S = 10.0
#: The time for which vLLM waits for blocks of a save before it preempts a request. A copy takes a
#: few milliseconds, a preempted request is recomputed from its first token.
FREES_LIMIT_S = 0.05


class GpuBlocks:
    """Keeps blocks of vLLM's pool in place: neither freed nor overwritten while a save reads them.

    Only a reference protects them on both model runners: one of them overwrites blocks of a
    preempted request before it informs connectors of the preemption.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        # Old releases take one sequence for each cache group.
        annotation = str(inspect.signature(pool.touch).parameters["blocks"].annotation)
        self._by_group = annotation.startswith("tuple")

    @property
    def count(self) -> int:
        return len(self._pool.blocks)

    def all_free(self) -> bool:
        """Whether no block is in use, except the null block."""
        return self._pool.get_num_free_blocks() == self.count - 1

    def pin(self, block_id: int) -> Any:
        block = self._pool.blocks[block_id]
        self._pool.touch(([block],) if self._by_group else [block])
        return block

    def holds(self, block_id: int, block_hash: bytes) -> bool:
        """Whether an unpinned block still has the contents of vLLM's ``block_hash``.

        vLLM's own cache knows: the block keeps its hash (and a group number of 4 bytes) until it is
        reallocated.
        """
        held = self._pool.blocks[block_id].block_hash
        return isinstance(held, bytes) and held[:-4] == block_hash

    def unpin(self, blocks: Sequence[Any]) -> None:
        self._pool.free_blocks(list(reversed(blocks)))

    @staticmethod
    def is_ours_alone(block: Any) -> bool:
        """Whether a pinned block becomes free as soon as it is unpinned."""
        return block.ref_cnt == 1


@dataclasses.dataclass
class _Job:
    """The blocks that one step saves."""

    number: int
    keys: list[bytes]
    block_ids: list[int]
    pinned: list[Any]
    told: list[bytes]  #: Those of the keys that KV events report.
    handed_at: float | None = None


@dataclasses.dataclass
class _Late:
    """A block of a request that has ended, which waits to be saved."""

    key: bytes
    hash: bytes  #: vLLM's hash of it.
    block_id: int
    run: Any  #: With its place in it: the data for KV events; None without them.
    index: int


class Saves:
    """From a block's completion to the last rank's report. Bound to the scheduler's thread.

    At most ``limit`` blocks are pinned. A live request's further blocks wait, since vLLM keeps them
    anyway. Those of a request that ends wait without protection: each is saved if vLLM's own cache
    still has it by then, else dropped and counted.
    """

    def __init__(
        self,
        blocks: GpuBlocks,
        *,
        limit: int,
        block_size: int,
        ranks: int,
        counts: Counts,
        clock: Callable[[], float],
        events: Any = None,
    ) -> None:
        """``events``: a BlockEvents, if saves are to be reported."""
        self.blocks = blocks
        self._limit = limit
        self._block_size = block_size
        self._ranks = ranks
        self._counts = counts
        self._clock = clock
        self._events = events
        self._next_job = 1
        self._late: collections.deque[_Late] = collections.deque()  # blocks without a live request
        self._open: _Job | None = None  # gathers until the step's plan is made
        self._jobs: dict[int, _Job] = {}
        self._partial: dict[int, Outcome] = {}
        # The keys of all jobs, and their jobs: a second copy of a block is not saved.
        self._keys: dict[bytes, int] = {}
        self._pinned = 0
        self._frees_awaited_since: float | None = None  # until a job releases its blocks

    @property
    def pinned(self) -> int:
        return self._pinned

    def keep_stepping(self) -> bool:
        """Whether an idle engine should continue stepping, to receive reports and end pins."""
        if self._open is not None or (self._late and self._pinned < self._limit):
            return True  # the next step's plan takes them
        now = self._clock()
        return any(now - (job.handed_at or now) < IDLE_LIMIT_S for job in self._jobs.values())

    def frees_soon(self) -> bool:
        """Whether a save in flight is about to release blocks that vLLM is short of.

        vLLM calls it when it has no free block, and at True leaves a request out of the step
        instead of preempting one. True for FREES_LIMIT_S at most from the first such call on,
        whatever is saved meanwhile; the end of a save restarts that time.
        """
        now = self._clock()
        # The late blocks of a request that has just ended go out with the step being planned.
        jobs = [*self._jobs.values(), *([self._open] if self._open else [])]
        if not any(self._frees(job, now) for job in jobs):
            return False
        if self._frees_awaited_since is None:
            self._frees_awaited_since = now
        if now - self._frees_awaited_since >= FREES_LIMIT_S:
            return False
        self._counts.add("pin_waits")
        return True

    def _frees(self, job: _Job, now: float) -> bool:
        if job.handed_at is not None and now - job.handed_at >= FREES_LIMIT_S:
            return False
        return any(self.blocks.is_ours_alone(block) for block in job.pinned)

    def collect(
        self, state: RequestState, table: Sequence[int], tokens: int, *, last: bool = False
    ) -> None:
        """Adds the unsaved blocks that are complete with ``tokens`` tokens.

        ``table`` are the request's blocks by index, ``last`` says that there is no later chance.
        """
        stop = min(tokens // self._block_size, len(table))
        if stop <= state.next_save:
            return
        stop = min(stop, state.chain.usable_blocks())
        first = state.next_save
        run = self._events.run(state, first, stop) if self._events and first < stop else None
        for index in range(first, stop):
            key = state.chain.key(index)
            if key in self._keys:
                state.last_job = max(state.last_job, self._keys[key])
            elif table[index] != 0:
                if self._pinned < self._limit:
                    state.last_job = self._add(key, table[index], run, index - first)
                elif not last:
                    return
                elif len(self._late) < self.blocks.count:
                    self._late.append(
                        _Late(key, state.chain.hash(index), table[index], run, index - first)
                    )
                else:
                    self._counts.add("save_dropped_blocks", 1, "pin_limit")
            state.next_save = index + 1

    def drop(self, state: RequestState, tokens: int, reason: str) -> None:
        """Counts the unsaved blocks of a request that ends."""
        stop = min(tokens // self._block_size, state.chain.usable_blocks())
        self._counts.add("save_dropped_blocks", max(0, stop - state.next_save), reason)

    def _collect_late(self) -> None:
        while self._late and self._pinned < self._limit:
            late = self._late.popleft()
            if late.key in self._keys:
                continue
            if self.blocks.holds(late.block_id, late.hash):
                self._add(late.key, late.block_id, late.run, late.index)
            else:
                self._counts.add("save_dropped_blocks", 1, "pin_limit")

    def collect_tail(self, state: RequestState, table: Sequence[int]) -> None:
        """Adds the prompt's last, partial block, once its tokens and the blocks before are
        complete.

        Nothing is written behind them while it is saved: the request generates no more.
        """
        index = state.request.num_prompt_tokens // self._block_size
        if state.next_save < index or len(table) <= index or table[index] == 0:
            return
        key = tail_key(state, self._block_size)
        if key in self._keys:
            state.last_job = max(state.last_job, self._keys[key])
        elif key and self._pinned < self._limit:
            state.last_job = self._add(key, table[index], None, 0)
        else:
            return
        state.tail_saved = True

    def _add(self, key: bytes, block_id: int, run: Any, index: int) -> int:
        """The number of the job that saves it."""
        job = self._open
        if job is None or len(job.keys) == _native.MAX_KEYS or len(job.keys[0]) != len(key):
            self._close()
            job = self._open = _Job(self._next_job, [], [], [], [])
            self._next_job += 1
        job.pinned.append(self.blocks.pin(block_id))
        if run is not None:
            self._events.offer(run, index)
            job.told.append(key)
        job.keys.append(key)
        job.block_ids.append(block_id)
        self._keys[key] = job.number
        self._pinned += 1
        return job.number

    def _close(self) -> None:
        if self._open is not None:
            self._jobs[self._open.number] = self._open
            self._open = None

    def orders(self) -> list[SaveOrder]:
        """The saves after this step; the orders still have to be handed out."""
        self._collect_late()
        self._close()
        return [
            SaveOrder(number, b"".join(job.keys), len(job.keys[0]), job.block_ids)
            for number, job in self._jobs.items()
            if job.handed_at is None
        ]

    def mark_handed_out(self, orders: Iterable[SaveOrder]) -> None:
        now = self._clock()
        for order in orders:
            self._jobs[order.job].handed_at = now
            self._counts.add("saves")

    def report(self, outcomes: dict[int, Outcome]) -> None:
        """Notes the workers' reports; a job that has ended on all ranks releases its blocks."""
        for number, outcome in outcomes.items():
            if number in self._partial:
                self._partial[number].merge(outcome)
                outcome = self._partial[number]
            if outcome.ranks < self._ranks:
                self._partial[number] = outcome
                continue
            self._partial.pop(number, None)
            job = self._jobs.pop(number, None)
            if job is None:
                log.error("pegaflow: report for unknown save job %d", number)
                continue
            self._release(job)
            self._counts.add("saved_blocks", outcome.blocks)
            self._counts.add("saved_bytes", outcome.bytes)
            self._counts.add("save_skipped_blocks", outcome.skipped)
            self._counts.add("save_failed_blocks", outcome.failed, outcome.error or "unknown")
            if job.handed_at is not None:
                self._counts.observe("save_seconds", self._clock() - job.handed_at)

    def give_up(self) -> dict[int, list[Any]]:
        """Drops the jobs that no worker has; returns the pins of the other jobs, by number."""
        self.drop_unsent("off")
        return {number: job.pinned for number, job in self._jobs.items()}

    def drop_unsent(self, reason: str) -> None:
        """Drops the jobs that no worker has yet."""
        self._counts.add("save_dropped_blocks", len(self._late), reason)
        self._late.clear()
        self._close()
        for number in [n for n, job in self._jobs.items() if job.handed_at is None]:
            job = self._jobs.pop(number)
            self._counts.add("save_dropped_blocks", len(job.keys), reason)
            self._release(job)

    def _release(self, job: _Job) -> None:
        for key in job.keys:
            del self._keys[key]
        self._pinned -= len(job.pinned)
        self._frees_awaited_since = None
        if self._events is not None:
            self._events.conclude(job.told)
        self.blocks.unpin(job.pinned)
