"""Whether loading a prefix is faster than computing it, from recent measurements.

Three rates decide: how fast this engine computes prompts, how fast its slowest rank copies out of
the pool, and when blocks of other nodes arrive, which the server predicts in a claim's answer.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

#: The half-life of measurements, in seconds of work.
WINDOW_S = 1.0
#: The share of prompt tokens from which on a step measures the rate of computing prompts.
LEAST_TOKENS = 64
#: Steps of different sizes are measured separately, with these lower bounds in tokens: a small step
#: is bound by memory and computes fewer tokens per second.
STEP_SIZES = (LEAST_TOKENS, 512, 2048)
#: The time of a load besides its copies: a call to the server, and a step to hand it out.
LOAD_OVERHEAD_S = 0.001
#: Longer times have no further effect and fit no message: a block's time has 32 bits of
#: nanoseconds.
LONGEST_S = 4.0


class Rate:
    """A recent rate: work per second."""

    def __init__(self) -> None:
        self._amount = 0.0
        self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        self._amount += amount
        self._seconds += max(seconds, 1e-9)
        if self._seconds > WINDOW_S:
            self._amount /= 2
            self._seconds /= 2

    @property
    def per_second(self) -> float:
        """0 while nothing was measured."""
        return self._amount / self._seconds if self._seconds else 0.0


class ComputeRate:
    """The rate at which the engine computes prompts, and its backlog.

    Measured in steps that compute prompts: from the plan of a step, or the end of the one before if
    that is later, to the report of its workers. Steps that only decode are ignored. Bound to the
    scheduler's thread.
    """

    def __init__(self, *, most_tokens: int, clock: Callable[[], float]) -> None:
        """``most_tokens``: the limit of tokens that one step computes."""
        self._most_tokens = most_tokens
        self._clock = clock
        self._rates = [Rate() for _ in STEP_SIZES]
        self._prompts: dict[str, int] = {}  # requests that are computed, and their tokens left
        self._backlog = 0  # the sum of their tokens
        self._step = 0
        self._steps: collections.deque[tuple[int, int, float]] = collections.deque()
        self._ended_at = 0.0

    def begin(self, request_id: str, tokens: int) -> None:
        """vLLM has admitted the request, and computes ``tokens`` of it."""
        self.end(request_id)
        if tokens > 1:
            self._prompts[request_id] = tokens
            self._backlog += tokens

    def end(self, request_id: str) -> None:
        """The request is gone, or was preempted."""
        self._backlog -= self._prompts.pop(request_id, 0)

    def plan(self, scheduled: Mapping[str, int], total: int) -> int:
        """Notes a step; returns its number if its workers should report its end, else 0."""
        prompts = 0
        for request_id in list(self._prompts):
            tokens = min(scheduled.get(request_id, 0), self._prompts[request_id])
            prompts += tokens
            self._backlog -= tokens
            self._prompts[request_id] -= tokens
            if self._prompts[request_id] == 0:
                del self._prompts[request_id]
        self._step += 1
        if prompts < LEAST_TOKENS:
            return 0
        self._steps.append((self._step, total, self._clock()))
        return self._step

    def ended(self, step: int) -> None:
        """The workers have reported that step."""
        while self._steps and self._steps[0][0] <= step:
            number, tokens, planned_at = self._steps.popleft()
            now = self._clock()
            if number == step:
                size = sum(tokens >= least for least in STEP_SIZES) - 1
                self._rates[size].add(tokens, now - max(planned_at, self._ended_at))
            self._ended_at = now

    def tokens_per_second(self, tokens: int) -> float:
        """The rate for a prompt with this many tokens; 0 while nothing was measured."""
        tokens = min(tokens, self._most_tokens)
        size = max(0, sum(tokens >= least for least in STEP_SIZES) - 1)
        if smaller := max(rate.per_second for rate in self._rates[: size + 1]):
            return smaller
        return next((rate.per_second for rate in self._rates[size + 1 :] if rate.per_second), 0.0)

    def unknown(self, tokens: int) -> int:
        """The number of a prompt's ``tokens`` to compute in order to measure their rate.

        The largest unmeasured step size, at most half of the prompt; 0: all are measured.
        """
        most = min(tokens // 2, self._most_tokens)
        size = sum(most >= least for least in STEP_SIZES) - 1
        if size < 0 or any(rate.per_second for rate in self._rates[size:]):
            return 0
        return STEP_SIZES[size]

    @property
    def backlog(self) -> int:
        """Tokens of admitted prompts that are not in a step yet."""
        return self._backlog


class CopyRate:
    """The slowest rank's time to copy a block out of the pool. Bound to the scheduler's thread."""

    def __init__(self) -> None:
        self._ranks: dict[int, Rate] = {}

    def report(self, copied: Mapping[int, tuple[float, float]]) -> None:
        """Adds measurements by rank: blocks, and their seconds."""
        for rank, (blocks, seconds) in copied.items():
            self._ranks.setdefault(rank, Rate()).add(blocks, seconds)

    @property
    def block_s(self) -> float:
        """0 while nothing was measured."""
        rates = [rate.per_second for rate in self._ranks.values()]
        return max((1 / rate for rate in rates if rate), default=0.0)


@dataclasses.dataclass(frozen=True)
class Computing:
    """The time to compute a request's blocks if they are not loaded."""

    delay_s: float = 0.0  #: Until it begins, after the prompts that are being computed.
    block_s: float = 0.0  #: Per block; 0: unknown.

    def seconds(self, blocks: int) -> float:
        return self.delay_s + blocks * self.block_s

    def later(self, seconds: float) -> Computing:
        """This, with a begin of computing that is so much later, within LONGEST_S."""
        return Computing(min(self.delay_s + seconds, LONGEST_S), self.block_s)

    def or_later(self, former: Computing, age_s: float) -> Computing:
        """This, or ``former`` from ``age_s`` ago, whichever has the later begin of computing.

        Requests that wait at the same time are computed one after the other. A claim counts all of
        them as ahead of it; once some of them load, nothing seems to be ahead of it. A new
        comparison with that would decline the load of each, and all would be computed.
        """
        if not self.block_s:
            return self
        return Computing(max(self.delay_s, former.delay_s - age_s), self.block_s)


