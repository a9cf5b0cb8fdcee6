"""Faults around copies, each injected into real engines' processes and a real server.

A scenario raises AssertionError at a violation, and returns its observations.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import random
import select
import signal
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.gpu.engine import first_word
from tests.gpu.processes import EngineProcess
from tests.support.vllm_server import PegaServer

#: For a server that is killed or stopped: the connector's own deadlines, not the long ones.
SHORT = {"lookup_deadline": 0.2, "reserve_deadline": 0.2, "open_deadline": 0.2}
PATIENCE_S = 60.0


@dataclasses.dataclass(frozen=True)
class Sizes:
    layers: int
    segment_bytes: int
    blocks: int
    kills: int  # Workers that are killed, one after the other.
    cancels: int
    faults: int  # While an engine reads another one.

    @property
    def page_bytes(self) -> int:
        return self.layers * self.segment_bytes

    def shape(self, blocks: int | None = None) -> dict[str, int]:
        return {
            "layers": self.layers,
            "segment_bytes": self.segment_bytes,
            "blocks": blocks or self.blocks,
        }


#: Like vLLM's default for a model of 8B: 32 allocations with 64 KiB of a block in each.
GPU_SIZES = Sizes(layers=32, segment_bytes=64 << 10, blocks=2048, kills=5, cancels=60, faults=200)
#: For a rehearsal in ordinary memory.
CPU_SIZES = Sizes(layers=4, segment_bytes=128 << 10, blocks=256, kills=2, cancels=20, faults=12)


class Place:
    """The server's program, a folder, devices, and processes that were started ahead."""

    def __init__(
        self, program: Path, folder: Path, devices: Sequence[str], sizes: Sizes, seed: int
    ) -> None:
        self.program = program
        self.folder = folder
        self.devices = list(devices)
        self.sizes = sizes
        self.seed = seed
        self._ahead: list[EngineProcess] = []
        self._taken: list[EngineProcess] = []
        self._servers = 0

    def prepare(self, count: int) -> None:
        """Starts processes on the first device, whose imports take seconds."""
        while len(self._ahead) < count:
            self._ahead.append(EngineProcess(self.devices[0]))

    def process(self, device: str | None = None) -> EngineProcess:
        if device in (None, self.devices[0]) and self._ahead:
            process = self._ahead.pop(0)
        else:
            process = EngineProcess(device or self.devices[0])
        self._taken.append(process)
        return process

    def server(self, pages: int, *arguments: str) -> PegaServer:
        """A server with room for this many pages, and 64 MiB at least."""
        self._servers += 1
        size = max(64 << 20, pages * self.sizes.page_bytes)
        return PegaServer(
            self.program, self.folder / f"s{self._servers}", f"{size >> 20}mb", arguments
        )

    def end_scenario(self) -> None:
        for process in self._taken:
            process.close()
        self._taken.clear()

    def close(self) -> None:
        self._taken += self._ahead
        self._ahead.clear()
        self.end_scenario()


class PoolView:
    """The pool of a running server, mapped as a stray client could."""

    def __init__(self, server: PegaServer) -> None:
        for entry in Path("/proc", str(server.pid), "fd").iterdir():
            if os.readlink(entry).startswith("/memfd:"):
                fd = os.open(entry, os.O_RDWR)
                self.bytes = mmap.mmap(fd, os.fstat(fd).st_size)
                os.close(fd)
                return
        raise AssertionError("the server has no pool")

    def words(self, stride: int) -> bytes:
        """8 bytes of each page, at a place that differs from page to page."""
        places = range(0, len(self.bytes), stride)
        return b"".join(
            self.bytes[at + number * 24 % (stride - 8) : at + number * 24 % (stride - 8) + 8]
            for number, at in enumerate(places)
        )

    def close(self) -> None:
        self.bytes.close()


