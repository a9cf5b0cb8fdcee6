"""PegaFlow as an external linker of SGLang's tree: pages straight between its device pools and the
server's pool, without a host tier in SGLang. docs/sglang.md has the flags.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from pegaflow import _native
from pegaflow.engine.config import ConfigError, socket_path
from pegaflow.sglang import device_pools, identity, settings, weight_updates
from pegaflow.sglang.engine import build, decline, ranks_of
from pegaflow.sglang.geometry import LayoutError
from pegaflow.sglang.identity import Refused
from pegaflow.sglang.pages import KEY_BYTES
from pegaflow.sglang.pins import Pin, Pins
from pegaflow.sglang.transfers import Batch, Transfers

log = logging.getLogger("sglang.pegaflow")

#: More results than SGLang waits for: it takes those of its pending offloads.
_ALL = 1 << 30


def _guarded(neutral: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a method that SGLang calls: a failure disables the cache and is a miss.

    Args:
        neutral: Makes the result of a linker without the cache.
    """

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.is_off:
                return neutral(self)
            try:
                return method(self, *args, **kwargs)
            except Exception as error:  # a bug of PegaFlow: SGLang goes on without the cache
                self.retire(f"{method.__name__}: {error!r}", "failure", error)
                return neutral(self)

        return guarded

    return decorate


class _LayerCounter:
    """What SGLang's pools wait for before a layer reads its pages."""

    def __init__(self, linker: PegaLinker) -> None:
        self._linker = linker
        self.consumer_index = -1
        #: SGLang waits for the last layer where a CUDA graph holds the whole prefill. All layers
        #: are ready at once, so any number does.
        self.num_layers = 1

    def set_consumer(self, index: int) -> None:
        self.consumer_index = index

    def wait_until(self, threshold: int) -> None:
        """Layer ``threshold`` may be read afterwards, in the order of the current stream."""
        if self.consumer_index >= 0:
            self._linker.wait_for_pages(self.consumer_index)

    def reset(self) -> None:
        self.consumer_index = -1


