"""--routing: conversations go where their cache is, also while parts of the fleet fail."""

from __future__ import annotations

import dataclasses
import os
import signal
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from demo.claims.routing_prefetch import PROMPTS, prefetch_hides_pull
from demo.client import Answer, complete
from demo.compare import computed_differences
from demo.expectations import full_blocks
from demo.prompts import BLOCK_TOKENS
from demo.report import Checks, Claim
from demo.routing_stage import ANSWER, Reply, RoutingStage, Turn
from demo.stage import forget_local, wait_until
from tests.support.publishing_vllm import EventProxy
from tests.support.vllm_server import RouterServer

ARMS = ("round-robin", "kv-aware")
#: The arms take turns, each with conversations of its own.
ROUNDS = 2
CONVERSATIONS, TURNS = 4, 5
#: Conversations that go on while something fails.
FEW, FEW_TURNS = 3, 5
#: Reports of cached tokens that must be within a block of their prediction.
MIN_CLOSE = 0.95
MIB = 1 << 20


@dataclasses.dataclass
class Arm:
    """The turns of all conversations of one policy; what is counted is of those after the first."""

    policy: str
    first: list[Reply] = dataclasses.field(default_factory=list)
    replies: list[Reply] = dataclasses.field(default_factory=list)
    close: int = 0  #: Reports within a block of their prediction.
    reports: int = 0

    @property
    def tokens(self) -> int:
        return sum(len(one.turn.prompt) for one in self.replies)

    @property
    def own(self) -> int:
        return sum(one.counted.own_tokens for one in self.replies)

    @property
    def loaded(self) -> int:
        return sum(one.counted.loaded_tokens for one in self.replies)

    @property
    def pulled(self) -> int:
        return sum(one.counted.pulled_bytes for one in self.replies)

    @property
    def stayed(self) -> int:
        return sum(one.stayed for one in self.replies)

    def ttft(self, share: float) -> float:
        """Seconds to the first token that ``share`` of the turns did not exceed."""
        times = sorted(one.answer.ttft_s for one in self.replies)
        return times[min(len(times) - 1, int(share * len(times)))]

    def figures(self) -> dict[str, object]:
        return {
            "turns": len(self.replies),
            "prompt_tokens": self.tokens,
            "own_tokens": self.own,
            "loaded_tokens": self.loaded,
            "pulled_bytes": self.pulled,
            "turns_where_history_was": self.stayed,
            "ttft_median_s": statistics.median(one.answer.ttft_s for one in self.replies),
            "ttft_p99_s": self.ttft(0.99),
            "reports": self.reports,
            "reports_within_a_block": self.close,
        }


def arm_table(arms: Sequence[Arm]) -> str:
    """The policies side by side."""
    lines = [
        f"  {'policy':<12} {'turns':>5} {'where history was':>18} {'own cache':>10} "
        f"{'loaded':>7} {'computed':>9} {'pulled':>9} {'TTFT p50':>9} {'p99':>7}"
    ]
    lines.append("  " + "-" * (len(lines[0]) - 2))
    for arm in arms:
        shares = (arm.own, arm.loaded, max(0, arm.tokens - arm.own - arm.loaded))
        own, loaded, computed = (f"{100 * part / arm.tokens:.0f} %" for part in shares)
        lines.append(
            f"  {arm.policy:<12} {len(arm.replies):>5} {arm.stayed:>18} {own:>10} {loaded:>7} "
            f"{computed:>9} {arm.pulled / MIB:>5.1f} MiB {1e3 * arm.ttft(0.5):>6.0f} ms "
            f"{1e3 * arm.ttft(0.99):>4.0f} ms"
        )
    lines.append("  (turns after the first; tokens of their prompts; one run, not a measurement)")
    return "\n".join(lines)


