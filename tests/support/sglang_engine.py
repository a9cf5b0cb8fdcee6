"""SGLang's real tree, pools and HiCache controller, with PegaFlow as its storage, without a model.

The content of each page follows from the tokens up to its end, so that any engine can check what
another one has saved without asking it.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import time
import unittest
from array import array
from typing import Any

import torch

from tests.support import sglang_classes

if sglang_classes.missing():
    raise ImportError(sglang_classes.missing())

from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import build_kv_host_pool
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.test.kits.unified_radix_cache.config import CacheConfig
from sglang.test.kits.unified_radix_cache.fixtures import build_fixture, match_prefix
from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures

from pegaflow.sglang import PegaHiCache


class Fixtures(UnifiedRadixCacheStorageFixtures, unittest.TestCase):
    """SGLang's own helpers, outside of a test case."""

    def runTest(self) -> None: ...


def content(tokens: list[int], end: int, size: int) -> torch.Tensor:
    """``size`` bytes that follow from the first ``end`` tokens."""
    text = array("q", tokens[:end]).tobytes()
    return torch.frombuffer(bytearray(hashlib.shake_128(text).digest(size)), dtype=torch.uint8)


class Tree:
    """A tree with device pools in ordinary memory."""

    def __init__(
        self,
        components: tuple[str, ...] = ("FULL",),
        page_size: int = 16,
        dtype: str = "bfloat16",
        layers: int = 2,
        slots: int = 1024,
        rank: tuple[int, int] = (0, 1),
        **config: Any,
    ) -> None:
        """``rank``: the number of this tensor-parallel rank, and of how many it is one."""
        self.fixtures = Fixtures()
        self.fixtures.cfg = CacheConfig(
            page_size=page_size,
            components=tuple(ComponentType[name] for name in components),
            num_layers=layers,
            full_attention_layer_ids=tuple(range(layers)) if components == ("FULL",) else (0,),
            kv_size=slots,
            dtype=getattr(torch, dtype),
            **({"max_context_len": 4096, "head_dim": 32} | config),
        )
        self.page = page_size
        self.cache, self.allocator, self.requests = build_fixture(self.fixtures.cfg)
        # Kept: the values hold until this object is gone.
        self._ranks = get_parallel().override(
            tp_rank=rank[0],
            tp_size=rank[1],
            attn_tp_rank=rank[0],
            attn_tp_size=rank[1],
            moe_tp_size=rank[1],
            pp_rank=0,
            pp_size=1,
        )
        self._ranks.__enter__()
        self.pool = self.fixtures._get_full_kv_pool(self.allocator)
        self.buffers = [*self.pool.k_buffer, *self.pool.v_buffer]
        self._names = 0

    def insert(self, tokens: list[int]) -> int:
        """Computes whole pages; the tree's node of the last one."""
        self.fixtures._insert(self.cache, self.allocator, self.requests, tokens)
        node = match_prefix(self.cache, tokens).last_device_node
        slots = self.cache.path_device_indices(node)
        for number in range(len(slots) // self.page):
            self.write(slots[number * self.page :][: self.page], tokens, number)
        return node

    def write(self, slots: torch.Tensor, tokens: list[int], number: int) -> None:
        for place, buffer in zip(self._pieces(tokens, number), self.buffers, strict=True):
            buffer[slots] = place.view(buffer.dtype).view(len(slots), *buffer.shape[1:])

    def _pieces(self, tokens: list[int], number: int) -> list[torch.Tensor]:
        """The bytes of one page, by layer."""
        sizes = [buffer[0].nbytes * self.page for buffer in self.buffers]
        return list(content(tokens, (number + 1) * self.page, sum(sizes)).split(sizes))

    def wrong(self, slots: torch.Tensor, tokens: list[int]) -> int:
        """How many pages in these slots are not those of the tokens."""
        bad = 0
        for number in range(len(slots) // self.page):
            rows = slots[number * self.page :][: self.page]
            for piece, buffer in zip(self._pieces(tokens, number), self.buffers, strict=True):
                if not torch.equal(buffer[rows].contiguous().view(torch.uint8).flatten(), piece):
                    bad += 1
                    break
        return bad

    def scribble(self) -> None:
        """No page keeps its bytes."""
        for buffer in self.buffers:
            buffer.fill_(7)

    def name(self) -> str:
        self._names += 1
        return f"request-{self._names}"


class HiCacheEngine(Tree):
    """A tree with HiCache's host pools and controller threads, and PegaFlow behind them."""

    def __init__(
        self,
        extra: dict[str, Any],
        backend_module: str = "pegaflow.sglang",
        backend_class: str = "PegaHiCache",
        mem_layout: str = "page_first_direct",
        **tree: Any,
    ) -> None:
        super().__init__(**tree)
        config = {
            "backend_name": "pegaflow",
            "module_path": backend_module,
            "class_name": backend_class,
            "interface_v1": 1,
            "prefetch_threshold": 1,
            "pegaflow.weights_id": "a model",
        } | extra
        args = ServerArgs(
            model_path="dummy",
            page_size=self.page,
            hicache_io_backend="direct",
            hicache_mem_layout=mem_layout,
            hicache_write_policy="write_through",
            hicache_storage_backend="dynamic",
            hicache_storage_backend_extra_config=json.dumps(config),
            hicache_storage_prefetch_policy="wait_complete",
        )
        args._mamba_cache_chunk_size = 64
        set_global_server_args_for_scheduler(args)
        self.cache.init_hicache(args, self.cache.cache_init_params)
        self.controller = self.cache.cache_controller
        # The test decides what is written; and pools of equal size leave no room for prefetches.
        self.cache.write_through_threshold = 1 << 30
        self.cache.load_back_threshold = 0
        self.controller.prefetch_capacity_limit = self.controller.mem_pool_host.size
        self.backend = self.controller.storage_backend

    def ready(self, timeout_s: float = 20.0) -> bool:
        return self.backend.wait_ready(timeout_s)

    def put(self, tokens: list[int]) -> dict[str, Any]:
        """Computes and saves; "acked": the pages that the backup thread reported as written."""
        node = self.insert(tokens)
        written: list[int] = []
        acks = self.controller.ack_backup_queue
        put = acks.put

        def count(operation: Any, *args: Any, **kwargs: Any) -> None:
            written.append(operation.completed_tokens // self.page)
            put(operation, *args, **kwargs)

        acks.put = count
        began = time.monotonic()
        try:
            self.fixtures._backup_node(self.cache, node)
            self.fixtures._flush_l3_backups(self.cache, timeout=30.0)
        finally:
            del acks.put
        return {"acked": sum(written), "seconds": time.monotonic() - began}

    def get(self, tokens: list[int]) -> dict[str, Any]:
        """Prefetches as the scheduler does, loads to the device, and compares.

        "found": whole pages on the device afterwards; "wrong": those with other bytes.
        """
        self.scribble()
        name = CacheRequestHandle(self.name(), 0)
        began = time.monotonic()
        root = self.cache.root_node_handle()
        self.cache.prefetch_from_storage(name, root, array("q", tokens), None, None)
        self.fixtures._run_prefetch_to_completion(self.cache, name, timeout=30.0)
        took = time.monotonic() - began
        request = self.fixtures._load_back_through_admission(self.cache, self.requests, tokens)
        if request.host_hit_length:
            self.fixtures._finish_pending_loads(self.cache)
        node = match_prefix(self.cache, tokens).last_device_node
        slots = self.cache.path_device_indices(node)
        wrong = self.wrong(slots, tokens)
        self.requests.free(request)
        return {"found": len(slots) // self.page, "wrong": wrong, "seconds": took}

    def empty(self) -> None:
        """All of SGLang's own tiers lose their pages."""
        self.cache.reset()
        self.allocator.clear()
        self.scribble()
        self.controller.mem_pool_host.kv_buffer.fill_(9)

    def call(self, name: str, *args: Any) -> Any:
        """Calls the backend itself; its result and the seconds that it took."""
        began = time.monotonic()
        result = getattr(self.backend, name)(*args)
        return result, time.monotonic() - began

    def hashes(self, tokens: list[int]) -> list[str]:
        from sglang.srt.mem_cache.radix_cache import RadixKey
        from sglang.srt.mem_cache.utils import get_storage_hash_str

        return get_storage_hash_str(RadixKey(array("q", tokens)), None, page_size=self.page)

    def bytes_of(self, tokens: list[int], number: int) -> bytes:
        """The keys of the first layer of one page."""
        return bytes(self._pieces(tokens, number)[0].numpy())

    def replace_weights(self) -> None:
        """What SGLang calls for new weights, here without a model that takes them."""
        from sglang.srt.managers.scheduler_components import weight_updater

        manager = object.__new__(weight_updater.SchedulerWeightUpdaterManager)
        try:
            manager.update_weights_from_disk(None)
        except AttributeError:
            pass  # there is no model

    def status(self) -> dict[str, Any]:
        return self.backend.status()

    def close(self) -> None:
        self.controller._stop_storage_threads()
        self.backend.close()


class PoolsEngine(HiCacheEngine):
    """The backend of a tree with several pools, called as the controller's threads call it."""

    def pages(self, pool: str, slots: list[int]) -> list[torch.Tensor]:
        """Views of the host pool's pages as bytes, one for each piece."""
        host = self.controller.mem_pool_host.get_pool(PoolName(pool))
        addresses, sizes = host.get_page_buffer_meta(torch.tensor(slots))
        pieces = []
        for address, size in zip(addresses, sizes, strict=True):
            raw = (ctypes.c_uint8 * size).from_address(address)
            pieces.append(torch.frombuffer(raw, dtype=torch.uint8))
        return pieces

    def slots(self, pool: str, page: int) -> list[int]:
        size = self.controller.mem_pool_host.get_pool(PoolName(pool)).page_size
        return list(range(page * size, (page + 1) * size))

    def transfer(self, pool: str, keys: list[str], pages: list[int]) -> PoolTransfer:
        policy = PoolHitPolicy.ALL_PAGES if pool == "kv" else PoolHitPolicy.TRAILING_PAGES
        slots = [slot for page in pages for slot in self.slots(pool, page)]
        return PoolTransfer(
            name=PoolName(pool), keys=keys, host_indices=torch.tensor(slots), hit_policy=policy
        )

    def set(self, pool: str, keys: list[str], pages: list[int]) -> list[bool]:
        """Fills pages with what their keys determine, and saves them."""
        for key, page in zip(keys, pages, strict=True):
            self._fill(pool, key, page)
        results = self.backend.batch_set_v2([self.transfer(pool, keys, pages)])
        return results[PoolName(pool)]

    def _expected(self, pool: str, key: str, pieces: list[torch.Tensor]) -> list[torch.Tensor]:
        sizes = [len(piece) for piece in pieces]
        text = list(f"{pool} {key}".encode())
        return list(content(text, len(text), sum(sizes)).split(sizes))

    def _fill(self, pool: str, key: str, page: int) -> None:
        pieces = self.pages(pool, self.slots(pool, page))
        for piece, made in zip(pieces, self._expected(pool, key, pieces), strict=True):
            piece.copy_(made)

    def fetch(self, pool: str, keys: list[str], pages: list[int]) -> tuple[list[bool], int]:
        """Loads; which pages, and how many of these have other bytes than their keys determine."""
        for page in pages:
            for piece in self.pages(pool, self.slots(pool, page)):
                piece.fill_(5)
        loaded = self.backend.batch_get_v2([self.transfer(pool, keys, pages)])[PoolName(pool)]
        wrong = 0
        for key, page, good in zip(keys, pages, loaded, strict=True):
            pieces = self.pages(pool, self.slots(pool, page))
            made = self._expected(pool, key, pieces)
            same = all(torch.equal(one, two) for one, two in zip(pieces, made, strict=True))
            wrong += good and not same
        return loaded, wrong

    def lengths(self, keys: list[str], windows: dict[str, int]) -> tuple[int, list[int]]:
        """The answer of batch_exists_v2: hit pages and restorable lengths."""
        transfers = [
            PoolTransfer(
                name=PoolName(pool), keys=keys[:pages], hit_policy=PoolHitPolicy.TRAILING_PAGES
            )
            for pool, pages in windows.items()
        ]
        found = self.backend.batch_exists_v2(keys, transfers)
        return found.kv_hit_pages, found.restorable_prefix_pages


class LatentEngine:
    """One of two tensor-parallel ranks with equal pages (MLA): a host pool and the backend."""

    def __init__(self, extra: dict[str, Any], rank: int) -> None:
        args = ServerArgs(model_path="dummy", page_size=16, hicache_mem_layout="page_first")
        set_global_server_args_for_scheduler(args)
        device = MLATokenToKVPool(
            size=256, page_size=16, dtype=torch.bfloat16, kv_lora_rank=64, qk_rope_head_dim=16,
            layer_num=3, device="cpu", enable_memory_saver=False,
        )  # fmt: skip
        self.pool = build_kv_host_pool(kv_pool=device, page_size=16)
        config = HiCacheStorageConfig(
            tp_rank=rank, tp_size=2, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
            is_mla_model=True, enable_storage_metrics=False, is_page_first_layout=True,
            model_name="dummy", extra_config={"pegaflow.weights_id": "latent"} | extra,
        )  # fmt: skip
        self.backend = PegaHiCache(config, {})
        self.backend.register_mem_pool_host(self.pool)

    def ready(self) -> bool:
        return self.backend.wait_ready(20.0)

    def set(self, keys: list[str], value: int) -> list[bool]:
        self.pool.kv_buffer.fill_(value)
        return self.backend.batch_set_v1(keys, torch.arange(16 * len(keys)))

    def get(self, keys: list[str]) -> tuple[list[bool], bool, float]:
        """What was loaded, whether other pages kept their bytes, and the value in the pages."""
        self.pool.kv_buffer.fill_(1)
        loaded = self.backend.batch_get_v1(keys, torch.arange(16 * len(keys)))
        pages = self.pool.kv_buffer[: 16 * len(keys)]
        rest = self.pool.kv_buffer[16 * len(keys) :]
        return loaded, bool((rest == 1).all()), float(pages.float().mean())

    def status(self) -> dict[str, Any]:
        return self.backend.status()

    def close(self) -> None:
        self.backend.close()
