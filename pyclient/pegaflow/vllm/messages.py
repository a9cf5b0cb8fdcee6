"""Messages between the two sides of a connector, sent each step; vLLM pickles them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from pegaflow.vllm.plans.load_plan import ClaimedRange, LoadRange


@dataclasses.dataclass(frozen=True)
class SaveOrder:
    """Blocks that this step completes, under their keys. The same on all ranks."""

    job: int
    keys: bytes  #: Back to back, ``key_bytes`` each.
    key_bytes: int
    blocks: list[int]  #: For each key, one of each member of the kind.
    kind: int = 0
    depths: bytes = b""  #: For each key, as the native mover takes them; empty: unknown.
    may_refuse: bool = False  #: The server may keep other blocks instead; see Saves.

    @property
    def count(self) -> int:
        return len(self.keys) // self.key_bytes


@dataclasses.dataclass(frozen=True)
class LoadOrder:
    """Blocks for one request, which waits for them."""

    load: int
    request_id: str
    token: bytes
    first: int  #: Index of the first block within the claim.
    blocks: list[int]  #: vLLM's, of all kinds.
    #: Seconds until computing this prompt would begin, and per block of it (0: unknown). None: the
    #: load is not compared with computing.
    computing: tuple[float, float] | None = None
    #: With several kinds: the blocks, and those that the claim has.
    ranges: Sequence[LoadRange] = ()
    claimed: Sequence[ClaimedRange] = ()
    refused: str = ""  #: Why it is not begun.
    chunked: int = 0  #: The number of the chunked load of which it is a part; 0: of none.
    has_more: bool = False  #: Further parts follow; vLLM waits for the last one's report.
    #: A load without a claim, which follows a prefill: the keys of the blocks, ``key_bytes`` each,
    #: the longest wait for all of them, and where the prefill engine is.
    keys: bytes = b""
    key_bytes: int = 0
    patience_s: float = 0.0
    node: bytes = b""  #: The incarnation of the prefill engine's server.

    @property
    def count(self) -> int:
        """The number of the cache's blocks."""
        return sum(one.count for one in self.ranges) or len(self.blocks)


@dataclasses.dataclass
class StepPlan(KVConnectorMetadata):
    """From the scheduler to every worker."""

    scheduler: bytes = b""  #: Its incarnation; job numbers rise within it.
    forward: bool = False  #: Whether the model runs in this step.
    measured: int = 0  #: The step's number, if its end should be reported.
    #: Every request waits for a load that is about to end: the step may last until one has ended.
    may_last: bool = False
    saves: list[SaveOrder] = dataclasses.field(default_factory=list)
    loads: list[LoadOrder] = dataclasses.field(default_factory=list)
    #: Loads that vLLM waits for and that no worker begins: reported as failed at once.
    refused: list[LoadOrder] = dataclasses.field(default_factory=list)
    #: Loads that are cancelled; the blocks that they have copied count.
    cancelled: list[int] = dataclasses.field(default_factory=list)
    #: Loads whose bytes must not be used, not even those that have arrived.
    discarded: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Outcome:
    """The outcome of a job on the ranks that have reported it."""

    ranks: int = 1
    blocks: int = 0  #: Sealed, or loaded.
    skipped: int = 0  #: Save: the cache had them, or had no room.
    failed: int = 0  #: Neither.
    bytes: int = 0
    direct_bytes: int = 0  #: Load: those of them from another engine or another node's pool.
    took_s: float = 0.0
    error: str = ""  #: The code of the first error.
    detail: str = ""
    cut: str = ""  #: Load: why it was cut in favor of computing, "stuck" or "slow".
    #: Load: the first position in its order that failed on any rank.
    first_failed: int | None = None
    #: Save: reported by a rank that holds the same bytes as the rank that saves them.
    replica: bool = False
    #: Load: pages compared with their checksums, and those that differed from the saved page.
    verified: int = 0
    corrupt: int = 0

    def merge(self, other: Outcome) -> None:
        """Adds another rank's report about the same job: the worst of all ranks counts."""
        if self.replica != other.replica:
            # A replica reports no blocks.
            says = other if self.replica else self
            total = self.ranks + other.ranks
            for field in dataclasses.fields(self):
                setattr(self, field.name, getattr(says, field.name))
            self.ranks = total
            return
        self.ranks += other.ranks
        self.blocks = min(self.blocks, other.blocks)
        self.skipped = max(self.skipped, other.skipped)
        self.failed = max(self.failed, other.failed)
        self.bytes += other.bytes
        self.direct_bytes += other.direct_bytes
        self.verified += other.verified
        self.corrupt += other.corrupt
        self.took_s = max(self.took_s, other.took_s)
        self.error = self.error or other.error
        self.detail = self.detail or other.detail
        self.cut = self.cut or other.cut
        if other.first_failed is not None:
            mine = other.first_failed if self.first_failed is None else self.first_failed
            self.first_failed = min(mine, other.first_failed)


@dataclasses.dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """From the workers to the scheduler: the jobs that ended since the last report."""

    #: By rank, if it has changed: why that rank cannot use the cache, empty if it can.
    away: dict[int, str] = dataclasses.field(default_factory=dict)
    saves: dict[int, Outcome] = dataclasses.field(default_factory=dict)
    loads: dict[int, Outcome] = dataclasses.field(default_factory=dict)
    #: By rank: blocks that were copied out of the pool, and the seconds that it took.
    copied: dict[int, tuple[float, float]] = dataclasses.field(default_factory=dict)
    step: int = 0  #: The last measured step that has ended.

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        assert isinstance(other, WorkerReport)
        self.away |= other.away
        self.copied |= other.copied
        self.step = max(self.step, other.step)
        for mine, theirs in ((self.saves, other.saves), (self.loads, other.loads)):
            for job, outcome in theirs.items():
                if job in mine:
                    mine[job].merge(outcome)
                else:
                    mine[job] = outcome
        return self

    def __bool__(self) -> bool:
        return bool(self.saves or self.loads or self.away or self.copied or self.step)