def run_routing(stage: RoutingStage) -> Iterator[Claim]:
    """The claims in order, with the servers that they need."""
    with stage.running(stage.plain):
        rounds = {
            policy: [
                stage.conversations(f"{policy}, round {number}", CONVERSATIONS, TURNS)
                for number in range(1, ROUNDS + 1)
            ]
            for policy in ARMS
        }
        few = {
            name: stage.conversations(name, FEW, FEW_TURNS)
            for name in ("restart", "drops", "routers")
        }
        elsewhere = stage.conversations("prefetch", PROMPTS, 1)
    with stage.serving():
        warm_up(stage)
        with EventProxy(stage.b.vllm.events_socket) as proxy:
            arms = compare(stage, rounds)
            stage.table = arm_table(list(arms.values()))
            stage.figures["policies"] = {name: arm.figures() for name, arm in arms.items()}
            yield goes_where_cache_is(arms["kv-aware"])
            yield beside_round_robin(arms["kv-aware"], arms["round-robin"])
            yield events_dropped(stage, few["drops"], proxy)
            yield engine_restarts(stage, few["restart"])
            yield router_killed(stage, few["routers"])
            yield prefetch_hides_pull(stage, [turn for turns in elsewhere for turn in turns])


def warm_up(stage: RoutingStage) -> None:
    """The first prompts of an engine are slow, and its pool is listed after the first one."""
    for node in stage.nodes:
        complete(node.vllm.http, stage.maker.tokens(500), ANSWER)
    stage.progress.say("warm-up (discarded)")


def check_answer(checks: Checks, reply: Reply) -> None:
    checks.none(reply.turn.name, computed_differences(reply.answer, reply.turn.baseline))


# -- where turns go


def compare(stage: RoutingStage, rounds: dict[str, list[list[list[Turn]]]]) -> dict[str, Arm]:
    """Both policies in turns, each with new conversations and a new router."""
    arms = {policy: Arm(policy) for policy in ARMS}
    for number in range(ROUNDS):
        for policy in ARMS:
            stage.mark(f"{policy}, round {number + 1}: {CONVERSATIONS} new conversations")
            with stage.routed(policy) as router:
                _talk(stage, router, rounds[policy][number], arms[policy])
    return arms


def _talk(
    stage: RoutingStage, router: RouterServer, conversations: Sequence[list[Turn]], arm: Arm
) -> None:
    arm.first += stage.begin(router, conversations)
    before = stage.reports(router)
    for turn in range(1, TURNS):
        # Clients do not take turns in a fixed order.
        for conversation in stage.random.sample(conversations, len(conversations)):
            reply = stage.ask(conversation[turn], router)
            arm.replies.append(reply)
            stage.progress.say(
                f"{reply.turn.name}: {reply.counted.own_tokens} of {len(reply.turn.prompt)} "
                f"tokens in the engine's own cache, {reply.counted.loaded_tokens} loaded, first "
                f"token after {reply.answer.ttft_s:.2f} s"
            )
    close, reports = stage.reports(router)
    arm.close += close - before[0]
    arm.reports += reports - before[1]


def goes_where_cache_is(arm: Arm) -> Claim:
    checks = Checks()
    for reply in (*arm.first, *arm.replies):
        check_answer(checks, reply)
    check_stayed(checks, arm.replies)
    for reply in arm.replies:
        # vLLM reports what it took from its own cache and from the pool.
        checks.require(
            reply.answer.cached_tokens >= reply.turn.known - BLOCK_TOKENS,
            f"{reply.turn.name}: {reply.answer.cached_tokens} cached tokens reported",
        )
    checks.equal("reports of cached tokens", arm.reports, len(arm.replies))
    checks.require(
        arm.close >= MIN_CLOSE * arm.reports,
        f"{arm.close} of {arm.reports} reports were within a block of the prediction",
    )
    return checks.claim(
        "1   Each turn goes to the engine that has its history, and is answered right",
        f"{arm.stayed} of {len(arm.replies)} turns; {arm.close} of {arm.reports} predictions of "
        "cached tokens were within a block of what the engine reported",
    )


def beside_round_robin(arm: Arm, other: Arm) -> Claim:
    checks = Checks()
    for reply in (*other.first, *other.replies):
        check_answer(checks, reply)
    checks.equal("turns of the policies", len(arm.replies), len(other.replies))
    checks.require(
        other.stayed < len(other.replies), "round robin happened to keep every conversation"
    )
    checks.require(
        arm.own > other.own,
        f"{arm.own} tokens in the engines' own caches, and {other.own} with round robin",
    )
    checks.require(
        arm.pulled < other.pulled,
        f"{arm.pulled} bytes pulled, and {other.pulled} with round robin",
    )
    return checks.claim(
        "2   Round robin in the same run reads more blocks from the other node",
        f"round robin met the history in {other.stayed} of {len(other.replies)} turns and pulled "
        f"{other.pulled / MIB:.1f} MiB between the nodes, kv-aware {arm.pulled / MIB:.1f} MiB",
    )


