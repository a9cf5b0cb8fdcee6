"""The Python API: an engine of your own loads what it saved, and no failure raises an exception."""

import asyncio
import ctypes
import hashlib
import importlib.util
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegaflow import _native
from pegaflow.api import AsyncCache, Cache, Loaded, Saved, token_keys
from pegaflow.api.buffers import LayoutError, layout
from tests.support.stray_client import pool_of
from tests.support.vllm_server import PegaServer

LAYERS, BLOCKS, TOKENS, HEADS, DIM = 3, 24, 16, 2, 8
#: Long deadlines: a busy machine must not turn a hit into a miss.
PATIENT = {
    "lookup_deadline": 20.0,
    "open_deadline": 20.0,
    "reserve_deadline": 20.0,
    "connect_deadline": 20.0,
    "load_patience": 20.0,
}
READY_S = 60.0


def new_arrays(fill: int = 0) -> list[np.ndarray]:
    """One array for each layer: (key or value, block, token, head, number)."""
    return [np.full((2, BLOCKS, TOKENS, HEADS, DIM), fill, np.float32) for _ in range(LAYERS)]


def options(server: PegaServer, model: str, **more: Any) -> dict[str, Any]:
    return {
        "factors": {"model": model},
        "block_axis": 1,
        "endpoint": server.address,
        **PATIENT,
        **more,
    }


@pytest.fixture
def model(request: pytest.FixtureRequest) -> str:
    """A namespace that is unique to each test."""
    return request.node.nodeid


def prompt_keys(name: str, blocks: int = 8) -> list[bytes]:
    return token_keys(range(blocks * TOKENS), TOKENS, salt=name.encode())


def fill(arrays: list[np.ndarray], blocks: list[int], random: np.random.Generator) -> None:
    for array in arrays:
        array[:, blocks] = random.standard_normal(array[:, blocks].shape)


def equal(one: list[np.ndarray], blocks: list[int], other: list[np.ndarray], to: list[int]) -> bool:
    return all(np.array_equal(a[:, blocks], b[:, to]) for a, b in zip(one, other, strict=True))


def wait_for(server: PegaServer, metric: str, value: float) -> None:
    """Waits until the server has executed calls without a response."""
    deadline = time.monotonic() + READY_S
    while server.metrics().total(metric) != value:
        assert time.monotonic() < deadline, f"{metric} does not become {value}"


# ---- keys


def test_a_key_is_the_hash_of_all_tokens_up_to_the_end_of_its_block():
    first = hashlib.sha256(hashlib.sha256(b"").digest() + struct.pack("<2q", 5, 6)).digest()
    second = hashlib.sha256(first + struct.pack("<2q", 7, -1)).digest()
    assert token_keys([5, 6, 7, -1, 9], 2) == [first, second]
    assert token_keys(np.array([5, 6, 7, -1]), 2) == [first, second]
    assert token_keys([4, 6, 7, -1], 2)[1] != second
    assert token_keys([5, 6], 2, salt=b"tenant")[0] != first
    assert token_keys([5], 2) == token_keys([], 2) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([1], 0), "block_size=0 is not a whole number from 1 to"),
        (([1], True), "block_size=True is not a whole number"),
        (([1, 2.5], 2), r"tokens\[1\]=2.5 is not a whole number from -9,223"),
        ((np.array([1.0, 2.0]), 2), r"tokens\[0\]=1.0 is not a whole number"),
        (([3, 1 << 63], 2), r"tokens\[1\]=9223372036854775808 is not a whole number"),
        (([1, 2, 3, None], 2), r"tokens\[3\]=None is not a whole number"),
        (([[1], [2]], 2), r"tokens\[0\]=\[1\] is not a whole number"),
        (("text", 2), "tokens='text' is not a sequence of whole numbers"),
        ((iter([1]), 2), "is not a sequence of whole numbers"),
        (([1], 1, "tenant"), "salt='tenant' is not bytes"),
    ],
)
def test_tokens_that_have_no_key_are_rejected_by_name(arguments, words):
    """A token that is cut to a whole number would have the key of another one."""
    with pytest.raises(ValueError, match=words):
        token_keys(*arguments)


# ---- layouts


def read_block(made: Any, block: int) -> bytes:
    return b"".join(
        ctypes.string_at(address + block * stride, size) for address, stride, size in made.segments
    )


