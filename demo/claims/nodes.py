"""--nodes: blocks of one node are hit on another, and a failure there costs only time."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from demo.client import Answer, complete
from demo.compare import computed_differences, differences
from demo.expectations import full_blocks, offered_blocks
from demo.nodes_stage import DemoNode, NodeCounters, NodesStage
from demo.prompts import BLOCK_TOKENS, Prompt
from demo.report import Checks, Claim
from demo.stage import MAX_ASKED_AGAIN, OUTPUT_TOKENS, wait_until

#: For claim 1, on and off the block grid.
LENGTHS = (500, 512, 1000, 3000)
#: The length of a prompt during whose transfer a failure happens: 93 blocks, 11.6 MiB.
LONG = 3000
#: Node A's bandwidth then: the prompt takes at least 1.5 s, below --fetch-deadline.
SLOW = "60mbit"
#: The middle of a transfer: the least and the largest share of the prompt that has left node A.
MIDDLE = (0.15, 0.9)
#: After a black hole the first prompt may still use a connection that it has broken.
TRIES_AFTER_HOLE = 3


@dataclasses.dataclass(frozen=True)
class NodePrompts:
    """The prompts, in the order of the claims."""

    moved: list[Prompt]  #: Computed on A, hit on B.
    returned: Prompt  #: Computed on B, hit on A.
    at_two: Prompt  #: On A and C when A is killed.
    at_one: Prompt  #: On A alone when it is killed.
    in_hole: Prompt  #: On A when it vanishes.
    after_hole: list[Prompt]

    @staticmethod
    def draw(stage: NodesStage) -> NodePrompts:
        def prompt(name: str, length: int) -> Prompt:
            return Prompt(name, stage.maker.tokens(length))

        return NodePrompts(
            moved=[prompt(str(length), length) for length in LENGTHS],
            returned=prompt("1000, computed on B", 1000),
            at_two=prompt("3000, on A and C", LONG),
            at_one=prompt("3000, on A only", LONG),
            in_hole=prompt("3000, in the hole", LONG),
            after_hole=[prompt(f"1000, after it ({n + 1})", 1000) for n in range(TRIES_AFTER_HOLE)],
        )

    def all(self) -> list[Prompt]:
        named = [self.returned, self.at_two, self.at_one, self.in_hole]
        return [*self.moved, *named, *self.after_hole]


def run_nodes(stage: NodesStage) -> Iterator[Claim]:
    """The claims, one after the other."""
    prompts = NodePrompts.draw(stage)
    with stage.plain_vllm() as plain:
        for prompt in prompts.all():
            with stage.progress.step(f"without the connector: prompt {prompt.name}"):
                stage.baseline[prompt.name] = complete(plain.http, prompt.tokens, OUTPUT_TOKENS)
        stage.progress.say(f"{len(prompts.all())} prompts were answered without the connector")
    with stage.servers(), stage.engine_at(stage.a):
        for prompt in (*prompts.moved, prompts.at_two):
            store_with_local_hit(stage, stage.a, prompt)
        with stage.engine_at(stage.c):
            yield copied_to_c(stage, prompts.at_two)
        with stage.engine_at(stage.b):
            yield hit_on_b(stage, prompts)
            yield killed_with_two_owners(stage, prompts.at_two)
            yield killed_with_one_owner(stage, prompts.at_one)
            yield black_hole(stage, prompts)


def store_with_local_hit(stage: NodesStage, node: DemoNode, prompt: Prompt) -> None:
    """Stores a prompt, and keeps the answer that the engine gives from its own cache."""
    with stage.progress.step(f"node {node.name} computes prompt {prompt.name}"):
        stage.store(node, prompt)
        stage.local_hits[prompt.name] = complete(node.engine.http, prompt.tokens, OUTPUT_TOKENS)
    stage.progress.say(f"node {node.name} has computed and stored prompt {prompt.name}")


# ---- without failures


def pulled_differences(
    counted: dict[str, NodeCounters], reader: DemoNode, owner: DemoNode, blocks: int, page: int
) -> list[str]:
    """The counters that do not fit a prompt whose blocks all came from ``owner``.

    Args:
        counted: By node, since before the prompt was asked the first time.
        blocks: The expected number of blocks; each node has a counter of them.
        page: Bytes of a block.
    """
    there, here = counted[owner.network.name], counted[reader.network.name]
    found = []
    for what, got, expected in (
        (f"blocks that {reader.name} fetched", here.fetched_blocks, blocks),
        (f"bytes that {reader.name} fetched", here.fetched_bytes, blocks * page),
        (f"bytes that {owner.name} lent", there.lent_bytes, blocks * page),
        ("blocks abandoned", here.given_up_blocks, 0),
    ):
        if got != expected:
            found.append(f"{what}: {got}, expected {expected}")
    for name, others in counted.items():
        if name != owner.network.name and others.lent_bytes:
            found.append(f"node {name.upper()} lent {others.lent_bytes} bytes")
    return found


def pull(
    stage: NodesStage, checks: Checks, reader: DemoNode, owner: DemoNode, prompt: Prompt
) -> tuple[int, dict[str, NodeCounters]]:
    """Asks a prompt at a node whose engine and server are without it; the number of fetched
    blocks.
    """
    whole = full_blocks(len(prompt), BLOCK_TOKENS)
    expected = offered_blocks(len(prompt), BLOCK_TOKENS, stored_blocks=whole)
    before = stage.all_counters()
    for _ in range(MAX_ASKED_AGAIN + 1):
        answer, last = stage.ask_counted(reader, prompt, OUTPUT_TOKENS)
        if not last[reader.network.name].missed_deadlines:
            break
        # Its server does not fetch a block twice, hence the sum below.
        stage.asked_again += 1
        stage.forget_local(reader)
    now = stage.all_counters()
    counted = {name: now[name] - before[name] for name in now}
    mine = last[reader.network.name]
    what = f"prompt {prompt.name} at {reader.name}"
    checks.equal(
        f"{what}: external hits in tokens", mine.external_hit_tokens, expected * BLOCK_TOKENS
    )
    checks.equal(f"{what}: local hits in tokens", mine.local_hit_tokens, 0)
    checks.equal(f"{what}: blocks loaded", mine.loaded_blocks, expected)
    checks.none(what, pulled_differences(counted, reader, owner, expected, stage.page_bytes))
    checks.none(what, answer_differences(stage, prompt, answer))
    stage.progress.say(
        f"node {reader.name}: prompt {prompt.name}: {mine.loaded_blocks} of {expected} blocks, "
        f"computed on {owner.name}; first token after {answer.ttft_s:.2f} s"
    )
    return expected, counted


def answer_differences(stage: NodesStage, prompt: Prompt, answer: Answer) -> list[str]:
    """The errors in an answer to a prompt that was loaded, and not partly computed."""
    return differences(
        answer,
        stage.local_hits.get(prompt.name),
        stage.baseline[prompt.name],
        whole_prompt=len(prompt) % BLOCK_TOKENS == 0,
    )


def copied_to_c(stage: NodesStage, prompt: Prompt) -> Claim:
    """Node C has an engine during one prompt; its server keeps the blocks that it has read."""
    checks = Checks()
    with stage.progress.step(f"node C: prompt {prompt.name}"):
        blocks, _ = pull(stage, checks, stage.c, stage.a, prompt)
    checks.equal(
        "replicas at C", int(stage.c.server.metrics().total("pegaflow_replica_blocks")), blocks
    )
    return checks.claim(
        "1   Node C's engine hits what A's computed; C has a copy when its engine has gone",
        f"{blocks} blocks were read from A, none from B; answered as by a local hit at A, and by "
        "a vLLM without the connector",
    )


def hit_on_b(stage: NodesStage, prompts: NodePrompts) -> Claim:
    """B's engine loads A's blocks, after a miss at C; and A's engine loads B's blocks."""
    checks = Checks()
    blocks = asked_in_vain = 0
    for prompt in prompts.moved:
        with stage.progress.step(f"node B: prompt {prompt.name}"):
            came, counted = pull(stage, checks, stage.b, stage.a, prompt)
        blocks += came
        asked_in_vain += counted["c"].questions
        checks.require(counted["c"].questions > 0, f"C got no request for {prompt.name}")
    store_with_local_hit(stage, stage.b, prompts.returned)
    with stage.progress.step(f"node A: prompt {prompts.returned.name}"):
        back, _ = pull(stage, checks, stage.a, stage.b, prompts.returned)
    megabytes = (blocks + back) * stage.page_bytes / 1e6
    stage.figures["pulled"] = {
        "blocks_a_to_b": blocks,
        "blocks_b_to_a": back,
        "questions_to_c": asked_in_vain,
    }
    return checks.claim(
        "2   Node B's engine hits what A's computed, and A's what B's computed",
        f"{blocks} blocks of {len(prompts.moved)} prompts came from A and {back} of one from B, "
        f"{megabytes:.1f} MB counted by the owner and by the reader; C received "
        f"{asked_in_vain} requests for missing blocks; tokens equal to a local hit where they were "
        "computed, and to a vLLM without the connector",
    )


# ---- during a transfer


@dataclasses.dataclass(frozen=True)
class Broken:
    """The outcome of a prompt whose owner was lost during its transfer."""

    answer: Answer
    sent_share: float  #: The share of the prompt's bytes that had been sent by then.
    whole_blocks: int  #: The blocks that B had by then.
    counted: dict[str, NodeCounters]  #: By surviving node.

    def check(self, checks: Checks, stage: NodesStage, prompt: Prompt) -> None:
        blocks = full_blocks(len(prompt), BLOCK_TOKENS)
        low, high = MIDDLE
        checks.require(
            low <= self.sent_share <= high and self.whole_blocks < blocks,
            f"it was not during the transfer: {self.sent_share:.0%} of the bytes had been sent, "
            f"{self.whole_blocks} of {blocks} blocks had arrived",
        )
        # Partly computed, in another batch: equal in tokens, not to the last bit.
        checks.none(
            f"prompt {prompt.name}", computed_differences(self.answer, stage.baseline[prompt.name])
        )

    def told(self) -> str:
        return f"{self.sent_share:.0%} of its bytes had left A"


def break_in_the_middle(
    stage: NodesStage, prompt: Prompt, what: str, act: Callable[[], object]
) -> Broken:
    """Asks a prompt of A's at B over a slow link, and acts when part of it has been sent."""
    total = full_blocks(len(prompt), BLOCK_TOKENS) * stage.page_bytes
    before, answered = stage.all_counters(), stage.b.answered()
    stage.a.network.limit(SLOW)
    sent_before = stage.a.network.sent_bytes()

    def sent() -> float:
        return (stage.a.network.sent_bytes() - sent_before) / total

    with stage.progress.step(f"node B: prompt {prompt.name}"), ThreadPoolExecutor(1) as pool:
        future = pool.submit(complete, stage.b.engine.http, prompt.tokens, OUTPUT_TOKENS)
        while sent() < MIDDLE[0] and not future.done():
            time.sleep(0.005)  # the polling interval
        act()
        share = sent()
        whole = (stage.b.counters() - before["b"]).fetched_blocks
        answer = future.result()
    counted = stage.counted_since(before, stage.b, answered)
    broken = Broken(answer, share, whole, counted)
    stage.progress.say(
        f"{what}: {broken.told()}; then {counted['b'].retried_blocks} blocks came from another "
        f"owner, and {counted['b'].given_up_blocks} were abandoned; first token after "
        f"{answer.ttft_s:.2f} s"
    )
    return broken


