"""What the kinds of an engine's blocks decide: names, claims, loads and saves.

The scheduler's side knows two interfaces. ``BlockRules`` belongs to an engine, ``Progress`` to one
of its requests. ``one_kind`` implements them for one group of full attention, where blocks are
cached one after another, and ``several_kinds`` for all other models. Both count a prompt in
*units*, the tokens between two keys: with one kind, a unit is a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from pegaflow.engine.rates import Computing
from pegaflow.vllm.hints import NO_HINTS, Hints

if TYPE_CHECKING:
    from pegaflow.vllm.adapters import Adapters
    from pegaflow.vllm.keys import KeyChain
    from pegaflow.vllm.loads import Loads
    from pegaflow.vllm.requests import Claim, Load, RequestState
    from pegaflow.vllm.saves import Saves

#: vLLM's blocks of a request by position, of each of its cache groups; 0 for none.
Tables = Sequence[Sequence[int]]
#: The states that vLLM offers in a step: (group, block id, tokens).
Offers = Iterable[tuple[int, int, int]]


class BlockRules(Protocol):
    """The rules of one engine. Immutable."""

    unit_tokens: int
    block_bytes: int  #: Of a page of kind 0 on one rank; loads of all kinds are measured in it.
    labels: tuple[str, ...]  #: The label `kind` of metrics, by the kind's number.
    pins_at_once: int  #: The most of vLLM's blocks that are saved together or not at all.
    has_kinds: bool  #: Whether the server's journal states them.
    #: The units of a block of full attention, whose keys routers get; 0: there is none.
    chain_units: int
    has_tails: bool  #: Whether the last, partial block of a prompt can be handed over.
    #: Whether another request can use a load only if it needs all of its tokens.
    loads_are_whole: bool

    #: The last units of a cached prefix that only prove the one before them, and are not offered.
    proof_units: int
    #: Whether the KV of a token is final only once the next token is, and is not part of the step.
    awaits_next_token: bool
    #: A request of more tokens makes vLLM compute no drafts for its whole batch; None: never.
    undrafted_from: int | None

    def least_units(self, min_load_tokens: int) -> int:
        """The least that is worth a load, with the option of that name; 0: the default."""

    def chain(self, request: Any, adapters: Adapters | None, salt: bytes) -> KeyChain:
        """The keys of a request's units."""

    def progress(self, request: Any, chain: KeyChain) -> Progress: ...

    def reach(self, request: Any, chain: KeyChain) -> int:
        """The leading units of a request that the cache may bring."""

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
        """Sends a claim for the units ``local`` to ``stop`` - 1; its ticket.

        Raises:
            PegaFlowError: it cannot be sent.
        """

    def take_claim(self, session: Any, claim: Claim, patience_s: float) -> bool | None:
        """Fills the claim with its answer; whether all ranks are registered. None: no answer yet.

        Raises:
            PegaFlowError: there will be no answer.
        """

    def claimable(self, chain: KeyChain, local: int, stop: int) -> list[tuple[int, Any, int, int]]:
        """The blocks that such a claim can bring, for KV events: their kind, its keys, the first
        block, and the one after the last.
        """

    def offered(self, claim: Claim, local: int, prompt_tokens: int) -> int:
        """The units beyond vLLM's own ``local`` ones that an answered claim brings."""

    def begin_load(
        self, loads: Loads, state: RequestState, claim: Claim | None, tables: Tables, tokens: int
    ) -> None:
        """Takes over a claim: vLLM has allocated blocks for ``tokens`` behind its own hit."""

    def refuse_load(
        self, loads: Loads, state: RequestState, tables: Tables, tokens: int, why: str
    ) -> None:
        """The same without a claim: the load is reported as failed."""


class Progress(Protocol):
    """Which blocks of one request the cache has or was given. Bound to the scheduler's thread."""

    last_job: int  #: The last save job that has a block of it; 0: none.

    def found(self, units: int) -> None:
        """A lookup has found the first ``units``."""

    def claimed(self, claim: Claim) -> None:
        """A claim was answered."""

    def queried(self, local_tokens: int) -> None:
        """vLLM may start the request, or start it again, behind its own hit of ``local_tokens``.
        The last call before it does counts.
        """

    def not_queried(self, local_tokens: int) -> None:
        """The same for a request that must not read the cache, so nothing is known of it."""

    def loaded(self, load: Load) -> None: ...

    def load_failed(self, load: Load, first_failed: int) -> None:
        """vLLM computes from there on, and the cache may have lost it. ``first_failed``: the
        position in the load, if blocks before it count.
        """

    def forget(self) -> None:
        """The cache has none of the blocks that it was given."""

    def has_work(self, tokens: int, offers: Offers = ()) -> bool:
        """Whether a step that completes ``tokens`` has blocks to save. Cheap."""

    def collect(
        self, saves: Saves, tables: Tables, tokens: int, offers: Offers = (), *, last: bool = False
    ) -> None:
        """Saves the blocks that are complete with ``tokens``. ``last``: there is no later step."""

    def drop(self, saves: Saves, tables: Tables, tokens: int, reason: str) -> None:
        """Counts the unsaved blocks of a request that ends."""

    def handed_tokens(self) -> int:
        """The leading tokens that another engine finds once last_job has ended."""