# -- faults


def _go_on(
    stage: RoutingStage,
    checks: Checks,
    conversations: Sequence[list[Turn]],
    turn: int,
    *routers: RouterServer,
) -> list[Reply]:
    """One turn of each conversation."""
    replies = [stage.ask(conversation[turn], *routers) for conversation in conversations]
    for reply in replies:
        check_answer(checks, reply)
    return replies


def _check_close(stage: RoutingStage, checks: Checks, router: RouterServer, count: int) -> None:
    """Checks the predictions of the last ``count`` reports, by the router's decisions."""
    for route in stage.routes(router)[:count]:
        predicted, reported = route["predicted_cached_tokens"], route["outcome"]["cached_tokens"]
        checks.require(
            reported is not None and abs(predicted - reported) <= BLOCK_TOKENS,
            f"{predicted} cached tokens were predicted, and {reported} reported",
        )


def events_dropped(
    stage: RoutingStage, conversations: Sequence[list[Turn]], proxy: EventProxy
) -> Claim:
    """The engine's cache is emptied, and the router is not told."""
    checks = Checks()
    stage.mark("events are dropped: new conversations")
    with stage.routed("kv-aware") as router:
        for reply in stage.begin(router, conversations):
            check_answer(checks, reply)
        at_b = [
            conversation
            for conversation, reply in zip(
                conversations, _go_on(stage, checks, conversations, 1, router), strict=True
            )
            if reply.engine == 1
        ]
        checks.require(bool(at_b), "no conversation is at engine b")
        if not at_b:
            return checks.claim("3   Dropped events", "")
        known = stage.blocks_of(router, stage.b)
        dropped = proxy.dropped
        with proxy.dropping():
            stage.mark("the cache of engine b is emptied, and its events are dropped")
            forget_local(stage.b.vllm, stage.maker)
            _go_on(stage, checks, at_b[:1], 2, router)
        lost = proxy.dropped - dropped
        checks.require(lost > 0, "no batch of events was dropped")
        stage.mark("events pass again")
        [reply] = _go_on(stage, checks, at_b[:1], 3, router)
        # What b has computed and loaded since then, and nothing of what it had before.
        has = full_blocks(len(reply.turn.prompt) + ANSWER - 1, BLOCK_TOKENS)
        wait_until(
            f"the router knows {has} blocks of engine b",
            lambda: stage.blocks_of(router, stage.b) == has,
            30,
        )
        stage.wait_for_trust(router)
        checks.equal("engine of the turn after the dropped events", reply.engine, 1)
        gaps = int(router.metrics().total("pegaflow_router_kv_gaps_total"))
        checks.require(gaps > 0, "the router noticed no gap")
        others = [one for one in conversations if one is not at_b[0]]
        _go_on(stage, checks, others, 2, router)
        _check_close(stage, checks, router, len(others))
    return checks.claim(
        "3   After dropped events the router knows again what the engine has",
        f"{lost} batches were dropped while the engine lost {known} blocks; with the next one the "
        f"router noticed the gap, and knew exactly its {has} blocks; all turns were answered right",
    )


def engine_restarts(stage: RoutingStage, conversations: Sequence[list[Turn]]) -> Claim:
    """An engine is killed with a request, and starts again at the same addresses."""
    checks = Checks()
    stage.mark("an engine restarts: new conversations")
    with stage.routed("kv-aware") as router:
        for reply in stage.begin(router, conversations):
            check_answer(checks, reply)
        replies = _go_on(stage, checks, conversations, 1, router)
        at_a = [one for one, reply in zip(conversations, replies, strict=True) if reply.engine == 0]
        checks.require(bool(at_a), "no conversation is at engine a")
        if not at_a:
            return checks.claim("4   An engine restarts", "")
        before = stage.counted()
        stage.mark("engine a is killed with a request")
        answer = _kill_with_request(stage, router, at_a[0][2])
        checks.none(at_a[0][2].name, computed_differences(answer, at_a[0][2].baseline))
        rest = [one for one in conversations if one is not at_a[0]]
        _go_on(stage, checks, rest, 2, router)
        pulled = stage.counted().pulled_bytes - before.pulled_bytes
        checks.require(pulled > 0, "nothing was read from the pool of the killed engine's node")
        stage.a.vllm.start_again()
        stage.mark("engine a is up again, with an empty cache")
        wait_until(
            "the router knows no block of engine a",
            lambda: stage.blocks_of(router, stage.a) == 0,
            30,
        )
        stage.wait_for_trust(router)
        for turn in range(3, FEW_TURNS):
            _go_on(stage, checks, conversations, turn, router)
            _check_close(stage, checks, router, len(conversations))
    return checks.claim(
        "4   An engine that restarts in place keeps no credit, and no request fails",
        f"the request at the killed engine was answered by the other one; {pulled / MIB:.1f} MiB "
        "came from the killed engine's pool; afterwards each prediction was within a block of the "
        "report",
    )


