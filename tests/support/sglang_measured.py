"""A linker's engine that measures its own calls, for perf/sglang.py."""

from __future__ import annotations

import hashlib
import time
from array import array
from typing import Any

import torch

from tests.support.sglang_linker_engine import LinkerEngine
from tests.support.waiting import wait_until

from sglang.srt.managers.schedule_batch import Req  # isort: skip
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.sampling.sampling_params import SamplingParams

#: The linker's methods that a pass without a hit calls.
_CALLS = ("lookup", "num_completed_offloads", "start_layer_wise_loading")
WAITING = 16  #: Requests in the scheduler's queue.


class MeasuredLinker(LinkerEngine):
    """Thread-bound, as its base."""

    def __init__(self, extra: dict[str, Any]) -> None:
        # A page has 4 KiB, so that the pool has room for the longest lookup.
        super().__init__(extra, layers=1)
        self._stored: list[str] = []

    def _chain(self, name: str, pages: int) -> list[str]:
        return [hashlib.sha256(f"{name} {number}".encode()).hexdigest() for number in range(pages)]

    def store_chain(self, pages: int) -> None:
        """Saves as many pages under the keys of one prompt, from a few pages of the pool."""
        self._stored = self._chain("stored", pages)
        have = 32
        slots = torch.arange(self.page, (have + 1) * self.page)
        for begin in range(0, pages, have):
            keys = self._stored[begin : begin + have]
            rows = slots[: len(keys) * self.page]
            self.linker.offload([PoolTransfer(name=PoolName.KV, keys=keys, device_indices=rows)])
            wait_until(lambda: self.linker.num_completed_offloads() > 0, "a save is pending")
            if not self.linker.pop_completed_offload():
                raise RuntimeError("a save failed")

    def time_lookups(self, pages: int, repeats: int) -> tuple[int, list[float]]:
        """Lookups by new requests: the pages found, and the seconds of each.

        A lookup without an answer in time counts with the time that it has waited.
        """
        return self._time(self._stored[:pages], repeats)

    def time_reductions(self, pages: int, repeats: int) -> list[float]:
        """The seconds that SGLang itself takes to agree with other ranks on each answer."""
        lengths = self.linker.lookup(self.name(), self._transfers(self._stored[:pages]))
        seconds = []
        for _ in range(repeats):
            began = time.perf_counter()
            agreed = self.cache.linker._sync_restorable_prefix(
                lengths, num_pages=pages, device_hit_pages=0
            )
            seconds.append(time.perf_counter() - began)
            if agreed != pages:
                raise RuntimeError(f"SGLang restores {agreed} of {pages} pages")
        return seconds

    def time_missing_lookups(self, pages: int, repeats: int) -> tuple[int, list[float]]:
        """The same for a prompt of which nothing is stored."""
        return self._time(self._chain("missing", pages), repeats)

    @staticmethod
    def _transfers(keys: list[str]) -> list[Any]:
        return [PoolTransfer(name=PoolName.KV, keys=keys)]

    def _time(self, keys: list[str], repeats: int) -> tuple[int, list[float]]:
        found, seconds = 0, []
        for _ in range(repeats):
            rid = self.name()
            transfers = self._transfers(keys)
            self.linker.num_completed_offloads()  # a new pass
            began = time.perf_counter()
            lengths = self.linker.lookup(rid, transfers)
            seconds.append(time.perf_counter() - began)
            found += lengths[-1] if lengths else 0
            self.linker._pins.release(rid)
            self.forget_the_missed_deadline()
        return found, seconds

    def time_passes(self, passes: int, with_linker: bool) -> tuple[list[float], list[float]]:
        """Passes of a scheduler with waiting requests, none of which has a hit.

        The seconds of each pass, and those of them inside the linker. The requests are new in each
        tenth pass.
        """
        inside = [0.0]
        if with_linker:
            for name in _CALLS:
                setattr(self.linker, name, self._timed(getattr(self.linker, name), inside))
        else:
            self.cache.linker = None
        whole, parts = [], []
        requests: list[Any] = []
        for number in range(passes):
            if number % 10 == 0:
                requests = self._requests(number)
            inside[0] = 0.0
            began = time.perf_counter()
            self.cache.check_hicache_events()
            for request, key in requests:
                self.cache.match_prefix(MatchPrefixParams(key=key, req=request))
            if with_linker:
                self.linker.start_layer_wise_loading()
            whole.append(time.perf_counter() - began)
            parts.append(inside[0])
        return whole, parts

    def _requests(self, number: int) -> list[tuple[Any, Any]]:
        made = []
        for place in range(WAITING):
            tokens = array("q", range(number * WAITING + place, number * WAITING + place + 2048))
            request = Req(
                rid=f"{number}-{place}",
                origin_input_text="",
                origin_input_ids=tokens,
                sampling_params=SamplingParams(max_new_tokens=1),
            )
            made.append((request, RadixKey(tokens)))
        return made

    @staticmethod
    def _timed(method: Any, inside: list[float]) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                inside[0] += time.perf_counter() - began

        return timed
