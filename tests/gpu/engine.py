"""One engine's memory on a device, without a model: real Mover, real copies, a pattern to check.

Every 8 bytes that an engine holds identify their block, layer and rank. ``Engine`` lives in a
process of its own, see processes.py; its commands and its results cross a pipe.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import hashlib
import os
import random
import select
import time
from collections.abc import Sequence
from typing import Any

import torch

from pegaflow import _native

#: Far more than a job takes; a job that is never reported is detected.
PATIENCE_S = 60.0
#: Loads and saves of this engine may be slow, where the test is not about deadlines.
PATIENT = {"lookup_deadline": 5.0, "reserve_deadline": 5.0, "open_deadline": 5.0}

_WORD = 0x9E3779B97F4A7C15  # odd, so that no two words of a block are equal
_ORIGIN, _LAYER, _RANK, _SALT = (
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x27D4EB2F165667C5,
    0xD6E8FEB8,
)
_CHUNK = 128  # blocks whose pattern is made at a time

#: Stores to address 64: an error of CUDA that the context keeps.
_BOOM = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry boom() {
  .reg .u64 %rd<2>;
  mov.u64 %rd1, 64;
  st.global.u64 [%rd1], %rd1;
  ret;
}
\0"""


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def first_word(origin: int, layer: int, rank: int, salt: int) -> int:
    """The first 8 bytes of a layer's share of a block, as a signed number."""
    return _signed(origin * _ORIGIN + layer * _LAYER + rank * _RANK + salt * _SALT)


def block_keys(space: str, origins: Sequence[int]) -> bytes:
    return b"".join(hashlib.sha256(f"{space}/{origin}".encode()).digest() for origin in origins)


