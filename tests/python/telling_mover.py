"""A mover whose loads are told before their bytes are there, as with a GPU's queues."""

import dataclasses
import random
from typing import Any

import numpy as np

from tests.python.fake_model import FakeModel
from tests.python.harness import Engine
from tests.python.rank import Rank


@dataclasses.dataclass
class Told:
    """What a mover says of a load that the engine need not wait for."""

    load: int
    blocks: int
    bytes: int
    took_s: float


class TellingMover:
    """Stands before a real mover whose copies end at once, and hides for a while that they did.

    Of a load that is hidden the blocks hold something else. It may be told then, and has its bytes
    when the engine works next: what a stream makes of work that waits for a copy. Its end is
    reported some calls later. One that is not told has its bytes when its end is reported.
    """

    def __init__(self, mover: Any, model: FakeModel, rng: random.Random) -> None:
        self._mover, self._model, self._rng = mover, model, rng
        self._blocks: dict[int, list[int]] = {}  # of loads under way
        self._hidden: dict[int, tuple[Any, list[np.ndarray] | None]] = {}
        self._told: set[int] = set()
        self.told = 0  #: In all.
        self.leaves_nothing_to_chance = True  #: Every load is told, and ends then.
        self.is_at_end = False  #: Then nothing is hidden any more.

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
            sure = self.leaves_nothing_to_chance and load in self._told
            if self.is_at_end or sure or self._chance(0.3):
                self._show(load)
                ended.append(self._hidden.pop(load)[0])
                self._told.discard(load)
        return ended

    def follow(self, within_s: float) -> list[Told]:
        told = []
        for load, (done, _) in self._hidden.items():
            if load in self._told or self._chance(0.3):
                continue
            self._told.add(load)
            self.told += 1
            told.append(Told(load, done.blocks, done.bytes, done.took_s))
        return told

    def engine_works(self) -> None:
        """Whatever the engine does from now on comes behind the loads that were told."""
        for load in self._told:
            self._show(load)

    def _chance(self, odds: float) -> bool:
        return not self.leaves_nothing_to_chance and self._rng.random() < odds

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


def tell_early(engine: Engine, rng: random.Random) -> TellingMover:
    """From now on the engine's only worker has such a mover."""
    (rank,) = engine.ranks
    assert isinstance(rank, Rank)
    side = rank.worker._worker
    mover = side.mover = TellingMover(side.mover, rank.model, rng)
    execute = rank.execute

    def execute_behind(output: Any, seeds: dict[str, int]) -> Any:
        mover.engine_works()
        return execute(output, seeds)

    rank.execute = execute_behind
    return mover
