"""Both sides as plain vLLM: for an engine that we cannot serve, and after a failure of ours."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from pegaflow.connector.messages import LoadOrder, StepPlan, WorkerReport
from pegaflow.connector.metrics import Counts
from pegaflow.connector.scheduler_side import SchedulerSide
from pegaflow.connector.worker_side import Reports, WorkerSide


class SchedulerOff:
    """The scheduler's side as plain vLLM: offers nothing, saves nothing.

    After a failure it brings to an end what the live side had begun.
    """

    def __init__(self, was: SchedulerSide | None = None, block_size: int = 1) -> None:
        self.counts = was.counts if was else Counts()
        self.counts.set("serving", 0, "scheduler")
        self._saves = was.saves if was else None
        self._loads = was.loads if was else None
        self._block_size = was._block_size if was else block_size
        self._incarnation = was._incarnation if was else b""
        self._refused: list[LoadOrder] = []
        if self._saves is not None:
            self._saves.drop_unsent("off")
        if was is not None:
            # Ending the session ends its claims. It may take a second, which no step has.
            threading.Thread(target=was.close, name="pega-retire", daemon=True).start()

    def bind_pool(self, pool: Any) -> None:
        return None

    def new_request(self, request: Any) -> None:
        return None

    def matched_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def allocated(self, request: Any, block_ids: Sequence[int], tokens: int) -> None:
        """A load that was offered before the failure is refused, for vLLM waits for it."""
        if tokens == 0 or self._loads is None:
            return
        if any(load.request_id == request.request_id for load in self._loads.not_handed_out()):
            return
        count = -(-tokens // self._block_size)
        # No load has this number: they rise from 1.
        self._refused.append(LoadOrder(0, request.request_id, b"", 0, list(block_ids[-count:])))

    def finished(self, request: Any, block_ids: Sequence[int]) -> None:
        return None

    def plan(self, output: Any) -> StepPlan:
        plan = StepPlan(scheduler=self._incarnation)
        plan.refused, self._refused = self._refused, []
        if self._loads is not None:
            loads = self._loads.not_handed_out()
            plan.refused += [self._loads.order(load) for load in loads]
            plan.cancelled, plan.discarded = self._loads.take_ends()
            self._loads.mark_handed_out(loads)
        return plan

    def report(self, report: WorkerReport) -> None:
        if self._saves is not None:
            self._saves.report(report.saves)
        if self._loads is not None:
            self._loads.report({id: out for id, out in report.loads.items() if id != 0})

    def keep_stepping(self) -> bool:
        return self._saves is not None and self._saves.keep_stepping()

    def reset_cache(self) -> bool:
        return True

    def take_counts(self) -> Counts | None:
        return self.counts.take()

    def close(self) -> None:
        return None


class WorkerOff:
    """A worker's side as plain vLLM: refuses every job, so that nobody waits for it.

    After a failure it brings to an end what the live side had begun: a load is reported only when
    its last copy has ended, for vLLM uses the blocks again then.
    """

    def __init__(self, was: WorkerSide | None = None) -> None:
        self.counts = was.counts if was else Counts()
        self.counts.set("serving", 0, "worker")
        self.reports = was.reports if was else Reports()
        self._was = was

    def register(self, kv_caches: Any) -> None:
        return None

    def start_loads(self, plan: StepPlan) -> None:
        for order in (*plan.refused, *plan.loads):
            if self._was is None or order.load not in self._was.loads:
                self.reports.refused_load(order, "off")

    def submit_saves(self, plan: StepPlan) -> None:
        for order in plan.saves:
            if self._was is None or order.job not in self._was.saves:
                self.reports.failed_save(order, "off")

    def collect(self) -> None:
        """Closes the mover, which waits for its copies, and reports what it leaves."""
        was, self._was = self._was, None
        if was is None or was.mover is None:
            return
        was.mover.close()
        was.collect()
        for job in was.loads.values():
            self.reports.refused_load(job.order, "off")
        for order in was.saves.values():
            self.reports.failed_save(order, "off")

    def take_counts(self) -> Counts | None:
        return self.counts.take()

    def close(self) -> None:
        self.collect()