def test_blocks_are_found_by_strides_in_arrays_of_any_order():
    base = np.arange(4 * 6 * 8 * 10, dtype=np.int32).reshape(4, 6, 8, 10)
    views = {
        "blocks first": (base, 0, 1),
        "blocks second": (base, 1, 4),
        "blocks last but one": (base, -2, 24),
        "a slice with gaps": (base[:, :, 2:5, :], 1, 4),
        "every other block": (base[::2], 0, 1),
        "transposed": (base.transpose(1, 0, 3, 2), 0, 4),
        "one block": (base[:1], 0, 1),
    }
    for name, (view, axis, pieces) in views.items():
        made = layout([view], axis)
        assert made.block_count == view.shape[axis], name
        assert len(made.segments) == pieces, name
        assert made.block_bytes == view.size // view.shape[axis] * 4, name
        for block in range(made.block_count):
            taken = np.frombuffer(read_block(made, block), np.int32)
            assert sorted(taken) == sorted(np.take(view, block, axis).ravel()), name


def test_arrays_of_another_layout_do_not_share_a_namespace():
    base = np.zeros((4, 6, 8), np.float32)
    descriptions = {
        layout([array], axis).description
        for array, axis in (
            (base, 0),
            (base, 1),
            (base.astype(np.float16), 0),
            (np.zeros((4, 8, 6), np.float32), 0),
            (base.transpose(0, 2, 1), 0),
        )
    }
    assert len(descriptions) == 5
    # The number of blocks and their place do not matter.
    assert layout([base], 0).description == layout([np.zeros((9, 6, 8), np.float32)]).description


@pytest.mark.parametrize(
    ("arrays", "axis", "words"),
    [
        ([], 0, "no arrays"),
        (None, 0, "arrays=None is not a list of arrays"),
        ([np.zeros((2, 2))], None, "block_axis=None is not a whole number"),
        ([np.zeros((2, 2))], True, "block_axis=True is not a whole number"),
        ([np.zeros((2, 2))], ["0"], "block_axis='0' is not a whole number"),
        ([b"bytes"], 0, r"arrays\[0\] is a bytes"),
        ([np.zeros((2, 2)), [1]], 0, r"arrays\[1\] is a list"),
        ([np.zeros((2, 2))], 2, "2 dimensions and no axis 2"),
        ([np.zeros((2, 2))], [0, 0], "2 block axes for 1 arrays"),
        (
            [np.zeros((2, 2)), np.zeros((3, 2))],
            0,
            r"arrays\[1\] has 3 blocks and arrays\[0\] has 2",
        ),
        ([np.zeros((0, 2))], 0, "is empty"),
        ([np.array([None, None])], 0, "not plain numbers"),
        ([np.broadcast_to(np.zeros(2), (3, 2))], 0, "read-only"),
        ([np.zeros((2, 4))[:, ::-1]], 0, "reversed or repeated"),
        ([np.lib.stride_tricks.as_strided(np.zeros(9), (4, 4), (8, 8))], 0, "overlap"),
        ([np.zeros((5000, 4, 2), np.float32)], 1, "5000 pieces of 8 bytes"),
    ],
)
def test_an_array_that_cannot_be_cached_is_rejected_with_the_reason(arrays, axis, words):
    with pytest.raises(LayoutError, match=words):
        layout(arrays, axis)


# ---- save, lookup, load


def test_one_engine_loads_the_blocks_of_another(pega, model, seed):
    random = np.random.default_rng(seed)
    ours, theirs = new_arrays(), new_arrays(7)
    keys = prompt_keys(model)
    blocks = [int(block) for block in random.permutation(BLOCKS)[:8]]
    fill(ours, blocks, random)
    with Cache(ours, **options(pega, model)) as one, Cache(theirs, **options(pega, model)) as two:
        assert one.wait_ready(READY_S) and two.wait_ready(READY_S)
        assert one.block_count == BLOCKS
        assert one.lookup(keys) == 0

        saved = one.save(keys, blocks)

        page = LAYERS * 2 * TOKENS * HEADS * DIM * 4
        assert saved == Saved(blocks=8, bytes=8 * page)
        assert one.save(keys, blocks) == Saved(skipped=8)
        assert two.lookup(keys) == 8
        assert two.lookup([keys[0], b"x" * 32, keys[2]]) == 1
        loaded = two.load(keys, range(8, 16))
        assert loaded == Loaded(blocks=8, bytes=8 * page)
        assert equal(ours, blocks, theirs, list(range(8, 16)))
        others = [block for block in range(BLOCKS) if not 8 <= block < 16]
        assert all((array[:, others] == 7).all() for array in theirs)


