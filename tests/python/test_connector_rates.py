"""Load or compute: the measured rates, the predictions, and the offers."""

import pytest

from pegaflow.engine.config import read_settings
from pegaflow.engine.rates import ComputeRate, CopyRate, LoadPolicy
from pegaflow.vllm.loads import Loads
from pegaflow.vllm.lookups import Lookups
from pegaflow.vllm.messages import Outcome, WorkerReport
from pegaflow.vllm.metrics import Counts
from tests.python.harness import BLOCK, Engine
from tests.python.test_connector_deadlines import RULES, Clock, SlowServer, begin, state

TOKEN = b"t" * 16


class Side:
    """The parts of the scheduler's side, with a server that the test plays."""

    def __init__(self, policy: str = "auto") -> None:
        self.clock = Clock()
        self.counts = Counts()
        self.server = SlowServer(self.clock)
        self.loads = Loads(
            ranks=1,
            block_bytes=1_000_000,
            patience_s=0.25,
            bytes_per_second=1e9,
            counts=self.counts,
            clock=self.clock,
        )
        self.policy = LoadPolicy(
            always=policy == "always",
            block_size=BLOCK,
            most_tokens=8192,
            queued_blocks=self.loads.queued_blocks,
            clock=self.clock,
        )
        self.lookups = Lookups(
            self.server,
            read_settings({}, {}),
            self.loads,
            self.policy,
            rules=RULES,
            follow=True,
            counts=self.counts,
            clock=self.clock,
        )

    def teach(self, tokens_per_second: float) -> None:
        """Teaches the side that the engine computes at this rate."""
        step(self.policy.compute, self.clock, 4096, 4096 / tokens_per_second)

    def slower(self, blocks: int, coming: int, last_s: float) -> str:
        """Sets a source that makes loads slower than computing from now on."""
        return self.policy.slower_source(blocks, coming, last_s, self.policy.computing(blocks))


@pytest.fixture
def side() -> Side:
    return Side()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def compute(clock) -> ComputeRate:
    return ComputeRate(most_tokens=8192, clock=clock)


def step(compute: ComputeRate, clock: Clock, prompt: int, seconds: float, others: int = 0) -> int:
    """One step that computes this many tokens of a prompt, and decodes for other requests."""
    if prompt:
        compute.begin("prompt", prompt)
    scheduled = {"prompt": prompt} | {f"d{i}": 1 for i in range(others)}
    number = compute.plan(scheduled, prompt + others)
    clock.now += seconds
    if number:
        compute.ended(number)
    return number


# ---- measurements


def test_steps_with_prompts_measure_the_rate_of_computing(compute, clock):
    assert compute.tokens_per_second(1000) == 0
    step(compute, clock, 4096, 0.1)
    assert compute.tokens_per_second(8000) == pytest.approx(40960)
    assert compute.backlog == 0


def test_steps_that_only_decode_are_not_measured(compute, clock):
    step(compute, clock, 4096, 0.1)
    for _ in range(1000):
        assert step(compute, clock, 0, 0.02, others=200) == 0
        assert step(compute, clock, 32, 0.02, others=200) == 0
    assert compute.tokens_per_second(8000) == pytest.approx(40960)


def test_idle_time_is_not_part_of_a_step(compute, clock):
    for _ in range(5):
        clock.now += 10.0
        step(compute, clock, 4096, 0.1)
    assert compute.tokens_per_second(8000) == pytest.approx(40960)


def test_steps_that_are_planned_ahead_count_from_the_end_of_the_previous_one(compute, clock):
    compute.begin("prompt", 5 * 4096)
    numbers = [compute.plan({"prompt": 4096}, 4096) for _ in range(2)]
    for _ in range(3):
        clock.now += 0.1
        compute.ended(numbers.pop(0))
        numbers.append(compute.plan({"prompt": 4096}, 4096))
    assert compute.tokens_per_second(8000) == pytest.approx(40960)


def test_small_steps_do_not_lower_the_rate_of_long_prompts(compute, clock):
    step(compute, clock, 4096, 0.1)
    for _ in range(50):
        step(compute, clock, 100, 0.02)
    assert compute.tokens_per_second(8000) == pytest.approx(40960)
    assert compute.tokens_per_second(100) == pytest.approx(5000)


def test_at_most_half_of_a_prompt_is_computed_to_measure_the_rate(compute, clock):
    assert [compute.unknown(tokens) for tokens in (100, 200, 1024, 3000, 8192)] == [
        0,
        64,
        512,
        512,
        2048,
    ]
    step(compute, clock, 600, 0.1)
    assert compute.unknown(1024) == 0, "steps of that size are known"
    assert compute.unknown(8192) == 2048
    step(compute, clock, 4096, 0.1)
    assert [compute.unknown(tokens) for tokens in (200, 1024, 8192)] == [0, 0, 0]


