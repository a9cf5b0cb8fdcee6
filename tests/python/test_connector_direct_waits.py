"""When a request begins to load that came with its prefill, and how long it waits for the end, with
a server that the test plays."""

from types import SimpleNamespace
from typing import Any

import pytest

from pegaflow import _native
from pegaflow.vllm.chunked import ChunkedLoad, ChunkedLoads
from pegaflow.vllm.early import EarlyWaits, SaveWatch
from pegaflow.vllm.handover import Handover
from pegaflow.vllm.requests import RequestState
from tests.python.test_connector_deadlines import Clock, state

PLACE = Handover(b"n" * 16, b"s" * 16, job=5, tokens=0, wait_s=30.0)
BLOCKS = 10


class Server:
    """Answers questions about the cache from sets of blocks, and waits for saves on command."""

    def __init__(self, of: RequestState, clock: Clock) -> None:
        self.clock = clock
        self.keys = of.chain.keys(0, BLOCKS)
        self.sealed: set[int] = set()
        self.offered: set[int] = set()
        self.over, self.begun = 4, 4  #: The last jobs.
        self.error: Exception | None = None  #: The answer about jobs that have begun.
        self.lookups: list[list[int]] = []
        self.nodes: set[bytes] = set()  #: Those that lookups have named.
        self.waits: list[tuple[int, bool, float]] = []

    def await_job(self, node, scheduler, number, patience_s, begun=False) -> int:
        self.waits.append((number, begun, self.clock() + patience_s))
        return len(self.waits) - 1

    def take_wait(self, ticket: int) -> int | None:
        number, begun, deadline = self.waits[ticket]
        if begun and self.error is not None:
            raise self.error
        reached = self.begun if begun else self.over
        if reached >= number:
            return reached
        if self.clock() >= deadline:
            raise _native.Timeout("no such job")
        return None

    def lookup(self, keys: bytes, key_bytes: int, prefill_node: bytes = b"") -> int:
        self.nodes.add(prefill_node)
        asked = [keys[i : i + key_bytes] for i in range(0, len(keys), key_bytes)]
        self.lookups.append([self.keys.index(key) for key in asked])
        return len(self.lookups) - 1

    def take(self, ticket: int, patience_s: float) -> Any:
        asked = self.lookups[ticket]
        found = self._leading(asked, self.sealed)
        return found, True, b"", 0, self._leading(asked[found:], self.offered)

    @staticmethod
    def _leading(asked: list[int], there: set[int]) -> int:
        return next((i for i, block in enumerate(asked) if block not in there), len(asked))

    def forget(self, ticket: int) -> None: ...


class Waiting:
    def __init__(self, direct: bool = True) -> None:
        self.state = state(BLOCKS)
        self.clock = Clock()
        self.server = Server(self.state, self.clock)
        self.waits = EarlyWaits(self.server, patience_s=2.0, clock=self.clock, direct=direct)
        self.waits.block_limit = 100
        assert self.waits.begin(self.state, PLACE)

    def polls(self, first: int = 1) -> str:
        """The result, if there is one in many steps."""
        for _ in range(20):
            self.clock.now += 0.003
            if result := self.waits.poll(self.state, first):
                return result
        return ""


@pytest.fixture
def waiting() -> Waiting:
    made = Waiting()
    assert made.polls() == ""
    return made


def test_a_prefill_has_begun_when_its_first_missing_block_is_offered(waiting):
    waiting.server.offered, waiting.server.begun = {0, 1, 2}, 5
    assert waiting.polls() == "begun"
    assert waiting.state.is_direct
    assert not waiting.state.early.is_ending


@pytest.mark.parametrize("direct", [True, False])
def test_a_lookup_names_the_prefill_engines_node_only_with_a_direct_group(direct):
    waiting = Waiting(direct=direct)
    waiting.polls()
    assert waiting.server.nodes == {PLACE.node if direct else b""}


def test_a_block_may_be_offered_at_the_requests_arrival():
    waiting = Waiting()
    waiting.server.sealed, waiting.server.offered = {0}, {1, 2}
    assert waiting.polls() == "begun"
    assert waiting.state.is_direct
    assert len(waiting.server.lookups) == 1


def test_a_save_may_begin_between_the_first_two_lookups():
    waiting = Waiting()
    assert waiting.waits.poll(waiting.state, 1) == ""
    assert len(waiting.server.lookups) == 1
    waiting.server.offered, waiting.server.begun = {0, 1, 2}, 5
    assert waiting.polls() == "begun"
    assert waiting.clock() < waiting.state.early.deadline - 29.0


