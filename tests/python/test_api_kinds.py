"""The Python API with several kinds of blocks: every restored byte is compared."""

import asyncio
import itertools
import select
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pegaflow import _native
from pegaflow.api import AsyncCache, Cache, Claim, Kind, KindRange, Loaded, LoadRange, token_keys
from pegaflow.api.buffers import LayoutError

UNIT, ALIGNMENT, BLOCKS = 16, 64, 200
#: Tokens, units.
PROMPT, UNITS = 256, 16
PATIENT = {
    "lookup_deadline": 20.0,
    "open_deadline": 20.0,
    "reserve_deadline": 20.0,
    "connect_deadline": 20.0,
    "load_patience": 20.0,
}
READY_S = 60.0
#: What 256 tokens need of each kind: full attention, windows of 41 tokens, states.
NEEDED = (KindRange(0, 0, 8), KindRange(1, 13, 3), KindRange(2, 3, 1))


class Engine:
    """An engine whose cache groups lie over the same arrays, as vLLM's do."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.arrays = [random.integers(0, 256, (BLOCKS, 6000), np.uint8) for _ in range(3)]
        #: (arrays, bytes of a block in each): full attention, windows of two groups, states.
        full, window, other, state = ((3, 4096), (2, 3000), (2, 1048), (1, 6000))
        self.groups = [
            [array[:, :size] for array in self.arrays[:layers]]
            for layers, size in (full, window, other, state)
        ]
        self._next = iter(random.permutation(BLOCKS).tolist())

    def kinds(self) -> list[Kind]:
        full, window, other, state = self.groups
        return [
            Kind("prefix", 32, [full]),
            Kind("trailing", 16, [window, other], tokens=40),
            Kind("state", 64, [state]),
        ]

    def members(self, kind: int) -> list[list[np.ndarray]]:
        return [self.groups[:1], self.groups[1:3], self.groups[3:]][kind]

    def new_blocks(self, kind: int, count: int) -> list[int]:
        """Blocks that were never used; those of all members for each block of the cache."""
        return list(itertools.islice(self._next, count * len(self.members(kind))))

    def ranges(self, claimed: Any) -> list[LoadRange]:
        return [LoadRange(*one, self.new_blocks(one[0], one[2])) for one in claimed]

    def bytes_of(self, one: LoadRange) -> list[bytes]:
        """The content of each block of the cache, its members' one behind the other."""
        members = self.members(one.kind)
        pages = [
            b"".join(array[block].tobytes() for array in members[place % len(members)])
            for place, block in enumerate(one.blocks)
        ]
        return [b"".join(pages[i : i + len(members)]) for i in range(0, len(pages), len(members))]


def options(pega: Any, model: str, engine: Engine, **more: Any) -> dict[str, Any]:
    return {
        "kinds": engine.kinds(),
        "unit_tokens": UNIT,
        "alignment_tokens": ALIGNMENT,
        "factors": {"model": model},
        "endpoint": pega.address,
        **PATIENT,
        **more,
    }


@pytest.fixture
def model(request: pytest.FixtureRequest) -> str:
    """A namespace that is unique to each test."""
    return request.node.nodeid


def nowhere(directory: Path) -> SimpleNamespace:
    """The address of a server that is not there."""
    return SimpleNamespace(address=f"unix:{directory}/absent.sock")


def unit_keys(model: str, units: int = UNITS) -> list[bytes]:
    return token_keys(range(units * UNIT), UNIT, salt=model.encode())


def block_keys(engine: Engine, keys: list[bytes], one: Any) -> list[bytes]:
    """The keys of the blocks of a range: each that of the unit that the block ends with."""
    units = engine.kinds()[one[0]].block_tokens // UNIT
    return [keys[(block + 1) * units - 1] for block in range(one[1], one[1] + one[2])]


