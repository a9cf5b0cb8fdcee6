"""The binding: arguments from Python, exceptions, and a real round trip."""

import array
import ctypes
import os
import select
from pathlib import Path

import pytest

from pegaflow import _native
from tests.support.vllm_server import PegaServer

SERVER = Path(os.environ["PEGA_BUILD_DIR"], "server", "pegaflow-server")
HANG_S = 60
#: Long deadlines: a busy machine must not turn a hit into a miss.
PATIENT = dict.fromkeys(
    ("connect_deadline", "lookup_deadline", "open_deadline", "reserve_deadline"), float(HANG_S)
)
BLOCKS = 32
SEGMENT = 4096
NOWHERE = "/nonexistent/pegaflow.sock"


class Memory:
    """Two segments for each block, in two allocations."""

    def __init__(self):
        self.parts = [ctypes.create_string_buffer(BLOCKS * SEGMENT) for _ in range(2)]
        self.segments = [(ctypes.addressof(part), SEGMENT, SEGMENT) for part in self.parts]

    def fill(self, block, byte):
        for part in self.parts:
            ctypes.memset(ctypes.addressof(part) + block * SEGMENT, byte, SEGMENT)

    def holds(self, block, byte):
        wanted = bytes([byte]) * SEGMENT
        return all(part[block * SEGMENT : (block + 1) * SEGMENT] == wanted for part in self.parts)


@pytest.fixture
def memory():
    return Memory()


@pytest.fixture
def mover(memory):
    device = _native.HostDevice()
    made = _native.Mover(NOWHERE, "engine", device, memory.segments, BLOCKS, [("model", "m")])
    yield made
    made.close()


def mover_at(server, device, memory, instance="engine", **options):
    """A worker of an engine at a server of the test."""
    options = PATIENT | options
    return _native.Mover(
        str(server.socket), instance, device, memory.segments, BLOCKS, [("model", "m")], **options
    )


def test_shards_and_nodes_are_checked_like_every_option(memory):
    def made(**options):
        device = _native.HostDevice()
        return _native.Mover(
            NOWHERE, "engine", device, memory.segments, BLOCKS, [("model", "m")], **options
        )

    for options in (
        {"rank": 3, "ranks": 4},
        {"rank": 3, "ranks": 4, "shard": 1, "shards": 2, "saves": False, "numa_node": 1},
        {"shard": None, "shards": None},
    ):
        made(**options).close()
    for options in ({"shard": 1}, {"shards": 2}, {"numa_node": -2}):
        with pytest.raises(_native.InvalidArgument):
            made(**options)


def next_report(mover):
    ready, _, _ = select.select([mover.finished_fd()], [], [], HANG_S)
    assert ready, "a job is not reported"
    (report,) = mover.take_finished()
    return report


def ready(link):
    for _ in range(HANG_S * 1000):
        if link.status()["state"] == "ready":
            return
        select.select([], [], [], 0.001)
    raise AssertionError(link.status())


def test_a_load_follows_saves_by_the_keys_of_its_blocks(memory, tmp_path):
    with PegaServer(SERVER, tmp_path, pool_size="64mb") as server:
        name = _native.random_id()
        session = _native.CacheSession(str(server.socket), "engine", scheduler=name, **PATIENT)
        device = _native.HostDevice()

        def made(instance, group):
            options = {"direct_group": group, "load_patience": float(HANG_S)}
            return mover_at(server, device, memory, instance, **options)

        mover = made("engine", "pd")
        ready(session)
        ready(mover)
        for block in range(4):
            memory.fill(block, 1 + block)
        keys = b"".join(bytes([n]) * 16 for n in range(1, 7))
        node = bytes.fromhex(session.status()["server"])
        begun = session.await_job(node, name, 1, 10.0, begun=True)

        mover.load_following(5, keys[: 4 * 16], 16, range(8, 12), float(HANG_S))
        mover.save(name, 1, keys[: 4 * 16], 16, range(4))

        reports = {}
        while len(reports) < 2:
            select.select([mover.finished_fd()], [], [], HANG_S)
            reports |= {report.kind: report for report in mover.take_finished()}
        assert session.take_wait(begun, HANG_S) == 1
        assert (reports["load"].id, reports["load"].blocks, reports["load"].error) == (5, 4, None)
        assert reports["load"].direct_bytes == 0  # an engine does not read its own memory
        assert all(memory.holds(8 + block, 1 + block) for block in range(4))
        assert session.take(session.lookup(keys, 16), HANG_S) == (4, True, b"", 0, 0)

        mover.load_following(6, keys, 16, range(8, 14), 0.01)
        late = next_report(mover)
        assert (late.blocks, late.error_code, late.failed_blocks) == (4, "timeout", [12, 13])
        with pytest.raises(_native.InvalidArgument):
            mover.load_following(7, keys, 16, range(3), 1.0)
        mover.close()
        with pytest.raises(_native.InvalidArgument):
            made("other", "g" * 65)
        alone = made("other", "")
        ready(alone)
        with pytest.raises(_native.Refused):
            alone.load_following(8, keys, 16, range(6), 1.0)
        alone.close()
        session.close()


