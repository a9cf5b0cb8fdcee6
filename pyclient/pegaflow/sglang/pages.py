"""The pages of one pool in the cache: lookups, loads and saves that end by their deadlines.

No call of this module raises. A failure is a miss or a page that was not saved, with one line in
the log for each new text.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from pegaflow import _native
from pegaflow.engine.job_reports import JobReports
from pegaflow.sglang.geometry import Geometry
from pegaflow.sglang.settings import Settings

log = logging.getLogger("sglang.pegaflow")

KEY_BYTES = 32
#: What a question may take beyond its own deadline, on an overloaded machine.
_GRACE_S = 0.05
#: The rules by their numbers on the wire: ``pegaflow.api.kinds.RULES``.
_STATE = 3


class Pages:
    """One pool of one rank: a namespace of its own, with a session and a mover. Thread-safe.

    Pages of a *run* are found from the first key on, as attention needs them. The others are found
    one by one: windows and states exist for some lengths of a prompt only.
    """

    def __init__(
        self,
        path: str,
        instance: str,
        build: str,
        geometry: Geometry,
        factors: Sequence[tuple[str, str]],
        settings: Settings,
        *,
        is_run: bool = True,
    ) -> None:
        """Connects in the background, and again whenever the server comes back.

        Args:
            path: Of the server's socket.
            is_run: Whether a page is of use only with all pages before it.

        Raises:
            PegaFlowError: an argument is invalid.
        """
        self._geometry = geometry
        self._is_run = is_run
        self._settings = settings
        device = _native.HostDevice(settings.copy_threads)
        options = {"build": build, **settings.mover_options()}
        if is_run:
            self._mover = _native.Mover(
                path, instance, device, geometry.segments, geometry.pages, factors, **options
            )
        else:
            kinds = [(_STATE, 0, 1, [(geometry.segments, geometry.pages)])]
            self._mover = _native.Mover.of_kinds(
                path, instance, device, kinds, 1, 1, factors, **options
            )
        self._session = _native.CacheSession(path, instance, build, **settings.link_options())
        self._answer_s = settings.lookup_deadline_ms / 1e3 + _GRACE_S
        self._scheduler = _native.random_id()
        self._numbers = itertools.count(1)
        self._reports = JobReports(self._mover)
        self._said = ""

    # ---- questions

    def count(self, hashes: Sequence[str]) -> int:
        """How many pages, from the first on, the cache has. Holds nothing."""
        found = 0
        for begin in range(0, len(hashes), _native.MAX_KEYS):
            part = hashes[begin : begin + _native.MAX_KEYS]
            here = self._count(part) if self._is_run else _leading(self.present(part))
            found += here
            if here < len(part):
                break
        return found

    def _count(self, hashes: Sequence[str]) -> int:
        keys = _native.pack_hex_keys(hashes)
        if not keys:
            return self._missed(hashes)
        answer = self._ask(lambda: self._session.lookup(keys, KEY_BYTES), self._session.take)
        return answer[0] if answer else 0

    def present(self, hashes: Sequence[str]) -> list[bool]:
        """Which pages the cache has; only for a pool whose pages are found one by one."""
        found = [False] * len(hashes)
        for begin in range(0, len(hashes), _native.MAX_KEYS):
            part = hashes[begin : begin + _native.MAX_KEYS]
            keys = _native.pack_hex_keys(part)
            if not keys:
                self._missed(part)
                continue
            answer = self._ask(
                lambda keys=keys: self._session.boundaries(keys, KEY_BYTES),
                self._session.take_boundaries,
            )
            for length in answer[0] if answer else ():
                found[begin + length - 1] = True
        return found

    def _ask(self, ask: Callable[[], int], take: Callable[..., Any]) -> Any:
        """The answer, or None without one by the deadline."""
        try:
            ticket = ask()
            answer = take(ticket, self._answer_s)
            if answer is None:
                self._session.forget(ticket)
                raise _native.Timeout("no response from the client thread")
        except _native.PegaFlowError as error:
            self._failed(error)
            return None
        return answer

    # ---- copies

    def load(self, hashes: Sequence[str], pages: Sequence[int]) -> list[bool]:
        """Which of ``pages`` were loaded; the content of the others is undefined.

        Returns when no copy is in flight: the caller may then use the pages for something else.
        """
        loaded: list[bool] = []
        for begin in range(0, len(hashes), _native.MAX_KEYS):
            end = begin + _native.MAX_KEYS
            step = self._load_run if self._is_run else self._load_each
            loaded += step(hashes[begin:end], pages[begin:end])
            if self._is_run and not loaded[-1]:
                break
        return loaded + [False] * (len(hashes) - len(loaded))

    def _load_run(self, hashes: Sequence[str], pages: Sequence[int]) -> list[bool]:
        keys = _native.pack_hex_keys(hashes)
        if not keys:
            self._missed(hashes)
            return [False] * len(hashes)
        answer = self._ask(lambda: self._session.claim(keys, KEY_BYTES), self._session.take)
        found, _, token, *_ = answer or (0, False, b"")
        try:
            if not found:
                return [False] * len(hashes)
            number = next(self._numbers)
            done = self._run(
                lambda: self._mover.load(number, token, 0, pages[:found]), ("load", number)
            )
        finally:
            if token:
                self._session.unclaim(token)
        good = _good(done, pages[:found])
        return good + [False] * (len(hashes) - found)

    def _load_each(self, hashes: Sequence[str], pages: Sequence[int]) -> list[bool]:
        loaded = []
        for text, page in zip(hashes, pages, strict=True):
            loaded.append(self._load_one(text, page))
            if not loaded[-1]:
                break  # windows and states are of no use without all of them
        return loaded + [False] * (len(hashes) - len(loaded))

    def _load_one(self, text: str, page: int) -> bool:
        keys = _native.pack_hex_keys([text])
        if not keys:
            self._missed([text])
            return False
        answer = self._ask(lambda: self._session.claim(keys, KEY_BYTES), self._session.take_ranges)
        if not answer or not answer[0]:
            return False
        token, ranges = answer[2], answer[3]
        try:
            number = next(self._numbers)
            wanted = [(0, ranges[0][1], 1, [page])]
            done = self._run(
                lambda: self._mover.load_ranges(number, token, wanted, ranges), ("load", number)
            )
        finally:
            self._session.unclaim(token)
        return done is not None and done.error is None

    def save(self, hashes: Sequence[str], pages: Sequence[int]) -> list[bool]:
        """Which of ``pages`` are in the cache, or need not be saved again.

        Returns when no copy is in flight.
        """
        saved: list[bool] = []
        for begin in range(0, len(hashes), _native.MAX_KEYS):
            part = hashes[begin : begin + _native.MAX_KEYS]
            saved += [self._save(part, pages[begin : begin + len(part)])] * len(part)
        return saved

    def _save(self, hashes: Sequence[str], pages: Sequence[int]) -> bool:
        keys = _native.pack_hex_keys(hashes)
        if not keys:
            self._missed(hashes)
            return False
        number = next(self._numbers)
        done = self._run(
            lambda: self._mover.save(self._scheduler, number, keys, KEY_BYTES, pages),
            ("save", number),
        )
        return done is not None and done.error is None

    def _run(self, start: Callable[[], None], job: tuple[str, int]) -> Any:
        """The report of a job, None if it was not accepted.

        The mover ends each job by its own deadlines. The pages may be read or written until then,
        so a report is waited for in any case.
        """
        try:
            start()
        except _native.PegaFlowError as error:
            self._failed(error)
            return None
        done = self._reports.wait(job)
        if done.error is not None:
            self._failed(done.error)
        return done

    # ---- the rest

    @property
    def geometry(self) -> Geometry:
        return self._geometry

    def reset(self, timeout_s: float = 10.0) -> bool:
        """Makes all pages of the namespace unfindable, for all engines; whether that is sure."""
        try:
            self._session.reset_cache(timeout_s)
        except _native.PegaFlowError as error:
            self._failed(error)
            return False
        return True

    def wait_ready(self, timeout_s: float) -> bool:
        """Waits at most ``timeout_s`` for each link; for starts and tests."""
        return self._mover.wait_ready(timeout_s) and self._session.wait_ready(timeout_s)

    def status(self) -> dict[str, Any]:
        """The states of both links."""
        return {"session": self._session.status(), "mover": self._mover.status()}

    def close(self) -> None:
        """Waits for the copies in flight. Afterwards the pool's memory may be freed."""
        self._mover.close()
        self._session.close()

    def _failed(self, error: object) -> None:
        text = str(error)
        if text != self._said:
            self._said = text
            log.warning("pegaflow: the cache is unavailable: %s", text)

    def _missed(self, hashes: Sequence[str]) -> int:
        if hashes:
            self._failed(f"{str(hashes[0])[:80]!r} is no page hash of 64 hexadecimal digits")
        return 0


def _leading(found: Sequence[bool]) -> int:
    return next((number for number, one in enumerate(found) if not one), len(found))


def _good(done: Any, pages: Sequence[int]) -> list[bool]:
    """Which pages of a load are whole; none behind the first one that is not."""
    if done is None:
        return [False] * len(pages)
    failed = set(done.failed_blocks)
    if done.error is not None and not failed:
        return [False] * len(pages)
    whole = _leading([page not in failed for page in pages])
    return [True] * whole + [False] * (len(pages) - whole)
