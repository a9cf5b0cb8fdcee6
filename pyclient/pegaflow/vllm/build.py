"""Builds a side from vLLM's configuration, or logs why it runs as plain vLLM."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from pegaflow.engine import notice
from pegaflow.engine.config import (
    INSTANCE_ENV,
    ConfigError,
    Settings,
    read_settings,
    socket_path,
)
from pegaflow.engine.kinds import BlockKinds
from pegaflow.engine.layout import Geometry, LayoutError, TooManyPieces, geometry
from pegaflow.vllm import adapters, agreement, computed, drafts, namespace, ranks, weights
from pegaflow.vllm.allocator import keeps_allocations
from pegaflow.vllm.exchange import Exchange
from pegaflow.vllm.grid import Grid, NoGrid, read_grid
from pegaflow.vllm.kinds import read_kinds, specs_by_layer
from pegaflow.vllm.off import SchedulerOff, WorkerOff
from pegaflow.vllm.plans import BlockRules
from pegaflow.vllm.plans.one_kind import OneKind
from pegaflow.vllm.plans.save_plan import SaveRules
from pegaflow.vllm.plans.several_kinds import SeveralKinds
from pegaflow.vllm.scheduler_side import SchedulerSide
from pegaflow.vllm.support import is_one_of_full_attention, kind_of_refusal, unsupported
from pegaflow.vllm.worker_side import StepsAhead, WorkerSide

log = logging.getLogger("vllm.pegaflow")


class Unservable(Exception):
    """This engine cannot use the cache; the text has the reason.

    ``kind`` is the reason's name in the server's metrics.
    """

    def __init__(self, text: str, kind: str = "device") -> None:
        super().__init__(text)
        self.kind = kind


def decline(vllm_config: Any, side: str, why: Exception, rank: int = 0) -> Any:
    """A light connection that reports to the server why this side does not use the cache, until it
    is closed; None if it cannot exist. Never raises: the engine runs as plain vLLM either way.
    """
    kind = why.kind if isinstance(why, Unservable) else "failure"
    try:
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
        return notice.report(
            extra, instance_id(vllm_config), build(), side, kind, str(why) or repr(why), rank
        )
    except Exception:  # an exception that reached vLLM would end the engine
        log.debug("pegaflow: a notice for the server failed", exc_info=True)
        return None


def _settings(vllm_config: Any) -> Settings:
    try:
        return read_settings(vllm_config.kv_transfer_config.kv_connector_extra_config or {})
    except ConfigError as error:
        raise Unservable(str(error), "configuration") from None


def _socket(settings: Settings) -> str:
    try:
        return socket_path(settings)
    except ConfigError as error:
        raise Unservable(str(error), "configuration") from None


def _refusal(vllm_config: Any, kv_cache_config: Any, settings: Settings) -> str:
    return unsupported(vllm_config, kv_cache_config) or weights.refusal(
        vllm_config, settings.weights_id
    )


def _grid(vllm_config: Any, kv_cache_config: Any, settings: Settings) -> Grid | None:
    """
    Raises:
        Unservable: the engine is configured to share blocks with other sizes, and cannot.
    """
    try:
        return read_grid(vllm_config, kv_cache_config, settings.tp_sizes)
    except NoGrid as error:
        raise Unservable(str(error), error.kind) from None


def instance_id(vllm_config: Any, environ: Mapping[str, str] = os.environ) -> str:
    """The name of the engine core (one data-parallel rank), equal in its scheduler and workers."""
    parallel = vllm_config.parallel_config
    rank = getattr(parallel, "data_parallel_index", getattr(parallel, "data_parallel_rank", 0))
    name = environ.get(INSTANCE_ENV) or vllm_config.kv_transfer_config.engine_id
    suffix = f"-dp{rank}" if getattr(parallel, "data_parallel_size", 1) > 1 else ""
    return name + suffix


def build() -> str:
    """Program and versions, for the server's log."""
    import vllm

    from pegaflow import _native

    return f"pegaflow {_native.__version__}, vllm {vllm.__version__}"