class Engine:
    """The worker of one rank, and a scheduler's session of its own."""

    def __init__(
        self,
        socket: str,
        instance: str,
        *,
        device: str,
        layers: int,
        segment_bytes: int,
        blocks: int,
        rank: int = 0,
        ranks: int = 1,
        **options: Any,
    ) -> None:
        self.device = torch.device(device)
        self.rank = rank
        self.blocks = blocks
        words = segment_bytes // 8
        shape = (blocks, words)
        self.layers = [
            torch.zeros(shape, dtype=torch.int64, device=self.device) for _ in range(layers)
        ]
        steps = [_signed(i * _WORD) for i in range(words)]
        self._steps = torch.tensor(steps, dtype=torch.int64, device=self.device)
        on_gpu = self.device.type == "cuda"
        self.copies = (
            _native.CudaDevice(self.device.index or 0) if on_gpu else _native.HostDevice(1)
        )
        link = PATIENT | options
        verify = link.pop("verify", "off")
        group = link.pop("direct_group", "")
        over_tcp = link.pop("over_tcp", "")
        network = {}
        if over_tcp:
            # As on hosts with cards, but UCX reads over TCP, which is slow.
            os.environ["PEGAFLOW_TEST_UCX_OVER_TCP"] = over_tcp
            network = {"direct_nics": ["auto"], "ucx_library": os.getenv("PEGA_UCX_LIBRARY", "")}
            network |= {"load_patience": PATIENCE_S}
        self._socket = socket
        self._instance = instance
        self.mover = _native.Mover(
            socket,
            instance,
            self.copies,
            [(layer.data_ptr(), segment_bytes, segment_bytes) for layer in self.layers],
            blocks,
            [("program", "tests/gpu"), ("page", f"{layers}x{segment_bytes}")],
            rank=rank,
            ranks=ranks,
            verify=verify,
            direct_group=group,
            **network,
            **link,
        )
        self.session = _native.CacheSession(socket, instance, **link)
        self._scheduler = _native.random_id()
        self._finished: dict[tuple[str, int], Any] = {}
        self._next = 1
        self.sync()

    def has_ipc_handles(self) -> bool:
        """Whether CUDA gives other processes its memory by a handle."""
        handle = (ctypes.c_byte * 64)()
        driver = ctypes.CDLL("libcuda.so.1")
        statuses = [
            driver.cuIpcGetMemHandle(handle, ctypes.c_uint64(layer.data_ptr()))
            for layer in self.layers
        ]
        return not any(statuses)

    # ---- contents of the engine's memory

    def _pattern(self, origins: Sequence[int], layer: int, rank: int, salt: int) -> torch.Tensor:
        first = [first_word(origin, layer, rank, salt) for origin in origins]
        return torch.tensor(first, dtype=torch.int64, device=self.device)[:, None] + self._steps

    def fill(self, blocks: Sequence[int], origins: Sequence[int], salt: int = 0) -> None:
        self._queue_fill(blocks, origins, salt)
        self.sync()

    def _queue_fill(self, blocks: Sequence[int], origins: Sequence[int], salt: int) -> None:
        for begin in range(0, len(blocks), _CHUNK):
            where = torch.tensor(blocks[begin : begin + _CHUNK], device=self.device)
            for number, layer in enumerate(self.layers):
                chunk = origins[begin : begin + _CHUNK]
                layer[where] = self._pattern(chunk, number, self.rank, salt)

    def wrong(
        self,
        blocks: Sequence[int],
        origins: Sequence[int],
        salt: int = 0,
        rank: int | None = None,
    ) -> list[int]:
        """The blocks that do not hold every byte of the pattern of their origins."""
        found: list[int] = []
        rank = self.rank if rank is None else rank
        for begin in range(0, len(blocks), _CHUNK):
            chunk = blocks[begin : begin + _CHUNK]
            where = torch.tensor(chunk, device=self.device)
            bad = torch.zeros(len(chunk), dtype=torch.bool, device=self.device)
            for number, layer in enumerate(self.layers):
                expected = self._pattern(origins[begin : begin + _CHUNK], number, rank, salt)
                bad |= (layer[where] != expected).any(dim=1)
            found += [block for block, is_bad in zip(chunk, bad.tolist(), strict=True) if is_bad]
        return found

    def clear(self) -> None:
        for layer in self.layers:
            layer.zero_()
        self.sync()

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # ---- jobs

    def wait_ready(self) -> None:
        assert self.mover.wait_ready(PATIENCE_S), self.mover.status()
        assert self.session.wait_ready(PATIENCE_S), self.session.status()

    def status(self) -> dict[str, Any]:
        info = self.copies.info() if self.device.type == "cuda" else {}
        return {**self.mover.status(), **info}

    def start_save(
        self,
        space: str,
        origins: Sequence[int],
        blocks: Sequence[int],
        *,
        job: int = 0,
        scheduler: bytes = b"",
    ) -> int:
        number = job or self._take_number()
        queue = torch.cuda.current_stream(self.device).cuda_stream if self._on_gpu() else 0
        keys = block_keys(space, origins)
        self.mover.save(scheduler or self._scheduler, number, keys, 32, list(blocks), queue)
        return number

    def save(self, *arguments: Any, **more: Any) -> dict[str, Any]:
        return self.finished("save", self.start_save(*arguments, **more))

    def claim(self, space: str, origins: Sequence[int]) -> tuple[int, bytes]:
        """The number of blocks found from the first on, and the token to load them with."""
        answer = self.session.take(self.session.claim(block_keys(space, origins), 32), PATIENCE_S)
        assert answer is not None, "a claim without an answer"
        found, complete, token, *_ = answer
        return (found if complete else 0), token

    def start_load(self, token: bytes, blocks: Sequence[int]) -> int:
        number = self._take_number()
        self.mover.load(number, token, 0, list(blocks))
        return number

    def load(self, space: str, origins: Sequence[int], blocks: Sequence[int]) -> dict[str, Any]:
        """Loads the blocks that are found; ``found`` is their number."""
        found, token = self.claim(space, origins)
        if found == 0:
            return {"found": 0, "blocks": 0, "failed_blocks": [], "error": None}
        done = self.finished("load", self.start_load(token, blocks[:found]))
        self.session.unclaim(token)
        return {"found": found, **done}

    def load_token(self, token: bytes, blocks: Sequence[int]) -> dict[str, Any]:
        return self.finished("load", self.start_load(token, blocks))

    def finished(self, kind: str, number: int) -> dict[str, Any]:
        """Waits until the job is reported."""
        deadline = time.monotonic() + PATIENCE_S
        while (kind, number) not in self._finished:
            for done in self.mover.take_finished():
                assert (done.kind, done.id) not in self._finished, f"{done.kind} reported twice"
                self._finished[done.kind, done.id] = done
            if (kind, number) in self._finished:
                break
            left = deadline - time.monotonic()
            assert left > 0, f"{kind} {number} was not reported in {PATIENCE_S} s"
            select.select([self.mover.finished_fd()], [], [], left)
        done = self._finished.pop((kind, number))
        names = ("blocks", "skipped", "failed_blocks", "verified", "corrupt", "error", "error_code")
        return {name: getattr(done, name) for name in (*names, "direct_bytes")}

    # ---- direct reads

    def compute_and_save(
        self, space: str, origins: Sequence[int], blocks: Sequence[int], compute_s: float
    ) -> dict[str, Any]:
        """Saves blocks whose content the device computes meanwhile, and overwrites them as soon as
        that is reported. Without a server it saves none."""
        if self._on_gpu():
            torch.cuda._sleep(int(compute_s * 1.5e9))  # cycles
        self._queue_fill(blocks, origins, 0)
        try:
            done = self.save(space, origins, blocks)
        except _native.PeerLost as error:
            done = {"blocks": 0, "error": str(error)}
        self.fill(blocks, origins, salt=1)
        return done

    def follow(
        self,
        space: str,
        origins: Sequence[int],
        blocks: Sequence[int],
        patience_s: float,
        node: bytes = b"",
        abort_s: float | None = None,
    ) -> dict[str, Any]:
        """Loads blocks while another engine saves them, at this node or at another one.

        ``abort_s``: the load is canceled after that time. Without a server it loads none.
        """
        number = self._take_number()
        keys = block_keys(space, origins)
        try:
            self.mover.load_following(number, keys, 32, list(blocks), patience_s, node)
        except _native.PeerLost as error:
            none = {"blocks": 0, "failed_blocks": list(blocks), "direct_bytes": 0}
            return {**none, "error": str(error)}
        if abort_s is not None:
            time.sleep(abort_s)
            self.mover.cancel_load(number)
        return self.finished("load", number)

    def memory_in_use(self, device: int) -> int:
        """Bytes of a GPU that any process uses."""
        free, total = torch.cuda.mem_get_info(device)
        return total - free

    def _is_finished(self) -> bool:
        return bool(select.select([self.mover.finished_fd()], [], [], 0)[0])

    def _take_number(self) -> int:
        self._next += 1
        return self._next

    def _on_gpu(self) -> bool:
        return self.device.type == "cuda"

    # ---- longer parts of a scenario, which cannot wait for a pipe

    def try_saves(self, space: str, stop: Any) -> list[tuple[float, float, int]]:
        """Saves one new block after the other until one is accepted and ``stop`` is set.

        Returns for each attempt its begin, its end, and the number of blocks saved.
        """
        attempts: list[tuple[float, float, int]] = []
        while not (stop() and any(saved for _, _, saved in attempts)):
            begin = time.monotonic()
            assert not attempts or begin - attempts[0][0] < PATIENCE_S, "no save was ever accepted"
            done = self.save(space, [len(attempts)], [len(attempts) % self.blocks])
            attempts.append((begin, time.monotonic(), done["blocks"]))
        return attempts

    def churn(self, space: str, seed: int, stop: Any, tell: Any) -> dict[str, int]:
        """Saves and loads at random until ``stop`` is set, and compares all loaded bytes.

        ``tell`` receives the counts after each round.
        """
        chance = random.Random(seed)
        counts: collections.Counter[str] = collections.Counter()
        half = self.blocks // 2
        while not stop():
            counts["rounds"] += 1
            amount = chance.randrange(1, half)
            first = chance.randrange(1 << 30)
            origins = list(range(first, first + amount))
            source = chance.sample(range(half), amount)
            target = chance.sample(range(half, self.blocks), amount)
            self.fill(source, origins, salt=seed)
            self.fill(target, origins, salt=seed + 1)
            try:
                saved = self.save(space, origins, source)
                counts[f"save {saved['error_code'] or 'good'}"] += 1
                loaded = self.load(space, origins, target)
            except _native.PegaFlowError as error:
                counts[f"refused {type(error).__name__}"] += 1
            else:
                counts["loaded"] += loaded["blocks"]
                if loaded["error"]:
                    counts["load failed"] += 1
                bad = set(loaded["failed_blocks"])
                came = [i for i in range(loaded["found"]) if target[i] not in bad]
                counts["wrong"] += len(
                    self.wrong([target[i] for i in came], [origins[i] for i in came], seed)
                )
            tell(dict(counts))
        return dict(counts)

    def cancel_loads(self, space: str, origins: Sequence[int], rounds: int, seed: int) -> dict:
        """Cancels loads at random moments and uses their blocks again at once.

        After each report the blocks get other bytes; a copy that still wrote then would be seen.
        """
        chance = random.Random(seed)
        counts: collections.Counter[str] = collections.Counter()
        half = self.blocks // 2
        last: tuple[list[int], int] | None = None
        for number in range(rounds):
            blocks = chance.sample(
                range(half * (number % 2), half * (number % 2 + 1)), len(origins)
            )
            found, token = self.claim(space, origins)
            assert found == len(origins), f"{found} of {len(origins)} blocks are found"
            begin = time.perf_counter()
            load = self.start_load(token, blocks)
            if number < 3:  # these measure the time of a load
                done = self.finished("load", load)
                counts["microseconds"] = int((time.perf_counter() - begin) * 1e6)
            else:
                until = begin + chance.random() * counts["microseconds"] * 1.2e-6
                while time.perf_counter() < until:
                    pass
                self.mover.cancel_load(load)
                done = self.finished("load", load)
            self.session.unclaim(token)
            self.fill(blocks, blocks, salt=1000 + number)
            failed = len(done["failed_blocks"])
            counts["whole" if not failed else "none" if failed == len(blocks) else "cut short"] += 1
            if last is not None:
                counts["wrong"] += len(self.wrong(last[0], last[0], salt=last[1]))
            last = (blocks, 1000 + number)
        return dict(counts)

    def follow_loads(self, space: str, origins: Sequence[int], rounds: int, seed: int) -> dict:
        """Reads blocks on the GPU while they are still being loaded, as soon as that is allowed.

        The work that reads them, and then gives them other bytes, is queued at the early completion
        of the load.
        """
        chance = random.Random(seed)
        counts: collections.Counter[str] = collections.Counter()
        stream = torch.cuda.current_stream(self.device).cuda_stream
        for number in range(rounds):
            blocks = chance.sample(range(self.blocks), len(origins))
            self.fill(blocks, origins, salt=2000 + number)
            found, token = self.claim(space, origins)
            assert found == len(origins), f"{found} of {len(origins)} blocks are found"
            load = self.start_load(token, blocks)
            where = torch.tensor(blocks, device=self.device)
            within = chance.choice((0.001, 0.005, 0.012, 1.0))
            while not (told := self.mover.follow(within, stream)):
                if self._is_finished():
                    break
            counts["ahead"] += bool(told) and not self._is_finished()
            seen = [layer[where] for layer in self.layers]
            for layer in self.layers:
                layer[where] = number
            if told:
                assert told[0].load == load and told[0].blocks == len(blocks), told
                counts["followed"] += 1
            done = self.finished("load", load)
            assert done["blocks"] == len(blocks) and not done["error"], done
            self.session.unclaim(token)
            for i, layer in enumerate(seen):
                expected = self._pattern(origins, i, self.rank, 0)
                counts["wrong"] += int((layer != expected).any(dim=1).sum())
                counts["late"] += int((self.layers[i][where] != number).any(dim=1).sum())
        return dict(counts)

    def boom(self) -> None:
        """An illegal address in a kernel of this process, in the context that our copies use."""
        driver = ctypes.CDLL("libcuda.so.1")
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        assert driver.cuModuleLoadData(ctypes.byref(module), _BOOM) == 0
        assert driver.cuModuleGetFunction(ctypes.byref(function), module, b"boom") == 0
        stream = ctypes.c_void_p(torch.cuda.current_stream(self.device).cuda_stream)
        assert driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, None, None) == 0

    def close(self) -> None:
        self.session.close()
        with contextlib.suppress(_native.PegaFlowError):
            self.mover.close()
