"""A server, a session and a mover of several kinds in Python, with the native module's calls.

``Cache`` is the server. ``install`` puts it in place of the native classes, so that the connector
runs unchanged. Copies happen in the call that reports them, as late as they may.
"""

import ctypes
import itertools
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from pegaflow import _native
from pegaflow.engine.kinds import BlockKind, BlockKinds, KindRule
from tests.python.kinds_engine import Store


class Cache:
    """What a server has, and what it was asked."""

    def __init__(self, draw: random.Random | None = None) -> None:
        self.draw = draw or random.Random(0)
        self.store: Store | None = None  # until a mover registers
        self.server = "11" * 16
        self.generation = 0
        self.claims: dict[bytes, dict[int, tuple[int, list[bytes]]]] = {}
        self.journal: list[tuple[bytes, bool, int]] = []
        self.copy_chance = 1.0
        self.failing_loads = 0.0
        #: Whether claimed blocks are at another node, and when the first and the last one arrive.
        self.coming: tuple[bool, float, float] = False, 0.0, 0.0
        self.asked: list[tuple[Any, ...]] = []  # calls of sessions and movers
        self._tokens = itertools.count(1)

    def restart(self) -> None:
        assert self.store is not None
        self.store = Store(self.store.kinds)
        self.claims.clear()
        self.server = f"{int(self.server, 16) + 1:032x}"

    def reset(self) -> None:
        if self.store is not None:
            self.store = Store(self.store.kinds)
        self.claims.clear()
        self.generation += 1

    def register(self, kinds: BlockKinds) -> None:
        if self.store is None:
            self.store = Store(kinds)
        assert self.store.kinds == kinds

    def claim(self, units: list[bytes], local: int) -> tuple[int, bytes, list[Any]]:
        if self.store is None:
            return 0, b"", []
        found, ranges = self.store.claim(units, local)
        if not found:
            return 0, b"", []
        kinds = self.store.kinds
        token = next(self._tokens).to_bytes(16, "little")
        self.claims[token] = {}
        for kind, first, count in ranges:
            keys = [units[kinds.unit_of(kinds.kinds[kind], first + i)] for i in range(count)]
            pages = [self.store.blocks[kind][key] for key in keys]
            self.claims[token][kind] = (first, pages)
            self.journal += [(key.ljust(32, b"\0"), True, kind) for key in keys]
        return found, token, [tuple(one) for one in ranges]