def hash_unit(vllm_config: Any, kv_cache_config: Any) -> int:
    """Tokens between two block hashes."""
    (group,) = kv_cache_config.kv_cache_groups
    block_size = group.kv_cache_spec.block_size
    unit = getattr(kv_cache_config, "hash_block_size", None) or getattr(
        vllm_config.cache_config, "hash_block_size", None
    )
    unit = unit or block_size
    if block_size % unit != 0:
        raise Unservable(f"hashes every {unit} tokens do not fit blocks of {block_size}", "engine")
    return unit


def scheduler_side(vllm_config: Any, kv_cache_config: Any) -> SchedulerSide | SchedulerOff:
    try:
        return _scheduler_side(vllm_config, kv_cache_config)
    except Unservable as reason:
        log.warning("pegaflow: this engine runs without the cache: %s", reason)
        return SchedulerOff(notice=decline(vllm_config, "scheduler", reason))


def _scheduler_side(vllm_config: Any, kv_cache_config: Any) -> SchedulerSide:
    settings = _settings(vllm_config)
    for remark in settings.remarks:
        log.info("pegaflow: %s", remark)
    if reason := _refusal(vllm_config, kv_cache_config, settings):
        raise Unservable(reason, kind_of_refusal(vllm_config, kv_cache_config))
    grid = _grid(vllm_config, kv_cache_config, settings)
    rules = block_rules(vllm_config, kv_cache_config, settings)
    path = _socket(settings)
    group = _direct_group(vllm_config, kv_cache_config, settings, grid)
    if group != settings.direct_group:
        log.warning("pegaflow: pegaflow.direct_group has no effect: %s", NOT_DIRECT)
        settings = dataclasses.replace(settings, direct_group=group)
    transfer = vllm_config.kv_transfer_config

    from vllm.v1.core.sched.output import SchedulerOutput

    from pegaflow import _native

    event_format = None
    events_config = getattr(vllm_config, "kv_events_config", None)
    if getattr(events_config, "enable_kv_cache_events", False):
        from pegaflow.vllm.event_format import EventFormat

        groups = kv_cache_config.kv_cache_groups
        kinds = _kinds(vllm_config, kv_cache_config)
        first_members = [kind.members[0] for kind in kinds.kinds] if kinds else [0]
        event_format = EventFormat(groups, first_members)
    may_load = transfer.is_kv_consumer and settings.mode != "save_only"
    scheduler = _native.random_id()
    session = _native.CacheSession(
        path,
        instance_id(vllm_config),
        build(),
        scheduler=scheduler,
        offers_loads=may_load,
        offers_saves=transfer.is_kv_producer,
        **settings.link_options(),
    )
    return SchedulerSide(
        session,
        settings,
        rules=rules,
        scheduler=scheduler,
        ranks=vllm_config.parallel_config.world_size,
        may_load=may_load,
        may_save=transfer.is_kv_producer,
        prefix_caching=bool(vllm_config.cache_config.enable_prefix_caching),
        own_tables="kv_connector_block_state" not in SchedulerOutput.__dataclass_fields__,
        in_lockstep=getattr(vllm_config.parallel_config, "data_parallel_size", 1) > 1,
        recomputes=not settings.keep_failure_policy
        or getattr(transfer, "kv_load_failure_policy", None) == "recompute",
        async_scheduling=bool(vllm_config.scheduler_config.async_scheduling),
        most_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        event_format=event_format,
        adapters=adapters.Adapters(adapters.salt(vllm_config)),
        name=f"server {path} instance {instance_id(vllm_config)}",
    )


NOT_DIRECT = (
    "only blocks of one cache group of full attention are read out of another engine's memory, and "
    "not with pegaflow.tp_sizes or vLLM's sleep mode"
)


def _direct_group(
    vllm_config: Any, kv_cache_config: Any, settings: Settings, grid: Grid | None
) -> str:
    """The group of engines that read each other's blocks; "": this one cannot.

    After a sleep the addresses of the KV cache stand for other memory, while other engines would
    still read what was there before.
    """
    can = grid is None and is_one_of_full_attention(kv_cache_config)
    sleeps = getattr(vllm_config.model_config, "enable_sleep_mode", False)
    return settings.direct_group if can and not sleeps else ""