def test_prompts_in_progress_are_computed_first(compute, clock):
    compute.begin("a", 10_000)
    compute.begin("b", 5_000)
    compute.begin("loaded", 1)
    assert compute.backlog == 15_000
    compute.plan({"a": 8_000}, 8_000)
    assert compute.backlog == 7_000
    compute.end("b")
    compute.end("b")
    compute.plan({"a": 1_999}, 1_999)
    assert compute.backlog == 1
    compute.plan({"a": 2}, 2)
    assert compute.backlog == 0


def test_the_slowest_rank_determines_the_rate_of_copies():
    copies = CopyRate()
    assert copies.block_s == 0
    both = WorkerReport(copied={0: (100, 0.1)}).aggregate(WorkerReport(copied={1: (100, 0.4)}))
    copies.report(both.copied)
    assert copies.block_s == pytest.approx(0.004)


def test_a_rank_that_has_copied_no_block_has_no_rate():
    copies = CopyRate()
    copies.report({0: (0.0, 0.1)})
    assert copies.block_s == 0
    copies.report({1: (100, 0.4)})
    assert copies.block_s == pytest.approx(0.004)


# ---- predictions


def test_no_load_is_declined_while_a_rate_is_unknown(side):
    assert side.slower(100, 50, 1e3) == ""
    side.teach(1e9)
    assert side.slower(100, 0, 0.0) == ""


def test_the_policy_always_declines_no_load():
    always = Side("always")
    always.teach(1e9)
    always.policy.copies.report({0: (1, 10.0)})
    assert always.slower(100, 50, 1e3) == ""
    assert always.policy.computing(100).block_s == 0


@pytest.mark.parametrize(("network", "source"), [(3.4e9, "peer"), (40e9, "")])
def test_ten_thousand_tokens_of_an_8b_model_on_an_h200(side, network, source):
    """128 KiB a token: 1.31 GB, in 385 ms over sockets; 10,000 tokens are computed in 284 ms."""
    side.teach(10_000 / 0.284)
    side.policy.copies.report({0: (1000, 1000 * BLOCK * (128 << 10) / 50e9)})
    assert side.slower(625, 625, 10_000 * (128 << 10) / network) == source


def test_loads_in_flight_are_copied_first(side):
    side.teach(16_000)  # a block in 1 ms
    side.policy.copies.report({0: (1000, 0.5)})
    assert side.slower(100, 0, 0.0) == ""
    begin(side.loads, state(100), 100)
    assert side.slower(100, 0, 0.0) == "pool"
    side.policy.compute.begin("another", 1600)
    assert side.slower(100, 0, 0.0) == "", "that is computed first"


# ---- offers


def test_a_claim_carries_the_time_of_computing(side):
    side.teach(16_000)
    asked = []
    claim = side.server.claim
    side.server.claim = lambda *arguments: asked.append(arguments[2:]) or claim(*arguments)
    assert side.lookups.blocks_beyond(state(), 0) is None
    assert asked == [(0.0, pytest.approx(0.001))]


def test_late_blocks_are_not_offered_and_blocks_in_the_pool_are(side):
    side.teach(16_000)
    one = state()
    side.server.answers[1] = (10, True, TOKEN, 6, 0.001, 0.5)
    assert side.lookups.blocks_beyond(one, 0) == 4
    assert side.lookups._counts.data["declined"] == {"peer": 1}
    assert side.lookups.blocks_beyond(one, 0) == 4, "decided once"
    assert side.server.ended == []


def test_a_claim_whose_blocks_are_all_late_is_released(side):
    side.teach(16_000)
    side.server.answers[1] = (10, True, TOKEN, 10, 0.001, 0.5)
    assert side.lookups.blocks_beyond(state(), 0) == 0
    assert side.lookups._counts.data["declined"] == {"peer": 1}
    assert side.server.ended == [TOKEN], "the server would keep its blocks until they expire"