def every_byte(place: Place) -> str:
    """Two ranks, on two GPUs if available: each gets back its own bytes, block by block."""
    sizes, chance = place.sizes, random.Random(place.seed)
    count = sizes.blocks // 2
    with place.server(4 * count) as server:
        ranks = [place.process(place.devices[rank % len(place.devices)]) for rank in range(2)]
        for rank, process in enumerate(ranks):
            process.open(str(server.socket), "tp2", **sizes.shape(), rank=rank, ranks=2)
        for process in ranks:
            process.call("wait_ready")
        origins = list(range(count))
        source = chance.sample(range(sizes.blocks), count)
        target = chance.sample(range(sizes.blocks), count)
        for process in ranks:
            process.call("fill", source, origins)
        job = {"job": 1, "scheduler": bytes(range(16))}
        numbers = [process.call("start_save", "b", origins, source, **job) for process in ranks]
        for process, number in zip(ranks, numbers, strict=True):
            saved = process.call("finished", "save", number)
            assert saved["blocks"] == count and not saved["error"], saved
        for process in ranks:
            process.call("clear")
        found, token = ranks[0].call("claim", "b", origins)
        assert found == count, f"{found} of {count} blocks are found"
        for process in ranks:
            process.begin("load_token", token, target)
        for process in ranks:
            loaded = process.take()
            assert loaded["blocks"] == count, loaded
        for rank, process in enumerate(ranks):
            assert process.call("wrong", target, origins) == []
            other = process.call("wrong", target, origins, rank=1 - rank)
            assert len(other) == count, "the pattern does not distinguish the ranks"
            shifted = process.call("wrong", target, origins[1:] + origins[:1])
            assert len(shifted) == count, "the pattern does not distinguish blocks"
        devices = ", ".join(place.devices[rank % len(place.devices)] for rank in range(2))
        return f"{count} blocks of {sizes.page_bytes >> 10} KiB for each of 2 ranks on {devices}"


