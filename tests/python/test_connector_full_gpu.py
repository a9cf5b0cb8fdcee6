"""GPU blocks that only a save keeps: vLLM waits for them, up to a limit."""

from collections.abc import Iterator
from typing import Any

import pytest

from pegaflow.vllm.saves import FREES_LIMIT_S
from tests.python.harness import BLOCK, Engine

#: The null block, those of a request that ends, and those of the prompt that continues.
ENDED, PROMPT = 10, 28
BLOCKS = 1 + ENDED + PROMPT


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class HoldingMover:
    """Wraps a real mover, and reports no save while it holds them."""

    def __init__(self, mover: Any) -> None:
        self._mover = mover
        self._held: list[Any] = []
        self.holds = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mover, name)

    def take_finished(self) -> list[Any]:
        self._held += self._mover.take_finished()
        if self.holds:
            return []
        held, self._held = self._held, []
        return held


class FullGpu:
    """An engine without a free block: a request and a save of an ended one have all of them."""

    def __init__(self, engine: Engine, prompt: Any) -> None:
        self.engine = engine
        self.side = engine.connector._scheduler
        self.clock = self.side.saves._clock = Clock()
        self.mover = engine.worker._worker.mover = HoldingMover(engine.worker._worker.mover)
        self.preempted: list[str] = []
        engine.on_schedule = lambda output: self.preempted.extend(output.preempted_req_ids or ())
        engine.add("ends", prompt(ENDED * BLOCK), 1)
        # One after the other: the first lookup that is answered is scheduled first.
        engine.run(until=lambda: self.side.saves.pinned == ENDED)
        engine.add("goes on", prompt(PROMPT * BLOCK), 8)
        engine.run(until=self.is_full)

    def is_full(self) -> bool:
        running = self.engine.scheduler.requests.get("goes on")
        pool = self.engine.scheduler.kv_cache_manager.block_pool
        return running.num_tokens > PROMPT * BLOCK and pool.get_num_free_blocks() == 0

    def waits(self) -> int:
        return int(self.engine.stats["pin_waits"])


@pytest.fixture
def full(pega, prompt) -> Iterator[FullGpu]:
    extra = {"pegaflow.max_pinned_percent": 50}
    with Engine(pega.address, blocks=BLOCKS, max_model_len=512, extra=extra) as engine:
        engine.wait_ready()
        yield FullGpu(engine, prompt)
        engine.run()
        engine.check_at_rest()


def test_a_full_gpu_waits_for_a_save_and_preempts_nothing(full):
    for _ in range(5):
        full.engine.step()
        full.clock.now += FREES_LIMIT_S / 10
    assert full.preempted == []
    assert full.waits() >= 4
    assert len(full.engine.answers["goes on"].tokens) == 1, "there was no block for a second one"

    full.mover.holds = False
    full.engine.run()

    assert full.preempted == []
    full.engine.answers["goes on"].check()


def test_a_save_that_hangs_delays_vllm_by_50_ms(full):
    full.engine.step()
    full.clock.now += FREES_LIMIT_S - 0.001
    full.engine.step()
    assert full.preempted == []

    full.clock.now += 0.002
    full.engine.step()

    assert full.preempted == ["goes on"]
    waits = full.waits()
    full.engine.step()
    full.clock.now += 10.0
    full.engine.step()
    assert full.waits() == waits, "a save that hangs is waited for once"
    full.mover.holds = False
    full.engine.run()
    full.engine.answers["goes on"].check()


def test_saves_that_follow_a_hanging_one_are_not_waited_for(full):
    full.engine.step()
    full.clock.now += FREES_LIMIT_S + 0.001
    full.engine.step()
    assert full.preempted == ["goes on"]

    # Later saves are younger than the limit, and wait behind that save.
    jobs = full.side.saves._jobs.values()
    assert jobs
    for job in jobs:
        job.handed_at = full.clock.now
    assert not full.engine.connector.has_pending_block_frees()
    full.mover.holds = False


def test_blocks_that_requests_still_use_are_not_waited_for(pega, prompt):
    with Engine(pega.address, blocks=BLOCKS, max_model_len=512) as engine:
        engine.wait_ready()
        mover = engine.worker._worker.mover = HoldingMover(engine.worker._worker.mover)
        engine.add("runs", prompt(64), 40)
        engine.run(until=lambda: engine.connector._scheduler.saves.pinned > 0)

        assert not engine.connector.has_pending_block_frees()

        mover.holds = False
        engine.run()
        engine.check_at_rest()
