"""Engines that read each other's blocks, on one GPU, on two, or in ordinary memory."""

from __future__ import annotations

import contextlib
import os
import random
import select
import time
from collections.abc import Iterator
from typing import Any

from tests.gpu.processes import EngineProcess
from tests.gpu.scenarios import PATIENCE_S, Place
from tests.support.vllm_server import PegaServer
from tests.support.waiting import wait_until

#: Of the prefill engine, while the decode engine waits for its blocks.
COMPUTE_S = 0.03
ROUNDS = 20
#: As the server has it.
TEST_VARIABLE = "PEGAFLOW_TEST_UCX_OVER_TCP"


def _engine(
    place: Place, device: str, name: str, server: PegaServer, **options: Any
) -> EngineProcess:
    return engine_of_group(place, place.process(device), device, name, server, **options)


def engine_of_group(
    place: Place,
    process: EngineProcess,
    device: str,
    name: str,
    server: PegaServer,
    **options: Any,
) -> EngineProcess:
    """An engine, ready, whose memory others may read."""
    engine = process.open(
        str(server.socket), name, direct_group="pd", **options, **place.sizes.shape()
    )
    engine.call("wait_ready")
    if device != "cpu":
        expandable = "expandable_segments:True" in os.environ.get("PYTORCH_ALLOC_CONF", "")
        assert engine.call("has_ipc_handles") != expandable
    return engine


def _overwritten_rounds(
    place: Place, prefill: EngineProcess, decode: EngineProcess, count: int, node: bytes = b""
) -> str:
    """The prefill engine overwrites its blocks once their save is reported; each load is right."""
    sizes, chance = place.sizes, random.Random(place.seed)
    direct, took = 0, []
    for number in range(ROUNDS):
        origins = list(range(number * count, (number + 1) * count))
        source = chance.sample(range(sizes.blocks), count)
        target = chance.sample(range(sizes.blocks), count)
        decode.call("fill", target, origins, 2)
        begin = time.monotonic()
        first, second = (decode, prefill) if number % 2 else (prefill, decode)
        for engine in (first, second):
            if engine is decode:
                engine.begin("follow", "d", origins, target, PATIENCE_S, node)
            else:
                engine.begin("compute_and_save", "d", origins, source, COMPUTE_S)
        loaded = decode.take()
        took.append(time.monotonic() - begin)
        saved = prefill.take()
        assert saved["blocks"] == count, saved
        assert loaded["blocks"] == count and not loaded["error"], loaded
        wrong = decode.call("wrong", target, origins)
        assert wrong == [], f"round {number}: blocks {wrong[:8]} are wrong"
        direct += loaded["direct_bytes"]
    every = ROUNDS * count * sizes.page_bytes
    assert direct > every // 2, f"only {direct} of {every} bytes were read directly"
    return (
        f"{direct / every:.0%} of {every >> 20} MiB read directly, every byte right; "
        f"{count} blocks after {sorted(took)[ROUNDS // 2] * 1e3:.1f} ms in the median"
    )


def direct_reads(place: Place) -> str:
    """Between two engines of one node."""
    count = place.sizes.blocks // 4
    with place.server(4 * count) as server:
        prefill = _engine(place, place.devices[-1], "prefill", server)
        decode = _engine(place, place.devices[0], "decode", server)
        return _overwritten_rounds(place, prefill, decode, count)


def far_reads(place: Place) -> str:
    """Between engines of two nodes, by UCX over TCP: what crosses GPUs crosses host memory there.

    On GPUs PEGA_UCX_LIBRARY names a UCX with CUDA support. It copies some 60 MB/s there, and a save
    waits 2 s for its readers.
    """
    count = place.sizes.blocks // 64
    with (
        place.server(4 * count, "--peer-listen", "127.0.0.1:0") as near,
        place.server(4 * count, "--peers", near.peer_listen) as far,
    ):
        wait_until(lambda: _peers(far)[0]["state"] == "ready", "the nodes are not joined")
        prefill = _engine(place, place.devices[-1], "prefill", near, over_tcp="lo")
        decode = _engine(place, place.devices[0], "decode", far, over_tcp="lo")
        node = bytes.fromhex(_peers(far)[0]["node"])
        said = _overwritten_rounds(place, prefill, decode, count, node)
        reads = far.metrics().total("pegaflow_direct_far_reads_total")
        assert reads > 0, "no read went to the other node"
        return f"{said}; {reads:.0f} reads of the other node"


