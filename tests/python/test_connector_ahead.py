"""Early completion: the time at which vLLM gets a report of loads that its GPU waits for."""

from __future__ import annotations

import dataclasses
import logging

import pytest
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from pegaflow._native import PeerLost
from pegaflow.vllm.messages import LoadOrder, StepPlan
from pegaflow.vllm.off import WorkerOff
from pegaflow.vllm.worker_side import StepsAhead, WorkerSide
from tests.python.fake_model import FakeModel
from tests.python.harness import kv_cache_config, put_beside_another, vllm_config


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("asynchronous", "forward", "steps"),
    [(True, True, 2), (True, False, 4), (False, True, 1), (False, False, 2)],
)
def test_a_load_is_reported_early_by_the_steps_until_its_request_runs(asynchronous, forward, steps):
    clock = Clock()
    ahead = StepsAhead(asynchronous, clock=clock)
    for _ in range(3):
        clock.now += 0.0015
        ahead.end_step(forward)
    assert ahead.seconds() == pytest.approx(steps * 0.0015)


def test_long_steps_count_up_to_a_limit():
    clock = Clock()
    ahead = StepsAhead(True, clock=clock)
    for step_s, expected in ((0.01, StepsAhead.LIMIT_S), (0.5, 0.0), (0.002, 0.004)):
        ahead.end_step(True)
        clock.now += step_s
        ahead.end_step(True)
        assert ahead.seconds() == pytest.approx(expected)


def test_a_step_after_one_of_another_kind_is_not_measured():
    clock = Clock()
    ahead = StepsAhead(True, clock=clock)
    for forward, expected in ((False, 0.008), (True, 0.0), (True, 0.004), (False, 0.0)):
        clock.now += 0.002
        ahead.end_step(forward)
        assert ahead.seconds() == pytest.approx(expected)


@dataclasses.dataclass
class Followed:
    load: int
    blocks: int = 2
    bytes: int = 8192
    took_s: float = 0.5


@dataclasses.dataclass
class Done:
    id: int
    kind: str = "load"
    blocks: int = 2
    bytes: int = 8192
    direct_bytes: int = 0
    took_s: float = 0.6
    skipped: int = 0
    verified: int = 0
    corrupt: int = 0
    copying_s: float = 0.0
    cut: str = ""
    failed_blocks: tuple[int, ...] = ()
    error: str | None = None
    error_code: str | None = None


class GpuMover:
    """The reports of a mover whose copies are queued on a GPU, without a GPU."""

    def __init__(self) -> None:
        self.followed: list[Followed] = []
        self.finished: list[Done] = []
        self.cancelled: list[int] = []
        self.following: list[int] = []
        self.asked = 0
        self.broken = False

    page_bytes = 4096

    def load(self, load, token, first, blocks, computing=None) -> None: ...

    def load_following(self, load, keys, key_bytes, blocks, patience_s, node) -> None:
        assert len(keys) == key_bytes * len(blocks) and patience_s > 0
        self.following.append(load)

    def cancel_load(self, load: int) -> None:
        self.cancelled.append(load)

    def follow(self, within_s: float) -> list[Followed]:
        self.asked += 1
        told, self.followed = self.followed, []
        return told

    def take_finished(self) -> list[Done]:
        if self.broken:
            raise RuntimeError("planted")
        taken, self.finished = self.finished, []
        return taken

    def close(self) -> None: ...


def worker_with_a_load() -> tuple[WorkerSide, GpuMover]:
    mover = GpuMover()
    worker = WorkerSide(lambda _: mover)
    worker.register({})
    order = LoadOrder(load=5, request_id="r", token=b"t" * 16, first=0, blocks=[7, 9])
    worker.start_loads(StepPlan(loads=[order]))
    return worker, mover


def test_a_followed_load_is_reported_once_and_its_end_is_silent():
    worker, mover = worker_with_a_load()
    worker.collect()
    assert worker.reports.take_received() == set()

    mover.followed = [Followed(5)]
    worker.collect()
    assert worker.reports.take_received() == {"r"}
    assert worker.reports.take_bad_blocks() == set()
    outcome = worker.reports.take_report().loads[5]
    assert (outcome.blocks, outcome.bytes, outcome.failed) == (2, 8192, 0)
    asked = mover.asked
    worker.collect()
    assert mover.asked == asked  # no load is left to follow

    mover.finished = [Done(5)]
    worker.collect()
    assert worker.reports.take_received() == set()
    assert worker.reports.take_report() is None
    assert worker.loads == {}


def test_only_the_last_part_of_a_chunked_load_is_followed():
    """The GPU would wait for the copies of the others, and no request needs them yet."""
    mover = GpuMover()
    worker = WorkerSide(lambda _: mover)
    worker.register({})
    first, last = (
        LoadOrder(number, "r", b"t" * 16, 0, [number], chunked=1, has_more=number == 5)
        for number in (5, 6)
    )
    worker.start_loads(StepPlan(loads=[first]))
    worker.collect()
    assert mover.asked == 0

    mover.finished = [Done(5, blocks=1)]
    worker.start_loads(StepPlan(loads=[last]))
    mover.followed = [Followed(6, blocks=1)]
    worker.collect()
    assert mover.asked == 1
    assert worker.reports.take_received() == {"r"}