def test_a_load_returns_the_prefix_that_is_cached(pega, model, seed):
    arrays = new_arrays()
    keys = prompt_keys(model)
    fill(arrays, [0, 1, 2], np.random.default_rng(seed))
    with Cache(arrays, **options(pega, model)) as cache:
        assert cache.wait_ready(READY_S)
        cache.save(keys[:3], [0, 1, 2])
        assert cache.load(keys, range(8, 16)).blocks == 3
        assert equal(arrays, [0, 1, 2], arrays, [8, 9, 10])
        assert all((array[:, 11:] == 0).all() for array in arrays)
        assert cache.load(keys[3:], range(5)) == Loaded()
        assert cache.load([], []) == Loaded()
        assert cache.save([], []) == Saved()
        wait_for(pega, "pegaflow_claims", 0)


def test_other_factors_share_no_block_and_a_reset_forgets_all(pega, model, seed):
    arrays = new_arrays()
    keys = prompt_keys(model)
    with (
        Cache(arrays, **options(pega, model)) as one,
        Cache(arrays, **options(pega, model + " of another training")) as two,
    ):
        assert one.wait_ready(READY_S) and two.wait_ready(READY_S)
        assert one.save(keys, range(8)).blocks == 8
        assert two.lookup(keys) == 0
        assert one.reset()
        assert one.lookup(keys) == 0


def test_threads_share_a_cache(pega, model, seed):
    random = np.random.default_rng(seed)
    arrays = new_arrays()
    fill(arrays, list(range(16)), random)
    with Cache(arrays, **options(pega, model), copy_threads=2) as cache:
        assert cache.wait_ready(READY_S)
        wrong: list[str] = []

        def work(me: int) -> None:
            mine = [2 * me, 2 * me + 1]
            for round_number in range(20):
                keys = prompt_keys(f"{model}/{me}/{round_number}", 2)
                if cache.save(keys, mine).blocks != 2:
                    wrong.append(f"thread {me}: not saved")
                if cache.load(keys, mine).blocks != 2:
                    wrong.append(f"thread {me}: not loaded")

        threads = [threading.Thread(target=work, args=(me,)) for me in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads), "hangs"
        assert not wrong


