"""One group of full attention: blocks are named, loaded and saved one after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pegaflow.engine.rates import Computing
from pegaflow.vllm.handover import is_asked_for, tail_key, tail_tokens
from pegaflow.vllm.hints import NO_HINTS, Hints
from pegaflow.vllm.keys import KeyChain
from pegaflow.vllm.plans import Offers, Tables
from pegaflow.vllm.saves import Late

if TYPE_CHECKING:
    from pegaflow.vllm.adapters import Adapters
    from pegaflow.vllm.loads import Loads
    from pegaflow.vllm.requests import Claim, Load, RequestState
    from pegaflow.vllm.saves import Saves


class OneKind:
    """The rules of an engine; a BlockRules whose units are blocks."""

    labels = ("full",)
    pins_at_once = 1
    has_kinds = False
    chain_units = 1
    loads_are_whole = False

    def __init__(
        self,
        block_size: int,
        hash_unit: int,
        block_bytes: int,
        *,
        drafts_have_kv: bool = False,
        last_block_is_proof: bool = False,
        undrafted_from: int | None = None,
    ) -> None:
        """
        Args:
            block_size: In tokens.
            hash_unit: The tokens between two of vLLM's hashes.
            block_bytes: Bytes of a block on one rank.
            drafts_have_kv: Blocks hold the KV of a draft model, which depends on the next token.
            last_block_is_proof: The last cached block only proves the one before (drafts.py).
            undrafted_from: BlockRules.undrafted_from.
        """
        # The draft KV of a prompt's last token depends on the answer.
        self.has_tails = not drafts_have_kv
        self.awaits_next_token = drafts_have_kv
        self.proof_units = int(last_block_is_proof)
        self.undrafted_from = undrafted_from
        self.unit_tokens = block_size
        self.block_bytes = block_bytes
        self._hash_unit = hash_unit

    def least_units(self, min_load_tokens: int) -> int:
        wanted = min_load_tokens or 2 * self.unit_tokens
        return max(1, -(-wanted // self.unit_tokens))

    def chain(self, request: Any, adapters: Adapters | None, salt: bytes) -> KeyChain:
        return KeyChain(request, self.unit_tokens, self._hash_unit, adapters, salt)

    def progress(self, request: Any, chain: KeyChain) -> OneKindProgress:
        return OneKindProgress(request, chain, self.unit_tokens, has_tails=self.has_tails)

    def reach(self, request: Any, chain: KeyChain) -> int:
        return chain.usable_blocks()

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
        keys = b"".join(chain.keys(local, stop)) + tail
        ticket: int = session.claim(
            keys,
            len(tail) or chain.key_bytes,
            computing.delay_s,
            computing.block_s,
            **hints.arguments(),
        )
        return ticket

    def take_claim(self, session: Any, claim: Claim, patience_s: float) -> bool | None:
        answer = session.take_claim(claim.ticket, patience_s)
        if answer is None:
            return None
        claim.held, complete, claim.token, coming, claim.first_s, claim.last_s = answer
        claim.here = claim.held - coming
        claim.blocks = max(0, claim.held - self.proof_units)
        claim.coming = max(0, coming - self.proof_units)
        return bool(complete)

    def claimable(self, chain: KeyChain, local: int, stop: int) -> list[tuple[int, Any, int, int]]:
        return [(0, chain, local, stop)]

    def offered(self, claim: Claim, local: int, prompt_tokens: int) -> int:
        return claim.first + claim.blocks - local if claim.first <= local else 0

    def begin_load(
        self, loads: Loads, state: RequestState, claim: Claim | None, tables: Tables, tokens: int
    ) -> None:
        (table,) = tables
        start = state.local_tokens // self.unit_tokens
        stop = start - (-tokens // self.unit_tokens)
        offered = claim is not None and claim.first <= start and stop <= claim.first + claim.blocks
        if claim is None or not offered or stop > len(table):
            raise AssertionError(f"{tokens} tokens were never offered to {state.request_id}")
        loads.begin(state, claim, start, table[start:stop])

    def refuse_load(
        self, loads: Loads, state: RequestState, tables: Tables, tokens: int, why: str
    ) -> None:
        (table,) = tables
        start = state.local_tokens // self.unit_tokens
        stop = start - (-tokens // self.unit_tokens)
        loads.refuse(state, None, start, stop, why, table[start:stop])


class OneKindProgress:
    """A Progress that is a single number."""

    def __init__(
        self, request: Any, chain: KeyChain, block_size: int, *, has_tails: bool = True
    ) -> None:
        self._has_tails = has_tails
        self._request = request
        self._chain = chain
        self._block_size = block_size
        #: Index of the first block that the cache neither has nor was given.
        self.next_save = 0
        self.last_job = 0
        self._tail_saved = False  # the prompt's last, partial block was given to a save

    def found(self, units: int) -> None:
        self.next_save = max(self.next_save, units)

    def claimed(self, claim: Claim) -> None:
        self.found(claim.full_stop(claim.first + claim.here))

    def queried(self, local_tokens: int) -> None:
        return None

    def not_queried(self, local_tokens: int) -> None:
        # vLLM's own blocks were offered to the cache when they were computed.
        self.found(local_tokens // self._block_size)

    def loaded(self, load: Load) -> None:
        self.found(load.full_stop)

    def load_failed(self, load: Load, first_failed: int) -> None:
        self.next_save = min(self.next_save, load.start + first_failed)

    def forget(self) -> None:
        self.next_save = 0
        self.last_job = 0
        self._tail_saved = False

    def has_work(self, tokens: int, offers: Offers = ()) -> bool:
        return tokens // self._block_size > self.next_save or self._wants_tail(tokens)

    def collect(
        self, saves: Saves, tables: Tables, tokens: int, offers: Offers = (), *, last: bool = False
    ) -> None:
        table = tables[0] if tables else ()
        self._collect(saves, table, tokens, last)
        if self._wants_tail(tokens):
            self._collect_tail(saves, table)

    def _collect(self, saves: Saves, table: Sequence[int], tokens: int, last: bool) -> None:
        stop = min(tokens // self._block_size, len(table))
        if stop <= self.next_save:
            return
        stop = min(stop, self._chain.usable_blocks())
        first = self.next_save
        handed = is_asked_for(self._request)
        run = saves.run(0, self._request, self._chain, first, stop) if first < stop else None
        for index in range(first, stop):
            key = self._chain.key(index)
            if job := saves.job_with(key):
                self.last_job = max(self.last_job, job)
            elif table[index] != 0:
                if (saves.handover_room if handed else saves.room) > 0:
                    self.last_job = saves.add(
                        key, (table[index],), run, index - first, before=index
                    )
                elif not last:
                    return
                else:
                    block_hash = self._chain.hash(index)
                    saves.wait(Late(key, block_hash, (table[index],), run, index - first, index))
            self.next_save = index + 1

    def _wants_tail(self, tokens: int) -> bool:
        """Whether to save the prompt's partial block, of which ``tokens`` are computed."""
        request = self._request
        if not self._has_tails or self._tail_saved or tokens < request.num_prompt_tokens:
            return False
        # The answer's tokens go into the same block, and a page that changes while it is copied
        # would not fit its checksum.
        if getattr(request, "max_tokens", 0) != 1:
            return False
        return is_asked_for(request) and bool(tail_tokens(request, self._block_size))

    def _collect_tail(self, saves: Saves, table: Sequence[int]) -> None:
        """Adds the prompt's last, partial block, once its tokens and the blocks before are
        complete.

        Nothing is written behind them while it is saved: the request generates no more.
        """
        index = self._request.num_prompt_tokens // self._block_size
        if self.next_save < index or len(table) <= index or table[index] == 0:
            return
        key = tail_key(self._request, self._chain, self._block_size)
        if job := saves.job_with(key):
            self.last_job = max(self.last_job, job)
        elif key and saves.handover_room > 0:
            self.last_job = saves.add(key, (table[index],), before=index)
        else:
            return
        self._tail_saved = True

    def drop(self, saves: Saves, tables: Tables, tokens: int, reason: str) -> None:
        stop = min(tokens // self._block_size, self._chain.usable_blocks())
        saves.dropped(max(0, stop - self.next_save), reason)

    def handed_tokens(self) -> int:
        if self._tail_saved:
            tokens: int = self._request.num_prompt_tokens
            return tokens
        return self.next_save * self._block_size
