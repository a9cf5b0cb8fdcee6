"""Several kinds of blocks, or others than full attention: windows, chunks and states.

A claim is for all blocks that one prefix needs, of all kinds, and brings all of them or none. So it
is never shortened, and a load that fails is computed as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pegaflow import _native
from pegaflow.engine.kinds import KindRule
from pegaflow.engine.rates import Computing
from pegaflow.vllm.handover import is_asked_for
from pegaflow.vllm.hints import NO_HINTS, Hints
from pegaflow.vllm.keys import KeyChain, KindKeys
from pegaflow.vllm.plans import Offers, Tables
from pegaflow.vllm.plans.load_plan import (
    ClaimedRange,
    LoadRefused,
    offered_tokens,
    pair,
    units_to_ask,
)
from pegaflow.vllm.plans.save_plan import SavePlan, SaveRules, Storable
from pegaflow.vllm.saves import Late

if TYPE_CHECKING:
    from pegaflow.vllm.adapters import Adapters
    from pegaflow.vllm.loads import Loads
    from pegaflow.vllm.requests import Claim, Load, RequestState
    from pegaflow.vllm.saves import Saves

#: Shorter hits are computed, unless the alignment is longer or an option says otherwise. Two blocks
#: of the smallest kind, if that is less.
LEAST_TOKENS = 64


class SeveralKinds:
    """The rules of an engine; a BlockRules."""

    has_kinds = True
    has_tails = False
    proof_units = 0
    awaits_next_token = False
    undrafted_from = None

    def __init__(self, saves: SaveRules, kind_bytes: Sequence[int]) -> None:
        """``kind_bytes``: the bytes of a page of each kind, on one rank."""
        self._kinds = saves.kinds
        self._saves = saves
        self._kind_bytes = tuple(kind_bytes)
        self.unit_tokens = saves.kinds.unit_tokens
        self.block_bytes = self._kind_bytes[0]
        first = saves.kinds.kinds[0]
        is_prefix = first.rule == KindRule.PREFIX
        self.chain_units = first.block_tokens // self.unit_tokens if is_prefix else 0
        self.labels = tuple(kind.rule.label for kind in saves.kinds.kinds)
        self.pins_at_once = max(len(kind.members) for kind in saves.kinds.kinds)
        # vLLM caches the windows and the state in front of its end only.
        self.loads_are_whole = saves.kinds.leaves_a_token

    def least_units(self, min_load_tokens: int) -> int:
        smallest = min(2 * self.unit_tokens, LEAST_TOKENS)
        wanted = min_load_tokens or max(self._kinds.alignment_tokens, smallest)
        return max(1, -(-wanted // self.unit_tokens))

    def chain(self, request: Any, adapters: Adapters | None, salt: bytes) -> KeyChain:
        return KeyChain(request, self.unit_tokens, self.unit_tokens, adapters, salt)

    def progress(self, request: Any, chain: KeyChain) -> SeveralKindsProgress:
        return SeveralKindsProgress(request, KindKeys(chain, self._kinds), self._saves)

    def reach(self, request: Any, chain: KeyChain) -> int:
        return units_to_ask(
            self._kinds, request.num_tokens, chain.usable_blocks(), _native.MAX_KEYS
        )

    def claim(
        self,
        session: Any,
        chain: KeyChain,
        local: int,
        stop: int,
        tail: bytes,
        computing: Computing,
        hints: Hints = NO_HINTS,
    ) -> int:
        # A window may begin before vLLM's own hit ends, so all keys are sent.
        ticket: int = session.claim(
            b"".join(chain.keys(0, stop)),
            chain.key_bytes,
            computing.delay_s,
            computing.block_s,
            local_units=local,
            **hints.arguments(),
        )
        return ticket

    def take_claim(self, session: Any, claim: Claim, patience_s: float) -> bool | None:
        answer = session.take_ranges(claim.ticket, patience_s)
        if answer is None:
            return None
        units, complete, claim.token, ranges, coming, claim.first_s, claim.last_s = answer
        claim.held = units
        claim.blocks = max(0, units - claim.first)
        # A part of such a claim is of no use: it arrives with its last block.
        claim.coming = claim.blocks if coming else 0
        claim.here = claim.blocks - claim.coming
        claim.ranges = [ClaimedRange(*one) for one in ranges]
        claim.pages = self._bytes(claim.ranges) / self.block_bytes
        return bool(complete)

    def claimable(self, chain: KeyChain, local: int, stop: int) -> list[tuple[int, Any, int, int]]:
        """Those of the longest hit. A shorter one may bring other windows, which are then reported
        by the request that saves them.
        """
        tokens, keys = stop * self.unit_tokens, KindKeys(chain, self._kinds)
        found = []
        for number, kind in enumerate(self._kinds.kinds):
            wanted = kind.wanted(tokens, local * self.unit_tokens)
            if wanted.count:
                found.append((number, keys.of_kind(number), wanted.first, wanted.end))
        return found

    def offered(self, claim: Claim, local: int, prompt_tokens: int) -> int:
        if claim.blocks == 0:
            return 0
        units, local_tokens = claim.first + claim.blocks, local * self.unit_tokens
        tokens = offered_tokens(self._kinds, units, claim.ranges, local_tokens, prompt_tokens)
        return tokens // self.unit_tokens

    def begin_load(
        self, loads: Loads, state: RequestState, claim: Claim | None, tables: Tables, tokens: int
    ) -> None:
        if claim is None or claim.blocks == 0:
            raise AssertionError(f"{tokens} tokens were never offered to {state.request_id}")
        start, stop = (
            state.local_tokens // self.unit_tokens,
            (state.local_tokens + tokens) // self.unit_tokens,
        )
        try:
            ranges = pair(self._kinds, claim.ranges, tables, state.local_tokens, tokens)
        except LoadRefused as refusal:
            loads.refuse(state, claim, start, stop, str(refusal))
        else:
            size = self._bytes([ClaimedRange(*one[:3]) for one in ranges])
            loads.begin_ranges(state, claim, start, stop, ranges, size)

    def refuse_load(
        self, loads: Loads, state: RequestState, tables: Tables, tokens: int, why: str
    ) -> None:
        start = state.local_tokens // self.unit_tokens
        stop = (state.local_tokens + tokens) // self.unit_tokens
        loads.refuse(state, None, start, stop, why)

    def _bytes(self, ranges: Sequence[ClaimedRange]) -> int:
        return sum(one.count * self._kind_bytes[one.kind] for one in ranges)


class SeveralKindsProgress:
    """A Progress: a SavePlan, and what the cache has said about the request."""

    def __init__(self, request: Any, keys: KindKeys, rules: SaveRules) -> None:
        self._request = request
        self._keys = keys
        self._kinds = rules.kinds
        self._unit_tokens = rules.kinds.unit_tokens
        self._plan = SavePlan(rules, request.num_prompt_tokens)
        self._known = 0  # units of the longest prefix that the cache is known to restore
        self.last_job = 0

    def found(self, units: int) -> None:
        self._known = max(self._known, units)

    def claimed(self, claim: Claim) -> None:
        if claim.here:
            self.found(claim.first + claim.here)

    def queried(self, local_tokens: int) -> None:
        self._plan.admit(local_tokens, self._known * self._unit_tokens, self._junction())

    def not_queried(self, local_tokens: int) -> None:
        self._plan.admit(local_tokens, local_tokens, self._junction())

    def _junction(self) -> int:
        boundary: int = self._request.shared_prefix_boundary
        return boundary

    def loaded(self, load: Load) -> None:
        self._plan.loaded(load.stop * self._unit_tokens)

    def load_failed(self, load: Load, first_failed: int) -> None:
        self._known = min(self._known, load.start)
        self._plan.load_failed(load.start * self._unit_tokens)

    def forget(self) -> None:
        self._known = 0
        self.last_job = 0
        self._plan.forget()

    def has_work(self, tokens: int, offers: Offers = ()) -> bool:
        return bool(offers) or self._plan.has_work(tokens)

    def collect(
        self, saves: Saves, tables: Tables, tokens: int, offers: Offers = (), *, last: bool = False
    ) -> None:
        if not tables:
            return  # vLLM has no blocks of it
        usable = self._keys.usable_units()
        offers = self._checked(saves, offers, usable)
        late: list[Storable] = []
        room = saves.handover_room if is_asked_for(self._request) else saves.room
        if last:
            found, late = self._plan.finish(tables, tokens, usable, room)
        else:
            found = self._plan.step(tables, tokens, usable, room, offers)
        for one, run, index in self._in_runs(saves, found):
            key = self._keys.key(one.kind, one.block)
            job = saves.job_with(key, one.kind)
            if not job:
                job = saves.add(key, one.ids, run, index, before=one.block, kind=one.kind)
            self.last_job = max(self.last_job, job)
        for one, run, index in self._in_runs(saves, late):
            key, block_hash = self._keys.key(one.kind, one.block), self._keys.hash(*one[:2])
            groups = self._kinds.kinds[one.kind].members
            saves.wait(Late(key, block_hash, one.ids, run, index, one.block, one.kind, groups))
        if last:
            saves.dropped(self._plan.dropped(), "pin_limit")

    def _checked(self, saves: Saves, offers: Offers, usable: int) -> Offers:
        """The offers of states whose blocks have vLLM's hash of the boundary.

        vLLM takes the hash of a block away when it gives the block to another request. Such a block
        would be saved under the name of this one.
        """
        kept = []
        for group, block_id, boundary in offers:
            unit = boundary // self._unit_tokens
            if not saves.ends_a_block(boundary, self._kinds.alignment_tokens):
                continue
            if not 0 < unit <= usable:
                continue  # it has no name yet
            if saves.blocks.hold((block_id,), self._keys.chain.hash(unit - 1), (group,)):
                kept.append((group, block_id, boundary))
            else:
                saves.dropped(1, "offer")
        return kept

    def _in_runs(
        self, saves: Saves, found: Sequence[Storable]
    ) -> Iterator[tuple[Storable, Any, int]]:
        """Each block with the data for KV events of the consecutive blocks that it belongs to."""
        first = 0
        while first < len(found):
            kind, begin = found[first].kind, found[first].block
            stop = first + 1
            while stop < len(found) and found[stop][:2] == (kind, begin + stop - first):
                stop += 1
            names = self._keys.of_kind(kind)
            run = saves.run(kind, self._request, names, begin, begin + stop - first)
            for index in range(first, stop):
                yield found[index], run, index - first
            first = stop

    def drop(self, saves: Saves, tables: Tables, tokens: int, reason: str) -> None:
        found, _ = self._plan.finish(tables, tokens, self._keys.usable_units(), 1 << 62)
        saves.dropped(len(found) + self._plan.dropped(), reason)

    def handed_tokens(self) -> int:
        return self._plan.saved_tokens()
