"""The cache for programs that wait."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from pegaflow import _native
from pegaflow.api import arguments
from pegaflow.api.core import CacheBase
from pegaflow.api.kinds import Claim
from pegaflow.api.results import Loaded, Saved, loaded, loaded_ranges, raise_for, saved
from pegaflow.engine.job_reports import JobReports


class Cache(CacheBase):
    """Blocks of an engine's arrays, kept on the node. Thread-safe.

    A failure at the server is a miss, or a result with an error; it raises only with
    ``raise_errors``. Invalid arguments always raise ValueError.
    """

    @functools.wraps(CacheBase.__init__, assigned=())
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._reports = JobReports(self._mover)

    def lookup(self, keys: Sequence[bytes], local_units: int = 0) -> int:
        """How many of ``keys``, from the first on, the cache has now. Holds nothing.

        With several kinds ``keys`` are those of units, and the result is the length in units that
        can be restored; 0: nothing beyond the ``local_units`` that the engine has itself, a
        multiple of the alignment.
        """
        self._check_units("lookup", local_units, needs_kinds=False)
        packed = self._pack(keys)
        try:
            blocks, *_ = self._answer(self._session.lookup(*packed, local_units=local_units))
        except _native.PegaFlowError as error:
            self._failed(error)
            return 0
        return blocks

    def boundaries(self, keys: Sequence[bytes], local_units: int = 0) -> list[int]:
        """Every length that can be restored, as multiples of the alignment. Holds nothing.

        Only with several kinds; ``keys`` are those of units.
        """
        self._check_units("boundaries", local_units)
        packed = self._pack(keys)
        try:
            multiples, _ = self._answer(
                self._session.boundaries(*packed, local_units=local_units),
                self._session.take_boundaries,
            )
        except _native.PegaFlowError as error:
            self._failed(error)
            return []
        return multiples

    def claim(self, keys: Sequence[bytes], local_units: int = 0) -> Claim:
        """Claims the blocks that the longest restorable prefix needs beyond ``local_units``.

        Only with several kinds; ``keys`` are those of units. The claim's blocks stay in the cache,
        unless it is full of claims, until unclaim().
        """
        self._check_units("claim", local_units)
        packed = self._pack(keys)
        try:
            return self._to_claim(
                self._answer(
                    self._session.claim(*packed, local_units=local_units),
                    self._session.take_ranges,
                )
            )
        except _native.PegaFlowError as error:
            return Claim(error=self._failed(error))

    def load_ranges(
        self, claim: Claim, ranges: Sequence[tuple[int, int, int, Sequence[int]]]
    ) -> Loaded:
        """Loads claimed blocks of several kinds; returns when the last copy has ended.

        Args:
            claim: That of ``claim()``.
            ranges: LoadRange or (kind, first, count, blocks) each, at most one a kind: parts of the
                claim's ranges, with the engine's blocks of all members for the first block, then
                for the next one.
        """
        checked = self._check_ranges(claim, ranges)
        if not checked:
            return Loaded()
        try:
            done = self._reports.wait(self._start_load_ranges(claim, checked))
            if self._raise_errors:
                raise_for(done)
        except _native.InvalidArgument:
            raise
        except _native.PegaFlowError as error:
            return Loaded(error=self._failed(error))
        return loaded_ranges(done)

    def load(self, keys: Sequence[bytes], blocks: Sequence[int]) -> Loaded:
        """Loads what the cache has of ``keys``, from the first on, into ``blocks``.

        Returns when the last copy has ended: from then on the engine owns the blocks again. A
        missing block, or one that cannot be pinned now, is not loaded and is not an error.
        """
        self._refuse_kinds("load")
        packed, listed = self._pack_blocks(keys, blocks, load=True)
        if not listed:
            return Loaded()
        token = b""
        try:
            found, _, token, *_ = self._answer(self._session.claim(*packed))
            if not found:
                return Loaded()
            done = self._reports.wait(self._start_load(token, listed[:found]))
            if self._raise_errors:
                raise_for(done)
            return loaded(done)
        except _native.PegaFlowError as error:
            return Loaded(error=self._failed(error))
        finally:
            if token:
                self._session.unclaim(token)

    def save(self, keys: Sequence[bytes], blocks: Sequence[int], kind: int = 0) -> Saved:
        """Saves ``blocks`` under ``keys``; cached blocks are skipped.

        Returns when the last copy has ended: the engine may then use the blocks for something else.
        With several kinds, ``keys`` are those of the units that the blocks of this kind end with,
        and ``blocks`` has those of all members for the first key, then for the next one.
        """
        packed, listed = self._pack_blocks(keys, blocks, kind)
        if not listed:
            return Saved()
        try:
            done = self._reports.wait(self._start_save(packed, listed, kind))
            if self._raise_errors:
                raise_for(done)
        except _native.PegaFlowError as error:
            return Saved(error=self._failed(error))
        return saved(done)

    def reset(self, timeout_s: float = 10.0) -> bool:
        """Makes everything that the namespace holds unfindable, for all engines of it.

        False when no server has confirmed it; then older blocks may still be found.
        """
        timeout_s = arguments.seconds("timeout_s", timeout_s)
        try:
            self._session.reset_cache(timeout_s)
        except _native.PegaFlowError as error:
            self._failed(error)
            return False
        return True

    def wait_ready(self, timeout_s: float = 10.0) -> bool:
        """Waits at most ``timeout_s`` for each side until the server serves it; whether it does.

        Before that, everything is a miss; an engine need not wait.
        """
        return self._wait_ready(timeout_s)

    def close(self) -> None:
        """Waits for the copies in flight. Afterwards everything is a miss."""
        self._close()

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _answer(self, ticket: int, take: Callable[..., Any] | None = None) -> Any:
        """The answer to a question, by the session's ``take()`` or another one."""
        session = self._session
        answer = (take or session.take)(ticket, self._answer_patience_s)
        if answer is None:  # past its own deadline, on an overloaded machine
            session.forget(ticket)
            raise _native.Timeout("no response from the client thread")
        return answer
