"""What the scheduler's side remembers of a request."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pegaflow.connector.keys import KeyChain
from pegaflow.connector.rates import Computing

if TYPE_CHECKING:
    from pegaflow.connector.handover import Handover


@dataclasses.dataclass
class Claim:
    """A question for blocks from ``first`` on, and its answer once there is one."""

    first: int  #: Index in the request's chain of the first key asked for.
    ticket: int | None  #: None once it is answered.
    asked_at: float
    blocks: int = 0
    coming: int = 0  #: Of the blocks, the last ones: on their way from another node.
    token: bytes = b""
    first_s: float = 0.0  #: When the first and the last coming block should be here, from the
    last_s: float = 0.0  #: question on; 0: not known.
    computing: Computing = Computing()  #: What computing took when the question was asked.
    accepted: bool = False  #: Its load is predicted to be faster than computing.
    offered: Sequence[bytes] = ()  #: Keys of which KV events will tell once it is answered.
    tail: bytes = b""  #: Key of the partial block asked for behind the full ones, if one was,
    tail_at: int = 0  #: and its index.

    def full_stop(self, stop: int) -> int:
        """``stop``, or the index of the partial block if that lies before it."""
        return min(stop, self.tail_at) if self.tail else stop


@dataclasses.dataclass(eq=False)
class Load:
    """Blocks on their way into one request, from vLLM's allocation to the workers' report.

    It outlives its request: vLLM keeps the blocks of an aborted one until the report.
    """

    id: int
    state: RequestState
    token: bytes
    offset: int  #: Of the first block within the claim.
    start: int  #: Index in the chain of the first block.
    keys: list[bytes]
    blocks: list[int]
    bytes: int
    coming: int = 0  #: Of its blocks, those that were not here yet when they were claimed.
    full_stop: int = 0  #: Index behind the last full block; a partial one may come after it.
    claimed_at: float = 0.0
    computing: Computing = Computing()  #: As its claim has it.
    handed_at: float | None = None  #: None: no worker knows of it yet.
    deadline: float | None = None
    cancelled: bool = False  #: The workers were told that it is of no more use.
    aborted: bool = False  #: Because its request was: nothing was wrong with it.
    discarded: bool = False  #: Its bytes must not be used.
    failed: bool = False  #: Some blocks did not come.

    @property
    def request_id(self) -> str:
        return self.state.request_id

    @property
    def stop(self) -> int:
        return self.start + len(self.blocks)

    def ended_badly(self, now: float) -> bool:
        """Whether something was wrong with it, once it is of no more use to others."""
        late = self.deadline is not None and now >= self.deadline
        return (self.failed or self.cancelled or late) and not self.aborted


@dataclasses.dataclass(eq=False)
class RequestState:
    """One request from on_new_request to request_finished. Bound to the scheduler's thread.

    The next request may have the same id while loads and saves of this one are still under way, so
    those refer to the state and never to the id.
    """

    request: Any
    chain: KeyChain
    generation: int  #: Of the cache when this request's KV began to be computed.
    lookup: int | None = None  #: Ticket of the question asked at arrival.
    lookup_at: float = 0.0
    claim: Claim | None = None
    local: int = 0  #: Blocks that vLLM's own cache had when we were last asked.
    load: Load | None = None
    load_failed: bool = False  #: Then it is never offered anything again.
    followed: Load | None = None  #: Another request's load of our blocks, which we wait for.
    follows_no_more: bool = False
    missed_at: float | None = None
    counted: set[str] = dataclasses.field(default_factory=set)
    #: Index of the first block that the cache neither has nor was given.
    next_save: int = 0
    handover: Handover | None = None  #: What a prefill engine has saved for it.
    wait: int | None = None  #: Ticket of the question whether that is there.
    wait_since: float = 0.0
    last_job: int = 0  #: The last of our saves that has a block of it; 0: none.
    tail_saved: bool = False  #: The prompt's last, partial block was given to a save.
    #: Block ids, where vLLM does not hand out its own table.
    table: list[int] = dataclasses.field(default_factory=list)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def forget_saves(self) -> None:
        """The cache has nothing of what it was given."""
        self.next_save = 0
        self.last_job = 0
        self.tail_saved = False
