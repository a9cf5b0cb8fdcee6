"""How a decode engine finds the present save of a prefill engine if it knows one of long ago.

Real servers, workers and sessions; the engines are the test.
"""

import time
import types
from typing import Any

import pytest

from pegaflow import _native
from pegaflow.vllm.early import SaveWatch, WatchOfBoth
from pegaflow.vllm.handover import Handover
from tests.python.test_connector_nodes import nodes  # noqa: F401
from tests.python.test_native import BLOCKS, HANG_S, PATIENT, Memory, next_report, ready
from tests.support.vllm_server import PegaServer

#: The number of saves between the one that a router knows and the present one.
LATE = 1000
PATIENCE_S = 10.0


class Prefill:
    """An engine that saves one block with each job."""

    def __init__(self, server: PegaServer) -> None:
        self.name = _native.random_id()
        self._jobs = 0
        self._memory = Memory()
        self._session = _native.CacheSession(
            str(server.socket), "prefill", scheduler=self.name, **PATIENT
        )
        self._mover = _native.Mover(
            str(server.socket),
            "prefill",
            _native.HostDevice(),
            self._memory.segments,
            BLOCKS,
            [("model", "watch")],
            **PATIENT,
        )
        ready(self._session)
        ready(self._mover)
        self.node = bytes.fromhex(self._session.status()["server"])

    def save(self, jobs: int = 1) -> None:
        """All of them are over then."""
        for _ in range(jobs):
            self._jobs += 1
            key = self.name + self._jobs.to_bytes(16, "little")
            self._mover.save(self.name, self._jobs, key, len(key), range(1))
            assert next_report(self._mover).blocks == 1

    def close(self) -> None:
        self._mover.close()
        self._session.close()


class Decode:
    """A decode engine's session, and the jobs that it waits for."""

    def __init__(self, server: PegaServer) -> None:
        self.asked: list[tuple[int, bool, float]] = []
        self._session = _native.CacheSession(
            str(server.socket), "decode", scheduler=_native.random_id(), **PATIENT
        )
        ready(self._session)

    def await_job(
        self, node: bytes, scheduler: bytes, number: int, patience_s: float, begun: bool = False
    ) -> int:
        self.asked.append((number, begun, patience_s))
        return self._session.await_job(node, scheduler, number, patience_s, begun)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def follow(self, watch: SaveWatch | WatchOfBoth, questions: int) -> None:
        """Until so many have been asked."""
        while True:
            seen = self.events()
            watch.poll()
            assert watch.ended == ""
            if len(self.asked) >= questions:
                return
            assert self.await_event(seen, HANG_S), "there is no answer"


def watch_of(
    kind: type[SaveWatch | WatchOfBoth], decode: Decode, prefill: Prefill
) -> SaveWatch | WatchOfBoth:
    """One that knows the first job of the prefill engine."""
    place = Handover(prefill.node, prefill.name, job=1, tokens=0, wait_s=30.0)
    return kind(decode, place, patience_s=PATIENCE_S, clock=time.monotonic)


@pytest.fixture
def closing():
    opened: list[Any] = []
    yield lambda made: opened.append(made) or made
    for one in reversed(opened):
        one.close()


def test_a_watch_that_is_a_thousand_saves_late_is_at_the_present_with_its_second_question(
    pega, closing
):
    prefill, decode = closing(Prefill(pega)), closing(Decode(pega))
    prefill.save(LATE)
    watch = closing(watch_of(WatchOfBoth, decode, prefill))

    decode.follow(watch, 4)

    assert sorted(decode.asked) == [
        (number, begun, PATIENCE_S) for number in (1, LATE + 1) for begun in (False, True)
    ]
    prefill.save()
    decode.follow(watch, 6)
    assert sorted(decode.asked[4:]) == [
        (LATE + 2, False, PATIENCE_S),
        (LATE + 2, True, PATIENCE_S),
    ]


def test_a_watch_of_another_node_is_at_the_present_with_its_second_question(
    nodes,  # noqa: F811
    closing,
):
    prefill, decode = closing(Prefill(nodes.p)), closing(Decode(nodes.d))
    prefill.save(LATE)
    watch = closing(watch_of(SaveWatch, decode, prefill))

    decode.follow(watch, 2)

    assert decode.asked == [(1, False, PATIENCE_S), (LATE + 1, False, PATIENCE_S)]
    prefill.save()
    decode.follow(watch, 3)
    assert decode.asked[2:] == [(LATE + 2, False, PATIENCE_S)]


def test_a_watch_of_a_prefill_engine_that_has_saved_nothing_waits_for_its_first_save(pega, closing):
    prefill, decode = closing(Prefill(pega)), closing(Decode(pega))
    watch = closing(watch_of(SaveWatch, decode, prefill))
    decode.follow(watch, 1)

    prefill.save()

    decode.follow(watch, 2)
    assert [number for number, *_ in decode.asked] == [1, 2]


def test_a_number_that_no_engine_reaches_ends_no_watch():
    """A question has 64 bits, and the number comes from another process."""
    asked = []

    class Session:
        def await_job(self, server: bytes, scheduler: bytes, number: int, patience_s: float) -> int:
            assert number < 1 << 63
            asked.append(number)
            return len(asked)

        def take_wait(self, ticket: int) -> int:
            return (1 << 64) - 1

    known = types.SimpleNamespace(node=bytes(16), scheduler=bytes(16), job=1)
    watch = SaveWatch(Session(), known, patience_s=1.0, clock=lambda: 0.0)
    for _ in range(3):
        watch.poll()
    assert len(asked) == 3 and not watch.ended