def save_needed(cache: Cache, engine: Engine, model: str) -> dict[tuple[int, int], bytes]:
    """Saves what the prompt needs; returns the bytes by kind and block."""
    saved = {}
    for one in engine.ranges(NEEDED):
        result = cache.save(block_keys(engine, unit_keys(model), one), one.blocks, kind=one.kind)
        assert (result.blocks, result.error) == (one.count, None)
        for number, page in enumerate(engine.bytes_of(one), one.first):
            saved[one.kind, number] = page
    return saved


def check(engine: Engine, ranges: list[LoadRange], saved: dict[tuple[int, int], bytes]) -> None:
    for one in ranges:
        for number, page in enumerate(engine.bytes_of(one), one.first):
            assert page == saved[one.kind, number], f"block {number} of kind {one.kind}"


def test_one_engine_restores_the_windows_and_states_of_another(pega, model, seed):
    ours, theirs = Engine(seed), Engine(seed + 1)
    keys = unit_keys(model)
    with (
        Cache(**options(pega, model, ours)) as one,
        Cache(**options(pega, model, theirs)) as two,
    ):
        assert one.wait_ready(READY_S)
        assert two.wait_ready(READY_S)
        saved = save_needed(one, ours, model)
        untouched = [array.copy() for array in theirs.arrays]

        assert two.lookup(keys) == UNITS
        assert two.boundaries(keys) == [4]
        claim = two.claim(keys)
        assert claim == Claim(UNITS, NEEDED, claim.token)
        ranges = theirs.ranges(claim.ranges)
        loaded = two.load_ranges(claim, ranges)

        assert loaded == Loaded(12, 8 * 3 * 4096 + 3 * 2 * (3000 + 1048) + 6000, None)
        check(theirs, ranges, saved)
        for one_range in ranges:  # And nothing else was written.
            members = theirs.members(one_range.kind)
            for place, block in enumerate(one_range.blocks):
                member = members[place % len(members)]
                for before, view in zip(untouched, member, strict=False):
                    before[block, : view.shape[1]] = view[block]
        for array, before in zip(theirs.arrays, untouched, strict=True):
            assert np.array_equal(array, before)
        two.unclaim(claim)


def test_a_part_of_a_claimed_window_is_loaded_behind_the_own_blocks(pega, model, seed):
    engine = Engine(seed)
    with Cache(**options(pega, model, engine)) as cache:
        assert cache.wait_ready(READY_S)
        saved = save_needed(cache, engine, model)

        claim = cache.claim(unit_keys(model), local_units=8)

        assert claim.ranges == (KindRange(0, 4, 4), KindRange(1, 13, 3), KindRange(2, 3, 1))
        parts = engine.ranges([(1, 14, 2), (0, 5, 2)])
        assert cache.load_ranges(claim, parts).blocks == 4
        check(engine, parts, saved)
        with pytest.raises(ValueError, match="2 blocks of kind 1 from 12 on are not claimed"):
            cache.load_ranges(claim, [LoadRange(1, 12, 2, [0, 1, 2, 3])])
        cache.unclaim(claim)


def test_the_asynchronous_cache_restores_the_same(pega, model, seed):
    ours, theirs = Engine(seed), Engine(seed + 1)

    async def run(saved: dict[tuple[int, int], bytes]) -> None:
        async with AsyncCache(**options(pega, model, theirs)) as cache:
            assert await cache.wait_ready(READY_S)
            keys = unit_keys(model)
            assert await cache.lookup(keys) == UNITS
            assert await cache.boundaries(keys) == [4]
            claim = await cache.claim(keys)
            ranges = theirs.ranges(claim.ranges)
            assert (await cache.load_ranges(claim, ranges)).blocks == 12
            check(theirs, ranges, saved)
            cache.unclaim(claim)
            (window,) = theirs.ranges([(1, 13, 1)])
            again = await cache.save(block_keys(theirs, keys, window), window.blocks, kind=1)
            assert (again.blocks, again.skipped) == (0, 1)

    with Cache(**options(pega, model, ours)) as one:
        assert one.wait_ready(READY_S)
        asyncio.run(run(save_needed(one, ours, model)))


