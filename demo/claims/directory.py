"""--nodes 3 --directory: whatever happens to Redis costs hits for a while, and no answer."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from demo.claims.nodes import pull
from demo.client import Answer, complete
from demo.compare import computed_differences
from demo.directory_stage import REBUILT_S, DirectoryCounters, DirectoryStage
from demo.expectations import full_blocks
from demo.nodes_stage import NodeCounters
from demo.prompts import BLOCK_TOKENS, Prompt
from demo.report import Checks, Claim
from demo.stage import OUTPUT_TOKENS, wait_until

#: 62 blocks. One of 8 of them is announced, by chance: none in one of 4,000 prompts.
LENGTH = 2000
#: 93 blocks: none in one of 10,000.
LONG = 3000
#: Requests at B at a time.
AT_ONCE = 2
#: Prompts in flight when a fault begins, stored on A.
IN_FLIGHT = 4
#: Prompts sent while the directory is away, stored on A.
STORED = 2
#: The same, stored nowhere.
NEW = 1
#: Prompts stored while the directory is away. The first is hit afterwards; the others are for a
#: request that misses a deadline on a busy machine, or has no block that is announced.
AFTER = 3


@dataclasses.dataclass(frozen=True)
class FaultPrompts:
    """The prompts of one fault; all are new to both engines."""

    in_flight: list[Prompt]
    stored: list[Prompt]
    new: list[Prompt]
    after: list[Prompt]

    @staticmethod
    def draw(stage: DirectoryStage, fault: str) -> FaultPrompts:
        def prompts(what: str, count: int) -> list[Prompt]:
            return [
                Prompt(f"{fault}, {what} {n + 1}", stage.maker.tokens(LENGTH)) for n in range(count)
            ]

        return FaultPrompts(
            prompts("in flight", IN_FLIGHT),
            prompts("stored before", STORED),
            prompts("new", NEW),
            prompts("after", AFTER),
        )

    def all(self) -> list[Prompt]:
        return [*self.in_flight, *self.stored, *self.new, *self.after]


@dataclasses.dataclass(frozen=True)
class Fault:
    """What happens to Redis, and how it ends."""

    name: str
    what: str  #: For the claim.
    act: Callable[[DirectoryStage], object]
    mend: Callable[[DirectoryStage], object]
    is_away: bool = True  #: The nodes notice that it does not answer.


def _flush(stage: DirectoryStage) -> None:
    stage.redis.call("FLUSHALL")


FAULTS = (
    Fault(
        "killed",
        "Redis is killed (SIGKILL), and starts again empty",
        lambda stage: stage.redis.kill(),
        lambda stage: stage.start(stage.redis),
    ),
    Fault(
        "stopped",
        "Redis is stopped (SIGSTOP), and continues",
        lambda stage: os.kill(stage.redis.pid, signal.SIGSTOP),
        lambda stage: os.kill(stage.redis.pid, signal.SIGCONT),
    ),
    Fault("flushed", "Redis is flushed (FLUSHALL)", _flush, lambda stage: None, is_away=False),
    Fault(
        "partitioned",
        "The network drops all packets from and to Redis, and is repaired",
        lambda stage: stage.redis_place.cut(),
        lambda stage: stage.redis_place.mend(),
    ),
)


def run_directory(stage: DirectoryStage) -> Iterator[Claim]:
    """The claims, one after the other."""
    first = [Prompt(f"3000, by the directory ({n + 1})", stage.maker.tokens(LONG)) for n in (0, 1)]
    drawn = {fault.name: FaultPrompts.draw(stage, fault.name) for fault in FAULTS}
    prompts = [*first, *(prompt for one in drawn.values() for prompt in one.all())]
    with stage.plain_vllm() as plain:
        for number, prompt in enumerate(prompts, 1):
            with stage.progress.step(f"without the connector: prompt {number} of {len(prompts)}"):
                stage.baseline[prompt.name] = complete(plain.http, prompt.tokens, OUTPUT_TOKENS)
        stage.progress.say(f"{len(prompts)} prompts were answered without the connector")
    stage.progress.say(
        f"Redis is on a node of its own, {stage.redis.address}; a partition takes that node's "
        "link off the bridge between the network namespaces, so that packets vanish"
    )
    with stage.servers(), stage.engine_at(stage.a), stage.engine_at(stage.b):
        yield found_by_directory(stage, first)
        for number, fault in enumerate(FAULTS, 2):
            yield survive(stage, number, fault, drawn[fault.name])


def _store(stage: DirectoryStage, prompts: list[Prompt]) -> None:
    """A computes prompts; its server has announced them unless the directory is away."""
    for prompt in prompts:
        with stage.progress.step(f"node A computes prompt {prompt.name}"):
            stage.store(stage.a, prompt)
    stage.progress.say(f"node A has computed and stored {len(prompts)} prompts")


def _wait_for_anchors(stage: DirectoryStage) -> int:
    """Waits until Redis has exactly the anchors that the nodes announce; returns their number."""
    wait_until(
        "Redis has the anchors of all nodes",
        lambda: stage.redis.anchors() == stage.announced() > 0,
        REBUILT_S,
    )
    return stage.announced()


def found_by_directory(stage: DirectoryStage, prompts: list[Prompt]) -> Claim:
    """B's engine loads what A's computed, and only the directory has named A."""
    checks = Checks()
    _store(stage, prompts)
    anchors = _wait_for_anchors(stage)
    before = DirectoryCounters.of(stage.b)
    checks.equal("links of B to named nodes before", links(stage), 0)
    blocks = 0
    for prompt in prompts:
        with stage.progress.step(f"node B: prompt {prompt.name}"):
            came, counted = pull(stage, checks, stage.b, stage.a, prompt)
        blocks += came
        checks.equal(f"requests to C for {prompt.name}", counted["c"].questions, 0)
    found = (DirectoryCounters.of(stage.b) - before).found
    checks.require(found > 0, "the directory named no node to B")
    checks.equal("links of B to named nodes", links(stage), 1)
    stage.figures["found"] = {"blocks": blocks, "lookups_found": found, "anchors": anchors}
    return checks.claim(
        "1   Servers without --peers: Node B's engine hits what A's computed",
        f"{blocks} blocks of {len(prompts)} prompts came from A, which {found} answers of the "
        f"directory named ({anchors} anchors); B has one link, to A; C received no request; "
        "tokens equal to a vLLM without the connector",
    )


def links(stage: DirectoryStage) -> int:
    return int(stage.b.server.metrics().total("pegaflow_directory_ready_links"))


@dataclasses.dataclass
class Load:
    """Requests at B, some at a time, and their answers."""

    stage: DirectoryStage
    pool: ThreadPoolExecutor
    sent: list[tuple[Prompt, Future[Answer]]] = dataclasses.field(default_factory=list)

    def send(self, prompts: list[Prompt]) -> None:
        for prompt in prompts:
            address = self.stage.b.engine.http
            future = self.pool.submit(complete, address, prompt.tokens, OUTPUT_TOKENS)
            self.sent.append((prompt, future))

    def wait_for_first(self) -> None:
        wait([future for _, future in self.sent], return_when=FIRST_COMPLETED)

    def in_flight(self) -> int:
        return sum(not future.done() for _, future in self.sent)

    def check(self, checks: Checks) -> int:
        """Waits for all answers and checks them; returns their number.

        Raises:
            RequestFailed: one was not answered, which ends the claim.
        """
        for prompt, future in self.sent:
            # Several at once, and some partly computed: equal in tokens, not to the last bit.
            baseline = self.stage.baseline[prompt.name]
            checks.none(f"prompt {prompt.name}", computed_differences(future.result(), baseline))
        return len(self.sent)


def survive(stage: DirectoryStage, number: int, fault: Fault, prompts: FaultPrompts) -> Claim:
    """One fault under load: every request is answered right, and hits come back."""
    checks = Checks()
    _store(stage, [*prompts.in_flight, *prompts.stored])
    _wait_for_anchors(stage)
    before, nodes_before = DirectoryCounters.of(stage.b), stage.all_counters()
    rebuilds = DirectoryCounters.of(stage.a).rebuilds
    with (
        stage.progress.step(f"Redis is {fault.name} under load"),
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        load = Load(stage, pool)
        load.send(prompts.in_flight)
        load.wait_for_first()
        in_flight = load.in_flight()
        fault.act(stage)
        if fault.is_away:
            wait_until("all nodes notice it", stage.none_uses_it, 30)
        in_time = stage.all_counters()["b"].fetched_blocks
        load.send([*prompts.stored, *prompts.new])
        answered = load.check(checks)
    checks.require(in_flight > 0, "no request was in flight when the fault began")
    without_it = (DirectoryCounters.of(stage.b) - before).without_it
    by_link = stage.all_counters()["b"].fetched_blocks - in_time
    if fault.is_away:
        checks.require(stage.none_uses_it(), "a node used the directory while it was away")
        checks.require(without_it > 0, "no question was answered without the directory")
        checks.require(by_link > 0, "no block came over the links that were there")
    # What is saved now is not announced, or is lost with the data.
    _store(stage, prompts.after)
    stage.progress.say(
        f"Redis was {fault.name}: {answered} requests answered, {in_flight} in flight when it "
        f"began; {without_it} questions without the directory, {by_link} blocks fetched after it"
    )
    return _come_back(stage, checks, number, fault, prompts, rebuilds, nodes_before, answered)


def _come_back(
    stage: DirectoryStage,
    checks: Checks,
    number: int,
    fault: Fault,
    prompts: FaultPrompts,
    rebuilds: int,
    nodes_before: dict[str, NodeCounters],
    answered: int,
) -> Claim:
    """The end of a fault, and the first hit by the directory afterwards."""
    fault.mend(stage)
    begin = time.monotonic()
    with stage.progress.step("Redis is back"):
        wait_until("all nodes use the directory", stage.all_use_it, 30)
        anchors = _wait_for_anchors(stage)
    rebuilt_s = time.monotonic() - begin
    rewritten = DirectoryCounters.of(stage.a).rebuilds - rebuilds
    checks.require(rewritten > 0, "A did not write its anchors again")
    asked, blocks, found = 0, 0, 0
    attempt = Checks()
    for prompt in prompts.after:
        asked += 1
        attempt = Checks()
        before = DirectoryCounters.of(stage.b)
        blocks, _ = pull(stage, attempt, stage.b, stage.a, prompt)
        found = (DirectoryCounters.of(stage.b) - before).found
        attempt.require(found > 0, f"the directory named no node for {prompt.name}")
        if not attempt.failures:
            break
    checks.none(f"afterwards, {asked} prompts", attempt.failures)
    back_s = time.monotonic() - begin
    now = stage.all_counters()
    checks.equal("requests to C", now["c"].questions - nodes_before["c"].questions, 0)
    fetched = now["b"].fetched_blocks - nodes_before["b"].fetched_blocks
    stage.figures[fault.name] = {
        "answered": answered,
        "fetched_blocks": fetched,
        "anchors": anchors,
        "rebuilt_s": rebuilt_s,
        "hits_back_s": back_s,
    }
    whole = full_blocks(LENGTH, BLOCK_TOKENS)
    return checks.claim(
        f"{number}   {fault.what}: each request is answered right, and hits are back",
        f"{answered} of {answered} requests at B answered right, {NEW} of them with a prompt "
        f"that no node had; {anchors} anchors were in Redis {rebuilt_s:.1f} s after its end, and "
        f"{blocks} of {whole} blocks of a prompt that was stored meanwhile came from A by "
        f"{found} answers of the directory; {fetched} blocks fetched in all; C received no request",
    )