def test_invalid_arguments_raise_at_once(pega, model):
    arrays = new_arrays()
    with Cache(arrays, **options(pega, model)) as cache:
        for keys, blocks, words in (
            ([b"k"], [0, 1], "1 keys for 2 blocks"),
            ([b"k"], [BLOCKS], f"block {BLOCKS} of {BLOCKS}"),
            ([b"k"], [-1], "block -1"),
            ([b""], [0], "a key of 0 bytes"),
            ([b"k" * 33], [0], "a key of 33 bytes"),
            ([b"k", b"kk"], [0, 1], r"keys\[1\] has 2 bytes and keys\[0\] has 1"),
            ([b"k"] * (_native.MAX_KEYS + 1), [0] * (_native.MAX_KEYS + 1), "keys in one call"),
            (["k"], [0], r"keys\[0\]='k' is not bytes"),
            ([b"k", 5], [0, 1], r"keys\[1\]=5 is not bytes"),
            (b"k", [0], "keys=b'k' is not a sequence of bytes"),
            (None, [0], "keys=None is not a sequence of bytes"),
            (iter([b"k"]), [0], "is not a sequence of bytes"),
            ([b"k"], None, "blocks=None is not a sequence of whole numbers"),
            ([b"k"], 0, "blocks=0 is not a sequence of whole numbers"),
            ([b"k"], [0.0], r"blocks\[0\]=0.0 is not a whole number from 0 to 23"),
            ([b"k"], [True], r"blocks\[0\]=True is not a whole number"),
            ([b"k"], ["0"], r"blocks\[0\]='0' is not a whole number"),
            ([b"k"], np.array([0.5]), r"blocks\[0\]=0.5 is not a whole number"),
            ([b"k"], [1 << 70], "of 24"),
        ):
            with pytest.raises(ValueError, match=words):
                cache.save(keys, blocks)
            with pytest.raises(ValueError, match=words):
                cache.load(keys, blocks)
        for kind in (1, -1, 0.0, True, None, "0"):
            with pytest.raises(ValueError, match=f"kind {kind!r} of 1 kinds of blocks"):
                cache.save([b"k"], [0], kind=kind)
        with pytest.raises(ValueError, match=r"blocks\[2\] is block 3, as blocks\[0\]: a load"):
            cache.load([b"a", b"b", b"c"], [3, 4, 3])
        for timeout_s in (-1, float("nan"), float("inf"), "1", None, True, 1e9):
            for call in (cache.wait_ready, cache.reset):
                with pytest.raises(ValueError, match="timeout_s=.* is not a number of seconds"):
                    call(timeout_s)
        for keys in ("k", [5], None):
            with pytest.raises(ValueError, match="bytes"):
                cache.lookup(keys)
        # Nothing was started, and the integers of NumPy are taken.
        assert len(cache._reports) == 0 and cache.wait_ready(READY_S)
        assert cache.save([b"numpy"], np.array([3], np.int32), kind=np.int64(0)).error is None
    for wrong, words in (
        ({"factors": {}}, "name is missing"),
        ({"factors": None}, "factors=None is not a mapping"),
        ({"factors": ["model"]}, "is not a mapping"),
        ({"factors": {"": "x"}}, "factors: the name='' is not a text"),
        ({"factors": {1: "x"}}, "factors: the name=1 is not a text"),
        ({"factors": {"model": None}}, r"factors\['model'\]=None is neither a text nor a number"),
        ({"factors": {"model": object()}}, "is neither a text nor a number"),
        ({"factors": {"model": "\ud800"}}, "is neither a text nor a number"),
        ({"factors": {"model": "x" * 70_000}}, "at most 256 of 65,536 bytes are possible"),
        ({"factors": {str(i): i for i in range(256)}}, "factors: 257 of"),
        ({"endpoint": 5}, "endpoint=5 is not a text"),
        ({"endpoint": ""}, "endpoint='' is not a text, or is empty"),
        ({"instance": ""}, "instance='' is not a text, or is empty"),
        ({"copy_threads": 0}, "copy_threads=0 is not a whole number from 1 to 64"),
        ({"copy_threads": 1.5}, "copy_threads=1.5 is not a whole number"),
        ({"verify": None}, "verify=None is not off, sample or all"),
        ({"raise_errors": 1}, "raise_errors=1 is not True or False"),
        ({"lookup_deadline": 0}, "lookup_deadline=0 is not a number of seconds above 0"),
        ({"open_deadline": "1"}, "open_deadline='1' is not a number of seconds"),
        ({"load_patience": float("nan")}, "load_patience=nan is not a number of seconds from 0"),
        ({"load_bytes_per_second": 0}, "load_bytes_per_second=0 is not a number of bytes above 0"),
        ({"lookup_dedline": 1.0}, "unknown option lookup_dedline; the nearest is lookup_deadline"),
        ({"unit_tokens": 16}, "unit_tokens=16 without kinds: remove it, or state kinds"),
        ({"kinds": 5}, "kinds=5 is not a sequence of Kind"),
        ({"block_axis": 9}, "no axis 9"),
        ({"factors": {"layout": "x"}}, "derived from the arrays"),
        ({"endpoint": "nowhere"}, "neither HOST:PORT"),
        ({"verify": "perhaps"}, "not off, sample or all"),
        ({"patience": 1.0}, "unknown option patience"),
    ):
        with pytest.raises(ValueError, match=words):
            Cache(arrays, **(options(pega, model) | wrong))


# ---- failures


@pytest.fixture
def absent(short_path: Path) -> Iterator[str]:
    yield f"unix:{short_path}/absent.sock"