def _direct_options(
    vllm_config: Any, kv_cache_config: Any, settings: Settings, grid: Grid | None, where: Geometry
) -> dict[str, Any]:
    """The options of native movers for direct reads."""
    group = _direct_group(vllm_config, kv_cache_config, settings, grid)
    if not group:
        return {}
    addresses = [segment.address for segment in where.segments]
    return {
        "direct_group": group,
        "has_fixed_memory": keeps_allocations(vllm_config, where.device, addresses),
        **settings.network_options(),
    }


def _kinds(vllm_config: Any, kv_cache_config: Any) -> BlockKinds | None:
    """The kinds of a model, if it has others than one group of full attention.

    The support check has found that they can be served.
    """
    if is_one_of_full_attention(kv_cache_config):
        return None
    return read_kinds(kv_cache_config, vllm_config.cache_config)


def block_rules(vllm_config: Any, kv_cache_config: Any, settings: Settings) -> BlockRules:
    """The rules of the engine's blocks.

    Raises:
        Unservable: hashes do not fit the blocks.
    """
    groups = kv_cache_config.kv_cache_groups
    if kinds := _kinds(vllm_config, kv_cache_config):
        rules = SaveRules.of(kinds, kv_cache_config, settings.window_interval)
        sizes = [
            sum(_page_bytes(groups[number]) for number in kind.members) for kind in kinds.kinds
        ]
        return SeveralKinds(rules, sizes)
    (group,) = groups
    unit = hash_unit(vllm_config, kv_cache_config)
    return OneKind(
        group.kv_cache_spec.block_size,
        unit,
        _page_bytes(group),
        drafts_have_kv=drafts.have_kv(vllm_config),
        last_block_is_proof=drafts.last_block_is_proof(vllm_config),
        undrafted_from=drafts.steps_without_drafts(vllm_config),
    )


def _page_bytes(group: Any) -> int:
    specs = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    if specs:
        return sum(spec.page_size_bytes for spec in specs.values())
    size: int = group.kv_cache_spec.page_size_bytes * len(group.layer_names)
    return size


def fails_by_request(kv_cache_config: Any) -> bool:
    """Whether a failed load is reported as that of a request, and not of blocks (Reports)."""
    return kv_cache_config is not None and not is_one_of_full_attention(kv_cache_config)


def worker_side(vllm_config: Any, kv_cache_config: Any) -> WorkerSide | WorkerOff:
    try:
        settings = _settings(vllm_config)
        if _refusal(vllm_config, kv_cache_config, settings):
            raise Unservable("")
        path = _socket(settings)
        grid = _grid(vllm_config, kv_cache_config, settings)
    except Unservable:
        # The scheduler's side has logged the reason.
        return WorkerOff(by_request=fails_by_request(kv_cache_config))

    place = ranks.place(vllm_config, kv_cache_config, grid.own if grid else 0)
    exchange = Exchange(instance_id(vllm_config), place.rank, place.ranks)

    def make_mover(kv_caches: Any) -> Any:
        return _make_mover(vllm_config, kv_cache_config, settings, path, kv_caches, exchange)

    ahead = StepsAhead(bool(vllm_config.scheduler_config.async_scheduling))
    return WorkerSide(
        make_mover,
        place.rank,
        saves=place.saves,
        ahead=ahead,
        by_request=fails_by_request(kv_cache_config),
    )