def pool_reads(place: Place) -> str:
    """Out of the pool of another node into an engine's memory, by UCX over TCP."""
    sizes, chance = place.sizes, random.Random(place.seed)
    count = sizes.blocks // 64
    patient = ("--peer-deadline", "5s", "--fetch-deadline", "8s")
    with contextlib.ExitStack() as stack:
        with _over_tcp("lo"):
            owner = place.server(4 * count, "--peer-listen", "127.0.0.1:0", *patient)
            stack.enter_context(owner)
            here = place.server(
                4 * count, "--peers", owner.peer_listen, "--direct-pool", "force", *patient
            )
            stack.enter_context(here)
        wait_until(
            lambda: here.metrics().total("pegaflow_peer_lane", lane="rdma") == 1,
            "the nodes do not read over UCX",
        )
        writer = _engine(place, place.devices[-1], "writer", owner)
        reader = _engine(place, place.devices[0], "reader", here, over_tcp="lo")
        direct, took = 0, []
        for number in range(ROUNDS):
            origins = list(range(number * count, (number + 1) * count))
            source, target = (chance.sample(range(sizes.blocks), count) for _ in range(2))
            writer.call("fill", source, origins)
            assert writer.call("save", "d", origins, source)["blocks"] == count
            reader.call("fill", target, origins, 2)
            begin = time.monotonic()
            loaded = reader.call("load", "d", origins, target)
            took.append(time.monotonic() - begin)
            assert loaded["blocks"] == count and not loaded["error"], loaded
            wrong = reader.call("wrong", target, origins)
            assert wrong == [], f"round {number}: blocks {wrong[:8]} are wrong"
            direct += loaded["direct_bytes"]
        every = ROUNDS * count * sizes.page_bytes
        assert direct == every, f"only {direct} of {every} bytes were read past the pool"
        assert here.metrics().total("pegaflow_fetch_bytes_total") == 0
        rate = count * sizes.page_bytes / sorted(took)[ROUNDS // 2] / 1e9
        return f"{every >> 20} MiB past this node's pool at {rate:.2f} GB/s, every byte right"


@contextlib.contextmanager
def _over_tcp(interface: str) -> Iterator[None]:
    """Programs that start meanwhile run UCX over TCP, as if the interface were a card."""
    os.environ[TEST_VARIABLE] = interface
    try:
        yield
    finally:
        del os.environ[TEST_VARIABLE]


def _peers(server: PegaServer) -> list[dict[str, Any]]:
    return server.get_by_socket("/health")["nodes"]["peers"]


def killed_source(place: Place) -> str:
    """SIGKILL of an engine that is being read: what counts as loaded is right, and its GPU has its
    memory back while the reader lives."""
    sizes, chance = place.sizes, random.Random(place.seed)
    count = sizes.blocks // 4
    loaded_blocks, freed_ms = 0, []
    with place.server(8 * count) as server:
        decode = _engine(place, place.devices[0], "decode", server)
        device = place.devices[-1]
        number_of_gpu = int(device.partition(":")[2] or 0) if device != "cpu" else None
        for kill in range(sizes.kills):
            before = 0 if number_of_gpu is None else decode.call("memory_in_use", number_of_gpu)
            prefill = _engine(place, device, f"prefill-{kill}", server)
            # The first load maps the memory of the other engine.
            for first in (2 * kill, 2 * kill + 1):
                origins = list(range(first * count, (first + 1) * count))
                target = chance.sample(range(sizes.blocks), count)
                decode.call("fill", target, origins, 2)
                decode.begin("follow", f"k{kill}", origins, target, 1.0)
                prefill.begin("compute_and_save", f"k{kill}", origins, target, COMPUTE_S)
                if first % 2:
                    time.sleep(COMPUTE_S + chance.random() * 0.02)
                    prefill.kill()
                loaded = decode.take()
                if first % 2 == 0:
                    assert loaded["blocks"] == count, loaded
                    prefill.take()
                good = [i for i in range(count) if target[i] not in set(loaded["failed_blocks"])]
                assert len(good) == loaded["blocks"], loaded
                loaded_blocks += len(good)
                wrong = decode.call("wrong", [target[i] for i in good], [origins[i] for i in good])
                assert wrong == [], f"kill {kill}: blocks {wrong[:8]} are wrong"
            gone = os.pidfd_open(prefill.pid)
            assert select.select([gone], [], [], PATIENCE_S)[0], "the killed process does not end"
            os.close(gone)
            since = time.monotonic()
            while number_of_gpu is not None:
                used = decode.call("memory_in_use", number_of_gpu) - before
                if used < sizes.blocks * sizes.page_bytes // 2:
                    freed_ms.append((time.monotonic() - since) * 1e3)
                    break
                waited = time.monotonic() - since
                assert waited < PATIENCE_S, f"{used} bytes of a GPU stay in use"
    freed = f"; memory free after {max(freed_ms):.0f} ms at most" if freed_ms else ""
    return f"{sizes.kills} kills, {loaded_blocks} blocks loaded, every byte right{freed}"
