"""Steps that last until a load has ended, and the requests that arrive meanwhile."""

import contextlib
import os
import threading
from collections.abc import Iterator

import pytest

from pegaflow.vllm import arrivals, scheduler_side, worker_side
from pegaflow.vllm.arrivals import ARRIVALS, Arrivals
from pegaflow.vllm.messages import LoadOrder, StepPlan
from pegaflow.vllm.worker_side import StepsAhead, WorkerSide
from tests.python.test_connector_ahead import Clock, Done, GpuMover, worker_that_follows_a_prefill
from tests.python.test_connector_chunked import LENGTH
from tests.python.test_connector_direct import reading
from tests.python.test_connector_handover import engines
from tests.python.test_connector_two_engines import run_together

#: A wait that ends only by its limit fails its test.
FOREVER_S = 600.0


@contextlib.contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    try:
        yield read, write
    finally:
        os.close(read)
        os.close(write)


@pytest.fixture
def here(monkeypatch) -> Arrivals:
    """The arrivals of a process with a scheduler, whose waits have no limit."""
    monkeypatch.setattr(arrivals, "LONG_S", FOREVER_S)
    found = Arrivals()
    found.begin()
    monkeypatch.setattr(worker_side, "ARRIVALS", found)
    return found


def test_the_end_of_a_job_ends_the_wait(here):
    with pipe() as (read, write):
        os.write(write, b"x")
        assert here.wait(read)
        assert os.read(read, 2) == b"x", "the wait leaves it to the mover's reader"


def test_a_request_that_arrives_ends_the_wait(here):
    with pipe() as (read, _):
        thread = threading.Thread(target=here.note)
        thread.start()
        assert not here.wait(read)
        thread.join()


def test_requests_that_have_arrived_end_one_wait_and_not_the_one_after_it(here):
    with pipe() as (read, write):
        here.note()
        here.note()
        assert not here.wait(read)
        thread = threading.Thread(target=os.write, args=(write, b"x"))
        thread.start()
        assert here.wait(read)
        thread.join()


def test_a_worker_without_a_scheduler_beside_it_waits_for_a_short_time():
    alone = Arrivals()
    alone.note()  # no scheduler is there to report it
    with pipe() as (read, _):
        assert not alone.wait(read)


def test_a_forked_child_shares_no_arrivals_with_its_parent(monkeypatch):
    monkeypatch.setattr(ARRIVALS, "_event", -1)
    ARRIVALS.begin()
    ARRIVALS.note()

    child = os.fork()
    if child == 0:
        status = 1
        try:
            with pipe() as (read, _):
                assert not ARRIVALS.wait(read)
            ARRIVALS.begin()
            ARRIVALS.note()
            ARRIVALS.note()
            assert os.eventfd_read(ARRIVALS._event) == 2
            status = 0
        finally:
            os._exit(status)

    assert os.waitpid(child, 0)[1] == 0
    assert os.eventfd_read(ARRIVALS._event) == 1
    ARRIVALS.end()


def test_a_load_that_ends_during_the_step_is_reported_in_it(here):
    worker, mover = worker_that_follows_a_prefill()
    with pipe() as (read, write):
        mover.finished_fd = lambda: read

        def end() -> None:
            mover.finished = [Done(5), Done(6)]
            os.write(write, b"x")

        thread = threading.Thread(target=end)
        worker.start_loads(StepPlan(may_last=True))
        thread.start()
        worker.collect()
        thread.join()
        assert worker.reports.take_received() == {"r"}


def test_a_step_that_has_something_to_report_does_not_wait(here):
    worker, mover = worker_that_follows_a_prefill()
    mover.finished_fd = lambda: pytest.fail("the step waits")
    mover.finished = [Done(5), Done(6)]
    worker.start_loads(StepPlan(may_last=True))
    worker.collect()
    assert worker.reports.take_received() == {"r"}


def test_only_steps_that_may_last_wait(here):
    worker, mover = worker_that_follows_a_prefill()
    mover.finished_fd = lambda: pytest.fail("the step waits")
    for plan in (StepPlan(), StepPlan(may_last=True), StepPlan()):
        mover.finished = [Done(5), Done(6)] if plan.may_last else []
        worker.start_loads(plan)
        worker.collect()


def test_the_wait_does_not_count_as_time_of_the_step(monkeypatch):
    """Otherwise later loads would be completed early by steps as long as the wait."""
    clock = Clock()

    class Passing(Arrivals):
        def wait(self, descriptor: int) -> bool:
            clock.now += 0.004
            return False

    monkeypatch.setattr(worker_side, "ARRIVALS", Passing())
    mover, early_by_s = GpuMover(), []
    mover.finished_fd = lambda: -1
    mover.follow = lambda within_s: early_by_s.append(within_s) or []
    worker = WorkerSide(lambda _: mover, ahead=StepsAhead(False, clock=clock))
    worker.register({})
    worker.start_loads(StepPlan(loads=[LoadOrder(5, "r", b"t" * 16, 0, [7, 9])]))
    for _ in range(3):
        clock.now += 0.001
        worker.start_loads(StepPlan(may_last=True))
        worker.collect()
    assert early_by_s == pytest.approx([0.002] * 3)  # two steps without the model


class HoldsBack:
    """A mover whose jobs end only for steps that wait for it."""

    def __init__(self, mover, waited: list[bool]) -> None:
        self._mover, self._waited = mover, waited

    def take_finished(self):
        return self._mover.take_finished() if self._waited else []

    def __getattr__(self, name):
        return getattr(self._mover, name)


def test_a_decode_engine_that_waits_only_for_a_direct_read_lets_the_step_last(
    own_pega, prompt, monkeypatch
):
    waited = []

    class Noted(Arrivals):
        def wait(self, descriptor: int) -> bool:
            waited.append(True)
            return super().wait(descriptor)

    monkeypatch.setattr(arrivals, "LONG_S", FOREVER_S)
    noted = Noted()
    noted.begin()
    monkeypatch.setattr(worker_side, "ARRIVALS", noted)
    # Three of four chunks are still to come, so the load follows the prefill.
    with reading(own_pega, prompt(LENGTH)) as (p, d):
        side = d.ranks[0].worker._worker
        side.mover = HoldsBack(side.mover, waited)
        run_together([p, d])
        d.answers["x"].check()
        assert d.answers["x"].loaded == LENGTH - 1
    assert waited


def test_no_step_lasts_while_another_request_needs_it(own_pega, prompt):
    with reading(own_pega, prompt(LENGTH)) as (p, d):
        side = d.connector._scheduler
        (follower,) = [one for one in side.loads.under_way() if one.patience_s]
        follower.awaits_prefill = False  # as once its last block is computed
        assert side._loads_end_soon()
        d.add("other", prompt(40), 20)
        d.run(lambda: "other" in side._states)
        follower.awaits_prefill = False
        assert not side._loads_end_soon()
        run_together([p, d])
        d.answers["x"].check()
        d.answers["other"].check()


def test_a_request_that_an_engine_receives_is_noted(pega, monkeypatch):
    noted = Arrivals()
    monkeypatch.setattr(scheduler_side, "ARRIVALS", noted)
    with engines(pega.address) as (_, d):
        d.connector.request_arrives()
        assert os.eventfd_read(noted._event) == 1


def test_two_waits_for_one_arrival_both_end(here):
    """The later one finds that the other one has read it."""
    with pipe() as (read, _):
        threads = [threading.Thread(target=here.wait, args=(read,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            here.note()
        for thread in threads:
            thread.join()
