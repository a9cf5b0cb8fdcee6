"""PegaFlow inside vLLM, which finds it by the name ``pegaflow.connector``.

The class here only routes: ``scheduler_side`` and ``worker_side`` do the work. docs/connector.md
describes loads and saves from the engine's side.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from pegaflow.engine.config import ConfigError, read_settings
from pegaflow.engine.guard import hook
from pegaflow.vllm import build, engine_calls
from pegaflow.vllm.computed import Computed
from pegaflow.vllm.messages import StepPlan, WorkerReport
from pegaflow.vllm.metrics import Counts, PromMetrics
from pegaflow.vllm.off import SchedulerOff, WorkerOff
from pegaflow.vllm.scheduler_side import SchedulerSide
from pegaflow.vllm.worker_side import WorkerSide

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # 0.30 and later
        KVConnectorTransferResults,
    )
except ImportError:
    KVConnectorTransferResults = None
try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource  # 0.32 and later
except ImportError:
    CacheHitSource = None

log = logging.getLogger("vllm.pegaflow")

__all__ = ["PegaKVConnector"]


def _nothing() -> None:
    return None


class PegaKVConnector(KVConnectorBase_V1, SupportsHMA):
    """A cache outside the engine. Best effort: after any failure the engine computes instead."""

    if CacheHitSource is not None:
        _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler: SchedulerSide | SchedulerOff | None = None
        self._worker: WorkerSide | WorkerOff | None = None
        self._computed: Computed | None = None  # what the hooks of this step's layers call
        self._failed: set[str] = set()
        self._make(role)
        self._choose_failure_policy()

    @hook(_nothing)
    def _make(self, role: Any) -> None:
        if role == KVConnectorRole.SCHEDULER:
            if self._scheduler is None:
                self._scheduler = build.scheduler_side(self._vllm_config, self._kv_cache_config)
                engine_calls.watch(self)
        elif self._worker is None:
            self._worker = build.worker_side(self._vllm_config, self._kv_cache_config)

    @hook(_nothing)
    def _choose_failure_policy(self) -> None:
        """A load that fails is computed. vLLM's default answers HTTP 500 instead.

        The scheduler reads the policy right after it has made its connector.
        """
        transfer = self._kv_transfer_config
        try:
            keep = read_settings(transfer.kv_connector_extra_config or {}).keep_failure_policy
        except ConfigError:
            return  # the side's constructor has logged it; nothing is loaded
        if not keep and getattr(transfer, "kv_load_failure_policy", None) == "fail":
            transfer.kv_load_failure_policy = "recompute"

    def retire(self, name: str, error: Exception) -> bool:
        """Disables the cache after a failure in ``name``; False if it was already disabled."""
        side = self._scheduler or self._worker
        live = side is None or isinstance(side, SchedulerSide | WorkerSide)
        if live or name not in self._failed:
            self._failed.add(name)
            log.error(
                "pegaflow: %s failed, the engine continues without the cache",
                name,
                exc_info=error,
            )
        if not live:
            return False
        self._computed = None
        if isinstance(side, SchedulerSide):
            self._scheduler = SchedulerOff(side)
        elif isinstance(side, WorkerSide):
            self._worker = WorkerOff(side)
        elif self._role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerOff()
        else:
            self._worker = WorkerOff(by_request=build.fails_by_request(self._kv_cache_config))
        off = self._scheduler or self._worker
        off.counts.add("internal_errors", 1, self._side_name())
        rank = getattr(side, "rank", 0)
        off.notice = build.decline(self._vllm_config, self._side_name(), error, rank)
        return True

    def _side_name(self) -> str:
        return "scheduler" if self._role == KVConnectorRole.SCHEDULER else "worker"

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a save that is dropped is a miss later

    # ---- scheduler

    @hook(_nothing)
    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.bind_pool(gpu_block_pool)

    @hook(_nothing)
    def on_new_request(self, request: Any) -> None:
        self._scheduler.new_request(request)

    @hook(lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    @hook(_nothing)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def get_external_cache_hit_sources(  # 0.32 and later
        self, request: Any, num_external_tokens: int
    ) -> dict[Any, int]:
        here, elsewhere = self._loaded_from(request, num_external_tokens)
        sources = {CacheHitSource.HOST: here, CacheHitSource.P2P: elsewhere}
        return {source: tokens for source, tokens in sources.items() if tokens}

    @hook(lambda: (0, 0))
    def _loaded_from(self, request: Any, tokens: int) -> tuple[int, int]:
        return self._scheduler.loaded_from(request, tokens)

    @hook(StepPlan)
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self._scheduler.plan(scheduler_output)

    @hook(_nothing)
    def update_connector_output(self, connector_output: Any) -> None:
        report = getattr(connector_output, "kv_connector_worker_meta", None)
        if isinstance(report, WorkerReport):
            self._scheduler.report(report)

    @hook(lambda: (False, None))
    def request_finished(
        self, request: Any, block_ids: Sequence[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self._scheduler.finished(request, (block_ids,))

    @hook(lambda: (False, None))
    def request_finished_all_groups(
        self, request: Any, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self._scheduler.finished(request, block_ids)

    @hook(lambda: False)
    def has_pending_push_work(self) -> bool:
        return self._scheduler.keep_stepping()

    @hook(lambda: False)
    def has_pending_block_frees(self) -> bool:  # 0.32 and later
        return self._scheduler.frees_soon()

    @hook(lambda: True)
    def reset_cache(self) -> bool:
        return self._scheduler.reset_cache(
            local=engine_calls.is_local_reset(), keeps_weights=engine_calls.keeps_weights()
        )

    @hook(_nothing)
    def weights_may_change(self, call: str) -> None:
        """vLLM is about to make all workers do ``call``, which may replace weights."""
        self._scheduler.weights_may_change(call)

    def request_arrives(self) -> None:
        """vLLM has received a request. Called by the thread that receives them."""
        try:
            self._scheduler.request_arrives()
        except Exception:  # disabling the cache is for the scheduler's thread
            log.debug("pegaflow: a step may sleep on beside a new request", exc_info=True)

    @hook(_nothing)
    def set_weight_version(self, version: str) -> None:
        """vLLM is about to record ``version`` as the version of its weights."""
        self._scheduler.set_weight_version(version)

    # ---- worker

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:  # 0.33 and later
        return True

    @hook(_nothing)
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._register(lambda: self._worker.register(kv_caches, alone=self._is_alone()))

    @hook(_nothing)
    def unregister_kv_caches(self) -> None:  # 0.33 and later
        """vLLM is about to unmap the KV cache."""
        self._worker.unregister()

    @hook(_nothing)
    def restore_kv_caches(self) -> None:  # 0.33 and later
        """The KV cache is mapped again, with no content."""
        self._register(lambda: self._worker.restore())

    def _register(self, register: Callable[[], None]) -> None:
        try:
            register()
        except build.Unservable as reason:
            log.warning("pegaflow: this engine runs without the cache: %s", reason)
            rank, by_request = self._worker.rank, self._worker.reports.by_request
            told = build.decline(self._vllm_config, "worker", reason, rank)
            self._worker = WorkerOff(
                rank=rank, reason=str(reason), notice=told, by_request=by_request
            )

    def _is_alone(self) -> bool:
        """Whether this is the only connector, rather than one of a MultiConnector."""
        return not has_kv_transfer_group() or get_kv_transfer_group() is self

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._begin_step()

    @hook(_nothing)
    def _begin_step(self) -> None:
        self._computed = None
        if self._worker is not None and isinstance(self._connector_metadata, StepPlan):
            self._computed = self._worker.begin_step(self._connector_metadata)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self._end_step()

    @hook(_nothing)
    def _end_step(self) -> None:
        self._computed = None
        if self._worker is not None:
            self._worker.end_step()

    @hook(_nothing)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if isinstance(self._connector_metadata, StepPlan):
            self._worker.start_loads(self._connector_metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return None  # a request runs only when its load has ended

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Saves nothing: the hook of the last layer marks the point at which all KV is queued."""
        if self._computed is not None:
            self._layer_computed(layer_name, attn_metadata)

    @hook(_nothing)
    def _layer_computed(self, layer_name: str, attn_metadata: Any) -> None:
        if self._computed is not None:  # it is after a failure of this call
            self._computed.layer(layer_name, attn_metadata)

    @hook(_nothing)
    def wait_for_save(self) -> None:
        self._submit_saves()

    def _submit_saves(self) -> None:
        if isinstance(self._connector_metadata, StepPlan):
            self._worker.submit_saves(self._connector_metadata)

    @hook(lambda: (None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self._submit_saves()
        self._worker.collect()
        return None, self._worker.reports.take_received() or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:  # 0.30 and later
        _, received = self.get_finished(finished_req_ids)
        return KVConnectorTransferResults(
            finished_recving=set(received or ()), failed_recving=self._failed_loads()
        )

    @hook(set)
    def _failed_loads(self) -> set[str]:
        return self._worker.reports.take_failed()

    @hook(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.reports.take_bad_blocks()

    @hook(_nothing)
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._worker.reports.take_report()

    # ---- both

    @hook(_nothing)
    def get_kv_connector_stats(self) -> Counts | None:
        return (self._scheduler or self._worker).take_counts()

    @hook(_nothing)
    def shutdown(self) -> None:
        engine_calls.unwatch(self)
        (self._scheduler or self._worker).close()

    @hook(tuple)
    def take_events(self) -> Iterable[Any]:
        return self._scheduler.take_events() if self._scheduler is not None else ()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Counts:
        return Counts(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PromMetrics:
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
