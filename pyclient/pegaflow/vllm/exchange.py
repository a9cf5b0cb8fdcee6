"""Texts that the ranks of an engine exchange before they register.

They cross the key-value store with which torch.distributed has connected the ranks. A collective
would have no deadline of its own, and a failed one would break vLLM's groups; a rank that is
missing in the store costs the others the deadline, and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

#: All ranks register in one call of vLLM's executor. The slowest may hash a weight file before.
DEADLINE_S = 10.0
_INTERVAL_S = 0.01


class NoExchange(Exception):
    """The texts of the other ranks are unknown; the text has the reason."""


def distributed_store() -> Any:
    """The store of torch.distributed; None in a process that it has not connected."""
    import torch

    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    get = getattr(distributed.distributed_c10d, "_get_default_store", None)
    return get() if get is not None else None


class Exchange:
    """One exchange among the ranks of an engine core. A later call returns the first result: vLLM
    may make only some ranks register again.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        ranks: int,
        *,
        store: Callable[[], Any] = distributed_store,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """
        Args:
            name: That of the engine core; several of them may share a store.
            store: Returns the store, or None; called by the first ``texts()``.
        """
        self._name = name
        self._rank, self._ranks = rank, ranks
        self._store, self._clock, self._pause = store, clock, pause
        self._known: list[str] = []

    def texts(self, own: str) -> list[str]:
        """The texts of all ranks, in their order.

        Raises:
            NoExchange: a rank's text did not arrive within the deadline, there is no store, or
                this rank's text is not the one that it has sent before.
        """
        if self._ranks == 1:
            return [own]
        if self._known:
            if self._known[self._rank] != own:
                raise NoExchange(f"those of rank {self._rank} have changed since its start")
            return self._known
        store = self._store()
        if store is None:
            raise NoExchange("torch.distributed does not connect its ranks")
        try:
            self._known = self._exchange(store, own)
        except RuntimeError as error:  # that of each failure of a store
            raise NoExchange(f"the store of torch.distributed failed: {error}") from None
        return self._known

    def _exchange(self, store: Any, own: str) -> list[str]:
        store.set(self._key(self._rank), own)
        deadline = self._clock() + DEADLINE_S
        missing = [rank for rank in range(self._ranks) if rank != self._rank]
        while missing := [rank for rank in missing if not store.check([self._key(rank)])]:
            if self._clock() >= deadline:
                names = ", ".join(map(str, missing))
                raise NoExchange(f"no text of rank {names} within {DEADLINE_S:.0f} s")
            self._pause(_INTERVAL_S)
        return [store.get(self._key(rank)).decode() for rank in range(self._ranks)]

    def _key(self, rank: int) -> str:
        return f"pegaflow/{self._name}/{rank}"
