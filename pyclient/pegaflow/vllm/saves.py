"""The schedule of saves, and the pins that keep GPU blocks in place meanwhile."""

from __future__ import annotations

import collections
import dataclasses
import inspect
import logging
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

from pegaflow import _native
from pegaflow.vllm.messages import Outcome, SaveOrder
from pegaflow.vllm.metrics import Counts

log = logging.getLogger("vllm.pegaflow")

#: The time for which an idle engine continues stepping to receive the reports of its last saves.
#: Copies take milliseconds; a worker without a report for this long is stuck, and an engine must
#: not spin for it.
IDLE_LIMIT_S = 10.0
#: The time for which vLLM waits for blocks of a save before it preempts a request. A copy takes a
#: few milliseconds, a preempted request is recomputed from its first token.
FREES_LIMIT_S = 0.05
#: The number of offered states without one at the end of a block, after which a warning is logged.
FIRST_STATES = 16


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

    def hold(self, block_ids: Sequence[int], block_hash: bytes, groups: Sequence[int] = ()) -> bool:
        """Whether unpinned blocks still have the contents of vLLM's ``block_hash``.

        ``groups`` are the cache groups of the blocks; empty: there is only one. vLLM's own cache
        knows: the block keeps its hash and the number of its group (4 bytes) until it is
        reallocated. The same tokens may then get it for another group, whose layers have other
        bytes.
        """
        held = [self._pool.blocks[block_id].block_hash for block_id in block_ids]
        if not all(isinstance(one, bytes) and one[:-4] == block_hash for one in held):
            return False
        return not groups or [int.from_bytes(one[-4:], "big") for one in held] == list(groups)

    def unpin(self, blocks: Sequence[Any]) -> None:
        self._pool.free_blocks(list(reversed(blocks)))

    @staticmethod
    def is_ours_alone(block: Any) -> bool:
        """Whether a pinned block becomes free as soon as it is unpinned."""
        return block.ref_cnt == 1


@dataclasses.dataclass
class _Job:
    """The blocks of one kind that one step saves."""

    number: int
    kind: int
    keys: list[bytes] = dataclasses.field(default_factory=list)
    depths: bytearray = dataclasses.field(default_factory=bytearray)  #: See SaveOrder.
    block_ids: list[int] = dataclasses.field(default_factory=list)
    pinned: list[Any] = dataclasses.field(default_factory=list)
    #: The names of those that KV events report.
    told: list[bytes] = dataclasses.field(default_factory=list)
    handed_at: float | None = None


@dataclasses.dataclass(frozen=True)
class Late:
    """A block of a request that has ended, which waits to be saved."""

    key: bytes
    hash: bytes  #: vLLM's hash of it.
    ids: tuple[int, ...]  #: vLLM's blocks: one of each member of the kind.
    run: Any  #: With its place in it: the data for KV events; None without them.
    index: int
    before: int  #: The blocks of its kind before it in its prompt.
    kind: int = 0
    groups: tuple[int, ...] = ()  #: vLLM's cache groups of the blocks; empty: there is only one.