def test_a_save_takes_an_event_that_was_recorded_before(memory, tmp_path):
    with PegaServer(SERVER, tmp_path, pool_size="64mb") as server:
        device = _native.HostDevice()
        mover = mover_at(server, device, memory)
        ready(mover)
        event = mover.record()
        assert event == 0  # in host memory: now

        mover.save(_native.random_id(), 7, bytes(16), 16, [0], computed=event)
        assert (next_report(mover).blocks, mover.record(queue=0)) == (1, 0)
        with pytest.raises(TypeError):
            mover.save(_native.random_id(), 8, bytes(16), 16, [0], computed=-1)
        mover.close()


@pytest.mark.parametrize("kind", ["list", "tuple", "I", "i", "q", "Q", "memoryview"])
def test_blocks_are_loaded_however_their_numbers_are_passed(kind, memory, tmp_path):
    def blocks(first):
        numbers = range(first, first + 8)
        if kind in ("list", "tuple"):
            return {"list": list, "tuple": tuple}[kind](numbers)
        if kind == "memoryview":  # Every second number of twice as many, like a slice of an array.
            return memoryview(array.array("q", [n for n in numbers for _ in range(2)]))[::2]
        return array.array(kind, numbers)

    with PegaServer(SERVER, tmp_path, pool_size="64mb") as server:
        session = _native.CacheSession(str(server.socket), "engine", **PATIENT)
        device = _native.HostDevice(threads=2)
        mover = mover_at(server, device, memory, load_patience=float(HANG_S))
        ready(session)
        ready(mover)
        for block in range(8):
            memory.fill(block, 1 + block)
        keys = b"".join(bytes([n]) * 16 for n in range(1, 9))

        mover.save(_native.random_id(), 7, keys, 16, blocks(0))
        saved = next_report(mover)
        assert (saved.kind, saved.id, saved.blocks, saved.skipped) == ("save", 7, 8, 0)
        assert saved.bytes == 8 * mover.page_bytes == 8 * 2 * SEGMENT
        assert (saved.error, saved.error_code, saved.failed_blocks) == (None, None, [])
        assert saved.took_s > 0

        assert session.take(session.lookup(keys, 16), HANG_S) == (8, True, b"", 0, 0)
        blocks_found, complete, token, coming, _ = session.take(session.claim(keys, 16), HANG_S)
        assert (blocks_found, complete, len(token), coming) == (8, True, 16, 0)
        mover.load(9, token, 0, blocks(16))
        assert next_report(mover).blocks == 8
        assert all(memory.holds(16 + block, 1 + block) for block in range(8))

        mover.load(10, _native.random_id(), 0, blocks(16))
        failed = next_report(mover)
        assert failed.error_code == "gone"
        assert failed.error.startswith("gone: ")
        assert failed.failed_blocks == list(range(16, 24))

        generation, unconfirmed = session.reset_cache(HANG_S)
        assert generation > 0 and unconfirmed == []
        assert session.take(session.lookup(keys, 16), HANG_S)[0] == 0
        mover.close()
        session.close()
        with pytest.raises(_native.PeerLost):
            session.lookup(keys, 16)