def test_without_a_server_everything_is_a_miss_and_nothing_raises(absent, model):
    keys = prompt_keys(model)
    with Cache(new_arrays(), factors={"model": model}, block_axis=1, endpoint=absent) as cache:
        assert not cache.wait_ready(0.0)
        assert cache.lookup(keys) == 0
        loaded = cache.load(keys, range(8))
        assert loaded.blocks == 0 and loaded.error
        saved = cache.save(keys, range(8))
        assert saved.blocks == 0 and saved.error
        assert not cache.reset(0.1)
        assert cache.status()["mover"]["state"] == "connecting"


def test_with_raise_errors_failures_raise(absent, model):
    keys = prompt_keys(model)
    with Cache(
        new_arrays(), factors={"model": model}, block_axis=1, endpoint=absent, raise_errors=True
    ) as cache:
        for call in (
            lambda: cache.lookup(keys),
            lambda: cache.load(keys, range(8)),
            lambda: cache.save(keys, range(8)),
            lambda: cache.reset(0.1),
        ):
            with pytest.raises(_native.PegaFlowError):
                call()


def test_a_closed_cache_is_a_miss(pega, model):
    cache = Cache(new_arrays(), **options(pega, model))
    assert cache.wait_ready(READY_S)
    cache.close()
    cache.close()
    assert cache.lookup(prompt_keys(model)) == 0
    assert cache.save(prompt_keys(model), range(8)).error
    assert cache.load(prompt_keys(model), range(8)).error
    assert not cache.reset(0.0)
    assert not cache.wait_ready(0.0)
    with pytest.raises(ValueError, match="is not bytes"):
        cache.lookup([5])


def test_a_stopped_server_costs_the_deadline_and_is_used_again(own_pega, model):
    arrays = new_arrays()
    keys = prompt_keys(model)
    short = PATIENT | {"lookup_deadline": 0.05, "open_deadline": 0.05, "reserve_deadline": 0.05}
    with Cache(arrays, **(options(own_pega, model) | short)) as cache:
        assert cache.wait_ready(READY_S)
        os.kill(own_pega.pid, signal.SIGSTOP)
        try:
            assert cache.lookup(keys) == 0
            assert cache.load(keys, range(8)).blocks == 0
            assert cache.save(keys, range(8)).error
        finally:
            os.kill(own_pega.pid, signal.SIGCONT)
        assert cache.wait_ready(READY_S)


def test_a_killed_server_fails_the_load_and_the_next_server_is_used(own_pega, model):
    arrays = new_arrays()
    keys = prompt_keys(model)
    with Cache(arrays, **options(own_pega, model)) as cache:
        assert cache.wait_ready(READY_S)
        assert cache.save(keys, range(8)).blocks == 8
        own_pega.kill()
        assert cache.load(keys, range(8)).blocks == 0
        assert cache.lookup(keys) == 0
        own_pega.start()
        assert cache.wait_ready(READY_S)
        assert cache.lookup(keys) == 0
        assert cache.save(keys, range(8)).blocks == 8
        assert cache.load(keys, range(8)).blocks == 8


# ---- asyncio


def test_the_asynchronous_cache_behaves_alike(pega, model, seed):
    arrays = new_arrays()
    fill(arrays, list(range(8)), np.random.default_rng(seed))
    keys = prompt_keys(model)

    async def scenario() -> None:
        async with AsyncCache(arrays, **options(pega, model)) as cache:
            assert await cache.wait_ready(READY_S)
            assert cache.block_count == BLOCKS
            assert (await cache.save(keys, range(8))).blocks == 8
            assert await cache.lookup(keys) == 8
            both = await asyncio.gather(
                cache.load(keys, range(8, 16)), cache.load(keys, range(16, 24))
            )
            assert [loaded.blocks for loaded in both] == [8, 8]
            assert equal(arrays, list(range(8)), arrays, list(range(8, 16)))
            assert equal(arrays, list(range(8)), arrays, list(range(16, 24)))
            assert await cache.load([], []) == Loaded()
            assert await cache.save([], []) == Saved()
            with pytest.raises(ValueError, match="keys for"):
                await cache.load(keys, [0])
        assert (await cache.load(keys, range(8))).error
        await cache.close()

    asyncio.run(scenario())