def _kill_with_request(stage: RoutingStage, router: RouterServer, turn: Turn) -> Answer:
    """The answer to a turn whose engine, the first one, is killed after it has the request."""
    # A stopped engine accepts the request and does not begin it, so the kill is never too late.
    os.killpg(stage.a.vllm.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as client:
        answering = client.submit(stage.ask_one_of, turn, router)
        wait_until(
            "engine a has the request",
            lambda: (
                router.metrics().total("pegaflow_router_engine_inflight", engine=stage.a.url) > 0
            ),
            30,
        )
        stage.a.vllm.kill()
        return answering.result()


def router_killed(stage: RoutingStage, conversations: Sequence[list[Turn]]) -> Claim:
    """Clients spread their turns over two routers; one is killed with a request."""
    checks = Checks()
    stage.mark("two routers: new conversations, whose turns alternate between them")
    with stage.two_routers() as (first, second):
        for reply in stage.begin(first, conversations):
            check_answer(checks, reply)
        heard = stage.placed_elsewhere(second)
        checks.require(
            heard >= len(conversations),
            f"the second router heard of {heard} placements of {len(conversations)} at the first",
        )
        replies = _go_on(stage, checks, conversations, 1, second, first)
        check_stayed(checks, replies)
        engine = stage.nodes[replies[0].engine].url
        stage.mark("the first router is killed with a request")
        in_flight = conversations[0][2]
        answer = _kill_router(stage, first, second, in_flight)
        checks.none(in_flight.name, computed_differences(answer, in_flight.baseline))
        # The killed router's copy of the request is counted by the engines as well.
        chosen = [one["engine"] for one in stage.routes(second)[0]["terms"] if one["chosen"]]
        checks.equal(f"{in_flight.name}, engine at the second router", chosen, [engine])
        replies = _go_on(stage, checks, conversations[1:], 2, first, second)
        for turn in range(3, FEW_TURNS):
            replies += _go_on(stage, checks, conversations, turn, second)
        check_stayed(checks, replies)
        _check_close(stage, checks, second, len(replies))
    return checks.claim(
        "5   One of two routers is killed, and its clients go on at the other one",
        f"the routers shared {heard} placements of first turns; every request was answered right, "
        f"and the request in flight and all {len(replies)} turns after the kill went to the engine "
        "that has their history",
    )


def check_stayed(checks: Checks, replies: Sequence[Reply]) -> None:
    for reply in replies:
        checks.require(
            reply.stayed,
            f"{reply.turn.name}: the engine had {reply.counted.own_tokens} of the "
            f"{reply.turn.known} tokens of the history",
        )


def _kill_router(
    stage: RoutingStage, first: RouterServer, second: RouterServer, turn: Turn
) -> Answer:
    """The answer to a turn that the first router has forwarded when it is killed."""
    for node in stage.nodes:
        os.killpg(node.vllm.pid, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(1) as client:
            answering = client.submit(stage.ask_one_of, turn, first, second)
            wait_until(
                "the first router has forwarded the request",
                lambda: first.metrics().total("pegaflow_router_engine_inflight") > 0,
                30,
            )
            first.kill()
            for node in stage.nodes:
                os.killpg(node.vllm.pid, signal.SIGCONT)
            return answering.result()
    finally:
        for node in stage.nodes:
            os.killpg(node.vllm.pid, signal.SIGCONT)
