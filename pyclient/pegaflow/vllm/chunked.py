"""Loads that follow a prefill: each chunk of a prompt is loaded once it is saved.

A prefill engine computes a long prompt in chunks, and each chunk is a save of its own. vLLM admits
a request with one number of tokens to load, and waits for one report. So the first chunk's blocks
admit the request with all tokens of the prompt, and the load has one part for each chunk, with a
claim of its own. The worker reports the load to vLLM when its last part has ended. If the prefill
does not end, a last part without copies stands for the missing blocks, and vLLM computes them.

With a direct group one part follows the prefill by itself: it has all blocks that no claim has
brought so far, and its worker reads each of them as soon as it is computed. Here it is only
watched, so that it ends when nothing more can come. docs/prefill_decode.md describes the flow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pegaflow.vllm.metrics import Counts
from pegaflow.vllm.requests import Claim, Load, RequestState

if TYPE_CHECKING:
    from pegaflow.vllm.handover import Waits
    from pegaflow.vllm.loads import Loads
    from pegaflow.vllm.lookups import Lookups


UNKNOWN = -1  #: No number of news.
#: The time in which a part that follows its prefill loads the blocks that are there, once no more
#: can come. What is missing then is computed.
GRACE_S = 0.25
#: The same if the prefill is over and all of its blocks are in the pool of another node, as long as
#: any load waits for blocks of another node; the time that the part's bytes may take is added.
FAR_GRACE_S = 2.0
#: After this time a part whose blocks are all in the pool is looked at again: no claim keeps them.
LOOK_AGAIN_S = 1.0
NEVER = float("inf")


@dataclasses.dataclass(eq=False)
class ChunkedLoad:
    """The load of one request, from its admission to the order of its last part."""

    number: int
    state: RequestState
    first: int  #: Index in the chain of its first block,
    stop: int  #: and after the last one, which may be the prompt's partial block.
    blocks: list[int]  #: vLLM's.
    next: int  #: Index of the first block that no part has.
    parts: list[Load] = dataclasses.field(default_factory=list)
    news: int = 0  #: Those of the request's watch when blocks were last claimed.
    result: str = ""  #: Why no further save is waited for; "": one is.
    is_last_claim: bool = False  #: The latest claim was sent after that.
    is_open: bool = True  #: The last part was not ordered yet, or follows the prefill.
    follower: Load | None = None  #: The last part, if it follows the prefill,
    ends_at: float = NEVER  #: and when it is cancelled,
    was_whole: bool = False  #: or looked at again, as the pool had all of its blocks.

    def rest(self) -> list[int]:
        """vLLM's blocks that no part has."""
        return self.blocks[self.next - self.first :]