def worker_that_follows_a_prefill() -> tuple[WorkerSide, GpuMover]:
    """A chunked load with a part that has a claim, and one that follows the prefill."""
    mover = GpuMover()
    worker = WorkerSide(lambda _: mover)
    worker.register({})
    claimed = LoadOrder(5, "r", b"t" * 16, 0, [7, 9], chunked=1, has_more=True)
    more = {"chunked": 1, "keys": bytes(64), "key_bytes": 32, "patience_s": 30.0}
    follower = LoadOrder(6, "r", b"", 0, [3, 4], **more)
    worker.start_loads(StepPlan(loads=[claimed, follower]))
    assert mover.following == [6]
    return worker, mover


def test_a_load_that_follows_its_prefill_is_reported_when_all_of_it_has_ended():
    worker, mover = worker_that_follows_a_prefill()
    mover.finished = [Done(6, direct_bytes=4096, copying_s=20.0)]
    worker.collect()
    assert mover.asked == 0
    assert worker.reports.take_received() == set()
    report = worker.reports.take_report()
    assert report.loads[6].direct_bytes == 4096
    assert not report.copied, "it has waited for the prefill between its copies"

    mover.finished = [Done(5)]
    worker.collect()
    assert worker.reports.take_received() == {"r"}
    assert worker.reports.take_bad_blocks() == set()


def test_what_a_cancelled_load_has_read_counts():
    worker, mover = worker_that_follows_a_prefill()
    worker.start_loads(StepPlan(cancelled=[6]))
    assert mover.cancelled == [6]
    mover.finished = [Done(5), Done(6, blocks=1, failed_blocks=(4,), error_code="cancelled")]
    worker.collect()
    assert worker.reports.take_received() == {"r"}
    assert worker.reports.take_bad_blocks() == {4}


def test_no_block_of_a_discarded_load_counts():
    worker, mover = worker_that_follows_a_prefill()
    mover.finished = [Done(5)]
    worker.collect()
    worker.start_loads(StepPlan(discarded=[6]))
    mover.finished = [Done(6)]
    worker.collect()
    assert worker.reports.take_received() == {"r"}
    assert worker.reports.take_bad_blocks() == {3, 4, 7, 9}


@pytest.mark.parametrize("keys", [b"", bytes(64)], ids=["claimed", "following"])
def test_no_earlier_part_counts_if_the_last_one_is_refused_in_the_step_of_a_reset(keys):
    mover = GpuMover()
    worker = WorkerSide(lambda _: mover)
    worker.register({})
    first = LoadOrder(5, "r", b"t" * 16, 0, [7, 9], chunked=1, has_more=True)
    last = LoadOrder(6, "r", b"", 0, [3, 4], chunked=1, keys=keys, key_bytes=32, patience_s=30.0)
    worker.start_loads(StepPlan(loads=[first]))
    mover.finished = [Done(5)]
    worker.collect()

    def refuse(*_: object, **__: object) -> None:
        raise PeerLost("no server")

    mover.load = mover.load_following = refuse
    worker.start_loads(StepPlan(loads=[last], discarded=[6]))

    assert worker.reports.take_received() == {"r"}
    assert worker.reports.take_bad_blocks() == {3, 4, 7, 9}


def test_a_gpu_that_breaks_under_a_followed_load_is_logged(caplog):
    worker, mover = worker_with_a_load()
    mover.followed = [Followed(5)]
    worker.collect()
    worker.reports.take_received()
    mover.finished = [Done(5, blocks=0, failed_blocks=(7, 9), error="internal: illegal address")]
    worker.collect()
    assert "illegal address" in caplog.text
    assert worker.reports.take_received() == set()


def test_a_discarded_load_is_reported_when_it_has_ended():
    worker, mover = worker_with_a_load()
    worker.start_loads(StepPlan(discarded=[5]))
    mover.followed = [Followed(5)]
    worker.collect()
    assert worker.reports.take_received() == set()
    mover.finished = [Done(5)]
    worker.collect()
    assert worker.reports.take_received() == {"r"}
    assert worker.reports.take_bad_blocks() == {7, 9}


def test_a_reported_load_is_not_reported_again_after_an_internal_error(caplog):
    """vLLM asserts that it waits for a reported load: its engine would end."""
    worker, mover = worker_with_a_load()
    worker.start_loads(StepPlan(loads=[LoadOrder(6, "s", b"t" * 16, 0, [3, 4])]))
    mover.followed = [Followed(5)]
    worker.collect()
    assert worker.reports.take_received() == {"r"}

    mover.broken = True
    off = WorkerOff(worker)
    with caplog.at_level(logging.ERROR):
        off.collect()
    assert "planted" in caplog.text
    assert off.reports.take_received() == {"s"}
    assert off.reports.take_bad_blocks() == {3, 4}


@pytest.mark.parametrize("others", [False, True])
def test_beside_another_connector_a_load_is_reported_at_its_end(tmp_path, monkeypatch, others):
    """Another connector may get the blocks of an aborted load, and its writes are unordered."""
    config = vllm_config(f"unix:{tmp_path}/absent.sock", max_model_len=128)
    if others:
        put_beside_another(config)
    caches = kv_cache_config(config, 16)
    group = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, caches)
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", group)
    group.register_kv_caches(FakeModel(caches).tensors)
    connector = group._connectors[0] if others else group
    worker = connector._worker
    worker.close()
    worker.mover = mover = GpuMover()
    worker.start_loads(StepPlan(loads=[LoadOrder(5, "r", b"t" * 16, 0, [7, 9])]))
    mover.followed = [Followed(5)]
    worker.collect()
    assert worker.reports.take_received() == (set() if others else {"r"})
    mover.finished = [Done(5)]
    worker.collect()
    assert worker.reports.take_received() == ({"r"} if others else set())
