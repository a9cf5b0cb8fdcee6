"""What the two sides of a connector tell each other each step; vLLM pickles it between them."""

from __future__ import annotations

import dataclasses

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclasses.dataclass(frozen=True)
class SaveOrder:
    """Blocks that this step completes, under their keys. The same on all ranks."""

    job: int
    keys: bytes  #: Back to back, ``key_bytes`` each.
    key_bytes: int
    blocks: list[int]


@dataclasses.dataclass(frozen=True)
class LoadOrder:
    """Claimed blocks for one request, which waits for them."""

    load: int
    request_id: str
    token: bytes
    first: int  #: Within the claim.
    blocks: list[int]
    #: In seconds: what is computed before this prompt, and how long one of its blocks is computed
    #: (0: not known). None: the load is waited for, however long computing takes.
    computing: tuple[float, float] | None = None


@dataclasses.dataclass
class StepPlan(KVConnectorMetadata):
    """From the scheduler to every worker."""

    scheduler: bytes = b""  #: Its incarnation; job numbers rise within it.
    forward: bool = False  #: Whether the model runs in this step.
    measured: int = 0  #: The step's number, if its end should be reported.
    saves: list[SaveOrder] = dataclasses.field(default_factory=list)
    loads: list[LoadOrder] = dataclasses.field(default_factory=list)
    #: Loads that vLLM waits for and that nobody shall begin: reported as failed at once.
    refused: list[LoadOrder] = dataclasses.field(default_factory=list)
    #: Loads that are of no more use; what they have copied counts.
    cancelled: list[int] = dataclasses.field(default_factory=list)
    #: Loads whose bytes must not be used, not even those that have arrived.
    discarded: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Outcome:
    """How a job ended on the ranks that have reported it."""

    ranks: int = 1
    blocks: int = 0  #: Sealed, or loaded.
    skipped: int = 0  #: Of a save: the cache had them, or had no room.
    failed: int = 0  #: Neither.
    bytes: int = 0
    took_s: float = 0.0
    error: str = ""  #: The code of the first error.
    detail: str = ""
    cut: str = ""  #: Of a load that computing would have overtaken: "stuck" or "slow".
    #: Of a load: the first position in its order that failed on any rank.
    first_failed: int | None = None
    #: Of a save, by a rank that holds the same bytes as another one, which saves them.
    replica: bool = False
    #: Of a load: pages compared with their checksums, and those that were not what was saved.
    verified: int = 0
    corrupt: int = 0

    def merge(self, other: Outcome) -> None:
        """Adds what another rank says about the same job: the worst of all ranks counts."""
        if self.replica != other.replica:
            # A replica has nothing to say of blocks.
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

    #: By rank, where it has changed: why that rank cannot use the cache, empty if it can.
    away: dict[int, str] = dataclasses.field(default_factory=dict)
    saves: dict[int, Outcome] = dataclasses.field(default_factory=dict)
    loads: dict[int, Outcome] = dataclasses.field(default_factory=dict)
    #: By rank: blocks that were copied out of the pool, and the seconds that it took.
    copied: dict[int, tuple[float, float]] = dataclasses.field(default_factory=dict)
    step: int = 0  #: The last step that was to be measured and has ended.

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
