"""A linker's engine on a GPU that measures its loads, for tests/gpu/sglang_pools.py."""

from __future__ import annotations

import hashlib
import statistics
import threading
import time
from typing import Any

import torch

from tests.support.sglang_linker_engine import LinkerEngine
from tests.support.waiting import wait_until

from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer  # isort: skip

_MATRIX = 8192


class GpuLinker(LinkerEngine):
    """Thread-bound, as its base."""

    def measure(self, pages: int, repeats: int) -> dict[str, Any]:
        """Loads of one prompt: GB/s alone and beside matrix products, and what these keep."""
        keys = [hashlib.sha256(f"page {number}".encode()).hexdigest() for number in range(pages)]
        # A pool in use has free pages in no order.
        order = torch.randperm(self.allocator.size // self.page - 1)[:pages] + 1
        slots = (order[:, None] * self.page + torch.arange(self.page)).flatten().cuda()
        transfer = PoolTransfer(name=PoolName.KV, keys=keys, device_indices=slots)
        size = sum(buffer[0].nbytes for buffer in self.buffers) * self.page * pages
        began = time.perf_counter()
        assert self.linker.offload([transfer])
        wait_until(lambda: self.linker.num_completed_offloads() > 0, "a save is pending")
        assert self.linker.pop_completed_offload(), "the save failed"
        saved = time.perf_counter() - began
        for _ in range(2):
            self._load(transfer)
        copy = _BareCopy(size)
        bare, alone = self._in_turns(copy, transfer, repeats)
        with _Products() as products:
            free = products.rate(1.0)
            begun = products.begin()
            while time.perf_counter() - begun[0] < 1.0:
                self._load(transfer)
            beside = products.end(begun)
            copying, loading = self._in_turns(copy, transfer, repeats)
        rates = {
            "bare copy": bare,
            "load": alone,
            "bare copy beside products": copying,
            "load beside products": loading,
        }
        found: dict[str, Any] = {"bytes": size, "save_s": round(saved, 4)}
        for name, seconds in rates.items():
            median = statistics.median(seconds)
            found[f"{name}, GB/s"] = {
                "median": round(size / median / 1e9, 2),
                "min": round(size / max(seconds) / 1e9, 2),
                "max": round(size / min(seconds) / 1e9, 2),
                "n": len(seconds),
            }
        return found | {"products kept": round(beside / free, 4)}

    def _in_turns(
        self, copy: _BareCopy, transfer: Any, repeats: int
    ) -> tuple[list[float], list[float]]:
        """The seconds of bare copies and of loads."""
        pairs = [(copy(), self._load(transfer)) for _ in range(repeats)]
        return [pair[0] for pair in pairs], [pair[1] for pair in pairs]

    def _load(self, transfer: Any) -> float:
        rid = self.name()
        lengths = self.linker.lookup(rid, [transfer])
        assert lengths and lengths[-1] == len(transfer.keys), "not found"
        began = time.perf_counter()
        assert self.linker.load(rid, [transfer])
        index = self.linker.start_layer_wise_loading()
        assert self.linker.finish_layer_wise_loading(index), "the load failed"
        self.linker.num_completed_offloads()
        return time.perf_counter() - began


class _BareCopy:
    """A copy of as many contiguous bytes from pinned memory, on a stream of its own."""

    def __init__(self, size: int) -> None:
        self._host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self._device = torch.empty(size, dtype=torch.uint8, device="cuda")
        self._stream = torch.cuda.Stream()
        self()

    def __call__(self) -> float:
        """Its seconds."""
        began = time.perf_counter()
        with torch.cuda.stream(self._stream):
            self._device.copy_(self._host, non_blocking=True)
        self._stream.synchronize()
        return time.perf_counter() - began


class _Products:
    """A thread that multiplies matrices without a pause."""

    def __enter__(self) -> _Products:
        self._stop, self._done = threading.Event(), 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        wait_until(lambda: self._done > 20, "no product ends")
        return self

    def _run(self) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            a = torch.randn(_MATRIX, _MATRIX, device="cuda", dtype=torch.bfloat16)
            out = torch.empty_like(a)
            events = [torch.cuda.Event() for _ in range(4)]
            for event in events:
                event.record()
            number = 0
            while not self._stop.is_set():
                events[number % 4].synchronize()
                torch.mm(a, a, out=out)
                events[number % 4].record()
                number += 1
                self._done = max(0, number - 4)

    def begin(self) -> tuple[float, int]:
        return time.perf_counter(), self._done

    def end(self, begun: tuple[float, int]) -> float:
        """Products in a second since begin()."""
        return (self._done - begun[1]) / (time.perf_counter() - begun[0])

    def rate(self, seconds: float) -> float:
        begun = self.begin()
        self._stop.wait(seconds)
        return self.end(begun)

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
