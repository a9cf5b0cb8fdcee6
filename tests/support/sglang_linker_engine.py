"""SGLang's real tree and device pools with PegaFlow as its external linker, without a model."""

from __future__ import annotations

import contextlib
import os
import random
import time
from array import array
from collections.abc import Iterator
from typing import Any

import torch

from tests.support.sglang_engine import Tree, content
from tests.support.waiting import wait_until

from sglang.srt.mem_cache.base_prefix_cache import (  # isort: skip
    EvictParams,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import reset_context
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from pegaflow.sglang import PegaLinker
from pegaflow.sglang.engine import ranks_of


class LinkerEngine(Tree):
    """One engine of one rank."""

    def __init__(self, extra: dict[str, Any], linker: type[Any] = PegaLinker, **tree: Any) -> None:
        super().__init__(**tree)
        on_gpu = self.buffers[0].is_cuda
        #: As in SGLang, the stream on which passes of the model write and read pages.
        self.forward_stream = torch.cuda.Stream() if on_gpu else None
        args = ServerArgs(model_path="dummy", page_size=self.page)
        args._mamba_cache_chunk_size = 64
        set_global_server_args_for_scheduler(args)
        self.linker = linker(
            args,
            self.cache.cache_init_params,
            components=set(self.cache.tree_components),
            extra_config={"pegaflow.weights_id": "a model"} | extra,
            forward_stream=self.forward_stream,
        )
        self.cache.init_cache_linker(self.linker)
        kvcache = self.allocator.get_kvcache()
        swa = getattr(kvcache, "swa_kv_pool", None)
        self.windows = [*swa.k_buffer, *swa.v_buffer] if swa is not None else []
        self.states: list[torch.Tensor] = []
        if self.fixtures.cfg.has_mamba:
            cache = self.requests.mamba_pool.mamba_cache
            self.states = [layer for one in (cache.temporal, *cache.conv) for layer in one]

    def ready(self, timeout_s: float = 20.0) -> bool:
        return self.linker.wait_ready(timeout_s)

    # ---- content

    def _rows(self, buffers: list[torch.Tensor], rows: Any, tokens: list[int], end: int, tag: int):
        """(a view of the rows of each buffer, the bytes that belong there)."""
        views = [buffer[rows].contiguous() for buffer in buffers]
        sizes = [view.nbytes for view in views]
        made = content([tag, *tokens[:end]], end + 1, sum(sizes))
        if buffers[0].is_cuda:  # without waiting for the stream
            made = made.pin_memory().to(buffers[0].device, non_blocking=True)
        return zip(buffers, views, made.split(sizes), strict=True)

    @contextlib.contextmanager
    def _forward(self, cycles: int = 2_000_000) -> Iterator[None]:
        """On a GPU, a pass on its own stream behind all work so far, which begins ``cycles`` later.

        That is a millisecond, in which the scheduler runs ahead.
        """
        if self.forward_stream is None:
            yield
            return
        self.forward_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.forward_stream):
            torch.cuda._sleep(cycles)
            yield

    def _fill(self, buffers: Any, rows: Any, tokens: list[int], end: int, tag: int) -> None:
        for buffer, view, made in self._rows(buffers, rows, tokens, end, tag):
            buffer[rows] = made.view(buffer.dtype).view(view.shape)

    def _same(self, buffers: Any, rows: Any, tokens: list[int], end: int, tag: int) -> bool:
        return all(
            torch.equal(view.view(torch.uint8).flatten(), made)
            for _, view, made in self._rows(buffers, rows, tokens, end, tag)
        )

    def stored(self, tokens: list[int]) -> list[int]:
        """The names in SGLang's own KV events of the pages that a put() of these tokens adds."""
        recorder = self.cache.tree_core.kv_events
        recorder.enabled = True
        try:
            assert self.put(tokens)
            events = self.cache.take_events()
        finally:
            recorder.enabled = False
        stored = [one for one in events if type(one).__name__ == "BlockStored"]
        return [name % (1 << 64) for one in stored for name in one.block_hashes]

    def scribble(self) -> None:
        for buffer in (*self.buffers, *self.windows, *self.states):
            buffer.fill_(7)

    # ---- steps

    def put(self, tokens: list[int]) -> bool:
        """Computes whole pages and inserts them, which offloads them; False without room."""
        match = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens))))
        have = match.device_prefix_len
        missing = len(tokens) - have
        if missing <= 0:
            return True
        lock = self.cache.inc_lock_ref(match.last_device_node).to_dec_params()
        try:
            return self._make_room(missing) and self._insert(tokens, match, have)
        finally:
            self.cache.dec_lock_ref(match.last_device_node, lock)

    def _insert(self, tokens: list[int], match: Any, have: int) -> bool:
        missing = len(tokens) - have
        fresh = self.fixtures._alloc(self.allocator, missing)
        with self._forward():
            self._compute(tokens, fresh, have)
        before = self.cache.path_device_indices(match.last_device_node)[:have]
        params = InsertParams(
            key=RadixKey(array("q", tokens)),
            value=torch.cat([before, fresh]).to(torch.int64),
            prev_prefix_len=have,
        )
        if self.states:
            slot = self.requests.mamba_allocator.alloc(1)
            with self._forward():
                self._fill(self.states, int(slot[0]), tokens, len(tokens), 3)
            params.mamba_value = slot
        result = self.cache.insert(params)
        if self.states and result.mamba_exist:
            self.requests.mamba_allocator.free(slot)
        return True

    def _compute(self, tokens: list[int], fresh: torch.Tensor, have: int) -> None:
        if self.forward_stream is not None:
            fresh.record_stream(self.forward_stream)  # it is freed before the pass begins
        for begin in range(0, len(tokens) - have, self.page):
            rows, end = fresh[begin : begin + self.page], have + begin + self.page
            self._fill(self.buffers, rows, tokens, end, 1)
            if self.windows:
                mapped = self.allocator.full_to_swa_index_mapping[rows]
                self._fill(self.windows, mapped, tokens, end, 2)

    def _state_room(self) -> bool:
        """A request has a state of its own and two more for its next ones."""
        if not self.states:
            return True
        states = self.requests.mamba_allocator
        if states.available_size() < 4:
            self.cache.evict(EvictParams(num_tokens=0, mamba_num=8))
        return states.available_size() >= 4

    def _make_room(self, tokens: int) -> bool:
        allocator = self.allocator
        sizes = [allocator.available_size()]
        if self.windows:
            sizes = [allocator.full_available_size(), allocator.swa_available_size()]
        if min(sizes) < tokens:
            extra = {"swa_num_tokens": tokens} if self.windows else {}
            self.cache.evict(EvictParams(num_tokens=tokens, **extra))
        sizes = [allocator.available_size()]
        if self.windows:
            sizes = [allocator.full_available_size(), allocator.swa_available_size()]
        return self._state_room() and min(sizes) >= tokens

    def get(self, tokens: list[int], *, abort: str = "") -> dict[str, Any]:
        """One request, as the scheduler serves it up to its forward pass.

        "local" and "loaded": pages on the device and from the cache; "wrong": loaded ones with
        other bytes; "failed": SGLang aborts the request. ``abort``: "matched", "queued", or "" for
        a request that ends after its pass.
        """
        assert self._state_room()
        request = self.fixtures._make_req(self.requests)
        request.rid = self.name()
        began = time.monotonic()
        match = self.cache.match_prefix(
            MatchPrefixParams(key=RadixKey(array("q", tokens)), req=request)
        )
        answer = {"local": match.device_prefix_len // self.page, "loaded": 0, "wrong": 0}
        self._last_hit = bool(match.host_hit_length)
        answer |= {"failed": False, "seconds": time.monotonic() - began}
        self.fixtures._apply_match_to_req(request, match)
        if match.host_hit_length and abort != "matched":
            lock = self.cache.inc_lock_ref(match.last_device_node).to_dec_params()
            self._make_room(match.host_hit_length)
            self.cache.init_load_back(
                InitLoadBackParams(
                    best_match_node=request.best_match_node,
                    host_hit_length=request.host_hit_length,
                    req=request,
                )
            )
            slots = self.cache.linker.private_load_indices.get(request.rid)
            if slots is not None:
                self._pass(request, tokens, answer, slots.clone(), abort)
            self.cache.dec_lock_ref(match.last_device_node, lock)
        self.cache.linker.hit_markers.pop(request.rid, None)
        self._end(request)
        return answer

    def _pass(
        self, request: Any, tokens: list[int], answer: dict[str, Any], slots: Any, abort: str
    ) -> None:
        if abort == "queued":
            self.cache.linker.release_request(request.rid)
            self.allocator.free(slots)
            return
        index = self.cache.ready_to_load_host_cache()
        counter = self.cache.linker.layer_done_counter
        counter.set_consumer(index)
        have = answer["local"] * self.page
        answer["loaded"] = len(slots) // self.page
        with self._forward():
            for layer in range(self.fixtures.cfg.num_layers):
                counter.wait_until(layer)
            # What SGLang does before it replays the CUDA graph of a whole prefill.
            counter.wait_until(counter.num_layers - 1)
            wrong = self._wrong(request, tokens, have, slots)
        answer["failed"] = bool(self.cache.finish_external_linker_loads([request]))
        answer["wrong"] = 0 if answer["failed"] else wrong
        self.allocator.free(slots)

    def _wrong(self, request: Any, tokens: list[int], have: int, slots: torch.Tensor) -> int:
        bad = 0
        window = (self.fixtures.cfg.sliding_window_size or 0) + self.page - 1
        for begin in range(0, len(slots), self.page):
            rows, end = slots[begin : begin + self.page], have + begin + self.page
            bad += not self._same(self.buffers, rows, tokens, end, 1)
            if self.windows and len(slots) - begin <= window // self.page * self.page:
                mapped = self.allocator.full_to_swa_index_mapping[rows]
                bad += not self._same(self.windows, mapped, tokens, end, 2)
        if self.states:
            slot = int(request.kv.mamba_pool_idx)
            bad += not self._same(self.states, slot, tokens, have + len(slots), 3)
        return bad

    def _end(self, request: Any) -> None:
        if self.states and request.kv.holds_mamba:
            self.requests.free_mamba_cache(request)
        self.requests.free(request)

    def drain(self, timeout_s: float = 30.0) -> dict[str, Any]:
        """Passes of an idle scheduler until nothing is pending; what is held nevertheless."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            self.cache.check_hicache_events()
            status = self.linker.status()
            if not self.cache.linker.pending_offloads and not status.get("pins"):
                break
            time.sleep(0.002)
        return {
            "offloads": len(self.cache.linker.pending_offloads),
            "locked": int(self.cache.protected_size()) if not self.windows else 0,
            "pins": status.get("pins", 0),
            "queued": status.get("queued", 0),
            "off": status["off"],
        }

    def evict(self, tokens: int) -> None:
        extra: dict[str, int] = {}
        if self.windows:
            extra["swa_num_tokens"] = tokens
        if self.states:
            extra["mamba_num"] = tokens // self.page
        self.cache.evict(EvictParams(num_tokens=tokens, **extra))

    def empty(self) -> None:
        """SGLang's flush of its cache, and no page keeps its bytes."""
        self.cache.reset()
        self.allocator.clear()
        self.requests.clear()
        self.scribble()

    def random_steps(self, seed: int, steps: int, prompts: list[list[int]]) -> dict[str, int]:
        """A sequence of steps with prompts that other engines use, too; their counts."""
        rng = random.Random(seed)
        counts = dict.fromkeys(("put", "get", "loaded", "wrong", "failed", "evicted", "reset"), 0)
        for _ in range(steps):
            whole = rng.choice(prompts)
            tokens = whole[: rng.randrange(1, len(whole) // self.page + 1) * self.page]
            what = rng.choices(
                ("put", "get", "matched", "queued", "evict", "reset", "events"),
                (30, 40, 5, 5, 15, 1, 10),
            )[0]
            if what == "put":
                counts["put"] += self.put(tokens)
            elif what in ("get", "matched", "queued"):
                answer = self.get(tokens, abort="" if what == "get" else what)
                counts["get"] += 1
                for name in ("loaded", "wrong", "failed"):
                    counts[name] += int(answer[name])
            elif what == "evict":
                self.evict(rng.choice((self.page, 8 * self.page, 64 * self.page)))
                counts["evicted"] += 1
            elif what == "reset":
                self.empty()
                counts["reset"] += 1
            else:
                self.cache.check_hicache_events()
        return counts

    def reclaimed(self, tokens: list[int], waits: bool) -> dict[str, Any]:
        """A request whose load gets pages that a pass in flight still writes.

        With overlapped scheduling that is the next token of a request that has finished.
        ``waits``: whether the linker waits for such passes.
        """
        wait = self.linker._await_reclaimed_pages
        self.put(tokens)
        self.drain()
        self.empty()
        rows = self.fixtures._alloc(self.allocator, self.allocator.available_size())
        with self._forward(200_000_000):
            for buffer in self.buffers:
                buffer.index_fill_(0, rows, 9)
        self.allocator.free(rows)
        if not waits:
            self.linker._await_reclaimed_pages = lambda: None
        try:
            return self.get(tokens)
        finally:
            self.linker._await_reclaimed_pages = wait

    def trap(self, call: str, pid: int, signal: int) -> None:
        """Sends the signal to a process right before the next call of this method of the linker."""
        method = getattr(self.linker, call)

        def trapped(*args: Any, **kwargs: Any) -> Any:
            delattr(self.linker, call)
            os.kill(pid, signal)
            return method(*args, **kwargs)

        setattr(self.linker, call, trapped)

    def trapped(self, call: str) -> bool:
        """Whether the call of the last trap() has come."""
        return call not in vars(self.linker)

    def lookups(self, tokens: list[int], count: int) -> tuple[int, int]:
        """Lookups for as many requests in one pass: hits, and missed deadlines."""
        hits = 0
        for _ in range(count):
            self.get(tokens, abort="matched")
            hits += self._last_hit
        return hits, self.linker.status()["missed_deadlines"]

    def forget_the_missed_deadline(self) -> None:
        self.linker._pins._open_until = 0.0

    def found(self, tokens: list[int]) -> list[int]:
        """A lookup past the tree, whose collectives need other ranks."""
        hashes = get_storage_hash_str(RadixKey(array("q", tokens)), None, page_size=self.page)
        return self.linker.lookup("alone", [PoolTransfer(name=PoolName.KV, keys=hashes)])

    def offload(self, tokens: list[int]) -> bool:
        """Saves pages of the prompt past the tree; whether that was done."""
        hashes = get_storage_hash_str(RadixKey(array("q", tokens)), None, page_size=self.page)
        rows = torch.arange(self.page, (len(hashes) + 1) * self.page)
        self.linker.offload([PoolTransfer(name=PoolName.KV, keys=hashes, device_indices=rows)])
        wait_until(lambda: self.linker.num_completed_offloads() > 0, "a save is pending")
        return self.linker.pop_completed_offload()

    def bytes_of(self, tokens: list[int], number: int) -> bytes:
        """The keys of the first layer of one page."""
        rows = torch.arange(self.page)
        _, _, made = next(self._rows(self.buffers, rows, tokens, (number + 1) * self.page, 1))
        return bytes(made.numpy())

    def agreeing_without_ranks(self) -> int:
        """The ranks that have to agree in a process without any; nothing else works after it."""
        self._ranks.__exit__(None, None, None)
        reset_context()
        return ranks_of(self.cache.cache_init_params).agreeing

    def status(self) -> dict[str, Any]:
        return self.linker.status()

    def names(self) -> list[str]:
        return [str(name) for name in self.linker.pools if isinstance(name, PoolName)]

    def close(self) -> None:
        self.linker.close()