def test_nothing_is_claimed_if_one_kind_is_missing(pega, model, seed):
    engine = Engine(seed)
    with Cache(**options(pega, model, engine)) as cache:
        assert cache.wait_ready(READY_S)
        keys = unit_keys(model)
        for one in engine.ranges(NEEDED[:2]):
            cache.save(block_keys(engine, keys, one), one.blocks, kind=one.kind)

        assert cache.claim(keys) == Claim()
        assert cache.boundaries(keys) == []
        assert cache.load_ranges(Claim(), []) == Loaded()
        with pytest.raises(ValueError, match="the claim is empty"):
            cache.load_ranges(Claim(), [LoadRange(0, 0, 1, [0])])


def test_without_a_server_everything_is_a_miss_with_a_reason(tmp_path, seed):
    engine = Engine(seed)
    with Cache(**options(nowhere(tmp_path), "m", engine)) as cache:
        keys = unit_keys("m")
        assert cache.lookup(keys) == 0
        assert cache.boundaries(keys) == []
        claim = cache.claim(keys)
        assert (claim.units, claim.ranges) == (0, ())
        assert "connecting" in claim.error
        assert cache.save(keys[1:2], [0]).error


def test_invalid_arguments_are_rejected_by_name(tmp_path, seed):
    engine = Engine(seed)
    base = options(nowhere(tmp_path), "m", engine)
    full = engine.groups[0]
    for change, words in (
        ({"kinds": [Kind("window", 16, [engine.groups[0]])]}, "rule 'window' is not one of prefix"),
        ({"kinds": [Kind(["prefix"], 16, [full])]}, r"kinds\[0\]: rule \['prefix'\] is not one of"),
        ({"kinds": [full]}, r"kinds\[0\]=.* is not a Kind"),
        ({"unit_tokens": 0}, "unit_tokens=0 is not a whole number from 1"),
        ({"unit_tokens": 16.0}, "unit_tokens=16.0 is not a whole number"),
        ({"alignment_tokens": None}, "alignment_tokens=None is not a whole number"),
        ({"alignment_tokens": 48}, "alignment_tokens=48 is no multiple of block_tokens=32"),
        ({"unit_tokens": 24}, "block_tokens=32 is no multiple of unit_tokens=24"),
        ({"kinds": [Kind("prefix", True, [full])]}, "block_tokens=True is not a whole number"),
        ({"kinds": [Kind("prefix", 16, [full], tokens=4)]}, "tokens=4 with the rule prefix"),
        ({"kinds": [Kind("trailing", 16, [full])]}, "tokens=0 with the rule trailing"),
        (
            {"kinds": [Kind("chunk", 16, [full], tokens=40)]},
            "tokens=40 is no multiple of block_tok",
        ),
        ({"kinds": [Kind("state", 16, [full]), Kind("prefix", 16, [full])]}, "prefix is the first"),
        ({"kinds": [Kind("prefix", 16, [])]}, r"kinds\[0\]: members is empty"),
        (
            {"kinds": [Kind("prefix", 16, None)]},
            "members=None is not a sequence of lists of arrays",
        ),
        ({"kinds": engine.kinds() * 6}, "18 kinds of blocks; 1 to 16 are possible"),
        ({"arrays": engine.groups[0]}, "arrays: with kinds"),
    ):
        with pytest.raises(ValueError, match=words):
            Cache(**{**base, **change})
    with pytest.raises(LayoutError, match=r"kinds\[0\]: arrays\[0\] is a bytes"):
        Cache(**{**base, "kinds": [Kind("prefix", 16, [[b"bytes"]])]})
    keys = unit_keys("m")
    held = Claim(units=4, token=b"x" * 16)
    with Cache(**base) as cache:
        for call, words in (
            (lambda: cache.lookup(keys, local_units=3), "3 units of 16 tokens are no multiple"),
            (lambda: cache.save(keys[:1], [0], kind=3), "kind 3 of 3 kinds"),
            (lambda: cache.save(keys[:2], [0, 1], kind=1), "2 keys for 2 blocks, 2 for each"),
            (lambda: cache.save(keys[:1], [0, BLOCKS], kind=1), f"block {BLOCKS} of {BLOCKS}"),
            (lambda: cache.load(keys, list(range(16))), "use claim"),
            (lambda: cache.lookup(keys, local_units=-4), "local_units=-4 is not a whole number"),
            (lambda: cache.claim(keys, local_units=4.0), "local_units=4.0 is not a whole number"),
            (lambda: cache.boundaries(keys, "4"), "local_units='4' is not a whole number"),
            (lambda: cache.unclaim(None), "claim=None is not that of claim"),
            (lambda: cache.load_ranges(None, []), "claim=None is not that of claim"),
            (lambda: cache.load_ranges(held, None), "ranges=None is not a sequence of LoadRange"),
            (lambda: cache.load_ranges(held, [(0, 0)]), r"ranges\[0\]=\(0, 0\) is not a LoadRange"),
            (lambda: cache.load_ranges(held, [(3, 0, 1, [0])]), r"ranges\[0\]: kind=3 is not"),
            (lambda: cache.load_ranges(held, [(0, -1, 1, [0])]), r"ranges\[0\]: first=-1 is not"),
            (lambda: cache.load_ranges(held, [(0, 0, 1.0, [0])]), r"ranges\[0\]: count=1.0 is not"),
            (lambda: cache.load_ranges(held, [(0, 0, 1, [0.5])]), r"ranges\[0\]: blocks\[0\]=0.5"),
            (lambda: cache.load_ranges(held, [(0, 0, 2, [7, 7])]), "is block 7, as ranges"),
            (
                lambda: cache.load_ranges(held, [(0, 0, 1, [0]), (0, 1, 1, [1])]),
                r"ranges\[1\]: kind 0 has another range",
            ),
        ):
            with pytest.raises(ValueError, match=words):
                call()
    plain = {k: v for k, v in base.items() if k not in ("kinds", "unit_tokens", "alignment_tokens")}
    with Cache(engine.groups[0], **plain) as cache:
        for call in (
            lambda: cache.claim(keys),
            lambda: cache.boundaries(keys),
            lambda: cache.lookup(keys, local_units=4),
            lambda: cache.load_ranges(Claim(), []),
        ):
            with pytest.raises(ValueError, match="made without kinds"):
                call()


