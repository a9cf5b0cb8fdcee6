"""The cache for asyncio."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import Any

from pegaflow import _native
from pegaflow.api.core import CacheBase
from pegaflow.api.kinds import Claim
from pegaflow.api.results import Loaded, Saved, loaded, loaded_ranges, raise_for, saved


class AsyncCache(CacheBase):
    """As ``Cache``, for one event loop: made in it, and bound to it.

    Ends of copies wake the loop through a descriptor. The loop's default executor waits for answers
    of the server that do not arrive at once, until their deadline at most.

    A cancelled load or save ends only after its copies: when it raises, the engine owns the blocks
    again.
    """

    @functools.wraps(CacheBase.__init__, assigned=())
    def __init__(self, *args: Any, **options: Any) -> None:
        """As ``Cache``.

        Raises:
            RuntimeError: no event loop is running.
        """
        self._loop = asyncio.get_running_loop()
        super().__init__(*args, **options)
        self._waiting: dict[tuple[str, int], asyncio.Future[Any]] = {}
        self._fd = self._mover.finished_fd()
        self._loop.add_reader(self._fd, self._collect)
        self._closed = False

    def _check_caller(self) -> None:
        """
        Raises:
            RuntimeError: called in another event loop, which would not learn of the copies' end.
        """
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("this cache belongs to the event loop in which it was made")

    async def lookup(self, keys: Sequence[bytes], local_units: int = 0) -> int:
        """As ``Cache.lookup``."""
        self._check_units("lookup", local_units, needs_kinds=False)
        packed = self._pack(keys)
        try:
            blocks, *_ = await self._answer(self._session.lookup(*packed, local_units=local_units))
        except _native.PegaFlowError as error:
            self._failed(error)
            return 0
        return blocks

    async def boundaries(self, keys: Sequence[bytes], local_units: int = 0) -> list[int]:
        """As ``Cache.boundaries``."""
        self._check_units("boundaries", local_units)
        packed = self._pack(keys)
        try:
            ticket = self._session.boundaries(*packed, local_units=local_units)
            multiples, _ = await self._answer(ticket, self._session.take_boundaries)
        except _native.PegaFlowError as error:
            self._failed(error)
            return []
        return multiples

    async def claim(self, keys: Sequence[bytes], local_units: int = 0) -> Claim:
        """As ``Cache.claim``. ``unclaim`` is no coroutine."""
        self._check_units("claim", local_units)
        packed = self._pack(keys)
        try:
            ticket = self._session.claim(*packed, local_units=local_units)
            return self._to_claim(await self._answer(ticket, self._session.take_ranges))
        except _native.PegaFlowError as error:
            return Claim(error=self._failed(error))

    async def load_ranges(
        self, claim: Claim, ranges: Sequence[tuple[int, int, int, Sequence[int]]]
    ) -> Loaded:
        """As ``Cache.load_ranges``."""
        checked = self._check_ranges(claim, ranges)
        if not checked:
            return Loaded()
        try:
            job = self._start_load_ranges(claim, checked)
            done = await self._end_of(job, lambda: self._mover.cancel_load(job[1]))
            if self._raise_errors:
                raise_for(done)
        except _native.InvalidArgument:
            raise
        except _native.PegaFlowError as error:
            return Loaded(error=self._failed(error))
        return loaded_ranges(done)

    async def load(self, keys: Sequence[bytes], blocks: Sequence[int]) -> Loaded:
        """As ``Cache.load``."""
        self._refuse_kinds("load")
        packed, listed = self._pack_blocks(keys, blocks, load=True)
        if not listed:
            return Loaded()
        token = b""
        try:
            found, _, token, *_ = await self._answer(self._session.claim(*packed))
            if not found:
                return Loaded()
            job = self._start_load(token, listed[:found])
            done = await self._end_of(job, lambda: self._mover.cancel_load(job[1]))
            if self._raise_errors:
                raise_for(done)
            return loaded(done)
        except _native.PegaFlowError as error:
            return Loaded(error=self._failed(error))
        finally:
            if token:
                self._session.unclaim(token)

    async def save(self, keys: Sequence[bytes], blocks: Sequence[int], kind: int = 0) -> Saved:
        """As ``Cache.save``."""
        packed, listed = self._pack_blocks(keys, blocks, kind)
        if not listed:
            return Saved()
        try:
            done = await self._end_of(self._start_save(packed, listed, kind), lambda: None)
            if self._raise_errors:
                raise_for(done)
        except _native.PegaFlowError as error:
            return Saved(error=self._failed(error))
        return saved(done)

    async def wait_ready(self, timeout_s: float = 10.0) -> bool:
        """As ``Cache.wait_ready``."""
        return await self._loop.run_in_executor(None, self._wait_ready, timeout_s)

    async def close(self) -> None:
        """As ``Cache.close``; pending saves and loads get their results first."""
        if self._closed:
            return
        self._closed = True
        await self._loop.run_in_executor(None, self._close)
        self._collect()
        self._loop.remove_reader(self._fd)

    async def __aenter__(self) -> AsyncCache:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _answer(self, ticket: int, take: Callable[..., Any] | None = None) -> Any:
        session = self._session
        take = take or session.take
        answer = take(ticket, 0.0)
        if answer is not None:
            return answer
        taking = self._loop.run_in_executor(None, take, ticket, self._answer_patience_s)
        try:
            answer = await asyncio.shield(taking)
        except asyncio.CancelledError:
            if take != session.take_boundaries:
                taking.add_done_callback(self._drop_claim)
            raise
        if answer is None:  # past its own deadline, on an overloaded machine
            session.forget(ticket)
            raise _native.Timeout("no response from the client thread")
        return answer

    def _drop_claim(self, taken: asyncio.Future[Any]) -> None:
        """Ends a claim that arrived after its caller was cancelled."""
        if not taken.cancelled() and taken.exception() is None and taken.result() is not None:
            self._session.unclaim(taken.result()[2])

    def _collect(self) -> None:
        for done in self._mover.take_finished():
            future = self._waiting.pop((done.kind, done.id))
            if not future.done():
                future.set_result(done)

    async def _end_of(self, job: tuple[str, int], give_up: Callable[[], None]) -> Any:
        """The job's report, even if the task is cancelled meanwhile."""
        future = self._waiting[job] = self._loop.create_future()
        cancelled: asyncio.CancelledError | None = None
        while not future.done():
            try:
                await asyncio.shield(future)
            except asyncio.CancelledError as error:
                if cancelled is None:
                    give_up()
                cancelled = error
        if cancelled is not None:
            raise cancelled
        return future.result()