class LoadPolicy:
    """Decides whether a load is offered. Bound to the scheduler's thread."""

    def __init__(
        self,
        *,
        always: bool,
        block_size: int,
        most_tokens: int,
        queued_blocks: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        """
        Args:
            always: Every load is offered, and none is cut.
            queued_blocks: The number of blocks that loads in flight copy before a new one.
        """
        self._always = always
        self._block_size = block_size
        self._queued_blocks = queued_blocks
        self.compute = ComputeRate(most_tokens=most_tokens, clock=clock)
        self.copies = CopyRate()

    def computing(self, blocks: int, ahead: int = 0) -> Computing:
        """The time to compute ``blocks`` of a prompt from now on, after ``ahead`` further
        blocks.
        """
        rate = 0.0 if self._always else self.compute.tokens_per_second(blocks * self._block_size)
        if not rate:
            return Computing()
        return Computing(
            min((self.compute.backlog + ahead * self._block_size) / rate, LONGEST_S),
            min(self._block_size / rate, LONGEST_S),
        )

    def held_to(self, blocks: int) -> Computing | None:
        """Computing that a load in flight is compared with; None: every load is wanted."""
        return None if self._always else self.computing(blocks)

    def learning_blocks(self, blocks: int) -> int:
        """The number of loadable ``blocks`` that are computed in order to measure a rate.

        An engine that always loads would never measure that computing is faster.
        """
        return (
            0
            if self._always
            else -(-self.compute.unknown(blocks * self._block_size) // self._block_size)
        )

    def slower_source(
        self,
        blocks: int,
        coming: int,
        last_s: float,
        computing: Computing,
        pages: float | None = None,
    ) -> str:
        """The source, "pool" or "peer", that makes a load slower than computing; empty: none does.

        Args:
            blocks: The number of blocks of the load.
            coming: The number of them that arrive from another node.
            last_s: Predicted seconds until the last of those arrives; 0: unknown.
            computing: The time to compute them.
            pages: The number of blocks that are copied for them, if it is another one.
        """
        if not computing.block_s:
            return ""
        limit = computing.seconds(blocks)
        if coming and last_s + LOAD_OVERHEAD_S > limit:
            return "peer"
        block_s = self.copies.block_s
        if not block_s:
            return ""
        here = self._queued_blocks() + (blocks if pages is None else pages) - coming
        return "pool" if here * block_s + LOAD_OVERHEAD_S > limit else ""


def preempted_in(output: Any) -> Iterable[str]:
    """Requests that a step has preempted, if the release reports them."""
    return getattr(output, "preempted_req_ids", None) or ()