# ---- the native module alone


def native_mover(pega: Any, model: str, engine: Engine, **more: Any) -> Any:
    kinds = [
        (
            ("prefix", "trailing", "chunk", "state").index(kind.rule),
            kind.tokens,
            kind.block_tokens,
            [
                (
                    [(array.ctypes.data, array.strides[0], array.shape[1]) for array in member],
                    BLOCKS,
                )
                for member in kind.members
            ],
        )
        for kind in engine.kinds()
    ]
    device = _native.HostDevice(1)
    arguments = dict(
        socket_path=str(pega.socket),
        instance=f"native {model}",
        device=device,
        kinds=kinds,
        unit_tokens=UNIT,
        alignment_tokens=ALIGNMENT,
        factors=[("model", model)],
        build="test",
        **PATIENT,
    )
    return _native.Mover.of_kinds(**{**arguments, **more})


def next_finished(mover: Any) -> Any:
    poll = select.poll()
    poll.register(mover.finished_fd(), select.POLLIN)
    assert poll.poll(READY_S * 1000)
    (done,) = mover.take_finished()
    return done


def test_the_native_module_saves_claims_and_loads_kinds_and_names_them_in_the_journal(
    pega, model, seed
):
    engine = Engine(seed)
    mover = native_mover(pega, model, engine)
    link = {k: v for k, v in PATIENT.items() if k != "load_patience"}
    session = _native.CacheSession(str(pega.socket), f"native {model}", "test", **link)
    assert mover.wait_ready(READY_S)
    assert session.wait_ready(READY_S)
    assert mover.kind_page_bytes == [3 * 4096, 2 * (3000 + 1048), 6000]
    assert mover.page_bytes == 3 * 4096
    space, position, *_ = session.take_journal(session.journal(0, _native.JOURNAL_END), READY_S)
    scheduler, keys, saved = _native.random_id(), unit_keys(model), {}
    for job, one in enumerate(engine.ranges(NEEDED), 1):
        packed = b"".join(block_keys(engine, keys, one))
        mover.save(scheduler, job, packed, 32, one.blocks, kind=one.kind)
        assert next_finished(mover).blocks == one.count
        for number, page in enumerate(engine.bytes_of(one), one.first):
            saved[one.kind, number] = page

    entries = session.take_journal_of_kinds(session.journal(space, position), READY_S)[4]
    assert sorted(kind for _, there, kind in entries if there) == [0] * 8 + [1] * 3 + [2]
    units, complete, token, ranges, *coming = session.take_ranges(
        session.claim(keys=b"".join(keys), key_bytes=32, local_units=0), READY_S
    )
    assert (units, complete, ranges) == (UNITS, True, [tuple(one) for one in NEEDED])
    assert coming == [0, 0.0, 0.0]
    assert session.take_boundaries(session.boundaries(b"".join(keys), 32), READY_S) == ([4], True)
    loads = engine.ranges(ranges)
    mover.load_ranges(load=9, token=token, ranges=loads, claimed=ranges, computing=(0.0, 1e-9))
    done = next_finished(mover)
    assert (done.kind, done.id, done.blocks, done.error) == ("load", 9, 12, None)
    check(engine, loads, saved)

    for given, words in (
        ([(0, 0, 1)], r"\(0, 0, 1\) is not a range \(kind, first, count, blocks\)"),
        ([(1, 13, 1, [0])], "1 blocks for 1 keys of kind 1, which has 2 for each key"),
        ([(0, 7, 2, [0, 1])], "2 blocks of kind 0 from 7 on are not claimed"),
        ([(0, 0, 1, [0]), (0, 1, 1, [1])], "two ranges of kind 0"),
    ):
        with pytest.raises(_native.InvalidArgument, match=words):
            mover.load_ranges(10, token, given, ranges)
    with pytest.raises(_native.InvalidArgument, match="kind 3 of 3"):
        mover.save(scheduler, 99, keys[0], 32, [0], kind=3)
    with pytest.raises(_native.InvalidArgument, match="rule 4"):
        native_mover(pega, model, engine, kinds=[(4, 0, 16, [])])
    mover.close()
    session.close()