class Session:
    """A CacheSession whose answers are there at once."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._tickets = itertools.count(1)
        self._answers: dict[int, Any] = {}

    def _answer(self, value: Any) -> int:
        ticket = next(self._tickets)
        self._answers[ticket] = value
        return ticket

    def _units(self, keys: bytes, key_bytes: int) -> list[bytes]:
        assert key_bytes > 0 and len(keys) % key_bytes == 0
        units = [keys[i : i + key_bytes] for i in range(0, len(keys), key_bytes)]
        assert len(units) <= _native.MAX_KEYS
        return units

    def lookup(self, keys: bytes, key_bytes: int, local_units: int = 0) -> int:
        units, store = self._units(keys, key_bytes), self._cache.store
        found = store.claim(units, local_units)[0] if store is not None else 0
        return self._answer((found, store is not None, b"", 0))

    def claim(
        self,
        keys: bytes,
        key_bytes: int,
        compute_delay_s: float = 0.0,
        compute_block_s: float = 0.0,
        local_units: int = 0,
    ) -> int:
        units = self._units(keys, key_bytes)
        self._cache.asked.append(("claim", len(units), local_units))
        found, token, ranges = self._cache.claim(units, local_units)
        coming, first_s, last_s = self._cache.coming
        return self._answer((found, True, token, ranges, found * coming, first_s, last_s))

    def take(self, ticket: int, patience_s: float = 0.0) -> Any:
        return self._answers.pop(ticket)

    take_ranges = take_journal_of_kinds = take_reset = take

    def forget(self, ticket: int) -> None:
        answer = self._answers.pop(ticket, None)
        if answer is not None and len(answer) in (4, 7) and answer[2]:
            self.unclaim(answer[2])

    def unclaim(self, token: bytes) -> None:
        self._cache.claims.pop(token, None)

    def events(self) -> int:
        return next(self._tickets)

    def await_event(self, seen: int, patience_s: float) -> bool:
        return True  # Each answer is there.

    def interrupt(self) -> None:
        return None

    def journal(self, space: int, position: int) -> int:
        cache = self._cache
        begun = position != _native.JOURNAL_END
        said = cache.journal[position:] if begun else []
        return self._answer((1, len(cache.journal), False, False, said))

    def ask_reset(self, deadline_s: float) -> int:
        self._cache.reset()
        return self._answer((self._cache.generation, []))

    def take_journal(self, ticket: int, patience_s: float = 0.0) -> Any:
        raise AssertionError("the journal of several kinds states them")

    def status(self) -> dict[str, Any]:
        return {"state": "ready", "detail": "", "server": self._cache.server}

    def close(self) -> None:
        return None


class Mover:
    """A Mover.of_kinds that copies memory of this process."""

    def __init__(self, cache: Cache, kinds: Sequence[Any], unit: int, alignment: int) -> None:
        self._cache = cache
        self._places = [members for *_, members in kinds]
        numbers = itertools.count()
        self.kinds = BlockKinds(
            tuple(
                BlockKind(KindRule(rule), tokens, block, tuple(next(numbers) for _ in members))
                for rule, tokens, block, members in kinds
            ),
            unit,
            alignment,
        )
        cache.register(self.kinds)
        self._saves: dict[int, Any] = {}
        self._loads: dict[int, Any] = {}
        self._cancelled: set[int] = set()
        self.kind_page_bytes = [
            sum(size for segments, _ in members for *_, size in segments)
            for members in self._places
        ]
        self.page_bytes = self.kind_page_bytes[0]

    # ---- jobs

    def save(
        self,
        scheduler: bytes,
        job: int,
        keys: bytes,
        key_bytes: int,
        blocks: Sequence[int],
        kind: int = 0,
        depths: bytes = b"",
        may_refuse: bool = False,
    ) -> None:
        assert len(depths) * key_bytes == len(keys), "the connector knows all depths"
        names = [keys[i : i + key_bytes] for i in range(0, len(keys), key_bytes)]
        assert len(blocks) == len(names) * len(self._places[kind]), "blocks of all members"
        assert job not in self._saves and 0 not in blocks
        self._cache.asked.append(("save", kind, len(names)))
        self._saves[job] = kind, names, list(blocks)

    def load_ranges(
        self, load: int, token: bytes, ranges: Sequence[Any], claimed: Sequence[Any]
    ) -> None:
        if token not in self._cache.claims:
            raise _native.Gone("there is no such claim")
        pages = self._cache.claims[token]
        known = {kind: (first, count) for kind, first, count in claimed}
        work = []
        for kind, first, count, blocks in ranges:
            begin, held = pages[kind]
            assert known[kind] == (begin, len(held))
            assert begin <= first and first + count <= begin + len(held), "a part of the claim"
            assert len(blocks) == count * len(self._places[kind])
            work.append((kind, held[first - begin : first - begin + count], list(blocks)))
        self._cache.asked.append(("load", [tuple(one)[:3] for one in ranges]))
        self._loads[load] = work

    def cancel_load(self, load: int) -> None:
        self._cancelled.add(load)

    def follow(self, within_s: float) -> list[Any]:
        return []

    def take_finished(self) -> list[Any]:
        done, draw = [], self._cache.draw
        for job in [job for job in self._saves if draw.random() < self._cache.copy_chance]:
            done.append(self._end_save(job, *self._saves.pop(job)))
        for load in [load for load in self._loads if draw.random() < self._cache.copy_chance]:
            done.append(self._end_load(load, self._loads.pop(load)))
        return done

    def _end_save(self, job: int, kind: int, names: list[bytes], blocks: list[int]) -> Any:
        stored, skipped = self._cache.store.blocks[kind], 0
        members = len(self._places[kind])
        for i, name in enumerate(names):
            page = self._page(kind, blocks[i * members : (i + 1) * members])
            skipped += name in stored
            stored.setdefault(name, page)
            self._cache.journal.append((name.ljust(32, b"\0"), True, kind))
        return self._done("save", job, len(names) - skipped, skipped)

    def _end_load(self, load: int, work: list[Any]) -> Any:
        fails = load in self._cancelled or self._cache.draw.random() < self._cache.failing_loads
        ids = [block for *_, blocks in work for block in blocks]
        count = 0
        for kind, pages, blocks in work:
            members = len(self._places[kind])
            for i, page in enumerate(pages):
                content = b"\xee" * len(page) if fails else page
                self._put_page(kind, blocks[i * members : (i + 1) * members], content)
            count += len(pages)
        if fails:
            return self._done("load", load, 0, 0, ids[:1], "planted")
        return self._done("load", load, count)

    def _done(
        self, what: str, number: int, blocks: int, skipped: int = 0, failed: Any = (), why: str = ""
    ) -> Any:
        return SimpleNamespace(
            kind=what,
            id=number,
            blocks=blocks,
            skipped=skipped,
            failed_blocks=failed,
            bytes=blocks * self.page_bytes,
            direct_bytes=0,
            took_s=0.001,
            copying_s=0.001,
            error=why or None,
            error_code=why or None,
            cut="",
            verified=0,
            corrupt=0,
        )

    def _pieces(self, kind: int, ids: Sequence[int]) -> list[tuple[int, int]]:
        """Addresses and sizes of a page, member after member."""
        return [
            (address + block * stride, size)
            for (segments, _), block in zip(self._places[kind], ids, strict=True)
            for address, stride, size in segments
        ]

    def _page(self, kind: int, ids: Sequence[int]) -> bytes:
        return b"".join(ctypes.string_at(*piece) for piece in self._pieces(kind, ids))

    def _put_page(self, kind: int, ids: Sequence[int], page: bytes) -> None:
        offset = 0
        for address, size in self._pieces(kind, ids):
            ctypes.memmove(address, page[offset : offset + size], size)
            offset += size
        assert offset == len(page)

    def status(self) -> dict[str, Any]:
        return {"state": "ready", "detail": "", "server": self._cache.server}

    def finished_fd(self) -> None:
        return None

    def close(self) -> None:
        return None


def install(monkeypatch: Any, cache: Cache) -> None:
    """Sessions and movers that are made from now on use ``cache``."""

    class Movers:
        @staticmethod
        def of_kinds(
            path: str,
            instance: str,
            device: Any,
            kinds: Sequence[Any],
            unit_tokens: int,
            alignment_tokens: int,
            factors: Any,
            **options: Any,
        ) -> Mover:
            return Mover(cache, kinds, unit_tokens, alignment_tokens)

    monkeypatch.setattr(_native, "CacheSession", lambda *arguments, **options: Session(cache))
    monkeypatch.setattr(_native, "Mover", Movers)