def test_waiting_prompts_are_compared_with_computing_all_of_them(side):
    side.teach(16_000)
    one, two = state(), state()
    # Each is computed in 10 ms, and the second one arrives 15 ms after the lookup.
    assert side.lookups.blocks_beyond(one, 0) is None
    assert side.lookups.blocks_beyond(two, 0) is None
    side.clock.now = two.claim.asked_at
    side.server.answers[1] = (10, True, TOKEN, 10, 0.001, 0.008)
    side.server.answers[2] = (10, True, TOKEN, 10, 0.001, 0.015)
    assert side.lookups.blocks_beyond(one, 0) == 10
    assert side.lookups.blocks_beyond(two, 0) == 10, "the first one would be computed before it"
    load = side.loads.begin(two, two.claim, 0, range(1, 11))
    computing = side.loads.order(load, side.policy.held_to(10)).computing
    assert computing == (pytest.approx(0.010), pytest.approx(0.001))
    side.clock.now += 0.006
    computing = side.loads.order(load, side.policy.held_to(10)).computing
    assert computing == (pytest.approx(0.004), pytest.approx(0.001))


def test_a_late_response_does_not_make_its_blocks_late(side):
    side.teach(16_000)
    one = state()
    assert side.lookups.blocks_beyond(one, 0) is None
    side.clock.now = one.claim.asked_at + 0.050
    side.server.answers[1] = (10, True, TOKEN, 10, 0.001, 0.055)
    assert side.lookups.blocks_beyond(one, 0) == 10, "they arrive in 5 ms, and are computed in 10"


def test_an_engine_without_a_rate_computes_a_part_of_a_cached_prompt(side):
    side.server.answers[1] = (20, True, TOKEN, 20, 0.001, 0.5)
    one = state(400)
    assert side.lookups.blocks_beyond(one, 0) == 16, "64 tokens are computed"
    assert side.lookups.blocks_beyond(one, 0) == 16, "decided once"
    side.teach(16_000)
    assert side.policy.learning_blocks(20) == 0


def test_the_policy_always_computes_no_cached_block():
    always = Side("always")
    always.server.answers[1] = (20, True, TOKEN, 20, 0.001, 0.5)
    assert always.lookups.blocks_beyond(state(400), 0) == 20


def test_a_claim_with_a_slower_load_is_released_and_is_a_miss(side):
    side.teach(16_000)
    side.policy.copies.report({0: (10, 1.0)})
    side.server.answers[1] = (10, True, TOKEN, 0, 0.0, 0.0)
    assert side.lookups.blocks_beyond(state(), 0) == 0
    assert side.lookups._counts.data["declined"] == {"pool": 1}
    assert side.lookups._counts.data["misses"] == {"slower": 1}
    assert side.server.ended == [TOKEN]


def test_a_shortened_load_is_not_a_failure(side):
    of = state()
    load = begin(side.loads, of)
    cut = Outcome(blocks=4, failed=6, error="timeout", cut="stuck", first_failed=4)
    assert side.loads.report({load.id: cut}) == [load]
    assert side.loads._counts.data["load_cuts"] == {"stuck": 1}
    assert "load_failures" not in side.loads._counts.data
    assert of.load_failed, "it is not offered again"


def test_a_worker_learns_the_time_of_computing_or_that_it_is_unknown(side):
    load = begin(side.loads, state())
    assert side.loads.order(load, side.policy.held_to(10)).computing == (0.0, 0.0)
    side.teach(16_000)
    order = side.loads.order(load, side.policy.held_to(10))
    assert order.computing == (0.0, pytest.approx(0.001))


def test_with_the_policy_always_loads_are_not_compared():
    side = Side("always")
    side.teach(16_000)
    order = side.loads.order(begin(side.loads, state()), side.policy.held_to(10))
    assert order.computing is None


# ---- with vLLM's scheduler and a server


def measured(engine: Engine) -> float:
    return engine.connector._scheduler.policy.compute.tokens_per_second(256)


def test_an_engine_measures_itself_and_declines_slower_loads(pega, prompt):
    with Engine(pega.address, extra={"pegaflow.load_policy": "auto"}) as engine:
        engine.wait_ready()
        side = engine.connector._scheduler
        tokens = prompt(320)
        engine.ask("cold", tokens)
        assert measured(engine) > 0
        engine.reset_local()

        # Very fast computing and slow copies: the load does not pay.
        side.policy.copies.report({0: (1, 1e6)})
        assert engine.ask("computed", tokens).loaded == 0
        assert engine.stats["declined{pool}"] == 1
        assert engine.stats["misses{slower}"] == 1
        engine.reset_local()

        # The opposite case.
        side.policy.copies._ranks.clear()
        side.policy.compute._rates[0]._seconds = side.policy.compute._rates[1]._seconds = 1e9
        assert engine.ask("loaded", tokens).loaded == 320
        assert side.policy.copies.block_s > 0, "the worker has measured its copies"
        engine.run()
        engine.check_at_rest()