def test_a_server_without_several_kinds_is_refused_by_name(pega, model, seed):
    # The version before features: this server appears as one that has none.
    mover = native_mover(pega, model, Engine(seed), maximum_version=3)
    assert not mover.wait_ready(0.0)
    while mover.status()["state"] == "connecting":
        assert not mover.wait_ready(0.05)
    status = mover.status()
    assert status["state"] == "refused"
    assert "does not support several kinds of blocks" in status["detail"]
    assert status["server_build"] in status["detail"]
    with pytest.raises(_native.PeerLost):
        mover.save(_native.random_id(), 1, bytes(32), 32, [0])
    mover.close()


def test_a_rank_without_a_layer_of_a_kind_reports_its_saves_at_once(pega, model, seed):
    engine = Engine(seed)

    def group(number: int) -> tuple[list[tuple[int, int, int]], int]:
        arrays = engine.groups[number]
        return [(a.ctypes.data, a.strides[0], a.shape[1]) for a in arrays], BLOCKS

    full = (0, 0, 32, [group(0)])
    ranks = [
        native_mover(pega, model, engine, kinds=[full, window], rank=rank, ranks=2)
        for rank, window in enumerate([(1, 40, 16, [group(1)]), (1, 40, 16, [])])
    ]
    for mover in ranks:
        assert mover.wait_ready(READY_S)
    assert ranks[1].kind_page_bytes == [3 * 4096, 0]

    ranks[1].save(_native.random_id(), 1, bytes(64), 32, [], kind=1)

    done = next_finished(ranks[1])
    assert (done.blocks, done.skipped, done.error) == (0, 2, None)
    for mover in ranks:
        mover.close()
