"""The connector inside a worker: registers its KV cache and runs the jobs of a step's plan."""

from __future__ import annotations

import dataclasses
import logging
import select
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pegaflow import _native
from pegaflow.engine.errors import error_code
from pegaflow.vllm.arrivals import ARRIVALS
from pegaflow.vllm.computed import Computed
from pegaflow.vllm.messages import LoadOrder, Outcome, SaveOrder, StepPlan, WorkerReport
from pegaflow.vllm.metrics import Counts

log = logging.getLogger("vllm.pegaflow")

#: The time that jobs have to end by themselves before vLLM unmaps the KV cache. Then the mover is
#: closed, which waits for the copies and for no server.
UNMAP_PATIENCE_S = 5.0


@dataclasses.dataclass
class _Job:
    """An accepted load, until the mover has reported it."""

    order: LoadOrder
    discarded: bool = False
    followed: bool = False  # completed early: vLLM's later work waits for its rest on the GPU


@dataclasses.dataclass
class _Parts:
    """The parts of a chunked load that this rank was ordered."""

    open: set[int] = dataclasses.field(default_factory=set)  # not reported yet
    blocks: set[int] = dataclasses.field(default_factory=set)  # vLLM's, of all of them
    is_last: bool = False  # no further one follows


def _failed_blocks(job: _Job, done: Any) -> set[int]:
    """vLLM's blocks that a load has not brought; in doubt all of them."""
    order, failed = job.order, set(done.failed_blocks)
    if order.ranges:
        in_doubt = bool(failed or done.error) or done.blocks != order.count
    else:
        in_doubt = len(order.blocks) - len(failed) != done.blocks
    return set(order.blocks) if job.discarded or in_doubt else failed


class Reports:
    """The reports of a step: ended loads to vLLM, the outcomes of jobs to the scheduler's side.

    Each report is taken exactly once. With one cache group of full attention vLLM learns which
    blocks have failed, and keeps those before them. Otherwise it learns which requests have failed:
    blocks of several groups would end the engine, and those of a window are no prefix.
    """

    def __init__(self, rank: int = 0, *, by_request: bool = False) -> None:
        self.by_request = by_request
        self._rank = rank
        self._away: str | None = None  # unknown
        self._received: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._failed: set[str] = set()
        self._chunked: dict[int, _Parts] = {}  # loads of which vLLM was not told yet
        self._report = WorkerReport()

    def begin_load(self, order: LoadOrder) -> None:
        """Call it for each order before its report: a chunked load ends with its last part."""
        if order.chunked:
            parts = self._chunked.setdefault(order.chunked, _Parts())
            parts.open.add(order.load)
            parts.blocks.update(order.blocks)
            parts.is_last = parts.is_last or not order.has_more

    def load(
        self, order: LoadOrder, outcome: Outcome, bad: Sequence[int], *, discarded: bool = False
    ) -> None:
        """``discarded``: no block of a chunked load may be used, whichever part has brought it."""
        if discarded and (parts := self._chunked.get(order.chunked)) is not None:
            bad = sorted(parts.blocks)
        if self._ends(order):
            self._received.add(order.request_id)
        if not self.by_request:
            self._bad_blocks.update(bad)
        elif outcome.first_failed is not None:
            self._failed.add(order.request_id)
        self._report.loads[order.load] = outcome

    def _ends(self, order: LoadOrder) -> bool:
        """Whether the report of this order is the last one of its load."""
        parts = self._chunked.get(order.chunked)
        if parts is None:
            return True
        parts.open.discard(order.load)
        if parts.open or not parts.is_last:
            return False
        del self._chunked[order.chunked]
        return True

    def refused_load(
        self, order: LoadOrder, error: str, detail: str = "", *, discarded: bool = False
    ) -> None:
        """A load without copies, now or later. ``discarded``: as load()."""
        outcome = Outcome(failed=order.count, error=error, detail=detail, first_failed=0)
        self.load(order, outcome, order.blocks, discarded=discarded)

    def save(self, job: int, outcome: Outcome) -> None:
        self._report.saves[job] = outcome

    def failed_save(self, order: SaveOrder, error: str, detail: str = "") -> None:
        self.save(order.job, Outcome(failed=order.count, error=error, detail=detail))

    def copied(self, blocks: float, seconds: float) -> None:
        """The blocks that a load has copied, and the time that they took after earlier ones."""
        before = self._report.copied.get(self._rank, (0.0, 0.0))
        self._report.copied[self._rank] = before[0] + blocks, before[1] + seconds

    def step(self, number: int) -> None:
        """A measured step has ended."""
        self._report.step = number

    def away(self, reason: str) -> None:
        """Why this rank cannot use the cache; empty if it can."""
        if reason != self._away:
            self._away = reason
            self._report.away[self._rank] = reason

    @property
    def is_away(self) -> bool:
        return bool(self._away)

    @property
    def has_received(self) -> bool:
        """Whether vLLM is to be told that a load has ended."""
        return bool(self._received)

    def take_received(self) -> set[str]:
        received, self._received = self._received, set()
        return received

    def take_bad_blocks(self) -> set[int]:
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_failed(self) -> set[str]:
        """Requests among those received, of which some block has not come."""
        failed, self._failed = self._failed, set()
        return failed

    def take_report(self) -> WorkerReport | None:
        report, self._report = self._report, WorkerReport()
        return report or None


