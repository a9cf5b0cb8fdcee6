"""A mover with early completion of loads, as with a GPU's queues."""

import dataclasses
import random
from typing import Any

import numpy as np

from tests.python.fake_model import FakeModel
from tests.python.harness import Engine
from tests.python.rank import Rank


@dataclasses.dataclass
class EarlyReport:
    """The early completion of a load."""

    load: int
    blocks: int
    bytes: int
    took_s: float


class EarlyMover:
    """Wraps a real mover whose copies end at once, and hides their end for a while.

    The blocks of a hidden load hold other bytes. It may be reported early, and then has its bytes
    when the engine works next, like work on a stream that waits for a copy. Its end is reported
    some calls later. A load without an early report has its bytes when its end is reported.
    """

    def __init__(self, mover: Any, model: FakeModel, rng: random.Random) -> None:
        self._mover, self._model, self._rng = mover, model, rng
        self._blocks: dict[int, list[int]] = {}  # of loads in flight
        self._hidden: dict[int, tuple[Any, list[np.ndarray] | None]] = {}
        self._reported: set[int] = set()
        self.reported = 0  #: Early reports so far.
        self.reports_every_load = True  #: Every load is reported early, and ends then.
        self.is_at_end = False  #: True if nothing is hidden from now on.

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mover, name)

    def load(
        self, load: int, token: bytes, first: int, blocks: list[int], computing: Any = None
    ) -> None:
        self._mover.load(load, token, first, blocks, computing=computing)
        self._blocks[load] = blocks

    def take_finished(self) -> list[Any]:
        ended = []
        for done in self._mover.take_finished():
            if done.kind != "load":
                ended.append(done)
            elif done.error is not None or self.is_at_end or self._chance(0.2):
                del self._blocks[done.id]
                ended.append(done)
            else:
                self._hidden[done.id] = done, self._hide(self._blocks.pop(done.id))
        for load in list(self._hidden):
            sure = self.reports_every_load and load in self._reported
            if self.is_at_end or sure or self._chance(0.3):
                self._show(load)
                ended.append(self._hidden.pop(load)[0])
                self._reported.discard(load)
        return ended

    def follow(self, within_s: float) -> list[EarlyReport]:
        early = []
        for load, (done, _) in self._hidden.items():
            if load in self._reported or self._chance(0.3):
                continue
            self._reported.add(load)
            self.reported += 1
            early.append(EarlyReport(load, done.blocks, done.bytes, done.took_s))
        return early

    def engine_works(self) -> None:
        """The engine's later work is queued behind the loads that were reported early."""
        for load in self._reported:
            self._show(load)

    def _chance(self, odds: float) -> bool:
        return not self.reports_every_load and self._rng.random() < odds

    def _hide(self, blocks: list[int]) -> list[np.ndarray]:
        bytes_of = [array[blocks].copy() for array in self._model.arrays]
        self._model.poison(blocks)
        return [np.asarray(blocks), *bytes_of]

    def _show(self, load: int) -> None:
        done, hidden = self._hidden[load]
        if hidden is None:
            return
        blocks, *bytes_of = hidden
        for array, content in zip(self._model.arrays, bytes_of, strict=True):
            array[blocks] = content
        self._hidden[load] = done, None


def complete_early(engine: Engine, rng: random.Random) -> EarlyMover:
    """Gives the engine's only worker such a mover."""
    (rank,) = engine.ranks
    assert isinstance(rank, Rank)
    side = rank.worker._worker
    mover = side.mover = EarlyMover(side.mover, rank.model, rng)
    execute = rank.execute

    def execute_behind(output: Any, seeds: dict[str, int]) -> Any:
        mover.engine_works()
        return execute(output, seeds)

    rank.execute = execute_behind
    return mover