def _make_mover(
    vllm_config: Any,
    kv_cache_config: Any,
    settings: Settings,
    path: str,
    kv_caches: Any,
    exchange: Exchange,
) -> Any:
    """Registers the KV cache.

    Raises:
        Unservable: its device or layout is not supported.
    """
    from pegaflow import _native

    kinds = _kinds(vllm_config, kv_cache_config)
    grid = _grid(vllm_config, kv_cache_config, settings)
    places = (
        read_geometries(kv_cache_config, kv_caches)
        if kinds is not None
        else [read_geometry(kv_cache_config, kv_caches, grid)]
    )
    # Before the factors, which need a layer of each kind.
    of_kinds = _mover_kinds(kinds, places) if kinds is not None else []
    agreed = _agreed(vllm_config, kv_cache_config, kinds, places, grid, exchange)
    device = _make_device(places[0], settings)
    factors = _factors(vllm_config, kv_cache_config, settings, kinds, places, grid, agreed)
    place = ranks.place(vllm_config, kv_cache_config, grid.own if grid else 0)
    options = dict(
        rank=place.rank,
        ranks=place.ranks,
        shard=place.shard,
        shards=place.shards,
        cells=place.cells,
        saves=place.saves,
        offers_saves=place.saves,
        **_direct_options(vllm_config, kv_cache_config, settings, grid, places[0]),
        build=build(),
        load_patience=settings.load_patience_ms / 1e3,
        load_bytes_per_second=settings.load_bytes_per_second,
        verify=settings.verify,
        **settings.link_options(),
    )
    where, instance = places[0], instance_id(vllm_config)
    if kinds is None:
        mover = _native.Mover(
            path, instance, device, where.segments, where.block_count, factors, **options
        )
    else:
        mover = _native.Mover.of_kinds(
            path,
            instance,
            device,
            of_kinds,
            kinds.unit_tokens,
            kinds.alignment_tokens,
            factors,
            **options,
        )
    return _in_order(mover, where, _watched_layers(vllm_config, where, options))


def _in_order(mover: Any, where: Geometry, layers: frozenset[str]) -> Any:
    return mover if where.device == "cpu" else _OnStream(mover, where.device_index, layers)


def _watched_layers(
    vllm_config: Any, where: Geometry, options: Mapping[str, Any]
) -> frozenset[str]:
    """The layers whose hooks show that all KV of a step is queued, if other engines read it."""
    if not options.get("direct_group"):
        return frozenset()
    return computed.layers_with_hooks(vllm_config, where.layers)


def _agreed(*arguments: Any) -> agreement.Agreement:
    """As agreement.reach().

    Raises:
        Unservable: the ranks of this engine cannot have one list of factors.
    """
    try:
        return agreement.reach(*arguments)
    except agreement.NoAgreement as error:
        raise Unservable(str(error), "engine") from None


def _factors(
    vllm_config: Any,
    kv_cache_config: Any,
    settings: Settings,
    kinds: BlockKinds | None,
    places: Sequence[Geometry],
    grid: Grid | None,
    agreed: agreement.Agreement,
) -> namespace.Factors:
    """
    Raises:
        Unservable: the model's weights are unknown.
    """
    instance = instance_id(vllm_config)
    try:
        weights_id = weights.weights_id(vllm_config, settings.weights_id, instance)
        draft_weights = weights.draft_weights_id(vllm_config, settings.weights_id, instance)
    except weights.UnknownWeights as error:
        raise Unservable(str(error), "weights") from None
    processor = weights.processor_id(vllm_config, instance)
    if kinds is not None:
        listed = namespace.factors_of_kinds(
            vllm_config,
            kv_cache_config,
            kinds,
            places,
            weights=weights_id,
            processor=processor,
            instance=instance,
            formats=agreed.formats,
        )
        return listed + agreed.scales
    (where,) = places
    listed = namespace.factors(
        vllm_config,
        kv_cache_config,
        weights=weights_id,
        processor=processor,
        draft_weights=draft_weights,
        instance=instance,
        hash_unit=hash_unit(vllm_config, kv_cache_config),
        layers=where.layers,
        arrangements=where.arrangements,
        grid=grid,
        formats=agreed.formats,
    )
    return listed + agreed.scales


def _mover_kinds(kinds: BlockKinds, places: Sequence[Geometry]) -> list[Any]:
    """The kinds with the places of their members, as the native module takes them.

    Raises:
        Unservable: a pipeline stage has no layer of a member.
    """
    made = []
    for kind in kinds.kinds:
        for number in kind.members:
            if not places[number].segments:
                raise Unservable(
                    f"a pipeline stage without layers of cache group {number} is not supported yet"
                )
        members = [(places[number].segments, places[number].block_count) for number in kind.members]
        made.append((int(kind.rule), kind.tokens, kind.block_tokens, members))
    return made