@pytest.mark.parametrize(
    ("name", "also"),
    [
        ("InvalidArgument", ValueError),
        ("Timeout", TimeoutError),
        ("PeerLost", ConnectionError),
        ("IoError", OSError),
        *((n, RuntimeError) for n in ("Busy", "OutOfCapacity", "Gone", "Cancelled", "Refused")),
        *((n, RuntimeError) for n in ("Corrupt", "Internal")),
    ],
)
def test_each_failure_is_a_pegaflow_error_and_a_standard_exception(name, also):
    made = getattr(_native, name)("why")
    assert isinstance(made, _native.PegaFlowError)
    assert isinstance(made, also)
    assert str(made) == "why"


def test_without_a_server_every_call_raises(mover):
    session = _native.CacheSession(NOWHERE, "engine")
    for ask in (session.lookup, session.claim):
        with pytest.raises(_native.PeerLost, match="connecting"):
            ask(b"k" * 32, 32)
    with pytest.raises(_native.PeerLost):
        mover.load(1, _native.random_id(), 0, [1])
    with pytest.raises(_native.Gone):
        session.take(12345)
    assert session.status()["connections"] == 0
    session.close()
    assert session.status()["state"] == "retired"


@pytest.mark.parametrize(
    "blocks", [[-1], [1 << 32], array.array("q", [-1]), array.array("d", [1.0]), [[1]], ["1"], 5]
)
def test_invalid_blocks_are_rejected(mover, blocks):
    with pytest.raises((_native.InvalidArgument, TypeError)):
        mover.load(1, _native.random_id(), 0, blocks)


@pytest.mark.parametrize(("keys", "key_bytes"), [(b"abc", 2), (b"", 0), (b"k" * 33, 33)])
def test_invalid_keys_are_rejected(mover, keys, key_bytes):
    with pytest.raises(_native.InvalidArgument, match="bytes"):
        mover.save(_native.random_id(), 1, keys, key_bytes, [0])


def test_a_rejected_option_is_named(memory):
    device = _native.HostDevice()
    for options, named in [
        ({"lookup_dedline": 1.0}, "lookup_dedline"),
        ({"lookup_deadline": -1.0}, "lookup_deadline"),
        ({"lookup_deadline": float("nan")}, "lookup_deadline"),
        ({"max_jobs": 0}, "max_jobs"),
    ]:
        with pytest.raises(_native.InvalidArgument, match=named):
            _native.Mover(NOWHERE, "e", device, memory.segments, BLOCKS, [], **options)
    with pytest.raises(_native.InvalidArgument, match="max_jobs"):
        _native.CacheSession(NOWHERE, "e", max_jobs=5)
    with pytest.raises(_native.InvalidArgument):
        _native.Mover(NOWHERE, "e", device, [], BLOCKS, [])
    with pytest.raises(_native.InvalidArgument):
        _native.Mover(NOWHERE, "e", device, [(1, 2)], BLOCKS, [])
    with pytest.raises(_native.InvalidArgument, match="16"):
        _native.CacheSession(NOWHERE, "e").unclaim(b"short")
    with pytest.raises(_native.InvalidArgument):
        _native.set_log_level("loud")


def test_ids_are_random_and_the_socket_follows_the_port(monkeypatch):
    assert len(_native.random_id()) == 16
    assert _native.random_id() != _native.random_id()
    monkeypatch.setenv("PEGAFLOW_RUNTIME_DIR", "/some/where")
    assert _native.default_socket_path(50055) == "/some/where/50055.sock"


def test_a_machine_without_a_gpu_raises():
    try:
        device = _native.CudaDevice()
    except _native.Refused as error:
        assert "CUDA driver" in str(error) or "GPU" in str(error)
    else:
        assert device.info()["path"] == "none"  # no pool yet
        with pytest.raises(_native.Refused, match="there is no GPU 99"):
            _native.CudaDevice(99)
