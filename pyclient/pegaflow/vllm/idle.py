"""Steps in which every request waits for the cache.

vLLM repeats its question about such a request in each step, and an engine without other work makes
about a thousand steps a second for it. On shared cores that time is missing in the prefill for
which the request waits. So such a step sleeps until the server answers or a request arrives, and
for a few milliseconds at most.

The steps after an event are short. The first one may take an answer on which only the next one
acts, or come before vLLM shows it the request that has arrived. And with older servers
``SaveWatch`` tells slow answers from quick ones by its polls, so one of these must come when an
answer is late.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pegaflow.vllm.early import QUICK_S
from pegaflow.vllm.metrics import Counts

#: So many steps after an event sleep for a short time: together, until an answer counts as slow.
BRIEF_STEPS = 2
BRIEF_S = QUICK_S / BRIEF_STEPS


class IdleSteps:
    """Delays the end of steps without work. Bound to the scheduler's thread, except interrupt()."""

    def __init__(
        self, session: Any, *, limit_s: float, counts: Counts, clock: Callable[[], float]
    ) -> None:
        """``limit_s``: the longest delay of a step; 0: none is delayed."""
        self._session = session
        self.limit_s = limit_s
        self._counts = counts
        self._clock = clock
        self._waiting: set[str] = set()  # requests of this step
        self._seen = 0  # events of the session before the requests of this step were polled
        self._brief = BRIEF_STEPS  # steps that sleep for a short time, from now on

    def add_waiting(self, request_id: str) -> None:
        """In this step, the request waits for an answer of the server, and for nothing else."""
        self._waiting.add(request_id)

    def end_step(self, requests: int, *, is_idle: bool) -> None:
        """Sleeps if all of the engine's ``requests`` wait, and the step ``is_idle``: it computes
        nothing, and nothing is in flight that only later steps notice.
        """
        waiting, self._waiting = len(self._waiting), set()
        if not waiting or not is_idle or waiting < requests:
            self._brief = BRIEF_STEPS
        else:
            self._counts.add("idle_steps")
            if self.limit_s > 0:
                self._sleep()
        if waiting:
            self._seen = self._session.events()

    def _sleep(self) -> None:
        started = self._clock()
        limit_s = min(self.limit_s, BRIEF_S) if self._brief else self.limit_s
        is_woken = self._session.await_event(self._seen, limit_s)
        self._brief = BRIEF_STEPS if is_woken else max(0, self._brief - 1)
        self._counts.add("idle_seconds", self._clock() - started)

    def interrupt(self) -> None:
        """A request arrives. Thread-safe."""
        if self.limit_s > 0:
            self._session.interrupt()