class PegaLinker(UnifiedCacheLinker):
    """A cache outside the engine, shared by all engines of the machine. Bound to the scheduler's
    thread, but for ``layer_done_counter``, which the forward pass calls.

    Best effort: no exception leaves it. An engine that cannot be served runs without the cache;
    one warning and the server's /instances give the reason.
    """

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: set[Any],
        extra_config: dict[str, Any] | None = None,
        forward_stream: Any = None,
    ) -> None:
        """Connects in the background, and again whenever the server comes back.

        Args:
            server_args: SGLang's ``ServerArgs``.
            params: Its ``CacheInitParams``, with the pools.
            components: Those of its tree.
            extra_config: The options, as ``pegaflow.port``.
            forward_stream: The stream that writes the pools; None if it is the current one.
        """
        self.forward_stream = forward_stream
        self.layer_done_counter = _LayerCounter(self)
        self.pools = {PoolName(name): None for name in ("kv", "swa", "mamba")}
        self.counts = dict.fromkeys(("lookups", "hits", "loads", "aborted", "saves"), 0)
        self._off = ""
        self._notice: Any = None
        self._extra = extra_config
        self._jobs: Transfers | None = None
        self._pins: Pins | None = None
        self._mover: Any = None
        self._session: Any = None
        self._queued: dict[str, tuple[Pin, list[tuple[int, list[int]]]]] = {}
        self._doomed: set[str] = set()
        self._ranks = ranks_of(params)
        self._instance = settings.instance("linker", self._ranks.number)
        try:
            self._start(server_args, params, components)
        except Refused as reason:
            self.retire(str(reason), reason.kind)
        except Exception as error:  # SGLang would end with an exception of its linker
            self.retire(f"the start failed: {error!r}", "failure", error)

    def _start(self, args: Any, params: Any, components: set[Any]) -> None:
        """
        Raises:
            Refused: this engine cannot be served.
        """
        try:
            read = settings.read(self._extra)
            path = socket_path(read)
        except ConfigError as error:
            raise Refused(str(error), "configuration") from None
        if not weight_updates.watch(self) and not read.weights_id:
            raise Refused("this release replaces weights in an unknown place", "engine")
        if getattr(args, "enable_memory_saver", False):
            raise Refused("--enable-memory-saver unmaps the pools that are copied", "engine")
        try:
            self._kinds = device_pools.kinds_of(params, components)
            device = self._device(device_pools.device_of(params), read)
        except LayoutError as error:
            raise Refused(str(error), "model") from None
        if self._ranks.is_mla and not read.untested:
            raise Refused(
                "the linker was not tested with MLA: set pegaflow.untested, or use HiCache",
                "model",
            )
        if self._ranks.cp_size > 1:
            raise Refused("context parallelism is not served by the linker", "engine")
        self._numbers = {PoolName(kind.pool): n for n, kind in enumerate(self._kinds)}
        self.pools = {PoolName(kind.pool): kind for kind in self._kinds}
        self._page = params.page_size
        factors = self._factors(args, read)
        self._mover = self._make_mover(path, device, factors, read)
        self._session = _native.CacheSession(path, self._instance, build(), **read.link_options())
        self._jobs = Transfers(self._mover, KEY_BYTES)
        self._pins = Pins(
            self._session,
            read,
            several_kinds=len(self._kinds) > 1,
            all_lengths=max(self._ranks.agreeing, self._ranks.tp_size) > 1,
        )
        if any(kind.pool == "mamba" for kind in self._kinds):
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)

    def _device(self, device: Any, read: settings.Settings) -> Any:
        """
        Raises:
            Refused: the device is not served.
        """
        self._is_gpu = device.type == "cuda"
        if device.type == "cpu":
            return _native.HostDevice(read.copy_threads)
        if not self._is_gpu:
            raise Refused(f"pools on {device.type} are not served", "device")
        return _native.CudaDevice(device.index or 0)

    def _factors(self, args: Any, read: settings.Settings) -> identity.Factors:
        common = identity.of_engine(args, read.weights_id, self._instance, self._ranks)
        meanings = [f"{kind.pool} {kind.tokens}: {kind.geometry.meaning}" for kind in self._kinds]
        pools = "+".join(kind.pool for kind in self._kinds)
        replicated = self._ranks.is_mla and pools == "kv"
        return identity.of_pool(common, pools, " || ".join(meanings), self._ranks, replicated)

    def _make_mover(
        self, path: str, device: Any, factors: identity.Factors, read: settings.Settings
    ) -> Any:
        options = {"build": build(), **read.mover_options()}
        if len(self._kinds) == 1:
            where = self._kinds[0].geometry
            return _native.Mover(
                path, self._instance, device, where.segments, where.pages, factors, **options
            )
        kinds = [
            (kind.rule, kind.tokens, self._page, [(kind.geometry.segments, kind.geometry.pages)])
            for kind in self._kinds
        ]
        return _native.Mover.of_kinds(
            path, self._instance, device, kinds, self._page, self._page, factors, **options
        )

    # ---- lookups

    @_guarded(lambda self: [])
    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        """Lengths in pages, the longest among them, that stay pinned for the request."""
        keys = self._prefix(transfers)
        if not keys:
            return []
        found = self._pins.lookup(rid, keys)
        self.counts["lookups"] += 1
        self.counts["hits"] += bool(found)
        return found

    @staticmethod
    def _prefix(transfers: Sequence[Any]) -> Sequence[str]:
        return next((one.keys for one in transfers if one.name == PoolName.KV), None) or ()

    # ---- loads

    @_guarded(lambda self: self._ranks.tp_size > 1)
    def load(self, rid: str, transfers: list[Any]) -> bool:
        """Queues a load for the next batch; False: SGLang computes instead.

        Ranks have to agree. With several, a load that this rank cannot start fails in the batch.
        """
        pin = self._pins.take(rid, self._prefix(transfers))
        wanted = self._wanted(pin, transfers) if pin is not None else None
        if pin is not None and wanted is None:
            self._session.unclaim(pin.token)
        if wanted is None:
            if self._ranks.tp_size > 1:
                self._doomed.add(rid)
            return self._ranks.tp_size > 1
        self._queued[rid] = (pin, wanted)
        return True

    def _wanted(
        self, pin: Pin, transfers: Sequence[Any]
    ) -> list[tuple[int, int, int, list[int]]] | None:
        """(kind, first, count, pages) for each pool; None if that is not what is pinned."""
        wanted = []
        for one in transfers:
            number = self._numbers[one.name]
            count = len(one.keys)
            pages = self._kinds[number].geometry.numbers(one.device_indices, count)
            wanted.append((number, pin.units - count, count, pages))
        wanted.sort()
        if len(self._kinds) == 1:
            return wanted
        claimed = sorted((kind, first, count) for kind, first, count in pin.ranges)
        return wanted if [one[:3] for one in wanted] == claimed else None

    @_guarded(lambda self: -1)
    def start_layer_wise_loading(self) -> int:
        """Starts all queued loads; the batch's index, -1 without loads."""
        if not self._queued and not self._doomed:
            return -1
        index, batch = self._jobs.begin()
        batch.failed = bool(self._doomed)
        self._doomed.clear()
        queued, self._queued = self._queued, {}
        self._await_reclaimed_pages()
        for pin, wanted in queued.values():
            batch.tokens.append(pin.token)
            self._jobs.load(batch, self._starter(pin, wanted))
        self.counts["loads"] += len(queued)
        return index

    def _await_reclaimed_pages(self) -> None:
        """Returns when no work on the GPU writes pages that the tree has given to a load.

        With overlapped scheduling SGLang reclaims the pages of a finished request while the last
        forward pass still writes its next token. The pass of this batch has to wait for both, so
        waiting here delays no token; and a load's deadline begins with its copies.
        """
        if self._is_gpu:
            for event in self.record_offload_ready():
                event.synchronize()

    def _starter(
        self, pin: Pin, wanted: list[tuple[int, int, int, list[int]]]
    ) -> Callable[[int], None]:
        if len(self._kinds) == 1:
            ((_, _, _, pages),) = wanted
            return lambda number: self._mover.load(number, pin.token, 0, pages)
        return lambda number: self._mover.load_ranges(number, pin.token, wanted, pin.ranges)

    @_guarded(lambda self: None)
    def wait_for_pages(self, index: int) -> None:
        """The pages of a batch may be read afterwards; called in the forward pass."""
        batch: Batch | None = self._jobs.batch(index) if self._jobs is not None else None
        if batch is None:
            return
        if not self._is_gpu:
            self._jobs.wait(batch)
            return
        import torch

        self._jobs.order(batch, torch.cuda.current_stream().cuda_stream)

    @_guarded(lambda self: False)
    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Waits until nothing writes into the batch's pages; whether all of them were loaded.

        False aborts the batch's requests in SGLang; that is counted.
        """
        good, tokens = self._jobs.finish(counter_index)
        for token in tokens:
            self._session.unclaim(token)
        if not good:
            self.counts["aborted"] += max(1, len(tokens))
            log.error(
                "pegaflow: the server was lost between a lookup and its load; SGLang aborts %d "
                "requests of the batch (%d since the start)",
                max(1, len(tokens)),
                self.counts["aborted"],
            )
        return good

    @_guarded(lambda self: True)
    def cancel_queued_load(self, rid: str) -> bool:
        """Whether a load of this request was queued and is not any longer."""
        if rid in self._doomed:
            self._doomed.discard(rid)
            return True
        queued = self._queued.pop(rid, None)
        if queued is None:
            return False
        self._session.unclaim(queued[0].token)
        return True

    # ---- saves

    @_guarded(lambda self: False)
    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        """Saves pages; SGLang keeps them until the result is taken."""
        if self._ranks.is_mla and not self._ranks.is_writer and len(self._kinds) == 1:
            self._jobs.saved_elsewhere()
            return True
        parts = []
        for one in transfers:
            kind = self._numbers[one.name]
            keys = _native.pack_hex_keys(one.keys)
            if keys:
                pages = self._kinds[kind].geometry.numbers(one.device_indices, len(one.keys))
                parts.append((kind, keys, pages))
        queued = bool(parts) and self._jobs.save(parts, self._ready_queue())
        self.counts["saves"] += queued
        return queued

    def _ready_queue(self) -> int:
        """A stream behind the work that writes the pages; 0 for pools in host memory."""
        if not self._is_gpu:
            return 0
        import torch

        self._side_stream = getattr(self, "_side_stream", None) or torch.cuda.Stream()
        for event in self.record_offload_ready():
            self._side_stream.wait_event(event)
        return self._side_stream.cuda_stream

    @_guarded(lambda self: _ALL)
    def num_completed_offloads(self) -> int:
        """How many results can be taken; SGLang asks once in each scheduling pass."""
        self._pins.begin_pass()
        return self._jobs.completed_saves()

    @_guarded(lambda self: False)
    def pop_completed_offload(self) -> bool:
        """The oldest result: whether the pages are in the cache."""
        return self._jobs.take_save()

    # ---- state

    def reset(self) -> None:
        """Ends all jobs and pins. The cache's pages stay: a reset is this engine's own."""
        self.layer_done_counter.reset()
        self._quiesce()

    def _quiesce(self) -> None:
        if self._jobs is None:
            return
        tokens = self._jobs.quiesce()
        tokens += [pin.token for pin, _ in self._queued.values()]
        self._queued.clear()
        self._doomed.clear()
        for token in tokens:
            self._session.unclaim(token)
        self._pins.release_all()

    def close(self) -> None:
        """Waits for the copies in flight. Idempotent; afterwards everything is a miss."""
        self._off = self._off or "it is closed"
        if self._jobs is not None:
            self._quiesce()
            self._mover.close()
            self._session.close()
            self._jobs = None
        if self._notice is not None:
            self._notice.close()
            self._notice = None

    @property
    def is_off(self) -> bool:
        return bool(self._off)

    def weights_replaced(self) -> None:
        """From here on KV belongs to other weights than the namespace."""
        self.retire("its weights are replaced: restart it to use the cache again", "weights")

    def retire(self, reason: str, kind: str, error: BaseException | None = None) -> None:
        """Disables the cache for good; ``kind`` is a reason of ``_native.DeclineNotice``."""
        if self._off:
            return
        self._off = reason
        log.warning("pegaflow: this engine runs without the cache: %s", reason, exc_info=error)
        if self._jobs is not None:
            self._quiesce()
        self._notice = decline(self._extra, self._instance, kind, reason, self._ranks.number)

    def wait_ready(self, timeout_s: float = 10.0) -> bool:
        """Waits at most ``timeout_s`` for each link; for starts and tests."""
        return (
            not self.is_off
            and self._mover.wait_ready(timeout_s)
            and self._session.wait_ready(timeout_s)
        )

    def status(self) -> dict[str, Any]:
        """Counts, pins, jobs, the state of both links, and why the cache is off."""
        known = {"off": self._off, "counts": dict(self.counts)}
        if self._pins is not None:
            known["pins"] = len(self._pins)
            known["queued"] = len(self._queued)
            known["missed_deadlines"] = self._pins.missed_deadlines
        if self._mover is not None:
            known["mover"] = self._mover.status()
            known["session"] = self._session.status()
        return known


__all__: Sequence[str] = ["PegaLinker"]