class StepsAhead:
    """The time from the early completion of a load to the step that uses it.

    These are a few steps, since results go to the scheduler, and on to the request, a step or two
    later. A load is completed early by this time, so that its end and the step coincide.
    """

    #: A longer step is ignored: it may have been a stop of any kind.
    LIMIT_S = 0.012

    def __init__(
        self, async_scheduling: bool, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``async_scheduling``: a step's results are read when the next one is queued."""
        self._steps = {True: 2.0, False: 4.0} if async_scheduling else {True: 1.0, False: 2.0}
        self._clock = clock
        self._ended_at = clock()
        self._forward = False
        self._seconds = 0.0

    def end_step(self, forward: bool) -> None:
        """Call it once per step; ``forward``: the model has run in it."""
        now = self._clock()
        took, self._ended_at = now - self._ended_at, now
        # A step of another kind than the one before does not predict the next ones, nor does one
        # that waited for a request.
        alike, self._forward = forward == self._forward, forward
        self._seconds = took * self._steps[forward] if alike and took < 4 * self.LIMIT_S else 0.0

    def skip(self) -> None:
        """The time since the end of the step says nothing about the length of steps."""
        self._ended_at = self._clock()

    def seconds(self) -> float:
        return min(self._seconds, self.LIMIT_S)


def _addresses(kv_caches: Any) -> list[int]:
    """The places of vLLM's tensors, some of which are in sequences."""

    def flat(value: Any) -> Iterator[Any]:
        if isinstance(value, Mapping | list | tuple):
            for one in value.values() if isinstance(value, Mapping) else value:
                yield from flat(one)
        else:
            yield value

    return [tensor.data_ptr() for tensor in flat(kv_caches)]


class WorkerSide:
    """Bound to the worker's thread; copies run on threads of the mover.

    While vLLM sleeps, the memory of its KV cache is unmapped, and a copy to or from it would end
    the engine. A mover touches that memory only for a job: unregister() ends all jobs, and none is
    accepted before restore(). The registration of the rank and of the pool's memory stays, so an
    engine uses the cache as soon as it is awake.
    """

    def __init__(
        self,
        make_mover: Callable[[Any], Any],
        rank: int = 0,
        *,
        saves: bool = True,
        ahead: StepsAhead | None = None,
        by_request: bool = False,
    ) -> None:
        """
        Args:
            make_mover: Makes a mover for the registered tensors.
            saves: False for a rank whose bytes another one saves.
            ahead: The time by which loads that the GPU waits for may be completed early.
            by_request: How failed loads are reported (Reports).
        """
        self.rank = rank
        self.name = f"worker-{rank}" if rank else "worker"
        self._saves = saves
        self.counts = Counts()
        self.reports = Reports(rank, by_request=by_request)
        self.mover: Any = None  # until vLLM registers its KV cache
        self.loads: dict[int, _Job] = {}
        self.saves: dict[int, SaveOrder] = {}
        self._make_mover = make_mover
        self._kv_caches: Any = None
        self._addresses: list[int] = []  # of the tensors that the mover has registered
        self._is_unmapped = False
        self._saved_plan: StepPlan | None = None  # the last one whose saves were submitted
        self._computed: Computed | None = None  # of the mover, in a step that saves
        self._link = ""
        self._ahead = ahead or StepsAhead(False)
        self._forward = False
        self._measured = 0  # the step whose end is to be reported to the scheduler's side
        self._tells_early = True
        self._may_last = False  # the step, until a load has ended

    def register(self, kv_caches: Any, *, alone: bool = True) -> None:
        """``alone``: only vLLM's model and this connector write to the blocks. After the early
        completion of a load its request may be aborted; another connector could then receive the
        blocks and write to them in no order with the load's last copies.
        """
        self._tells_early = alone
        self._kv_caches, self._addresses = kv_caches, _addresses(kv_caches)
        self.mover = self._make_mover(kv_caches)
        self.counts.set("serving", 1, self.name)

    def unregister(self) -> None:
        """Ends all jobs: vLLM unmaps the KV cache next. Idempotent.

        vLLM sleeps only when no block is in use. Only the last copies of a load that was completed
        early and then aborted may still be in flight, or a job of which vLLM has no record.
        """
        self._is_unmapped = True
        if self.mover is None:
            return
        for load, job in self.loads.items():
            if not job.followed:  # then all its copies are queued
                job.discarded = True  # its bytes will be gone
                self.mover.cancel_load(load)
        deadline = time.monotonic() + UNMAP_PATIENCE_S
        poller = select.poll()
        poller.register(self.mover.finished_fd(), select.POLLIN)
        self._take_finished()
        while self._has_jobs() and (left_s := deadline - time.monotonic()) > 0:
            poller.poll(left_s * 1e3)
            self._take_finished()
        if self._has_jobs():
            self._close_mover()

    def _has_jobs(self) -> bool:
        return bool(self.loads or self.saves)

    def _close_mover(self) -> None:
        log.warning(
            "pegaflow: %d loads and %d saves have not ended %.0f s after vLLM began to sleep and "
            "are given up",
            len(self.loads),
            len(self.saves),
            UNMAP_PATIENCE_S,
        )
        self.mover.close()
        self._take_finished()  # each job that was accepted
        self.mover = None

    def restore(self) -> None:
        """The KV cache is mapped again. Idempotent.

        Raises:
            Unservable: the tensors are elsewhere than before, and cannot be registered there.
        """
        self._is_unmapped = False
        if self._kv_caches is None:
            return
        addresses = _addresses(self._kv_caches)
        if self.mover is not None and addresses == self._addresses:
            return
        if self.mover is not None:
            self.mover.close()
        self._addresses = addresses
        self.mover = self._make_mover(self._kv_caches)

    def begin_step(self, plan: StepPlan) -> Computed | None:
        """What is to be called in each layer's hook of this step; None: nothing."""
        self.end_step()
        # Only the mover of a GPU has it.
        mark: Computed | None = getattr(self.mover, "computed", None)
        if mark is not None and plan.saves and self._saves and mark.begin(plan):
            self._computed = mark
        return self._computed

    def end_step(self) -> None:
        """The step is over, or has failed: its event is not used again. Idempotent."""
        if self._computed is not None:
            self._computed.clear()
            self._computed = None

    def start_loads(self, plan: StepPlan) -> None:
        self._forward = plan.forward
        self._measured = plan.measured
        self._may_last = plan.may_last
        for order in (*plan.loads, *plan.refused):
            self.reports.begin_load(order)
        for order in plan.refused:
            self.reports.refused_load(order, order.refused or "off")
        for order in plan.loads:
            # A reset may come in the step in which the last part of a load is ordered.
            discarded = order.load in plan.discarded
            if self._is_unmapped:
                self.reports.refused_load(order, "asleep", discarded=discarded)
                continue
            try:
                self._load(order)
            except _native.PegaFlowError as error:
                code = error_code(error)
                self.reports.refused_load(order, code, str(error), discarded=discarded)
            else:
                self.loads[order.load] = _Job(order)
        for load in plan.discarded:
            if load in self.loads:
                self.loads[load].discarded = True
                self.mover.cancel_load(load)
        for load in plan.cancelled:
            if load in self.loads:
                self.mover.cancel_load(load)

    def _load(self, order: LoadOrder) -> None:
        if order.ranges:
            self.mover.load_ranges(order.load, order.token, order.ranges, order.claimed)
        elif order.keys:
            self.mover.load_following(
                order.load,
                order.keys,
                order.key_bytes,
                order.blocks,
                order.patience_s,
                order.node,
            )
        else:
            self.mover.load(
                order.load, order.token, order.first, order.blocks, computing=order.computing
            )

    def _save(self, scheduler: bytes, order: SaveOrder, computed: int | None) -> None:
        more: dict[str, Any] = {"depths": order.depths} if order.depths else {}
        if computed is not None:
            more["computed"] = computed
        if order.kind:
            more["kind"] = order.kind
        if order.may_refuse:
            more["may_refuse"] = True
        self.mover.save(scheduler, order.job, order.keys, order.key_bytes, order.blocks, **more)

    def submit_saves(self, plan: StepPlan) -> None:
        """Called when the step's forward pass is queued: the mover records it as an event. Other
        engines may read the blocks from an earlier one on, if the last layer's hook recorded it.

        Called again for the same plan, because releases before 0.31 call wait_for_save() only in
        steps with a forward pass, and a request's last blocks are saved in a step without one.
        """
        if plan is self._saved_plan:
            return
        self._saved_plan = plan
        computed = self._computed.event(plan) if self._computed is not None else None
        for order in plan.saves:
            if not self._saves:
                self.reports.save(order.job, Outcome(replica=True))
                continue
            if self._is_unmapped:
                self.reports.failed_save(order, "asleep")
                continue
            try:
                self._save(plan.scheduler, order, computed)
            except _native.PegaFlowError as error:
                self.reports.failed_save(order, error_code(error), str(error))
            else:
                self.saves[order.job] = order

    def collect(self) -> None:
        """Notes the jobs that have ended."""
        self._ahead.end_step(self._forward)
        if self._measured:
            self.reports.step(self._measured)
            self._measured = 0
        if self.mover is None or not self._has_jobs():
            return
        self._take_finished()
        if self._may_last and not self.reports.has_received:
            self._wait_for_end()
        # vLLM waits for the last part of a chunked load, and for no other. If that follows a
        # prefill, it is not completed early.
        if self._tells_early and any(
            not (job.followed or job.order.has_more or job.order.keys)
            for job in self.loads.values()
        ):
            self._follow()

    def _wait_for_end(self) -> None:
        """The loads in flight are about to end. vLLM would sleep for 1 ms before the next step."""
        if ARRIVALS.wait(self.mover.finished_fd()):
            self._take_finished()
        self._ahead.skip()

    def _take_finished(self) -> None:
        for done in self.mover.take_finished():
            # Removed when it is reported, not before: there is no other report of it.
            if done.kind == "load":
                self._load_ended(self.loads[done.id], done)
                del self.loads[done.id]
            else:
                self._save_ended(self.saves[done.id], done)
                del self.saves[done.id]

    def _load_ended(self, job: _Job, done: Any) -> None:
        # A load may end before its first page. One that follows a prefill waits between its copies.
        if done.copying_s and done.bytes and not job.order.keys:
            self.reports.copied(done.bytes / self.mover.page_bytes, done.copying_s)
        if job.followed:
            if done.error:
                # Only a failure of the GPU causes this, and in its context the engine fails too.
                log.error("pegaflow: a load failed after its early completion: %s", done.error)
            return
        failed = _failed_blocks(job, done)
        bad = [block in failed for block in job.order.blocks]
        # Of several kinds all of the cache's blocks have failed, or none.
        missing = bad.count(True) if not job.order.ranges else job.order.count * any(bad)
        error = "discarded" if job.discarded else done.error_code or "unknown"
        outcome = Outcome(
            blocks=job.order.count - missing,
            failed=missing,
            bytes=done.bytes,
            direct_bytes=done.direct_bytes,
            took_s=done.took_s,
            error=error if failed else "",
            detail=done.error or "",
            cut="" if job.discarded else done.cut,
            first_failed=bad.index(True) if failed else None,
            verified=done.verified,
            corrupt=done.corrupt,
        )
        self.reports.load(job.order, outcome, sorted(failed), discarded=job.discarded)

    def _save_ended(self, order: SaveOrder, done: Any) -> None:
        self.reports.save(
            order.job,
            Outcome(
                blocks=done.blocks,
                skipped=done.skipped,
                failed=order.count - done.blocks - done.skipped,
                bytes=done.bytes,
                took_s=done.took_s,
                error=done.error_code or "",
                detail=done.error or "",
            ),
        )

    def take_counts(self) -> Counts | None:
        if self.mover is not None:
            status = self.mover.status()
            state = status["state"]
            if state != self._link:
                self._link = state
                self.counts.set_link_state(self.name, state)
                # Without a server all ranks are equal, and the scheduler's own link reports it.
                if state == "refused":
                    self.reports.away(status["detail"])
                elif state == "ready" or self.reports.is_away:
                    self.reports.away("")
        return self.counts.take()

    def _follow(self) -> None:
        """Completes loads early whose last copies are on the GPU's queues and will have ended about
        when the model needs them.
        """
        for ahead in self.mover.follow(self._ahead.seconds()):
            job = self.loads[ahead.load]
            if job.discarded:
                continue  # reported when it has ended
            job.followed = True
            self.reports.load(
                job.order, Outcome(blocks=ahead.blocks, bytes=ahead.bytes, took_s=ahead.took_s), ()
            )

    def close(self) -> None:
        """Waits for the copies in flight; afterwards the engine's memory may be freed."""
        self._kv_caches = None
        if self.mover is not None:
            self.mover.close()
