"""Decode requests that a router sends together with their prefill.

Such a request does not know which save will contain its last block, because the prefill engine has
not computed it yet. It knows the key of that block. So it waits until a save of the prefill engine
is over, looks whether the block is there, and otherwise waits for the next save. All requests that
wait for one engine share one call to the server. With a direct group it also waits until a save has
begun: then the load begins, and its worker waits for the rest. docs/prefill_decode.md describes the
flow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from pegaflow import _native
from pegaflow.engine.errors import error_code
from pegaflow.vllm.requests import RequestState

#: An answer takes this long. One of an older server that is there at the first poll after it is
#: taken for one about a save that had ended before the question: polls are as far apart as the
#: scheduler's steps.
QUICK_S = 0.002
#: The longest patience of a question that passes over saves: only older servers get one, and the
#: saves may already be over.
STRIDE_PATIENCE_S = 0.02
#: No scheduler reaches this job. Numbers come from other processes, and a question has 64 bits.
MOST_JOBS = 1 << 62


class SaveWatch:
    """Follows the saves of one prefill engine: ended saves, or begun ones. Bound to the scheduler's
    thread.

    The number of the last save that is over is known from the router, or from an earlier answer,
    and may be old. An answer reports how far the saves are, so the second question is about the
    one in flight. Older servers do not report it. Then the strides between the questions grow as
    long as the answers are immediate, and shrink again when one is not, so that a few questions
    reach the present.
    """

    def __init__(
        self,
        session: Any,
        handover: Any,
        *,
        patience_s: float,
        clock: Callable[[], float],
        begun: bool = False,
    ) -> None:
        """``handover``: names a job of the engine that was not over when the router heard of it.
        ``begun``: follows the saves that have begun.
        """
        self.users = 0  #: The number of requests that wait.
        self.news = 0  #: Rises when more saves may be over.
        self.ended = ""  #: Why nothing can be followed any longer; "": it can.
        #: The server reports what the engine begins to save: blocks of it are found without claims.
        self.reports_begun = False
        self._begun = begun
        self._session = session
        self._node, self._scheduler = handover.node, handover.scheduler
        self._patience_s = patience_s
        self._clock = clock
        self._over = handover.job - 1
        self._stride, self._rises = 1, True
        self._ticket: int | None = None
        self._asked, self._asked_at = 0, 0.0
        self._is_slow = False

    def knows(self, job: int) -> None:
        """Another request names a job, which says that those before it are over."""
        if job - 1 > self._over:
            self._over = job - 1
            self._rises = True

    def poll(self) -> None:
        """Takes the answer to the pending question, and asks the next one. Never waits."""
        if self.ended:
            return
        if self._ticket is not None:
            try:
                reached = self._session.take_wait(self._ticket)
                if reached is None:
                    # Each request that waits polls in each step.
                    self._is_slow = self._is_slow or self._clock() - self._asked_at >= QUICK_S
                    return
                self._advance(reached)
            except _native.PegaFlowError as error:
                self._failed(error)
            self._ticket = None
            self.news += 1
        if not self.ended:
            self._ask()

    def _advance(self, reached: int) -> None:
        """``reached``: the saves up to this one are over; 0: the server does not report it."""
        self.reports_begun = self._begun
        self._over = max(self._over, self._asked, reached)
        if reached:
            self._rises, self._stride = False, 1
            return
        self._rises = self._rises and not self._is_slow
        self._stride = self._stride * 2 if self._rises else max(1, self._stride // 2)

    def _failed(self, error: Exception) -> None:
        if error_code(error) == "timeout":
            # A server that hangs shows in the lookup that follows.
            self._rises, self._stride = False, max(1, self._stride // 2)
        else:
            self.ended = reason_of(error)

    def _ask(self) -> None:
        self._asked = min(self._over + self._stride, MOST_JOBS)
        self._asked_at, self._is_slow = self._clock(), False
        limit = self._patience_s if self._stride == 1 else STRIDE_PATIENCE_S
        try:
            self._ticket = self._session.await_job(
                self._node,
                self._scheduler,
                self._asked,
                min(limit, self._patience_s),
                **({"begun": True} if self._begun else {}),
            )
        except _native.PegaFlowError as error:
            self.ended = reason_of(error)
            self.news += 1

    def close(self) -> None:
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            self._session.forget(ticket)


class WatchOfBoth:
    """Follows the ended and the begun saves of one engine. A SaveWatch.

    A server that is too old reports only the former, and so does one for an engine of another node
    whose memory this engine cannot read.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """As of SaveWatch."""
        self.users = 0
        self._over = SaveWatch(*arguments, **options)
        self._begun = SaveWatch(*arguments, **options, begun=True)

    @property
    def news(self) -> int:
        return self._over.news + self._begun.news

    @property
    def ended(self) -> str:
        return self._over.ended

    @property
    def reports_begun(self) -> bool:
        return self._begun.reports_begun

    def knows(self, job: int) -> None:
        self._over.knows(job)
        self._begun.knows(job)

    def poll(self) -> None:
        self._over.poll()
        self._begun.poll()

    def close(self) -> None:
        self._over.close()
        self._begun.close()