def test_blocks_that_are_too_few_to_be_loaded_do_not_begin_it():
    waiting = Waiting()
    waiting.server.offered = {0}
    assert waiting.polls(3) == ""
    waiting.server.offered, waiting.server.begun = {0, 1, 2, 3}, 5
    assert waiting.polls(3) == "begun"


def test_a_block_behind_a_missing_one_does_not_begin_it(waiting):
    waiting.server.offered, waiting.server.begun = {9}, 5
    assert waiting.polls() == ""
    assert not waiting.state.is_direct


def test_the_last_block_is_known_to_be_computed_when_it_is_offered(waiting):
    waiting.server.offered, waiting.server.begun = {0, 1, 2}, 5
    assert waiting.polls() == "begun"
    waiting.server.offered, waiting.server.begun = set(range(BLOCKS)), 6
    assert waiting.polls() == ""
    assert waiting.state.early.is_ending
    assert waiting.server.lookups[-1] == [9]
    waiting.server.sealed, waiting.server.over = set(range(BLOCKS)), 6
    assert waiting.polls() == "over"


def test_a_saved_block_begins_a_load_that_follows_an_engine_of_this_node(waiting):
    waiting.server.sealed, waiting.server.begun, waiting.server.over = {0, 1, 2}, 5, 5
    assert waiting.polls() == "begun"
    assert waiting.state.is_direct


def test_a_saved_block_of_an_engine_elsewhere_begins_a_load_by_claims():
    waiting = Waiting()
    waiting.server.error = _native.Refused("another node")
    assert waiting.polls() == ""
    waiting.server.sealed, waiting.server.over = {0, 1, 2}, 5
    assert waiting.polls() == "begun"
    assert not waiting.state.is_direct


def test_a_load_by_claims_goes_on_directly_when_a_block_is_offered():
    waiting = Waiting()
    waiting.server.error = _native.Refused("another node")
    assert waiting.polls() == ""
    waiting.server.sealed, waiting.server.over = {0, 1, 2}, 5
    assert waiting.polls() == "begun"
    waiting.server.offered, waiting.server.over = {3, 4}, 6
    assert waiting.polls(3) == ""
    assert waiting.state.is_direct


def test_a_request_without_room_waits_for_the_whole_prompt(waiting):
    waiting.waits.block_limit = BLOCKS
    waiting.server.offered, waiting.server.begun = {0, 1, 2}, 5
    assert waiting.polls() == ""
    assert not waiting.state.is_direct
    waiting.server.sealed, waiting.server.over = set(range(BLOCKS)), 5
    assert waiting.polls() == "over"


def test_the_end_of_the_engine_ends_the_wait_and_that_of_its_begun_jobs_does_not(waiting):
    waiting.server.error = _native.Refused("planted")
    assert waiting.polls() == ""
    assert waiting.polls() == ""
    waiting.clock.now += 31.0
    assert waiting.polls() == "timeout"


def test_without_a_group_no_begun_job_is_asked_for():
    waiting = Waiting(direct=False)
    waiting.server.offered, waiting.server.begun = set(range(BLOCKS)), 6
    assert waiting.polls() == ""
    assert not any(begun for _, begun, _ in waiting.server.waits)
    assert isinstance(waiting.state.early.watch, SaveWatch)
    waiting.server.sealed, waiting.server.over = {0, 1, 2}, 5
    assert waiting.polls() == "begun"
    assert not waiting.state.is_direct


@pytest.mark.parametrize(
    ("node", "size", "claims", "ends_at"),
    [
        (b"there", 0, True, 102.0),
        (b"there", 13e9, True, 115.0),
        (b"here", 13e9, True, 100.25),
        (b"there", 13e9, False, 100.25),
    ],
    ids=["a small one", "a large one", "in this node's pool", "no more can come"],
)
def test_a_load_from_another_nodes_pool_gets_the_time_that_its_bytes_need(
    node, size, claims, ends_at
):
    claimed = []
    lookups = SimpleNamespace(claim_next=lambda state, start: claimed.append(start))
    loads = ChunkedLoads(
        waits=None,
        lookups=lookups,
        loads=None,
        unit_tokens=16,
        counts=None,
        unclaim=None,
        node=lambda: b"here",
        clock=lambda: 100.0,
        bytes_per_second=1e9,
    )
    follower = SimpleNamespace(node=node, bytes=size, start=7)
    chunked = ChunkedLoad(1, None, 0, 1, [], 0, follower=follower)
    loads._give_time(chunked, claims=claims)
    assert chunked.ends_at == ends_at
    assert claimed == ([7] if node == b"here" else [])
