"""Time on the scheduler's side, with a clock of the test."""

import pytest

from pegaflow.engine.config import read_settings
from pegaflow.engine.rates import Computing, LoadPolicy
from pegaflow.vllm.loads import COMING_PATIENCE_S, REPORT_MARGIN_S, Loads
from pegaflow.vllm.lookups import STEP_PATIENCE_S, Lookups
from pegaflow.vllm.messages import Outcome, WorkerReport
from pegaflow.vllm.metrics import Counts
from pegaflow.vllm.plans.one_kind import OneKind
from pegaflow.vllm.requests import Claim, RequestState
from tests.python.test_connector_keys import FakeRequest

BLOCK = 16
RULES = OneKind(BLOCK, BLOCK, 1_000_000)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class SlowServer:
    """Responds when the test says so; waiting advances the clock by the allowed time."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.answers: dict[int, tuple[int, bool, bytes, int]] = {}
        self.asked: list[str] = []
        self.ended: list[bytes] = []
        self.forgotten: list[int] = []
        self.waited_s = 0.0

    def lookup(self, keys: bytes, key_bytes: int) -> int:
        self.asked.append("lookup")
        return len(self.asked)

    def claim(
        self, keys: bytes, key_bytes: int, compute_delay_s: float, compute_block_s: float
    ) -> int:
        self.asked.append("claim")
        return len(self.asked)

    def take(self, ticket: int, patience_s: float = 0.0):
        if ticket not in self.answers:
            self.clock.now += patience_s
            self.waited_s += patience_s
            return None
        return self.answers.pop(ticket)

    def take_claim(self, ticket: int, patience_s: float = 0.0):
        answer = self.take(ticket, patience_s)
        return answer if answer is None or len(answer) == 6 else (*answer, 0.0, 0.0)

    def forget(self, ticket: int) -> None:
        self.forgotten.append(ticket)

    def unclaim(self, token: bytes) -> None:
        self.ended.append(token)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def loads(clock) -> Loads:
    return Loads(
        ranks=1,
        block_bytes=1_000_000,
        patience_s=0.25,
        bytes_per_second=1e9,
        counts=Counts(),
        clock=clock,
    )


@pytest.fixture
def server(clock) -> SlowServer:
    return SlowServer(clock)


@pytest.fixture
def policy(clock, loads) -> LoadPolicy:
    return LoadPolicy(
        always=True,
        block_size=BLOCK,
        most_tokens=8192,
        queued_blocks=loads.queued_blocks,
        clock=clock,
    )


@pytest.fixture
def lookups(clock, loads, policy, server) -> Lookups:
    return Lookups(
        server,
        read_settings({}, {}),
        loads,
        policy,
        rules=RULES,
        follow=True,
        counts=Counts(),
        clock=clock,
    )


@pytest.fixture
def with_drafts(clock, loads, policy, server) -> Lookups:
    return Lookups(
        server,
        read_settings({}, {}),
        loads,
        policy,
        rules=OneKind(BLOCK, BLOCK, 1_000_000, drafts_have_kv=True, last_block_is_proof=True),
        follow=True,
        counts=Counts(),
        clock=clock,
    )


def state(blocks: int = 10) -> RequestState:
    request = FakeRequest(blocks * BLOCK, unit=BLOCK)
    request.request_id = f"r{id(request)}"
    return state_of(request)


def state_of(request: FakeRequest) -> RequestState:
    chain = RULES.chain(request, None, b"")
    return RequestState(request, chain, 0, RULES.progress(request, chain))


def begin(loads: Loads, of: RequestState, blocks: int = 10):
    claim = Claim(first=0, ticket=None, asked_at=0.0, blocks=blocks, token=b"t" * 16)
    load = loads.begin(of, claim, 0, range(1, blocks + 1))
    loads.mark_handed_out([load])
    return load


# ---- lookups


def test_a_miss_is_valid_for_100_ms(clock, lookups, server):
    one = state()
    lookups.ask(one)
    server.answers[1] = (0, True, b"", 0)
    assert lookups.blocks_beyond(one, 0) == 0

    clock.now += 0.099
    assert lookups.blocks_beyond(one, 0) == 0
    assert server.asked == ["lookup"]

    clock.now += 0.002
    server.answers[2] = (10, True, b"t" * 16, 0)
    assert lookups.blocks_beyond(one, 0) == 10
    assert server.asked == ["lookup", "claim"]


def test_blocks_of_another_node_are_offered_and_still_saved_here(loads, lookups, server):
    one = state()
    lookups.ask(one)
    server.answers[1] = (10, True, b"", 7)
    server.answers[2] = (10, True, b"t" * 16, 6)

    assert lookups.blocks_beyond(one, 0) == 10
    # Four of ten blocks are here; the others may not arrive.
    assert one.progress.next_save == 4
    assert one.claim.coming == 6


def test_a_load_of_blocks_in_flight_has_a_later_deadline_than_one_of_local_blocks(clock, loads):
    here, coming = state(), state()
    claim = Claim(first=0, ticket=None, asked_at=0.0, blocks=10, coming=4, token=b"t" * 16)
    first = loads.begin(here, claim, 0, list(range(6)))
    second = loads.begin(coming, claim, 0, list(range(7)))
    assert (first.coming, second.coming) == (False, True)
    loads.mark_handed_out([first, second])

    assert second.deadline - first.deadline >= COMING_PATIENCE_S


def test_an_old_miss_is_not_used(clock, lookups, server):
    # The request waited in vLLM's queue while another one saved the prefix.
    one = state()
    lookups.ask(one)
    server.answers[1] = (0, True, b"", 0)
    clock.now += 5.0
    server.answers[2] = (4, True, b"t" * 16, 0)

    assert lookups.blocks_beyond(one, 0) == 4


def test_a_lookup_is_waited_for_1_ms_and_abandoned_after_20(clock, lookups, server):
    one = state()
    assert lookups.blocks_beyond(one, 0) is None
    assert server.waited_s == pytest.approx(0.001)

    for _ in range(18):
        clock.now += 0.001
        lookups.new_step()
        assert lookups.blocks_beyond(one, 0) is None
    assert server.waited_s == pytest.approx(0.001), "later steps do not wait"

    clock.now += 0.002
    assert lookups.blocks_beyond(one, 0) == 0
    assert server.forgotten == [1]


def test_a_response_is_used_however_long_the_step_in_between_took(clock, lookups, server):
    one = state()
    assert lookups.blocks_beyond(one, 0) is None
    clock.now += 10.0
    server.answers[1] = (6, True, b"t" * 16, 0)

    assert lookups.blocks_beyond(one, 0) == 6


def test_the_total_wait_of_one_step_is_bounded(lookups, server):
    for _ in range(64):
        assert lookups.blocks_beyond(state(), 0) is None
    assert server.waited_s == pytest.approx(STEP_PATIENCE_S)

    lookups.new_step()
    assert lookups.blocks_beyond(state(), 0) is None
    assert server.waited_s == pytest.approx(STEP_PATIENCE_S + 0.001)


def test_an_offer_follows_the_present_state_of_vllms_own_cache(lookups, server):
    one = state()
    server.answers[1] = (6, True, b"t" * 16, 0)
    assert lookups.blocks_beyond(one, 2) == 6
    assert lookups.blocks_beyond(one, 2) == 6, "a second lookup, the same result"
    assert lookups.blocks_beyond(one, 5) == 3, "its own cache grew"
    assert server.asked == ["claim"]

    server.answers[2] = (8, True, b"u" * 16, 0)
    assert lookups.blocks_beyond(one, 1) == 0, "it shrank: the claim begins too late"
    assert server.ended == [b"t" * 16]


def test_a_server_without_the_worker_is_a_miss(lookups, server):
    one = state()
    server.answers[1] = (0, False, b"", 0)
    assert lookups.blocks_beyond(one, 0) == 0
    assert lookups._counts.data["misses"] == {"not_registered": 1}


# ---- loads


def test_a_load_is_abandoned_once_after_its_deadline(clock, loads):
    load = begin(loads, state())
    bytes_s = 10 * 1_000_000 / 1e9
    clock.now += 0.25 + bytes_s + REPORT_MARGIN_S - 0.001
    assert loads.take_ends() == ([], [])
    assert loads.holds_up(load, clock())

    clock.now += 0.002
    assert not loads.holds_up(load, clock())
    assert loads.take_ends() == ([load.id], [])
    assert loads.take_ends() == ([], []), "said once"
    assert loads.under_way() == [load], "and still to be reported"


def test_a_deadline_counts_the_bytes_queued_before(clock, loads):
    begin(loads, state(1000), 1000)
    second = begin(loads, state())
    assert second.deadline - clock() == pytest.approx(0.25 + 1.0 + 0.01 + REPORT_MARGIN_S)


def test_a_load_that_follows_its_prefill_has_the_time_of_the_wait_and_delays_no_other(clock, loads):
    follower = loads.begin_following(
        state(), 0, [b"k" * 32] * 500, list(range(500)), full_stop=500, patience_s=30.0
    )
    other = begin(loads, state())
    assert follower.deadline - clock() == pytest.approx(30.0 + 0.25 + 0.5 + REPORT_MARGIN_S)
    assert other.deadline - clock() == pytest.approx(0.25 + 0.01 + REPORT_MARGIN_S)
    assert loads.queued_blocks() == 10

    order = loads.order(follower, Computing(0.1, 0.1))

    assert (order.keys, order.key_bytes, order.patience_s) == (b"k" * 32 * 500, 32, 30.0)
    assert order.computing is None


def test_a_request_that_waited_for_a_late_load_sends_its_own_lookup(clock, loads, lookups, server):
    leader = state()
    load = begin(loads, leader)
    follower = state_of(leader.request)
    assert lookups.blocks_beyond(follower, 0) is None
    assert follower.followed is load
    clock.now += 1.0
    assert lookups.blocks_beyond(follower, 0) is None
    assert server.asked == []

    clock.now += 1.0
    server.answers[1] = (10, True, b"t" * 16, 0)
    assert lookups.blocks_beyond(follower, 0) == 10


def test_a_request_that_waited_for_a_failed_load_waits_for_no_other(loads, lookups, server):
    leader = state()
    load = begin(loads, leader)
    followers = [state_of(leader.request) for _ in range(2)]
    for follower in followers:
        assert lookups.blocks_beyond(follower, 0) is None
    loads.report({load.id: Outcome(failed=10, error="gone", first_failed=0)})
    begin(loads, followers[0])

    server.answers[1] = (10, True, b"t" * 16, 0)
    assert lookups.blocks_beyond(followers[1], 0) == 10


def test_a_load_of_other_blocks_is_no_reason_to_wait(loads, lookups, server):
    begin(loads, state(), 4)
    other = state()
    other.request.block_hashes = [bytes(32)] * 10
    server.answers[1] = (10, True, b"t" * 16, 0)

    assert lookups.blocks_beyond(other, 0) == 10


# ---- reports of several ranks


def test_a_load_ends_when_every_rank_has_reported_it(clock):
    loads = Loads(
        ranks=2,
        block_bytes=1,
        patience_s=1,
        bytes_per_second=1e9,
        counts=Counts(),
        clock=clock,
    )
    of = state()
    load = begin(loads, of)

    assert loads.report({load.id: Outcome(blocks=10, bytes=5)}) == []
    bad = Outcome(blocks=7, failed=3, bytes=4, error="timeout", first_failed=7)
    assert loads.report({load.id: bad}) == [load]

    assert of.load_failed
    assert of.progress.next_save == 0
    assert loads._counts.data["loaded_bytes"] == {"": 9}
    assert loads._counts.data["load_failures"] == {"timeout": 1}


def test_what_lies_behind_a_failed_part_is_saved_again_however_it_ends(loads):
    of = state()
    of.progress.found(10)
    failed, behind = begin(loads, of, 5), begin(loads, of)
    bad = Outcome(blocks=3, failed=2, error="timeout", first_failed=3)

    loads.report({failed.id: bad})
    loads.report({behind.id: Outcome(blocks=10)})

    assert of.progress.next_save == 3


def test_reports_of_ranks_are_merged_into_the_worst_one():
    first = WorkerReport(saves={1: Outcome(blocks=4)}, loads={7: Outcome(blocks=9)})
    second = WorkerReport(
        saves={1: Outcome(blocks=3, failed=1, error="gone"), 2: Outcome(blocks=1)},
        loads={7: Outcome(blocks=5, failed=4, error="timeout", first_failed=2)},
    )
    merged = first.aggregate(second)

    assert merged.saves[1] == Outcome(ranks=2, blocks=3, failed=1, error="gone")
    assert merged.saves[2].ranks == 1
    assert merged.loads[7].first_failed == 2
    assert merged.loads[7].error == "timeout"
    assert merged
    assert not WorkerReport()


# ---- a last block that only proves the one before it


def test_with_drafts_the_last_cached_block_is_claimed_and_not_offered(with_drafts, server):
    one = state()
    server.answers[1] = (7, True, b"t" * 16, 2)
    assert with_drafts.blocks_beyond(one, 0) == 6
    assert (one.claim.blocks, one.claim.coming) == (6, 1)
    assert one.progress.next_save == 5, (
        "the block of the proof may be of another node, and is saved"
    )


def test_a_claim_of_a_proof_alone_is_released(with_drafts, server):
    one = state()
    server.answers[1] = (1, True, b"t" * 16, 0)
    assert with_drafts.blocks_beyond(one, 0) == 0
    assert server.ended == [b"t" * 16]


def test_with_drafts_vllm_s_own_hit_may_make_a_prompt_too_short(with_drafts, server):
    assert with_drafts.is_worth_asking(state(), 7)
    assert not with_drafts.is_worth_asking(state(), 8), "one block would be loaded, two are wanted"
