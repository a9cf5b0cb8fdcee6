"""The scheduler side's state of a request."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pegaflow.engine.rates import Computing
from pegaflow.vllm.hints import NO_HINTS, Hints
from pegaflow.vllm.keys import KeyChain
from pegaflow.vllm.plans.load_plan import ClaimedRange, LoadRange

if TYPE_CHECKING:
    from pegaflow.vllm.chunked import ChunkedLoad
    from pegaflow.vllm.early import EarlyWait
    from pegaflow.vllm.handover import Handover
    from pegaflow.vllm.plans import Progress, Tables


#: More than any request has.
ALL_TOKENS = 1 << 62


@dataclasses.dataclass
class Claim:
    """A claim on the units from ``first`` on, and its answer once there is one."""

    first: int  #: Index in the request's chain of the first unit that vLLM did not have itself.
    ticket: int | None  #: None once it is answered.
    asked_at: float
    held: int = 0  #: The number of units that the server holds until the claim is released.
    blocks: int = 0  #: The number of leading units that may be offered; at most ``held``.
    here: int = 0  #: The number of units in the pool of this node.
    coming: int = 0  #: The number of blocks, at the end, in flight from another node.
    token: bytes = b""
    first_s: float = 0.0  #: Predicted arrival of the first and the last block in flight, counted
    last_s: float = 0.0  #: from the claim; 0: unknown.
    computing: Computing = Computing()  #: The time to compute them when the claim was sent.
    accepted: bool = False  #: Its load is predicted to be faster than computing.
    offered: Sequence[bytes] = ()  #: Keys that KV events report once it is answered.
    tail: bytes = b""  #: Key of the partial block after the full ones, if it was claimed,
    tail_at: int = 0  #: and its index.
    #: With several kinds: the blocks that were claimed, and their size in pages of the first kind.
    ranges: Sequence[ClaimedRange] = ()
    pages: float | None = None

    @property
    def wanted_stop(self) -> int:
        """The index after the last block that it was for."""
        return self.tail_at + bool(self.tail)

    def full_stop(self, stop: int) -> int:
        """``stop``, or the index of the partial block if that lies before it."""
        return min(stop, self.tail_at) if self.tail else stop


@dataclasses.dataclass(eq=False)
class Load:
    """The load of one request's blocks, from vLLM's allocation to the workers' report.

    It outlives its request: vLLM keeps the blocks of an aborted one until the report.
    """

    id: int
    state: RequestState
    token: bytes
    start: int  #: Index in the chain of the first unit.
    keys: list[bytes]  #: Those of the units.
    blocks: list[int]  #: vLLM's.
    bytes: int
    pages: float  #: Its size in pages of the first kind.
    offset: int = 0  #: With one kind: index of the first block within the claim.
    ranges: Sequence[LoadRange] = ()  #: With several kinds: the blocks, and
    claimed: Sequence[ClaimedRange] = ()  #: those of its claim.
    refused: str = ""  #: Why it is not begun; vLLM waits for its report.
    coming: int = 0  #: The number of its blocks that were in flight from another node when claimed.
    full_stop: int = 0  #: Index after the last full block; a partial one may follow it.
    claimed_at: float = 0.0
    computing: Computing = Computing()  #: Its claim's.
    handed_at: float | None = None  #: None: not yet handed to the workers.
    deadline: float | None = None
    cancelled: bool = False  #: The workers were ordered to cancel it.
    aborted: bool = False  #: Cancelled with its request, not because of a failure.
    discarded: bool = False  #: Its bytes must not be used.
    failed: bool = False  #: Some blocks did not arrive.
    chunked: ChunkedLoad | None = None  #: The load of which it is a part,
    left: int = 0  #: and the number of that one's blocks behind it.
    #: It has no claim and follows a prefill: the longest wait for its blocks. 0: it has one.
    patience_s: float = 0.0
    node: bytes = b""  #: The server of the prefill engine.
    awaits_prefill: bool = False  #: It cannot end yet: its last block is not computed.

    @property
    def is_quiet(self) -> bool:
        """Whether nothing happens to it before the server reports more of the prefill."""
        ends = self.cancelled or self.discarded
        return self.awaits_prefill and self.handed_at is not None and not ends

    @property
    def is_ending(self) -> bool:
        """Whether it follows its prefill, whose last block is computed."""
        return bool(self.patience_s) and not self.awaits_prefill and self.handed_at is not None

    @property
    def request_id(self) -> str:
        return self.state.request_id

    @property
    def stop(self) -> int:
        return self.start + len(self.keys)

    @property
    def units(self) -> int:
        return len(self.keys)

    @property
    def count(self) -> int:
        """The number of the cache's blocks."""
        return sum(one.count for one in self.ranges) or len(self.keys)

    def ended_badly(self, now: float) -> bool:
        """Whether it failed, as opposed to being aborted."""
        late = self.deadline is not None and now >= self.deadline
        return (self.failed or self.cancelled or late) and not self.aborted


@dataclasses.dataclass(eq=False)
class RequestState:
    """One request from on_new_request to request_finished. Bound to the scheduler's thread.

    The next request may have the same id while loads and saves of this one are still in flight, so
    those refer to the state and never to the id.
    """

    request: Any
    chain: KeyChain
    generation: int  #: The cache's generation when this request's KV began to be computed.
    progress: Progress
    lookup: int | None = None  #: Ticket of the question asked at arrival.
    lookup_at: float = 0.0
    claim: Claim | None = None
    offer_dropped: bool = False  #: A reset dropped the claim of an offer that vLLM may still take.
    local_tokens: int = 0  #: Those that vLLM's own cache had at vLLM's last query.
    #: The number of leading tokens that have draft KV; no later ones are saved.
    drafted_tokens: int = ALL_TOKENS
    load: Load | None = None
    chunked: ChunkedLoad | None = None  #: Its load, if that follows the prefill.
    load_failed: bool = False  #: No further load is offered.
    followed: Load | None = None  #: Another request's load of the same blocks.
    follows_no_more: bool = False
    missed_at: float | None = None
    counted: set[str] = dataclasses.field(default_factory=set)
    hints: Hints = NO_HINTS
    handover: Handover | None = None  #: The blocks that a prefill engine has saved for it.
    wait: int | None = None  #: Ticket of the wait for them.
    early: EarlyWait | None = None  #: The wait, if it came together with its prefill.
    wait_since: float = 0.0
    #: Block ids, if vLLM does not expose its own table.
    table: list[int] = dataclasses.field(default_factory=list)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def is_direct(self) -> bool:
        """Whether its blocks can be read out of its prefill engine's memory."""
        return self.early is not None and self.early.is_direct


def tables_of(state: RequestState, block_state: Any) -> Tables:
    """A request's blocks, of each cache group."""
    if block_state is None:
        return (state.table,)
    return block_state.get_block_ids(state.request_id) or ()


def admitted_in(output: Any) -> set[str]:
    """The requests that begin, or begin again, in this step."""
    new = {one.req_id for one in output.scheduled_new_reqs}
    return new | set(output.scheduled_cached_reqs.resumed_req_ids)
