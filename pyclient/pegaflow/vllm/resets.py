"""An explicit reset, from vLLM's request until a server has confirmed it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from pegaflow import _native
from pegaflow.vllm.metrics import Counts

log = logging.getLogger("vllm.pegaflow")

#: The wait of the request itself, which comes from an operator or a trainer, not from a step. A
#: server responds within 0.4 s if a node does not confirm.
PATIENCE_S = 1.0
#: A server that has not responded by then receives the request again.
DEADLINE_S = 10.0
RETRY_INTERVAL_S = 0.1


class Resets:
    """Bound to the scheduler's thread."""

    def __init__(self, session: Any, *, counts: Counts, clock: Callable[[], float]) -> None:
        self._session = session
        self._counts = counts
        self._clock = clock
        self._ticket: int | None = None
        self._asked_at = 0.0
        self.is_owed = False  #: A reset was requested, and no server has confirmed it.

    def begin(self) -> None:
        """Resets the namespace, and waits a moment for the confirmation."""
        self.is_owed = True
        if self._ticket is not None:
            self._session.forget(self._ticket)  # it began before this request
        self._ask()
        if not self._take(PATIENCE_S):
            log.warning("pegaflow: no server confirms the reset yet; nothing is loaded until then")

    def is_done(self) -> bool:
        """Whether the last reset is confirmed; repeats it at intervals if not. Does not wait."""
        if not self.is_owed:
            return True
        if self._ticket is None and self._clock() - self._asked_at >= RETRY_INTERVAL_S:
            self._ask()
        return self._take(0.0)

    def _ask(self) -> None:
        self._asked_at = self._clock()
        try:
            self._ticket = self._session.ask_reset(DEADLINE_S)
        except _native.PegaFlowError as error:
            self._ticket = None
            log.debug("pegaflow: a reset could not be sent: %s", error)

    def _take(self, patience_s: float) -> bool:
        if self._ticket is None:
            return False
        try:
            answer = self._session.take_reset(self._ticket, patience_s)
        except _native.PegaFlowError as error:
            self._ticket = None
            log.debug("pegaflow: a reset failed and is repeated: %s", error)
            return False
        if answer is None:
            return False
        self._ticket = None
        self.is_owed = False
        self._confirmed(*answer)
        return True

    def _confirmed(self, generation: int, unconfirmed: list[str]) -> None:
        log.info("pegaflow: the cache was reset generation=%d", generation)
        if not unconfirmed:
            return
        self._counts.add("reset_unconfirmed_nodes", len(unconfirmed))
        log.warning(
            "pegaflow: the reset was not confirmed by %d node(s): %s; their engines may still find "
            "older blocks: reset again, or stop those nodes",
            len(unconfirmed),
            ", ".join(unconfirmed),
        )