def restart_a(stage: NodesStage) -> None:
    """A's server restarts, empty; its engine and the other nodes reconnect."""
    stage.a.network.limit(None)
    stage.start(stage.a.server)
    wait_until(
        "A's engine is registered again",
        lambda: (
            stage.a.server.metrics().total("pegaflow_instances")
            - stage.a.server.metrics().total("pegaflow_instances_waiting")
            == 1
        ),
        60,
    )
    stage.wait_for_peers()


def killed_with_two_owners(stage: NodesStage, prompt: Prompt) -> Claim:
    checks = Checks()
    broken = break_in_the_middle(stage, prompt, "A's server was killed", stage.a.server.kill)
    broken.check(checks, stage, prompt)
    from_c = broken.counted["c"].lent_bytes // stage.page_bytes
    checks.require(broken.counted["b"].retried_blocks > 0, "no block was requested from C")
    checks.require(from_c > 0, "C lent nothing")
    stage.figures["killed_with_two_owners"] = figures(broken) | {"blocks_from_c": from_c}
    restart_a(stage)
    return checks.claim(
        "3   A's server is killed during a transfer: the rest comes from C",
        f"{broken.told()} when it was killed (SIGKILL), {broken.whole_blocks} blocks were whole; "
        f"{from_c} came from C; answered right, first token after {broken.answer.ttft_s:.2f} s",
    )


