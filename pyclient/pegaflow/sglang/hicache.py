"""PegaFlow as a storage backend of SGLang's HiCache.

SGLang keeps evicted pages in a host pool of its own and passes their places; pages are copied
straight between that memory and the server's pool. docs/sglang.md has the flags.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig

from pegaflow.engine.config import ConfigError, socket_path
from pegaflow.sglang import identity, settings, weight_updates
from pegaflow.sglang.engine import build, decline, server_args
from pegaflow.sglang.geometry import LayoutError, of_host_pool
from pegaflow.sglang.identity import Ranks, Refused
from pegaflow.sglang.pages import Pages

try:
    from sglang.srt.mem_cache.hicache_storage import PoolTransferResult
except ImportError:  # releases without several pools
    PoolTransferResult = None

log = logging.getLogger("sglang.pegaflow")

#: SGLang's name of the pool of full attention, and of those whose pages are found one by one.
KV = "kv"
TRAILING = ("swa", "mamba")
#: Pools of which tensor-parallel ranks have different pages although attention is MLA.
_NOT_REPLICATED = ("mamba", "draft", "draft_swa")
#: Pools and classes of pools that were tested, see docs/sglang.md.
_TESTED_POOLS = (KV, *TRAILING)
_TESTED_CLASSES = ("MHATokenToKVPoolHost", "MLATokenToKVPoolHost", "MambaPoolHost")


def _guarded(neutral: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a method that SGLang calls: a failure disables the cache and is a miss.

    Args:
        neutral: Makes the result of a miss from the method's arguments.
    """

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.is_off:
                return neutral(*args, **kwargs)
            try:
                return method(self, *args, **kwargs)
            except Exception as error:  # a bug of PegaFlow: SGLang goes on without the cache
                self.retire(f"{method.__name__}: {error!r}", "failure", error)
                return neutral(*args, **kwargs)

        return guarded

    return decorate


def _none_of(keys: Sequence[str], *args: Any, **kwargs: Any) -> list[bool]:
    return [False] * len(keys)


def _none_of_pools(transfers: Sequence[Any], *args: Any, **kwargs: Any) -> dict[str, list[bool]]:
    return {transfer.name: [False] * len(transfer.keys or ()) for transfer in transfers}


def _no_hit(*args: Any, **kwargs: Any) -> Any:
    return PoolTransferResult(0, {})