class ChunkedLoads:
    """The chunked loads of an engine. Bound to the scheduler's thread."""

    def __init__(
        self,
        *,
        waits: Waits,
        lookups: Lookups,
        loads: Loads,
        unit_tokens: int,
        counts: Counts,
        unclaim: Callable[[Load], None],
        node: Callable[[], bytes],
        clock: Callable[[], float],
        bytes_per_second: float,
    ) -> None:
        """``unclaim``: ends the claim of a part. ``node``: the incarnation of the server.
        ``bytes_per_second``: of a load, at the least.
        """
        self._waits = waits
        self._lookups = lookups
        self._loads = loads
        self._unit_tokens = unit_tokens
        self._counts = counts
        self._unclaim = unclaim
        self._node = node
        self._clock = clock
        self._bytes_per_second = bytes_per_second
        self._last_number = 0
        self.open: dict[int, ChunkedLoad] = {}  #: Those whose last part was not ordered yet.
        self.following: dict[int, ChunkedLoad] = {}  #: Those whose last part follows the prefill.

    def begin(self, state: RequestState, table: Sequence[int], tokens: int) -> bool:
        """vLLM has admitted a request with ``tokens``; whether its claim has only some of them, and
        the load follows the prefill. ``table``: all of its blocks.
        """
        claim = state.claim
        first = state.local_tokens // self._unit_tokens
        stop = first - (-tokens // self._unit_tokens)
        if claim is None or state.early is None or stop <= claim.first + claim.blocks:
            return False
        state.claim = None
        if claim.first > first or stop > min(len(table), claim.wanted_stop):
            raise AssertionError(f"{tokens} tokens were never offered to {state.request_id}")
        self._last_number += 1
        chunked = ChunkedLoad(
            self._last_number, state, first, stop, list(table[first:stop]), next=first
        )
        self.open[chunked.number] = state.chunked = chunked
        if claim.first + claim.blocks > first:
            self._order(chunked, claim)
        else:
            self._lookups.end_claim(claim)
        if state.is_direct:
            self._follow(chunked)
        return True

    def waiting(self) -> list[str]:
        """The requests for which no part is in flight: they wait for the prefill."""
        return [
            one.state.request_id
            for one in (*self.open.values(), *self.following.values())
            if all(part.is_quiet or not self._loads.is_under_way(part) for part in one.parts)
        ]

    def poll(self, away: bool) -> None:
        """Orders the parts whose blocks are there. ``away``: a rank cannot use the cache."""
        for chunked in list(self.open.values()):
            if chunked.state.load_failed:
                self._end(chunked, "failed")
            elif away:
                self._end(chunked, "not_registered")
            else:
                self._poll(chunked)
        for chunked in self.following.values():
            failed = "failed" if chunked.state.load_failed else ""
            self._watch(chunked, failed or ("not_registered" if away else ""))

    def _poll(self, chunked: ChunkedLoad) -> None:
        state = chunked.state
        if not chunked.result:
            chunked.result = self._waits.poll(state, chunked.next)
        if state.is_direct and not chunked.result:
            self._lookups.drop(state)  # a claim that is not answered
            self._follow(chunked)
            return
        news = state.early.watch.news
        if state.claim is None:
            if news == chunked.news and (not chunked.result or chunked.is_last_claim):
                return
            chunked.news, chunked.is_last_claim = news, bool(chunked.result)
            self._lookups.claim_next(state, chunked.next)
        claim = self._lookups.take_next(state)
        if claim is not None and claim.first + claim.blocks > chunked.next:
            self._order(chunked, claim)
        elif claim is None and state.claim is None:
            chunked.news = UNKNOWN  # it was late, or could not be sent: there may be blocks
        if chunked.is_open and chunked.is_last_claim and state.claim is None:
            self._end(chunked, chunked.result)

    def _order(self, chunked: ChunkedLoad, claim: Claim) -> None:
        """Begins the part that a claim brings."""
        stop = min(chunked.stop, claim.first + claim.blocks)
        blocks = chunked.rest()[: stop - chunked.next]
        load = self._loads.begin(chunked.state, claim, chunked.next, blocks)
        load.left = chunked.stop - stop
        chunked.next = stop
        self._add(chunked, load)
        if stop == chunked.stop:
            self._close(chunked, "over", wait="over")

    def _follow(self, chunked: ChunkedLoad) -> None:
        """Begins the part that follows the prefill: all that no part has."""
        state, first = chunked.state, chunked.next
        keys, full_stop = self._lookups.rest_keys(state, first, chunked.stop)
        if len(keys) != chunked.stop - first or not keys[-1]:
            self._end(chunked, "failed")  # some key is in doubt since its claim
            return
        load = self._loads.begin_following(
            state,
            first,
            keys,
            chunked.rest(),
            full_stop=full_stop,
            patience_s=self._waits.left_s(state),
            node=state.early.node,
        )
        self._add(chunked, load)
        chunked.follower = load
        del self.open[chunked.number]
        self.following[chunked.number] = chunked

    def _watch(self, chunked: ChunkedLoad, failed: str) -> None:
        """Cancels a part that follows its prefill if it cannot end by itself any longer.
        ``failed``: why the blocks that it still brings are of no use.
        """
        state, load = chunked.state, chunked.follower
        assert load is not None
        if not chunked.result:
            chunked.result = failed or self._waits.poll(state, chunked.stop)
            load.awaits_prefill = not chunked.result and not state.early.is_ending
            if not chunked.result:
                return
            self._give_time(chunked, claims=chunked.result == "over")
        if failed:
            chunked.ends_at, chunked.was_whole = 0.0, False
        elif state.claim is not None and self._lookups.has_rest(state, chunked.stop):
            chunked.ends_at, chunked.was_whole = self._clock() + LOOK_AGAIN_S, True
        if self._clock() < chunked.ends_at:
            return
        if chunked.was_whole:
            self._give_time(chunked, claims=True)
        else:
            self._loads.cancel(load)

    def _give_time(self, chunked: ChunkedLoad, *, claims: bool) -> None:
        """Nothing more can come: what is there may still be loaded. ``claims``: that may be all."""
        load = chunked.follower
        assert load is not None
        is_far = claims and load.node != self._node()
        far_s = FAR_GRACE_S + load.bytes / self._bytes_per_second
        chunked.ends_at = self._clock() + (far_s if is_far else GRACE_S)
        chunked.was_whole = False
        if claims and not is_far:
            self._lookups.claim_next(chunked.state, load.start)

    def ended(self, load: Load) -> None:
        """The workers have reported a load."""
        chunked = load.chunked
        if chunked is None or load is not chunked.follower or not chunked.is_open:
            return
        self._lookups.drop(chunked.state)
        is_short = load.failed or chunked.state.load_failed
        why = (chunked.result or "failed") if is_short else "over"
        self._close(chunked, "not_saved" if is_short and why == "over" else why, wait=why)

    def _add(self, chunked: ChunkedLoad, load: Load) -> None:
        load.chunked = chunked
        chunked.parts.append(load)
        chunked.state.load = None  # the request has several

    def _end(self, chunked: ChunkedLoad, why: str, *, whole: bool = False) -> None:
        """Ends a load short: its last part is one without copies. ``whole``: the blocks of the
        parts before it must not be used either.
        """
        self._lookups.drop(chunked.state)
        first = chunked.first if whole else chunked.next
        blocks = chunked.blocks if whole else chunked.rest()
        # The wait is over, but some block is missing: its save was dropped, or it was evicted.
        reason = "not_saved" if why == "over" else why
        load = self._loads.refuse(chunked.state, None, first, chunked.stop, reason, blocks)
        self._add(chunked, load)
        self._close(chunked, reason, wait=why)

    def _close(self, chunked: ChunkedLoad, result: str, *, wait: str) -> None:
        chunked.is_open = False
        (self.following if chunked.follower else self.open).pop(chunked.number)
        self._counts.add("chunked_loads", 1, result)
        self._waits.conclude(chunked.state, wait)

    def abort(self, state: RequestState) -> bool:
        """The request is gone; whether vLLM waits for a report of its load."""
        chunked, state.chunked = state.chunked, None
        if chunked is None:
            return False
        if chunked.follower is not None and chunked.is_open:
            self._close(chunked, "dropped", wait="dropped")
        elif chunked.is_open:
            self._end(chunked, "dropped")
        in_flight = [load for load in chunked.parts if self._loads.is_under_way(load)]
        for load in in_flight:
            self._unclaim(load)
            self._loads.abort(load)
        return bool(in_flight)

    def discard_all(self) -> None:
        """The cache was reset: no block of a load that is not complete may be used."""
        for chunked in list(self.open.values()):
            self._end(chunked, "reset", whole=True)
        for chunked in list(self.following.values()):
            self._close(chunked, "reset", wait="reset")  # its last part is discarded