@dataclasses.dataclass
class EarlyWait:
    """The wait of one request."""

    watch: SaveWatch | WatchOfBoth
    deadline: float
    blocks: int  #: The prompt's full blocks; the wait ends with the last one.
    node: bytes = b""  #: The server of the prefill engine.
    news: int = -1  #: Those of the watch at the last lookup.
    lookup: int | None = None  #: Its ticket, until it is answered,
    keys: int = 0  #: and the number of its keys.
    enough: int = 0  #: So many of them show that the prefill has begun, with one that is offered.
    asks_last: bool = False  #: The next one is for the last key alone.
    #: The number of leading blocks that the cache had at the first lookup; None: unknown.
    cached: int | None = None
    has_begun: bool = False  #: There are further blocks, and the request may load them.
    #: The server finds them in a pool or in the prefill engine's memory, so the load may follow the
    #: prefill without further claims.
    is_direct: bool = False
    is_ending: bool = False  #: Its last block is computed, and is being saved.
    local: int = 0  #: The number of leading blocks that vLLM has itself.
    reserved: int = 0  #: Blocks of the GPU that it may hold before all of its prompt is saved.


class EarlyWaits:
    """The waits of requests that came with their prefill. Bound to the scheduler's thread."""

    def __init__(
        self,
        session: Any,
        *,
        patience_s: float,
        clock: Callable[[], float],
        direct: bool = False,
    ) -> None:
        """``direct``: blocks may be read out of other engines' memory."""
        self._session = session
        self._patience_s = patience_s
        self._clock = clock
        self._direct = direct
        #: How many of the GPU's blocks requests may hold while their prefills run.
        self.block_limit = 0
        self._reserved = 0
        self._watches: dict[tuple[bytes, bytes], SaveWatch | WatchOfBoth] = {}

    def begin(self, state: RequestState, handover: Any) -> bool:
        """Begins the wait; False if the prompt has no block to wait for."""
        blocks = state.chain.usable_blocks()
        if blocks == 0 or state.chain.doubt:
            return False
        name = (handover.node, handover.scheduler)
        watch = self._watches.get(name)
        if watch is None:
            watch = self._watches[name] = (WatchOfBoth if self._direct else SaveWatch)(
                self._session, handover, patience_s=self._patience_s, clock=self._clock
            )
        watch.knows(handover.job)
        watch.users += 1
        deadline = self._clock() + handover.wait_s
        state.early = EarlyWait(watch, deadline, blocks, handover.node)
        return True

    def poll(self, state: RequestState, first: int) -> str:
        """Why the wait is over; "": it is not. Never waits.

        "over": the last block is there. "begun": the prefill has saved the block ``first`` or, if
        the cache has had that one before, a later one, and the request may load what is there. With
        a direct group, a block counts from the moment at which its save begins.
        """
        early = state.early
        early.watch.poll()
        try:
            if found := self._look(state, early, first):
                return found
        except _native.PegaFlowError as error:
            early.lookup = None
            return reason_of(error)
        is_answered = early.lookup is None and not early.asks_last
        if is_answered and early.news == early.watch.news and early.watch.ended:
            return early.watch.ended
        return "timeout" if self._clock() >= early.deadline else ""

    def _look(self, state: RequestState, early: EarlyWait, first: int) -> str:
        """As poll(), from the lookups alone."""
        if early.lookup is None:
            if early.news == early.watch.news and not early.asks_last:
                return ""
            if not early.asks_last:  # the last key alone shows nothing of what has begun meanwhile
                early.news = early.watch.news
            keys = self._keys(state, early, first)
            early.keys, early.asks_last = len(keys), False
            more = {"prefill_node": early.node} if self._direct else {}
            early.lookup = self._session.lookup(
                b"".join(keys), len(keys[0]), **state.hints.arguments(), **more
            )
        answer = self._session.take(early.lookup, 0.0)
        if answer is None:
            return ""
        early.lookup = None
        return self._read(early, answer)

    def _read(self, early: EarlyWait, answer: tuple[Any, ...]) -> str:
        found, complete = answer[:2]
        offered = answer[4] if self._direct else 0
        if found == early.keys or not complete:  # of an incomplete instance nothing is found
            return "over"
        early.is_ending = early.is_ending or found + offered == early.keys
        is_first = early.cached is None
        if is_first and early.keys > 1:
            early.cached = found
        is_offered = offered and 0 < early.enough <= found + offered
        if is_offered or (found and not is_first and early.keys > 1):
            result = self._begin(early)
            early.is_direct = early.has_begun and bool(is_offered or early.watch.reports_begun)
            return result
        if early.keys == 1:
            return ""
        early.asks_last = True  # it may be there, although the save of another one was dropped
        return ""

    def _keys(self, state: RequestState, early: EarlyWait, first: int) -> list[bytes]:
        """The keys to look up: all, then the first one that was missing and the last one.

        If the request may not load before the end, or its load follows the prefill, only the last
        one counts.
        """
        chain, last = state.chain, early.blocks - 1
        follows = early.is_direct if self._direct else early.has_begun
        is_whole = not self.block_limit or follows or early.blocks > _native.MAX_KEYS
        early.enough = 0
        if is_whole or early.asks_last:
            return [chain.key(last)]
        if early.cached is None:
            early.enough = first + 1
            return chain.keys(0, early.blocks)
        probe = max(early.cached, first)
        early.enough = int(probe <= last)
        return [chain.key(probe), chain.key(last)] if probe < last else [chain.key(last)]

    def _begin(self, early: EarlyWait) -> str:
        """The request may load, if it does not already and there is room."""
        return "begun" if not early.has_begun and self._reserve(early) else ""

    def _reserve(self, early: EarlyWait) -> bool:
        blocks = early.blocks + 1 - early.local
        if self._reserved + blocks > self.block_limit:
            return False
        early.has_begun, early.reserved = True, blocks
        self._reserved += blocks
        return True

    def end(self, state: RequestState) -> None:
        """Forgets the wait of a request, and with the last one the engine."""
        early, state.early = state.early, None
        self._reserved -= early.reserved
        if early.lookup is not None:
            self._session.forget(early.lookup)
        early.watch.users -= 1
        if early.watch.users == 0:
            early.watch.close()
            self._watches = {
                name: each for name, each in self._watches.items() if each is not early.watch
            }


def reason_of(error: Exception) -> str:
    """Why a wait ended, as the metric's label."""
    return "no_server" if isinstance(error, _native.PeerLost) else error_code(error)