class PegaHiCache(HiCacheStorage):
    """A cache outside the engine, shared by all engines of the machine. Thread-safe.

    Best effort: no exception leaves it, and after any failure SGLang computes instead. Each call
    ends by the deadlines of ``settings``. An engine that cannot be served runs without the cache;
    one warning and the server's /instances give the reason.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Any = None) -> None:
        """Opens no connection yet: that needs SGLang's pools.

        Args:
            storage_config: With the options in ``extra_config``, as ``pegaflow.port``.
        """
        self._off = ""
        self._notice: Any = None
        self._lock = threading.Lock()
        self._pools: dict[str, Pages] = {}
        self._by_object: dict[int, Pages] = {}
        self._counts = dict.fromkeys(("saved", "loaded", "asked", "found"), 0)
        self._config = storage_config
        self._ranks = _ranks(storage_config)
        self._instance = settings.instance("hicache", self._ranks.number)
        self._factors: identity.Factors = []
        try:
            self._start()
        except Refused as reason:
            self.retire(str(reason), reason.kind)
        except Exception as error:  # SGLang would end with an exception of its storage
            self.retire(f"the start failed: {error!r}", "failure", error)

    def _start(self) -> None:
        """
        Raises:
            Refused: this engine cannot be served.
        """
        extra = self._config.extra_config or {}
        try:
            self._settings = settings.read(extra)
            self._path = socket_path(self._settings)
        except ConfigError as error:
            raise Refused(str(error), "configuration") from None
        if getattr(self._config, "dcp_size", 1) > 1:
            raise Refused("decode context parallelism is not served", "engine")
        if getattr(self._config, "should_split_heads", False):
            raise Refused("tp_lcm_size is not served: remove it", "configuration")
        if not weight_updates.watch(self) and not self._settings.weights_id:
            raise Refused(
                "this release replaces weights in an unknown place; state pegaflow.weights_id and "
                "restart the engine after each update of its weights",
                "engine",
            )
        args = server_args()
        if args is None:
            raise Refused("this release keeps its options in an unknown place", "engine")
        self._factors = identity.of_engine(
            args, self._settings.weights_id, self._instance, self._ranks
        )

    # ---- pools

    @_guarded(lambda *args, **kwargs: None)
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """SGLang's pool of full attention."""
        self.mem_pool_host = mem_pool_host
        self._add(KV, mem_pool_host)

    @_guarded(lambda *args, **kwargs: None)
    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """A further pool, of windows or states; or that of full attention once more."""
        self._add(str(host_pool_name), host_pool)

    def on_host_pools_registered(self) -> None:
        """Nothing: each pool is served as soon as it is registered."""

    def _add(self, name: str, host_pool: Any) -> None:
        with self._lock:
            if (known := self._by_object.get(id(host_pool))) is not None:
                self._pools[name] = known  # one namespace, whatever its name
                return
        is_tested = name in _TESTED_POOLS and type(host_pool).__name__ in _TESTED_CLASSES
        if not is_tested and not self._settings.untested:
            self.retire(
                f"the pool {name} of class {type(host_pool).__name__} was not tested: set "
                "pegaflow.untested to serve it, see docs/sglang.md",
                "model",
            )
            return
        replicated = self._ranks.is_mla and name not in _NOT_REPLICATED
        try:
            geometry = of_host_pool(host_pool)
        except LayoutError as error:
            self.retire(str(error), "model")
            return
        pages = Pages(
            self._path,
            f"{self._instance}-{name}",
            build(),
            geometry,
            identity.of_pool(self._factors, name, geometry.meaning, self._ranks, replicated),
            self._settings,
            is_run=name not in TRAILING,
        )
        with self._lock:
            self._pools[name] = pages
            self._by_object[id(host_pool)] = pages

    def _saves(self, name: str) -> bool:
        return self._ranks.is_writer or name in _NOT_REPLICATED

    # ---- one pool

    @_guarded(lambda *args, **kwargs: 0)
    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """How many pages, from the first one on, are in the cache."""
        found = self._pools[KV].count(keys)
        self._count(asked=len(keys), found=found)
        return found

    @_guarded(_none_of)
    def batch_get_v1(
        self, keys: Sequence[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Loads pages into the slots ``host_indices``; which of them were loaded."""
        return self._get(KV, keys, host_indices)

    @_guarded(_none_of)
    def batch_set_v1(
        self, keys: Sequence[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Saves pages from the slots ``host_indices``; which of them need not be saved again."""
        return self._set(KV, keys, host_indices)

    # ---- several pools

    @_guarded(_no_hit)
    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[Any] | None = None,
        extra_info: Any = None,
    ) -> Any:
        """The lengths, in pages, after which all pools have what a prompt needs to continue."""
        run = self._pools[KV].count(keys)
        self._count(asked=len(keys), found=run)
        hits = {KV: run} if run else {}
        lengths = range(1, run + 1)
        for transfer in pool_transfers or ():
            if not lengths:
                break
            name = str(transfer.name)
            lengths, longest = self._narrow(transfer, keys[:run], lengths)
            if longest:
                hits[name] = longest
        restorable = list(lengths)
        result = PoolTransferResult(restorable[-1] if restorable else 0, hits)
        if "restorable_prefix_pages" in {one.name for one in dataclasses.fields(result)}:
            result.restorable_prefix_pages = restorable
        return result

    def _narrow(
        self, transfer: Any, keys: Sequence[str], lengths: Sequence[int]
    ) -> tuple[Sequence[int], int]:
        """Those of ``lengths`` that a pool allows, and the longest length that it allows alone."""
        pages = self._pools.get(str(transfer.name))
        if pages is None:
            return (), 0
        policy = str(getattr(transfer.hit_policy, "value", transfer.hit_policy))
        if policy == "all_pages":
            run = pages.count(keys)
            return [length for length in lengths if length <= run], run
        if policy != "trailing_pages":
            return (), 0
        window = max(1, len(transfer.keys) if transfer.keys else 1)
        allowed, run = set(), 0
        for number, one in enumerate(pages.present(keys), 1):
            run = run + 1 if one else 0
            if run >= min(window, number):
                allowed.add(number)
        return [length for length in lengths if length in allowed], max(allowed, default=0)

    @_guarded(_none_of_pools)
    def batch_get_v2(
        self, transfers: Sequence[Any], extra_info: Any = None
    ) -> dict[str, list[bool]]:
        """Loads pages of several pools; for each pool which of them were loaded."""
        return {
            one.name: self._get(str(one.name), one.keys or (), one.host_indices)
            for one in transfers
        }

    @_guarded(_none_of_pools)
    def batch_set_v2(
        self, transfers: Sequence[Any], extra_info: Any = None
    ) -> dict[str, list[bool]]:
        """Saves pages of several pools; for each pool which of them need not be saved again."""
        return {
            one.name: self._set(str(one.name), one.keys or (), one.host_indices)
            for one in transfers
        }

    def _get(self, name: str, keys: Sequence[str], slots: Any) -> list[bool]:
        pages = self._pools.get(name)
        if pages is None or slots is None:
            return [False] * len(keys)
        loaded = pages.load(keys, pages.geometry.numbers(slots, len(keys)))
        self._count(loaded=sum(loaded))
        return loaded

    def _set(self, name: str, keys: Sequence[str], slots: Any) -> list[bool]:
        pages = self._pools.get(name)
        if pages is None or slots is None:
            return [False] * len(keys)
        if not self._saves(name):
            return [True] * len(keys)  # another rank saves equal pages
        saved = pages.save(keys, pages.geometry.numbers(slots, len(keys)))
        self._count(saved=sum(saved))
        return saved

    # ---- the interface without places, which copies once more and is not used

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        """None: pages are loaded by ``batch_get_v1``."""
        self._explain()

    def batch_get(
        self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[None]:
        """A miss for each key, as ``get``."""
        self._explain()
        return [None] * len(keys)

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """False: pages are saved by ``batch_set_v1``."""
        self._explain()
        return False

    def batch_set(
        self,
        keys: Sequence[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """False, as ``set``."""
        self._explain()
        return False

    def _explain(self) -> None:
        self.retire(
            'SGLang does not pass the places of its pages: add "interface_v1": 1 to '
            "--hicache-storage-backend-extra-config",
            "configuration",
        )

    @_guarded(lambda *args, **kwargs: False)
    def exists(self, key: str) -> bool:
        """Whether one page is in the cache."""
        return self._pools[KV].count([key]) == 1

    # ---- state

    @_guarded(lambda *args, **kwargs: False)
    def clear(self) -> bool:
        """Makes all pages of this engine's namespaces unfindable, for all engines that share them.

        SGLang calls it for an operator's request to clear the storage.
        """
        reset = [pages.reset() for pages in set(self._pools.values())]
        return all(reset)  # each is tried

    @property
    def is_off(self) -> bool:
        return bool(self._off)

    def weights_replaced(self) -> None:
        """From here on KV belongs to other weights than the namespace."""
        self.retire("its weights are replaced: restart it to use the cache again", "weights")

    def retire(self, reason: str, kind: str, error: BaseException | None = None) -> None:
        """Disables the cache for good; ``kind`` is a reason of ``_native.DeclineNotice``."""
        with self._lock:
            if self._off:
                return
            self._off = reason
        log.warning("pegaflow: this engine runs without the cache: %s", reason, exc_info=error)
        self._notice = decline(
            self._config.extra_config, self._instance, kind, reason, self._ranks.number
        )

    def wait_ready(self, timeout_s: float = 10.0) -> bool:
        """Waits at most ``timeout_s`` until the server serves all pools; for starts and tests."""
        end = time.monotonic() + timeout_s
        return not self.is_off and all(
            pages.wait_ready(max(0.0, end - time.monotonic())) for pages in self._pools.values()
        )

    def status(self) -> dict[str, Any]:
        """The state of each pool's links, the counts of pages, and why the cache is off."""
        links = {name: pages.status() for name, pages in self._pools.items()}
        return {"off": self._off, "pages": dict(self._counts), "pools": links}

    def close(self) -> None:
        """Waits for the copies in flight. Idempotent; afterwards everything is a miss."""
        with self._lock:
            self._off = self._off or "it is closed"
            pools = set(self._pools.values())
            notice, self._notice = self._notice, None
        for pages in pools:
            pages.close()
        if notice is not None:
            notice.close()

    def _count(self, **more: int) -> None:
        with self._lock:
            for name, number in more.items():
                self._counts[name] += number


def _ranks(config: Any) -> Ranks:
    return Ranks(
        tp_rank=config.tp_rank,
        tp_size=config.tp_size,
        pp_rank=getattr(config, "pp_rank", 0),
        pp_size=getattr(config, "pp_size", 1),
        cp_rank=getattr(config, "attn_cp_rank", 0),
        cp_size=getattr(config, "attn_cp_size", 1),
        dp_rank=getattr(config, "dp_rank", 0),
        is_mla=bool(config.is_mla_model),
    )
