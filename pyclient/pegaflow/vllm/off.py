"""Both sides as plain vLLM: for an engine that cannot be served, and after an internal error.

After an error they complete the work that the live side had begun. They read its tables once and
call none of its code, which may be the cause.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

from pegaflow.vllm.messages import LoadOrder, StepPlan, WorkerReport
from pegaflow.vllm.metrics import Counts
from pegaflow.vllm.plans import Tables
from pegaflow.vllm.saves import IDLE_LIMIT_S
from pegaflow.vllm.scheduler_side import SchedulerSide
from pegaflow.vllm.worker_side import Reports, WorkerSide

log = logging.getLogger("vllm.pegaflow")


class SchedulerOff:
    """The scheduler's side: offers nothing, saves nothing."""

    def __init__(self, was: SchedulerSide | None = None, *, notice: Any = None) -> None:
        """``notice`` reports the reason to the server until this side is closed."""
        self.notice = notice
        self.counts = was.counts if was else Counts()
        self.counts.set("serving", 0, "scheduler")
        self._was = was
        self._since = time.monotonic()
        self._refused: list[LoadOrder] = []  # vLLM waits for these
        self._cancelled: list[int] = []  # loads that follow a prefill, which no side watches now
        self._pins: dict[int, list[Any]] = {}  # of save jobs that the workers know
        self._reported: dict[int, int] = {}  # number of ranks that reported a job
        self._events: Sequence[Any] = ()  # withdraws the blocks that KV events have reported
        if was is None:
            return
        self._refused = [
            LoadOrder(
                load.id,
                load.request_id,
                b"",
                0,
                load.blocks,
                ranges=load.ranges,
                chunked=load.chunked.number if load.chunked else 0,
                has_more=load.left > 0,
            )
            for load in was.loads.not_handed_out()
        ] + [
            LoadOrder(0, one.state.request_id, b"", 0, one.rest(), chunked=one.number)
            for one in was.chunked.open.values()
        ]
        followers = [one.follower for one in was.chunked.following.values()]
        self._cancelled = [load.id for load in followers if load is not None]
        if was.events is not None:
            self._events = was.events.give_up()
        if was.saves is not None:
            self._pins = was.saves.give_up()
        # Ending the session ends its claims. It may take a second, too long for a step.
        threading.Thread(target=was.close, name="pega-retire", daemon=True).start()

    def bind_pool(self, pool: Any) -> None:
        return None

    def new_request(self, request: Any) -> None:
        return None

    def request_arrives(self) -> None:
        return None

    def matched_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def allocated(self, request: Any, tables: Tables, tokens: int) -> None:
        """Rejects a load that was offered before the failure, because vLLM waits for it."""
        waits = any(order.request_id == request.request_id for order in self._refused)
        if tokens == 0 or self._was is None or waits:
            return
        count = -(-tokens // self._was.unit_tokens)
        # No load has this number: they rise from 1. Blocks are reported with one kind only.
        self._refused.append(LoadOrder(0, request.request_id, b"", 0, list(tables[0][-count:])))

    def loaded_from(self, request: Any, tokens: int) -> tuple[int, int]:
        return tokens, 0

    def finished(self, request: Any, tables: Tables) -> None:
        return None

    def plan(self, output: Any) -> StepPlan:
        refused, self._refused = self._refused, []
        cancelled, self._cancelled = self._cancelled, []
        return StepPlan(refused=refused, cancelled=cancelled)

    def report(self, report: WorkerReport) -> None:
        """Releases GPU blocks whose saves have ended on all ranks."""
        for job, outcome in report.saves.items():
            if job not in self._pins or self._was is None or self._was.saves is None:
                continue
            self._reported[job] = self._reported.get(job, 0) + outcome.ranks
            if self._reported[job] >= self._was.ranks:
                self._was.saves.blocks.unpin(self._pins.pop(job))

    def keep_stepping(self) -> bool:
        return bool(self._pins) and time.monotonic() - self._since < IDLE_LIMIT_S

    def frees_soon(self) -> bool:
        return False

    def take_events(self) -> Sequence[Any]:
        events, self._events = self._events, ()
        return events

    def reset_cache(self, local: bool = False, keeps_weights: bool = False) -> bool:
        return True

    def weights_may_change(self, call: str) -> None:
        return None

    def set_weight_version(self, version: str) -> None:
        return None

    def take_counts(self) -> Counts | None:
        return self.counts.take()

    def close(self) -> None:
        if self.notice is not None:
            self.notice.close()


class WorkerOff:
    """A worker's side: rejects every job, so that vLLM does not wait for it.

    A load that was in flight is reported only when its last copy has ended, because vLLM then
    reuses the blocks.
    """

    def __init__(
        self,
        was: WorkerSide | None = None,
        *,
        rank: int = 0,
        reason: str = "",
        notice: Any = None,
        by_request: bool = False,
    ) -> None:
        """``reason`` is for the scheduler, if it does not know that this rank is off; ``notice``
        reports it to the server until this side is closed.
        """
        self.notice = notice
        self.counts = was.counts if was else Counts()
        rank = was.rank if was else rank
        self.counts.set("serving", 0, f"worker-{rank}" if rank else "worker")
        self.reports = was.reports if was else Reports(rank, by_request=by_request)
        if was or reason:
            self.reports.away("it failed, see its log" if was else reason)
        self._was = was

    def register(self, kv_caches: Any, *, alone: bool = True) -> None:
        return None

    def unregister(self) -> None:
        """vLLM is about to unmap the KV cache: waits for the last copies."""
        self.collect()

    def restore(self) -> None:
        return None

    def begin_step(self, plan: StepPlan) -> None:
        return None

    def end_step(self) -> None:
        return None

    def start_loads(self, plan: StepPlan) -> None:
        for order in (*plan.loads, *plan.refused):  # a chunked load's last part is the last
            if self._was is None or order.load not in self._was.loads:
                self.reports.begin_load(order)
                self.reports.refused_load(order, "off")

    def submit_saves(self, plan: StepPlan) -> None:
        for order in plan.saves:
            if self._was is None or order.job not in self._was.saves:
                self.reports.failed_save(order, "off")

    def collect(self) -> None:
        """Closes the mover, which waits for its copies, and reports its last jobs."""
        if self._was is None:
            return
        if self._was.mover is not None:
            self._was.mover.close()
        was, self._was = self._was, None
        try:
            was.collect()
        except Exception:
            log.exception("pegaflow: the mover's reports are lost, all its loads count as failed")
        for job in was.loads.values():
            if not job.followed:  # a second report of a followed load would stop vLLM
                self.reports.refused_load(job.order, "off")
        for order in was.saves.values():
            self.reports.failed_save(order, "off")

    def take_counts(self) -> Counts | None:
        return self.counts.take()

    def close(self) -> None:
        if self.notice is not None:
            self.notice.close()
        self.collect()