def killed_with_one_owner(stage: NodesStage, prompt: Prompt) -> Claim:
    checks = Checks()
    store_with_local_hit(stage, stage.a, prompt)
    broken = break_in_the_middle(stage, prompt, "A's server was killed", stage.a.server.kill)
    broken.check(checks, stage, prompt)
    checks.require(broken.counted["b"].given_up_blocks > 0, "no block was given up")
    checks.equal("bytes that C lent", broken.counted["c"].lent_bytes, 0)
    stage.figures["killed_with_one_owner"] = figures(broken)
    restart_a(stage)
    return checks.claim(
        "4   The same with a prompt without another owner: the missing blocks are computed",
        f"{broken.told()} when it was killed; {broken.counted['b'].given_up_blocks} blocks did "
        f"not arrive; answered right, first token after {broken.answer.ttft_s:.2f} s",
    )


def black_hole(stage: NodesStage, prompts: NodePrompts) -> Claim:
    """Packets from and to A are dropped during one prompt, without any error."""
    checks = Checks()
    prompt = prompts.in_hole
    for each in (prompt, *prompts.after_hole):
        store_with_local_hit(stage, stage.a, each)
    broken = break_in_the_middle(stage, prompt, "A fell into a black hole", stage.a.network.cut)
    broken.check(checks, stage, prompt)
    checks.require(broken.counted["b"].given_up_blocks > 0, "no block was given up")

    stage.a.network.limit(None)
    stage.a.network.mend()
    begin = time.monotonic()
    wait_until("B can ask A again", lambda: stage.b.sees(stage.a), 30)
    hits = 0
    asked = 0
    for after in prompts.after_hole:
        # The first prompt may detect only now that a connection of the lane has not survived.
        attempt = Checks()
        asked += 1
        hits, _ = pull(stage, attempt, stage.b, stage.a, after)
        if not attempt.failures:
            break
    checks.none(f"after the hole, {asked} prompts", attempt.failures)
    back_s = time.monotonic() - begin
    stage.figures["black_hole"] = figures(broken) | {
        "prompts_until_a_hit": asked,
        "hits_back_s": back_s,
    }
    return checks.claim(
        "5   A is in a black hole during a transfer: computed, and hit again afterwards",
        f"{broken.told()} when the network lost it; {broken.counted['b'].given_up_blocks} blocks "
        f"were abandoned; answered right, first token after {broken.answer.ttft_s:.2f} s; {hits} "
        f"blocks came from A {back_s:.1f} s after the network was repaired, at the "
        f"{('first', 'second', 'third')[asked - 1]} prompt",
    )


def figures(broken: Broken) -> dict[str, float]:
    mine = broken.counted["b"]
    return {
        "sent_share": broken.sent_share,
        "whole_blocks": broken.whole_blocks,
        "retried_blocks": mine.retried_blocks,
        "given_up_blocks": mine.given_up_blocks,
        "loaded_blocks": mine.loaded_blocks,
        "ttft_s": broken.answer.ttft_s,
    }
