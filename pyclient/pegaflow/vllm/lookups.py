"""Lookups and claims for requests, without making the scheduler wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pegaflow import _native
from pegaflow.engine.config import Settings
from pegaflow.engine.errors import error_code
from pegaflow.engine.rates import LoadPolicy
from pegaflow.vllm.handover import tail_key
from pegaflow.vllm.loads import Loads
from pegaflow.vllm.metrics import Counts
from pegaflow.vllm.plans import BlockRules
from pegaflow.vllm.requests import ALL_TOKENS, Claim, RequestState

#: The total wait of one step. Answers take about 50 us, so a step with many new requests stays far
#: below it; a slow server costs the step this much and no more.
STEP_PATIENCE_S = 0.004


class Lookups:
    """Questions and claims for requests that wait. Bound to the scheduler's thread.

    A lookup at arrival holds nothing and is usually answered by the time the scheduler gets to the
    request. If it finds blocks beyond vLLM's own cache, a claim follows; the blocks in the claim's
    answer are offered.
    """

    def __init__(
        self,
        session: Any,
        settings: Settings,
        loads: Loads,
        policy: LoadPolicy,
        *,
        rules: BlockRules,
        follow: bool,
        counts: Counts,
        clock: Callable[[], float],
        events: Any = None,
    ) -> None:
        """``events``: a BlockEvents, if claims are to be reported. All counts of blocks here are in
        units of the rules.
        """
        self._session = session
        self._wait_s = settings.claim_wait_ms / 1e3
        self._limit_s = settings.claim_limit_ms / 1e3
        self._miss_ttl_s = settings.miss_ttl_ms / 1e3
        self._loads = loads
        self._policy = policy
        self._rules = rules
        self._min_blocks = rules.least_units(settings.min_load_tokens)
        self._follow = follow
        self._counts = counts
        self._clock = clock
        self._events = events
        self._patience_s = STEP_PATIENCE_S
        # Blocks of claims whose loads are undecided, by their place.
        self._undecided: dict[int, int] = {}

    def new_step(self) -> None:
        self._patience_s = STEP_PATIENCE_S

    def ask(self, state: RequestState) -> None:
        """Sends the lookup at arrival, which holds nothing; a failure shows later."""
        usable = self._reach(state)
        if usable < self._min_blocks:
            return
        keys = b"".join(state.chain.keys(0, min(usable, _native.MAX_KEYS)))
        try:
            state.lookup = self._session.lookup(
                keys, state.chain.key_bytes, **state.hints.arguments()
            )
            state.lookup_at = self._clock()
        except _native.PegaFlowError as error:
            self._missed(state, _reason(error))

    def blocks_beyond(self, state: RequestState, local: int) -> int | None:
        """The number of blocks from ``local`` on that the cache will bring; None: not yet known.

        vLLM may call it in every step while the request waits for room; it is cheap then.
        """
        usable = self._reach(state)
        if not self.is_worth_asking(state, local):
            if usable < self._min_blocks:  # otherwise vLLM's own cache has nearly all of it
                self._count_once(state, state.chain.doubt or "too_short")
            self._drop_claim(state)
            return 0
        if self._waits_for_another(state, local, usable):
            return None
        if state.claim is None and not self._worth_a_claim(state, local):
            return 0
        if state.claim is None and not self._claim(state, local, usable):
            return 0
        return self._answer(state, local)

    def is_worth_asking(self, state: RequestState, local: int) -> bool:
        """Whether the cache could bring enough beyond ``local`` blocks."""
        reach = self._reach(state) - self._rules.proof_units
        if reach - local < self._min_blocks and self._tail(state):
            reach += 1
        return reach - local >= self._min_blocks

    def first_worth_loading(self, state: RequestState, local: int) -> int:
        """The index of the block with which the blocks from ``local`` on are worth a load, before
        all of them are there.
        """
        if self._policy.learning_blocks(max(0, self._reach(state) - local)):
            return ALL_TOKENS  # some of them are computed, to measure how fast that is
        return local + self._min_blocks - 1

    def _reach(self, state: RequestState) -> int:
        return self._rules.reach(state.request, state.chain)

    def _tail(self, state: RequestState) -> bytes:
        """The key of the prompt's partial block, if a prefill engine has saved it.

        Only for a request that has generated nothing: afterwards the block is another one.
        """
        request, handover = state.request, state.handover
        if handover is None or not (
            handover.tokens == request.num_prompt_tokens == request.num_tokens
        ):
            return b""
        if not self._rules.has_tails:
            return b""
        return tail_key(request, state.chain, self._rules.unit_tokens)

    def _waits_for_another(self, state: RequestState, local: int, usable: int) -> bool:
        """Whether another request loads the same blocks: vLLM's own cache will have them soon."""
        if not self._follow or state.follows_no_more:
            return False
        now = self._clock()
        if state.followed is not None:
            if self._loads.holds_up(state.followed, now):
                return True
            # A request that waited for a failed load does not wait for another: with many requests
            # on one prefix the last one would wait for the failures of all others.
            state.follows_no_more = state.followed.ended_badly(now)
            state.followed = None
            if state.follows_no_more:
                return False
        state.followed = self._loads.overlapping(state.chain.key, local, usable)
        if state.followed is None:
            return False
        self._counts.add("followed")
        self._drop_lookup(state)
        self._drop_claim(state)
        state.missed_at = None
        return True

    def _worth_a_claim(self, state: RequestState, local: int) -> bool:
        now = self._clock()
        if state.lookup is not None:
            asked_at = state.lookup_at
            answer = self._take_lookup(state)
            if answer is not None and now - asked_at < self._miss_ttl_s:
                blocks, complete = answer
                if not complete:
                    self._missed(state, "not_registered", asked_at)
                elif blocks - self._rules.proof_units - local < self._min_blocks:
                    self._missed(state, "not_cached", asked_at)
        return state.missed_at is None or now - state.missed_at >= self._miss_ttl_s

    def _take_lookup(self, state: RequestState) -> tuple[int, bool] | None:
        """The answer to the lookup at arrival; does not wait."""
        ticket, state.lookup = state.lookup, None
        try:
            answer = self._session.take(ticket, 0.0)
        except _native.PegaFlowError as error:
            self._missed(state, _reason(error))
            return None
        if answer is None:
            self._session.forget(ticket)  # the claim's answer follows it and replaces it
            return None
        blocks, complete, _, elsewhere, *_ = answer
        # What another node has is saved here once it was loaded, or computed.
        state.progress.found(blocks - elsewhere)
        return blocks, complete

    def _claim(self, state: RequestState, local: int, usable: int) -> bool:
        stop = min(usable, local + _native.MAX_KEYS)
        tail = self._tail(state) if usable - local < _native.MAX_KEYS else b""
        # Those before it may be computed first. What is offered is decided when that is known.
        computing = self._policy.computing(stop - local, sum(self._undecided.values()))
        try:
            ticket = self._rules.claim(
                self._session, state.chain, local, stop, tail, computing, state.hints
            )
        except _native.PegaFlowError as error:
            self._missed(state, _reason(error))
            return False
        state.claim = Claim(
            first=local,
            ticket=ticket,
            asked_at=self._clock(),
            computing=computing,
            tail=tail,
            tail_at=stop,
        )
        self._undecided[id(state.claim)] = stop - local
        if self._events is not None:
            state.claim.offered = self._events.offer_unreported(
                state.request, self._rules.claimable(state.chain, local, stop)
            )
        return True

    def _answer(self, state: RequestState, local: int) -> int | None:
        claim = state.claim
        assert claim is not None
        if claim.ticket is not None and not self._take_claim(state, claim):
            return None if state.claim is not None else 0
        # vLLM's own cache may have grown or shrunk since the question.
        offered = self._rules.offered(claim, local, state.request.num_tokens)
        if offered < self._min_blocks and state.is_direct and claim.first <= local:
            # All come out of another engine's memory.
            self._undecided.pop(id(claim), None)
            claim.accepted = True
            offered = claim.wanted_stop - local
        if offered >= self._min_blocks and not claim.accepted:
            offered = self._worth_loading(claim, offered)
            if offered < self._min_blocks:
                self._drop_claim(state)
                self._missed(state, "slower")
                return 0
        if offered >= self._min_blocks:
            if "hit" not in state.counted:
                state.counted.add("hit")
                self._counts.add("hits")
            return offered
        self._drop_claim(state)
        self._missed(state, "not_cached")
        return 0

    def claim_next(self, state: RequestState, first: int) -> None:
        """Claims the blocks from ``first`` on for a load that follows its prefill. A failure counts
        as a miss, and leaves no claim.
        """
        reach = self._reach(state)
        if reach > first or (reach == first and self._tail(state)):
            self._claim(state, first, reach)

    def take_next(self, state: RequestState) -> Claim | None:
        """The answered claim, which the caller owns then; None: not yet, or the claim is gone."""
        claim = state.claim
        if claim is None or not self._take_claim(state, claim):
            return None
        self._undecided.pop(id(claim), None)
        state.claim = None
        return claim

    def has_rest(self, state: RequestState, stop: int) -> bool:
        """Whether claim_next() found all blocks before ``stop`` in this server's pool. Ends the
        claim.
        """
        claim = self.take_next(state)
        if claim is None:
            return False
        self.end_claim(claim)
        return claim.first + claim.blocks - claim.coming >= stop

    def end_claim(self, claim: Claim) -> None:
        """No load takes over an answered claim that the caller owns."""
        if claim.held:
            self._session.unclaim(claim.token)

    def rest_keys(self, state: RequestState, first: int, stop: int) -> tuple[list[bytes], int]:
        """The keys of the blocks ``first`` to ``stop`` - 1, of which the last may be the prompt's
        partial block, and the index after the last full one.
        """
        full_stop = min(stop, self._reach(state))
        keys: list[bytes] = state.chain.keys(first, full_stop)
        return (keys + [self._tail(state)] if full_stop < stop else keys), full_stop

    def _worth_loading(self, claim: Claim, offered: int) -> int:
        """The number of ``offered`` blocks that are loaded sooner than computed. Decided once per
        claim: blocks that are fetched for it should be used.
        """
        self._undecided.pop(id(claim), None)
        waited_s = self._clock() - claim.asked_at
        held_to = self._policy.computing(offered).or_later(claim.computing, waited_s)
        last_s = max(0.0, claim.last_s - waited_s)
        coming = min(claim.coming, offered)
        # With several kinds, a load comes from the pool or waits for another node.
        pages = coming if coming and claim.ranges else claim.pages
        source = self._policy.slower_source(offered, coming, last_s, held_to, pages)
        if source == "peer":
            self._counts.add("declined", 1, source)
            offered -= claim.coming
            claim.blocks -= claim.coming
            claim.coming = 0
            source = self._policy.slower_source(offered, 0, 0.0, held_to) if offered > 0 else ""
        if source:
            self._counts.add("declined", 1, source)
            return 0
        claim.accepted = True
        left = 0 if claim.ranges else self._policy.learning_blocks(offered)
        if offered - left >= self._min_blocks:
            claim.blocks -= left
            claim.coming = max(0, claim.coming - left)
            offered -= left
        return offered

    def _take_claim(self, state: RequestState, claim: Claim) -> bool:
        """Whether the claim has its answer now. Without one, the claim may be abandoned."""
        started = self._clock()
        fresh = started - claim.asked_at < self._wait_s
        patience = min(self._wait_s, self._patience_s) if fresh else 0.0
        try:
            complete = self._rules.take_claim(self._session, claim, patience)
        except _native.PegaFlowError as error:
            self._conclude(claim)
            self._undecided.pop(id(claim), None)
            state.claim = None
            self._missed(state, _reason(error))
            return False
        now = self._clock()
        self._patience_s = max(0.0, self._patience_s - (now - started))
        if complete is None:
            if now - claim.asked_at >= self._limit_s:
                self._drop_claim(state)
                self._missed(state, "late")
            return False
        self._conclude(claim)
        claim.ticket = None
        state.progress.claimed(claim)
        if not complete:
            self._drop_claim(state)
            self._missed(state, "not_registered")
            return False
        return True

    def not_registered(self, state: RequestState) -> None:
        """A rank cannot load: nothing is offered."""
        self._count_once(state, "not_registered")
        self.drop(state)

    def drop(self, state: RequestState) -> None:
        """The request is gone, admitted without a load, or the cache was reset."""
        self._drop_lookup(state)
        self._drop_claim(state)
        state.followed = None

    def _drop_lookup(self, state: RequestState) -> None:
        ticket, state.lookup = state.lookup, None
        if ticket is not None:
            self._session.forget(ticket)

    def _drop_claim(self, state: RequestState) -> None:
        claim, state.claim = state.claim, None
        if claim is None:
            return
        self._undecided.pop(id(claim), None)
        self._conclude(claim)
        if claim.ticket is not None:
            self._session.forget(claim.ticket)
        elif claim.held:
            self._session.unclaim(claim.token)

    def _conclude(self, claim: Claim) -> None:
        offered, claim.offered = claim.offered, ()
        if offered:
            self._events.conclude(offered)

    def _missed(self, state: RequestState, reason: str, at: float | None = None) -> None:
        state.missed_at = self._clock() if at is None else at
        self._counts.add("misses", 1, reason)

    def _count_once(self, state: RequestState, reason: str) -> None:
        if reason not in state.counted:
            state.counted.add(reason)
            self._counts.add("misses", 1, reason)


def _reason(error: Exception) -> str:
    """Why there is no answer, as the metric's label. Any error is a miss."""
    return "no_server" if isinstance(error, _native.PeerLost) else error_code(error)