def _make_device(where: Geometry, settings: Settings) -> Any:
    from pegaflow import _native

    if where.device == "cpu":
        return _native.HostDevice(settings.copy_threads)
    if where.device != "cuda":
        raise Unservable(f"a KV cache on {where.device} is not supported yet")
    try:
        device = _native.CudaDevice(where.device_index)
    except _native.PegaFlowError as error:
        raise Unservable(f"the GPU cannot be used: {error}") from None
    info = device.info()
    if not info["kernels"]:
        log.warning("pegaflow: built without CUDA kernels, so loads and saves are slow")
    return device


class _OnStream:
    """A mover whose saves follow the engine's earlier work on its GPU, and whose loads the engine's
    later work may follow.
    """

    def __init__(self, mover: Any, device_index: int, layers: frozenset[str] = frozenset()) -> None:
        """``layers``: as of Computed, whose events save() takes for reads by other engines."""
        import torch

        self._mover = mover
        self._current_stream = torch.cuda.current_stream
        self._device_index = device_index
        self.computed = computed.Computed(layers, self._queue, self._record)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mover, name)

    def save(
        self,
        scheduler: bytes,
        job: int,
        keys: bytes,
        key_bytes: int,
        blocks: Sequence[int],
        **more: Any,
    ) -> None:
        self._mover.save(scheduler, job, keys, key_bytes, blocks, self._queue(), **more)

    def follow(self, within_s: float) -> Sequence[Any]:
        return self._mover.follow(within_s, self._queue())

    def _record(self, queue: int) -> int:
        event: int = self._mover.record(queue)
        return event

    def _queue(self) -> int:
        stream: int = self._current_stream(self._device_index).cuda_stream
        return stream


def read_geometry(
    kv_cache_config: Any, kv_caches: Mapping[str, Any], grid: Grid | None = None
) -> Geometry:
    """The places of the blocks of the only cache group; with a grid, those of the rank's cells one
    after the other.

    Raises:
        Unservable: the tensors have an unknown layout, or layers share them.
    """
    (group,) = kv_cache_config.kv_cache_groups
    if others := sorted(set(kv_caches) - set(group.layer_names)):
        raise Unservable(f"layers that share the KV of others are not supported yet: {others[0]}")
    try:
        return geometry(
            kv_caches,
            group.layer_names,
            specs_by_layer(group),
            kv_cache_config.num_blocks,
            cells=grid.own if grid else 1,
        )
    except TooManyPieces as error:
        if grid is None or grid.own == 1:
            raise Unservable(str(error)) from None
        raise Unservable(
            f"{grid.stated} cuts a block into {grid.own} cells on each rank, so it {error.detail}; "
            "set VLLM_KV_CACHE_LAYOUT=HND, fewer sizes or a smaller --block-size",
            "configuration",
        ) from None
    except LayoutError as error:
        raise Unservable(str(error)) from None


def read_geometries(kv_cache_config: Any, kv_caches: Mapping[str, Any]) -> list[Geometry]:
    """The places of the blocks of each cache group.

    A stage without a layer of some group has no bytes of it. Groups lie in the same memory: a block
    belongs to one of them at a time.

    Raises:
        Unservable: the tensors have an unknown layout, or layers share them.
    """
    groups = kv_cache_config.kv_cache_groups
    known = {layer for group in groups for layer in group.layer_names}
    if others := sorted(set(kv_caches) - known):
        raise Unservable(f"layers that share the KV of others are not supported yet: {others[0]}")
    count = kv_cache_config.num_blocks
    try:
        places = [
            geometry(kv_caches, group.layer_names, specs_by_layer(group), count)
            if group.layer_names
            else None
            for group in groups
        ]
    except LayoutError as error:
        raise Unservable(str(error)) from None
    devices = {(place.device, place.device_index) for place in places if place is not None}
    if len(devices) != 1:
        raise Unservable(f"the KV cache lies on {len(devices)} devices")
    ((device, index),) = devices
    nothing = Geometry((), (), count, (), device, index)
    return [place or nothing for place in places]