def test_without_a_server_the_asynchronous_cache_misses_too(absent, model):
    keys = prompt_keys(model)

    async def scenario() -> None:
        named = {"factors": {"model": model}, "block_axis": 1, "endpoint": absent}
        async with AsyncCache(new_arrays(), **named) as cache:
            assert await cache.lookup(keys) == 0
            assert (await cache.load(keys, range(8))).error
            assert (await cache.save(keys, range(8))).error
        async with AsyncCache(new_arrays(), **named, raise_errors=True) as cache:
            with pytest.raises(_native.PegaFlowError):
                await cache.lookup(keys)

    asyncio.run(scenario())


def test_a_cancelled_load_ends_after_its_copies(pega, model, seed):
    arrays = new_arrays()
    keys = prompt_keys(model)

    async def scenario() -> None:
        async with AsyncCache(arrays, **options(pega, model)) as cache:
            assert await cache.wait_ready(READY_S)
            await cache.save(keys, range(8))
            for turns in range(30):
                task = asyncio.create_task(cache.load(keys, range(8, 16)))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                try:
                    await task
                except asyncio.CancelledError:
                    pass  # as requested; a load that was faster has a result
                assert not cache._waiting, "a copy may be in flight"
            assert (await cache.load(keys, range(8, 16))).blocks == 8

    asyncio.run(scenario())
    wait_for(pega, "pegaflow_pins", 0)
    wait_for(pega, "pegaflow_claims", 0)


def test_an_asynchronous_cache_refuses_another_event_loop(absent, model):
    """That loop would not learn of the end of a copy."""

    async def make() -> AsyncCache:
        return AsyncCache(new_arrays(), factors={"model": model}, block_axis=1, endpoint=absent)

    async def use(cache: AsyncCache) -> None:
        for call in (
            cache.lookup([b"k"]),
            cache.save([b"k"], [0]),
            cache.load([b"k"], [0]),
        ):
            with pytest.raises(RuntimeError, match="belongs to the event loop in which it was mad"):
                await call

    loop = asyncio.new_event_loop()
    cache = loop.run_until_complete(make())
    try:
        asyncio.run(use(cache))
    finally:
        loop.run_until_complete(cache.close())
        loop.close()


def test_an_asynchronous_cache_needs_an_event_loop(pega, model):
    with pytest.raises(RuntimeError, match="no running event loop"):
        AsyncCache(new_arrays(), **options(pega, model))


# ---- verification, and the example


def test_a_page_that_was_overwritten_is_not_loaded(own_pega, model, seed):
    arrays = new_arrays()
    fill(arrays, list(range(8)), np.random.default_rng(seed))
    keys = prompt_keys(model)
    with Cache(arrays, **options(own_pega, model, verify="all")) as cache:
        assert cache.wait_ready(READY_S)
        cache.save(keys, range(8))
        with pool_of(own_pega) as pool:
            pool[pool.find(arrays[1][1, 5].tobytes())] ^= 1
        loaded = cache.load(keys, range(8, 16))
        assert loaded.blocks == 5
        assert loaded.error.startswith("corrupt")
        wait_for(own_pega, "pegaflow_corrupt_pages_total", 1)
        assert cache.lookup(keys) == 5


EXAMPLE = Path(__file__).parents[2] / "examples" / "engine.py"


def test_the_example_engine_has_other_logits_with_other_kv():
    """Shows that equal logits mean equal KV."""
    spec = importlib.util.spec_from_file_location("example_engine", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    made = example.Model()
    shape = (example.LAYERS, 2, 2, example.BLOCK_TOKENS, example.HEADS, example.HEAD)
    kv, table = np.zeros(shape, np.float32), [1, 0]
    for position in range(20):
        made.forward(position, position, kv, table)
    changed = kv.copy()
    changed[0, 1, 1, 0] *= 1.5
    right = made.forward(7, 20, kv, table)
    assert np.array_equal(right, made.forward(7, 20, kv, table))
    assert not np.allclose(right, made.forward(7, 20, changed, table), atol=1e-4)


def test_the_example_engine_loads_the_blocks_of_another(pega):
    assert len(EXAMPLE.read_text().splitlines()) < 150
    ran = subprocess.run(
        [
            sys.executable,
            str(EXAMPLE),
            "--endpoint",
            pega.address,
            "--prompt-tokens",
            "100",
            "--patience",
            "20",
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "first engine: 0 of 100 tokens loaded" in ran.stdout
    assert "second engine: 96 of 100 tokens loaded" in ran.stdout
    assert "the logits are equal" in ran.stdout