def two_engines(place: Place) -> str:
    """Two engines on one GPU save, load and compare at the same time; one loads the other's."""
    sizes = place.sizes
    small = sizes.blocks // 4
    with place.server(3 * sizes.blocks) as server:
        engines = [place.process() for _ in range(2)]
        for name, process in zip("ab", engines, strict=True):
            process.open(str(server.socket), name, **sizes.shape(small))
            process.call("wait_ready")
        origins = list(range(small // 2))
        engines[0].call("fill", origins, origins)
        assert engines[0].call("save", "shared", origins, origins)["blocks"] == small // 2
        target = list(range(small // 2, small))
        assert engines[1].call("load", "shared", origins, target)["blocks"] == small // 2
        assert engines[1].call("wrong", target, origins) == []
        for number, process in enumerate(engines):
            process.watch("churn", f"churn{number}", place.seed + 10 * number)
        rounds = [0, 0]
        while min(rounds) < 20:
            for number, process in enumerate(engines):
                rounds[number] = process.told()["rounds"]
        ends = [process.stop() for process in engines]
        for end in ends:
            assert end["wrong"] == 0 and end["loaded"] > 0, end
        loaded = " and ".join(str(end["loaded"]) for end in ends)
        return f"loaded {loaded} blocks concurrently, all with the right bytes"


def killed_writer(place: Place) -> str:
    """SIGKILL in the middle of a save: its slots stay reserved until the process is gone.

    A save of the whole pool is in flight, so another engine finds room only in the slots of the
    killed one. The pool shows that copies continue after the signal.
    """
    sizes = place.sizes
    late, gone_ms, refused, rounds = 0, [], 0, 0
    while len(gone_ms) < sizes.kills:
        rounds += 1
        assert rounds <= 4 * sizes.kills, "the saves end before their writers are killed"
        with place.server(sizes.blocks) as server:
            writer, other = place.process(), place.process()
            writer.open(str(server.socket), "writer", **sizes.shape())
            other.open(str(server.socket), "other", **sizes.shape(64))
            for process in (writer, other):
                process.call("wait_ready")
            blocks, mine = list(range(sizes.blocks)), list(range(64))
            writer.call("fill", blocks, blocks)
            other.call("fill", mine, mine, 7)
            view = PoolView(server)
            stride = sizes.page_bytes
            pidfd = os.pidfd_open(writer.pid)
            before = view.words(stride)
            writer.call("start_save", "writer", blocks, blocks)
            while view.words(stride) == before:
                pass  # until the first pages are written
            other.watch("try_saves", "other")
            writer.kill()
            first = view.words(stride)
            killed = time.monotonic()
            ready = select.select([pidfd], [], [], PATIENCE_S)[0]
            gone = time.monotonic()
            assert ready, "the killed process does not end"
            changed = view.words(stride) != first
            attempts = other.stop()
            ended_before = other.call("claim", "writer", [sizes.blocks - 1])[0] != 0
            # The whole pool is free by now: later writes of others stay unchanged.
            saved = other.call("save", "mine", mine, mine)
            assert saved["blocks"] == 64, saved
            other.call("clear")
            for _ in range(5):
                loaded = other.call("load", "mine", mine, mine)
                assert loaded["blocks"] == 64, loaded
                wrong = other.call("wrong", mine, mine, 7)
                assert wrong == [], f"pages written by a process that was gone: {wrong}"
            os.close(pidfd)
            view.close()
            place.end_scenario()
        if ended_before:
            continue
        early = [a for a in attempts if a[1] < gone and a[2]]
        assert not early, f"slots were reused before their writer was gone: {early}"
        late += changed
        gone_ms.append((gone - killed) * 1e3)
        refused += sum(killed <= begin and end < gone for begin, end, _ in attempts)
    return (
        f"{sizes.kills} kills in a save, after {late} of which the pool still changed; gone "
        f"{min(gone_ms):.0f} to {max(gone_ms):.0f} ms after the signal, in which {refused} saves "
        "of another engine got no slot; no write hit a reused slot"
    )


def killed_server(place: Place) -> str:
    """SIGKILL and a new server, under load: jobs end, nothing hangs, the cache is used again."""
    return _disturbed(place, _kill_and_start)


def stopped_server(place: Place) -> str:
    """SIGSTOP under load: jobs end by their deadlines; after SIGCONT the cache is used again."""
    return _disturbed(place, _stop_and_continue)


def _kill_and_start(server: PegaServer, engine: EngineProcess, told: dict[str, int]) -> None:
    server.kill()
    rounds = told["rounds"]
    while engine.told()["rounds"] < rounds + 5:
        pass  # rounds continue without a server
    server.start()


def _stop_and_continue(server: PegaServer, engine: EngineProcess, told: dict[str, int]) -> None:
    os.kill(server.pid, signal.SIGSTOP)
    try:
        rounds = told["rounds"]
        while engine.told()["rounds"] < rounds + 5:
            pass
    finally:
        os.kill(server.pid, signal.SIGCONT)


def _disturbed(
    place: Place, disturb: Callable[[PegaServer, EngineProcess, dict[str, int]], None]
) -> str:
    sizes = place.sizes
    small = sizes.blocks // 4
    with place.server(sizes.blocks) as server:
        engine = place.process().open(str(server.socket), "e", **sizes.shape(small), **SHORT)
        engine.call("wait_ready")
        engine.watch("churn", "c", place.seed)
        loaded, longest, took = 0, 0.0, []
        for _ in range(3):
            told = engine.told()
            while told["loaded"] <= loaded:
                told = engine.told()
            disturb(server, engine, told)
            begin = time.monotonic()
            loaded = told["loaded"]
            while told["loaded"] <= loaded:
                told = engine.told()
                assert time.monotonic() - begin < PATIENCE_S, f"not in use again: {told}"
            took.append(time.monotonic() - begin)
        longest = max(took)
        end = engine.stop()
        assert end["wrong"] == 0, end
        failed = {
            k: v for k, v in end.items() if k not in ("rounds", "loaded", "wrong", "save good")
        }
        assert failed, "the fault had no effect"
        return (
            f"{end['rounds']} rounds, {end['loaded']} blocks right; in use again after "
            f"<= {longest:.2f} s; {failed}"
        )


def cancelled_loads(place: Place) -> str:
    """Loads cancelled at any moment; their blocks are reused as soon as they are reported."""
    sizes = place.sizes
    amount = sizes.blocks // 2  # more than a GPU queues ahead
    with place.server(sizes.blocks) as server:
        engine = place.process().open(str(server.socket), "e", **sizes.shape())
        engine.call("wait_ready")
        origins = list(range(amount))
        engine.call("fill", origins, origins)
        assert engine.call("save", "c", origins, origins)["blocks"] == amount
        counts = engine.call("cancel_loads", "c", origins, sizes.cancels, place.seed)
        assert counts.get("wrong", 0) == 0, counts
        return f"{sizes.cancels} loads of {amount} blocks: {counts}"


def cuda_error(place: Place) -> str:
    """An illegal address in the engine's process: the copies retire, the process continues.

    So does another engine on the same GPU.
    """
    if not place.devices[0].startswith("cuda"):
        return "skipped: needs a GPU"
    sizes = place.sizes
    with place.server(2 * sizes.blocks) as server:
        broken, other = place.process(), place.process()
        for name, process in (("broken", broken), ("other", other)):
            process.open(str(server.socket), name, **sizes.shape(256))
            process.call("wait_ready")
        blocks = list(range(256))
        for process, salt in ((broken, 1), (other, 2)):
            process.call("fill", blocks, blocks, salt)
        assert broken.call("save", "k", blocks[:128], blocks[:128])["blocks"] == 128
        broken.call("boom")
        number = broken.call("start_save", "x", blocks, blocks)
        failed = broken.call("finished", "save", number)
        assert failed["error_code"] == "internal" and failed["blocks"] == 0, failed
        assert "ILLEGAL_ADDRESS" in failed["error"], failed
        found, token = broken.call("claim", "k", blocks[:128])
        assert found == 128
        loaded = broken.call("load_token", token, blocks[:128])
        assert loaded["blocks"] == 0 and len(loaded["failed_blocks"]) == 128, loaded
        assert broken.call("status")["state"]  # it still responds
        assert other.call("save", "y", blocks, blocks)["blocks"] == 256
        other.call("clear")
        assert other.call("load", "y", blocks, blocks)["blocks"] == 256
        assert other.call("wrong", blocks, blocks, 2) == []
        return f"reported as: {failed['error'][:110]}"


def small_pool(place: Place) -> str:
    """A pool with room for a part of one request: some of it is saved, and loaded byte for byte."""
    sizes = place.sizes
    with place.server(1) as server:
        room = (64 << 20) // sizes.page_bytes
        count = min(sizes.blocks, 8 * room)
        engine = place.process().open(str(server.socket), "e", **sizes.shape())
        engine.call("wait_ready")
        origins = list(range(count))
        engine.call("fill", origins, origins)
        saved = engine.call("save", "s", origins, origins)
        assert saved["blocks"] + saved["skipped"] == count or saved["error"], saved
        engine.call("clear")
        loaded = engine.call("load", "s", origins, origins)
        found = loaded["found"]
        assert loaded["blocks"] == found <= room < count, loaded
        assert engine.call("wrong", origins[:found], origins[:found]) == []
        return f"of {count} blocks with room for {room}: {saved['blocks']} saved, {found} loaded"


def planted_error(place: Place) -> str:
    """A changed byte in the pool: a miss with checksums, and without them the pattern differs."""
    sizes = place.sizes
    with place.server(256) as server:
        careful = place.process().open(
            str(server.socket), "careful", **sizes.shape(256), verify="all"
        )
        careless = place.process().open(str(server.socket), "careless", **sizes.shape(256))
        for process in (careful, careless):
            process.call("wait_ready")
        origins, target = list(range(64)), list(range(64, 128))
        careful.call("fill", origins, origins)
        saved = careful.call("save", "v", origins, origins)
        assert saved["blocks"] == 64, saved
        loaded = careful.call("load", "v", origins, target)
        assert loaded["verified"] == 64 and loaded["corrupt"] == 0, loaded
        view = PoolView(server)
        page = view.bytes.find(struct.pack("<q", first_word(41, 0, 0, 0)))
        assert page >= 0, "the pool does not have that page"
        at = page + sizes.page_bytes // 2
        view.bytes[at] ^= 1
        view.close()
        careless.call("load", "v", origins, target)
        assert careless.call("wrong", target, origins) == [target[41]]
        loaded = careful.call("load", "v", origins, target)
        # A load ends at its first wrong page; the blocks before it are used.
        assert loaded["corrupt"] == 1 and loaded["failed_blocks"] == target[41:], loaded
        assert careful.call("wrong", target[:41], origins[:41]) == []
        return "one bit of one page: the load ends there, and the blocks before it are right"


def followed_loads(place: Place) -> str:
    """Work that is queued behind a load in flight reads its blocks whole."""
    sizes = place.sizes
    count = sizes.blocks // 4
    with place.server(2 * count) as server:
        engine = place.process()
        engine.open(str(server.socket), "follow", **sizes.shape())
        engine.call("wait_ready")
        origins = list(range(count))
        engine.call("fill", origins, origins)
        saved = engine.call("save", "f", origins, origins)
        assert saved["blocks"] == count, saved
        counts = engine.call("follow_loads", "f", origins, sizes.cancels, place.seed)
        assert counts["wrong"] == 0 and counts["late"] == 0, counts
        assert counts["ahead"] > sizes.cancels // 2, counts
        return (
            f"{counts['followed']} of {sizes.cancels} loads followed, {counts['ahead']} before "
            "their end; every byte right"
        )


SCENARIOS: dict[str, Callable[[Place], str]] = {
    scenario.__name__: scenario
    for scenario in (
        every_byte,
        two_engines,
        cancelled_loads,
        followed_loads,
        small_pool,
        planted_error,
        cuda_error,
        stopped_server,
        killed_server,
        killed_writer,
    )
}


def prepared(names: Sequence[str], sizes: Sizes) -> int:
    """The number of processes on the first device that these scenarios use."""
    needs: dict[str, Any] = {
        "every_byte": 1,
        "two_engines": 2,
        "planted_error": 2,
        "cuda_error": 2,
        "killed_writer": 2 * sizes.kills,
    }
    return sum(needs.get(name, 1) for name in names)
