"""Loads in flight, which also keep other requests from loading the same blocks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from pegaflow.engine.rates import Computing
from pegaflow.vllm.messages import LoadOrder, Outcome
from pegaflow.vllm.metrics import Counts
from pegaflow.vllm.plans.load_plan import LoadRange
from pegaflow.vllm.requests import Claim, Load, RequestState

log = logging.getLogger("vllm.pegaflow")

#: The worker counts its deadline from the response to `open`; the scheduler, from handing out the
#: load, adds this time for the order and the report.
REPORT_MARGIN_S = 1.0
#: The total time that the worker waits for blocks from another node.
COMING_PATIENCE_S = 2.0


class Loads:
    """Loads from vLLM's allocation to the last rank's report. Bound to the scheduler's thread."""

    def __init__(
        self,
        *,
        ranks: int,
        block_bytes: int,
        patience_s: float,
        bytes_per_second: float,
        counts: Counts,
        clock: Callable[[], float],
        labels: Sequence[str] = ("full",),
        whole: bool = False,
    ) -> None:
        """
        Args:
            block_bytes: Of a page of the first kind.
            labels: Those of the kinds, for metrics.
            whole: Other requests can use a load only if they need all of its tokens.
        """
        self._labels = labels
        self._whole = whole
        self._ranks = ranks
        self._block_bytes = block_bytes
        self._patience_s = patience_s
        self._bytes_per_second = bytes_per_second
        self._counts = counts
        self._clock = clock
        self._next_id = 1
        self._under_way: dict[int, Load] = {}
        self._partial: dict[int, Outcome] = {}  # reported by some ranks, not by all
        self._cancels: list[int] = []
        self._discards: list[int] = []

    def under_way(self) -> list[Load]:
        return list(self._under_way.values())

    def is_under_way(self, load: Load) -> bool:
        return load.id in self._under_way

    def begin(self, state: RequestState, claim: Claim, start: int, blocks: Sequence[int]) -> Load:
        """Takes over a claim: ``blocks`` receive the chain's blocks from ``start`` on."""
        stop = start + len(blocks)
        full_stop = claim.full_stop(stop)
        keys = state.chain.keys(start, full_stop) + [claim.tail] * (stop - full_stop)
        return self._begin(
            state,
            claim,
            start,
            keys,
            offset=start - claim.first,
            blocks=list(blocks),
            bytes=len(blocks) * self._block_bytes,
            pages=len(blocks),
            coming=max(0, stop - (claim.first + claim.blocks - claim.coming)),
            full_stop=full_stop,
        )

    def begin_following(
        self,
        state: RequestState,
        start: int,
        keys: list[bytes],
        blocks: Sequence[int],
        *,
        full_stop: int,
        patience_s: float,
        node: bytes = b"",
    ) -> Load:
        """A load without a claim, which waits ``patience_s`` for a prefill to compute its blocks:
        ``blocks`` receive those with ``keys``, the chain's from ``start`` on. ``node``: the server
        of the prefill engine.
        """
        return self._begin(
            state,
            Claim(start, ticket=None, asked_at=self._clock()),
            start,
            keys,
            blocks=list(blocks),
            bytes=len(blocks) * self._block_bytes,
            pages=0,  # no other load waits for its copies
            full_stop=full_stop,
            patience_s=patience_s,
            node=node,
            awaits_prefill=True,
        )

    def begin_ranges(
        self,
        state: RequestState,
        claim: Claim,
        start: int,
        stop: int,
        ranges: Sequence[LoadRange],
        size: int,
    ) -> Load:
        """Takes over a claim with several kinds: the units ``start`` to ``stop`` - 1 need
        ``ranges``, of ``size`` bytes on one rank.
        """
        return self._begin(
            state,
            claim,
            start,
            state.chain.keys(start, stop),
            blocks=[block for one in ranges for block in one.blocks],
            ranges=ranges,
            claimed=claim.ranges,
            bytes=size,
            pages=0 if claim.coming else size / self._block_bytes,
            coming=stop - start if claim.coming else 0,
            full_stop=stop,
        )

    def refuse(
        self,
        state: RequestState,
        claim: Claim | None,
        start: int,
        stop: int,
        why: str,
        blocks: Sequence[int] = (),
    ) -> Load:
        """A load that vLLM waits for and that cannot be begun: a worker reports it as failed.

        ``blocks``: vLLM's, if it has one kind. ``claim``: None, if it has ended.
        """
        if claim is None:
            claim = Claim(start, ticket=None, asked_at=self._clock())
        keys = state.chain.keys(start, stop)
        load = self._begin(state, claim, start, keys, blocks=list(blocks), bytes=0, pages=0)
        load.refused = why
        load.cancelled = True  # no worker has it
        return load

    def _begin(
        self, state: RequestState, claim: Claim, start: int, keys: list[bytes], **more: Any
    ) -> Load:
        load = Load(
            id=self._next_id,
            state=state,
            token=claim.token,
            start=start,
            keys=keys,
            claimed_at=claim.asked_at,
            computing=claim.computing,
            **more,
        )
        self._next_id += 1
        self._under_way[load.id] = load
        state.load = load
        return load

    def not_handed_out(self) -> list[Load]:
        """Those that the next step begins, and those that it refuses."""
        return [load for load in self._under_way.values() if load.handed_at is None]

    def mark_handed_out(self, loads: Sequence[Load]) -> None:
        """Marks loads as handed to the workers; their deadlines run from now on."""
        now = self._clock()
        for load in loads:
            load.handed_at = now
        queued = 0
        for load in self._under_way.values():
            own = load.bytes
            if not load.patience_s:
                queued += load.bytes
                own = queued
            if load.deadline is None:
                patience = self._patience_s + own / self._bytes_per_second + REPORT_MARGIN_S
                patience += load.patience_s
                if load.coming:
                    patience += COMING_PATIENCE_S
                load.deadline = now + patience
        self._counts.add("loads", sum(not load.refused for load in loads))

    def queued_blocks(self) -> float:
        """Blocks that loads in flight copy out of the pool before a new one, in pages of the first
        kind.
        """
        return sum(max(0.0, load.pages - load.coming) for load in self._under_way.values())

    def overlapping(self, chain_keys: Callable[[int], bytes], start: int, stop: int) -> Load | None:
        """A load within its deadline that brings one of the chain's blocks ``start`` to ``stop`` -
        1.

        Keys are chained: two chains that agree at one block agree at all blocks before it. So the
        first block that both ranges have in common decides; a partial one has a key of its own. If
        vLLM can hit only at the end of a load, it is the last one.
        """
        now = self._clock()
        for load in self._under_way.values():
            first = max(start, load.stop - 1 if self._whole else load.start)
            if first >= min(stop, load.stop) or not self.holds_up(load, now):
                continue
            if load.keys[first - load.start] == chain_keys(first):
                return load
        return None

    def holds_up(self, load: Load, now: float) -> bool:
        """Whether it is worth waiting for: it may still succeed in time."""
        if load.chunked is not None and load.chunked.is_open:
            return False  # vLLM's own cache has its blocks when the prefill has ended, not before
        if load.id not in self._under_way or load.cancelled or load.discarded:
            return False
        return load.deadline is None or now < load.deadline

    def abort(self, load: Load) -> None:
        """Ends the load of a request that is gone early; it is still reported."""
        load.aborted = True
        self.cancel(load)

    def cancel(self, load: Load) -> None:
        """Ends a load early; what it has copied counts."""
        if load.id in self._under_way and not load.cancelled:
            load.cancelled = True
            self._cancels.append(load.id)

    def discard_all(self) -> None:
        """Discards all loads in flight: the cache was reset."""
        for load in self._under_way.values():
            load.discarded = True
            self._discards.append(load.id)

    def take_ends(self) -> tuple[list[int], list[int]]:
        """Loads to cancel and to discard, for the next step; those past their deadline too."""
        now = self._clock()
        for load in self._under_way.values():
            if load.deadline is not None and now >= load.deadline and not load.cancelled:
                log.warning(
                    "pegaflow: a load of %d blocks has no report after %.2f s and is cancelled "
                    "request=%s",
                    load.count,
                    now - (load.handed_at or now),
                    load.request_id,
                )
                self.cancel(load)
        ends = self._cancels, self._discards
        self._cancels, self._discards = [], []
        return ends

    def report(self, outcomes: dict[int, Outcome]) -> list[Load]:
        """Notes the workers' reports; returns the loads that have ended on all ranks."""
        ended = []
        for load_id, outcome in outcomes.items():
            if load_id in self._partial:
                self._partial[load_id].merge(outcome)
                outcome = self._partial[load_id]
            if outcome.ranks < self._ranks:
                self._partial[load_id] = outcome
                continue
            self._partial.pop(load_id, None)
            load = self._under_way.pop(load_id, None)
            if load is None:
                log.error("pegaflow: report for unknown load %d", load_id)
                continue
            self._end(load, outcome)
            ended.append(load)
        return ended

    def _end(self, load: Load, outcome: Outcome) -> None:
        state = load.state
        state.load = None
        self._count_blocks(load, outcome)
        self._counts.add("loaded_bytes", outcome.bytes)
        self._counts.add("direct_bytes", outcome.direct_bytes)
        self._counts.add("verified_pages", outcome.verified)
        self._counts.add("corrupt_pages", outcome.corrupt)
        if load.handed_at is not None:
            self._counts.observe("load_seconds", self._clock() - load.handed_at)
        if outcome.first_failed is None:
            if not state.load_failed:  # else vLLM computes these blocks too, behind another part
                state.progress.loaded(load)
            return
        self._counts.add("load_failed_blocks", outcome.failed)
        if outcome.cut:
            self._counts.add("load_cuts", 1, outcome.cut)
        else:
            self._counts.add("load_failures", 1, outcome.error or "unknown")
        load.failed = True
        state.load_failed = True
        state.progress.load_failed(load, outcome.first_failed)

    def _count_blocks(self, load: Load, outcome: Outcome) -> None:
        if not load.ranges:
            self._counts.add("loaded_blocks", outcome.blocks, self._labels[0])
        elif outcome.first_failed is None:
            for one in load.ranges:
                self._counts.add("loaded_blocks", one.count, self._labels[one.kind])

    def order(self, load: Load, computing: Computing | None) -> LoadOrder:
        """``computing``: its time now; None: the load is not compared with computing."""
        if load.ranges or load.patience_s:
            computing = None  # a part of such a load is of no use, or it waits for its prefill
        if computing:
            computing = computing.or_later(load.computing, self._clock() - load.claimed_at)
            # If a part is cut, the engine computes all that is behind it too.
            computing = computing.later(load.left * computing.block_s)
        return LoadOrder(
            load.id,
            load.request_id,
            load.token,
            load.offset,
            load.blocks,
            (computing.delay_s, computing.block_s) if computing else None,
            load.ranges,
            load.claimed,
            load.refused,
            load.chunked.number if load.chunked else 0,
            load.left > 0,
            **self._following(load),
        )

    @staticmethod
    def _following(load: Load) -> dict[str, Any]:
        if not load.patience_s:
            return {}
        return {
            "keys": b"".join(load.keys),
            "key_bytes": len(load.keys[0]),
            "patience_s": load.patience_s,
            "node": load.node,
        }