class Saves:
    """From a block's completion to the last rank's report. Bound to the scheduler's thread.

    At most ``limit`` blocks are pinned. A live request's further blocks wait, since vLLM keeps them
    anyway. Those of a request that ends wait without protection: each is saved if vLLM's own cache
    still has it by then, else dropped and counted. The blocks of a prompt that another engine waits
    for are pinned up to ``handover_limit`` instead: it would wait for a step of this engine, or
    compute what is saved late.

    A server whose eviction policy refuses saves may refuse these, unless this engine hands prompts
    over to others, which wait for their blocks.
    """

    def __init__(
        self,
        blocks: GpuBlocks,
        *,
        limit: int,
        handover_limit: int,
        ranks: int,
        counts: Counts,
        clock: Callable[[], float],
        events: Any = None,
        labels: Sequence[str] = ("full",),
        undrafted: Container[int] = (),
    ) -> None:
        """``events``: a BlockEvents, if saves are to be reported. ``labels``: those of the kinds,
        for metrics. ``undrafted``: blocks without draft KV.
        """
        self.blocks = blocks
        #: Set with the first request for a handover, and for good: a later prompt may wait for a
        #: block that a job of another request saves.
        self.hands_over = False
        self._limit = limit
        self._handover_limit = max(limit, handover_limit)
        self._labels = labels
        self._undrafted = undrafted
        self._ranks = ranks
        self._counts = counts
        self._clock = clock
        self._events = events
        self._next_job = 1
        self._late: collections.deque[Late] = collections.deque()  # blocks without a live request
        # By kind: gathers until the step's plan is made.
        self._open: dict[int, _Job] = {}
        self._jobs: dict[int, _Job] = {}
        self._partial: dict[int, Outcome] = {}
        # By kind, the keys of all jobs, and their jobs: a second copy of a block is not saved.
        self._keys: list[dict[bytes, int]] = [{} for _ in labels]
        self._pinned = 0
        self._frees_awaited_since: float | None = None  # until a job releases its blocks
        #: States that vLLM has offered inside of a block, and at the end of one.
        self.states_inside, self.states_at_end = 0, 0

    @property
    def pinned(self) -> int:
        return self._pinned

    @property
    def room(self) -> int:
        """The number of blocks that may be pinned now."""
        return self._limit - self._pinned

    @property
    def handover_room(self) -> int:
        """The same for blocks of a prompt that another engine waits for."""
        return self._handover_limit - self._pinned

    def ends_a_block(self, tokens: int, block_tokens: int) -> bool:
        """Whether a state that vLLM offers after ``tokens`` can be saved: no others have a key."""
        if tokens % block_tokens == 0:
            self.states_at_end += 1
            return True
        self.states_inside += 1
        if self.states_inside == FIRST_STATES and not self.states_at_end:
            log.warning(
                "pegaflow: no state of this model is saved: vLLM offers states after numbers of "
                "tokens, such as %d, that are no multiple of a block's %d; start vLLM with "
                "--block-size %d",
                tokens,
                block_tokens,
                block_tokens,
            )
        return False

    def keep_stepping(self) -> bool:
        """Whether an idle engine should continue stepping, to receive reports and end pins."""
        if self._open or self._has_room_for_late():
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
        jobs = [*self._jobs.values(), *self._open.values()]
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

    def run(self, kind: int, request: Any, names: Any, first: int, stop: int) -> Any:
        """The data of these blocks for KV events; None without them."""
        if self._events is None:
            return None
        return self._events.run(kind, request, names, first, stop)

    def job_with(self, key: bytes, kind: int = 0) -> int:
        """The number of the job that saves this block; 0: none does."""
        return self._keys[kind].get(key, 0)

    def dropped(self, blocks: int, reason: str) -> None:
        """Counts blocks that are not saved."""
        self._counts.add("save_dropped_blocks", blocks, reason)

    def wait(self, late: Late) -> None:
        """Saves a block of a request that ends as soon as there is room."""
        if len(self._late) < self.blocks.count:
            self._late.append(late)
        else:
            self.dropped(1, "pin_limit")

    def _has_room_for_late(self) -> bool:
        return bool(self._late) and len(self._late[0].ids) <= self.room

    def _collect_late(self) -> None:
        while self._has_room_for_late():
            late = self._late.popleft()
            if self.job_with(late.key, late.kind):
                continue
            if self._hold(late):
                self.add(
                    late.key, late.ids, late.run, late.index, before=late.before, kind=late.kind
                )
            else:
                self.dropped(1, "pin_limit")

    def _hold(self, late: Late) -> bool:
        """Whether vLLM's blocks still are what they were when the request ended."""
        if any(block_id in self._undrafted for block_id in late.ids):
            return False  # reallocated to the same tokens, in a step without drafts
        return self.blocks.hold(late.ids, late.hash, late.groups)

    def add(
        self,
        key: bytes,
        ids: Sequence[int],
        run: Any = None,
        index: int = 0,
        *,
        before: int,
        kind: int = 0,
    ) -> int:
        """Saves a block with the next step; the number of its job.

        ``ids`` are one of vLLM's blocks of each member of the kind, ``index`` is the block's place
        in ``run``, ``before`` the number of blocks of its kind before it in its prompt.
        """
        job = self._open.get(kind)
        if job is None or len(job.keys) == _native.MAX_KEYS or len(job.keys[0]) != len(key):
            self._close(kind)
            job = self._open[kind] = _Job(self._next_job, kind)
            self._next_job += 1
        job.pinned += [self.blocks.pin(block_id) for block_id in ids]
        if run is not None:
            job.told.append(self._events.offer(run, index))
        job.keys.append(key)
        job.depths.append((before + 1).bit_length())
        job.block_ids += ids
        self._keys[kind][key] = job.number
        self._pinned += len(ids)
        return job.number

    def _close(self, kind: int) -> None:
        if job := self._open.pop(kind, None):
            self._jobs[job.number] = job

    def _close_all(self) -> None:
        for kind in list(self._open):
            self._close(kind)

    def orders(self) -> list[SaveOrder]:
        """The saves after this step; the orders still have to be handed out."""
        self._collect_late()
        self._close_all()
        return [
            SaveOrder(
                job.number,
                b"".join(job.keys),
                len(job.keys[0]),
                job.block_ids,
                kind=job.kind,
                depths=bytes(job.depths),
                may_refuse=not self.hands_over,
            )
            # Job numbers rise within a scheduler.
            for job in sorted(self._jobs.values(), key=lambda job: job.number)
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
            self._counts.add("saved_blocks", outcome.blocks, self._labels[job.kind])
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
        self._close_all()
        for number in [n for n, job in self._jobs.items() if job.handed_at is None]:
            job = self._jobs.pop(number)
            self._counts.add("save_dropped_blocks", len(job.keys), reason)
            self._release(job)

    def _release(self, job: _Job) -> None:
        for key in job.keys:
            del self._keys[job.kind][key]
        self._pinned -= len(job.pinned)
        self._frees_awaited_since = None
        if self._events is not None:
            self._events.conclude(job.told)
        self.blocks.unpin(job.pinned)
