"""--pd: prompts are prefilled on one engine and decoded on another, through the router."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

from demo.claims.early_legs import run_early
from demo.claims.handed_over import answered_as_by_one
from demo.client import complete, complete_text
from demo.compare import computed_differences
from demo.pd_stage import PdStage
from demo.prompts import BLOCK_TOKENS, Prompt
from demo.report import Checks, Claim
from demo.stage import OUTPUT_TOKENS, wait_until
from demo.streams import Seen, Stream
from tests.support.vllm_server import RouterServer

#: Tokens of the answer during which the decode engine is killed; it takes many seconds.
LONG_ANSWER = 600


def record_baseline(stage: PdStage) -> None:
    """Answers every prompt with one vLLM that has no connector."""
    with stage.running(stage.plain):
        for prompt in stage.prompts:
            stage.baseline[prompt.name] = complete(stage.plain.http, prompt.tokens, OUTPUT_TOKENS)
            stage.texts[prompt.name] = complete_text(stage.plain.http, prompt.tokens, OUTPUT_TOKENS)
            stage.progress.say(f"one engine alone: prompt of {prompt.name} tokens")
        more = (*stage.early, *stage.chunked, stage.killed)
        for prompt in more:
            stage.baseline[prompt.name] = complete(stage.plain.http, prompt.tokens, OUTPUT_TOKENS)
        stage.progress.say(f"one engine alone: {len(more)} more prompts")
        if stage.has_two_nodes:
            stage.baseline[stage.last.name] = complete(
                stage.plain.http, stage.last.tokens, OUTPUT_TOKENS
            )


def run_split(stage: PdStage) -> Iterator[Claim]:
    """The claims, one after the other."""
    record_baseline(stage)
    with stage.servers(), stage.running(stage.prefill):
        with stage.running(stage.decode), stage.routed() as router:
            warm_up(stage, router.http)
            yield split_all(stage, router.http)
            yield kill_before(stage, router.http)
        with stage.running(stage.decode):
            with stage.routed() as router:
                yield comes_back(stage, router.http)
            with stage.routed("--pd-first-token") as router:
                yield first_token(stage, router)
            with stage.routed() as router:
                yield client_leaves(stage, router.http)
                if stage.has_two_nodes:
                    yield kill_server(stage, router.http)
                yield kill_after(stage, router.http)
    yield from run_early(stage)


def warm_up(stage: PdStage, address: str) -> None:
    """The first prompts are slow in every engine: the answer to one is discarded."""
    complete(address, stage.maker.tokens(1000), OUTPUT_TOKENS)
    stage.progress.say("warm-up (discarded)")


def split_all(stage: PdStage, address: str) -> Claim:
    checks = Checks()
    loaded = fetched = 0
    for prompt in stage.prompts:
        before, prefilled = stage.counted(), stage.prefilled()
        bytes_before = stage.fetched_bytes(), stage.lent_bytes()
        answer, external = answered_as_by_one(stage, checks, address, prompt)
        after = stage.counted()
        loaded += external
        stage.progress.say(
            f"prompt of {prompt.name} tokens: first token after {answer.ttft_s:.2f} s, "
            f"{external} tokens came from the prefill engine"
        )
        what = f"prompt of {prompt.name} tokens"
        checks.equal(f"{what}: successful waits", after["over"] - before["over"], 1)
        checks.equal(f"{what}: requests at the prefill engine", stage.prefilled() - prefilled, 1)
        if stage.has_two_nodes:
            # Whole pages, also of the last block.
            wanted = -(-len(prompt) // BLOCK_TOKENS) * stage.page_bytes
            checks.equal(f"{what}: fetched bytes", stage.fetched_bytes() - bytes_before[0], wanted)
            checks.equal(f"{what}: lent bytes", stage.lent_bytes() - bytes_before[1], wanted)
            fetched += wanted
    stage.figures |= {"loaded_tokens": loaded, "fetched_bytes": fetched}
    return checks.claim(
        "1   Prompts are prefilled on one engine, decoded on another, and answered as by one",
        f"{len(stage.prompts)} prompts of {min(map(len, stage.prompts))} to "
        f"{max(map(len, stage.prompts))} tokens; the decode engine took {loaded} tokens from the "
        "cache and computed one of each"
        + (f"; {fetched / (1 << 20):.1f} MiB came from the other node" if fetched else ""),
    )


def kill_before(stage: PdStage, address: str) -> Claim:
    """The decode engine has the request and has sent nothing when it is killed."""
    checks = Checks()
    prompt = Prompt("1000", stage.maker.tokens(1000))
    prefilled = stage.prefilled()
    # A stopped engine accepts the request and does not begin it, so the kill is never too late.
    os.killpg(stage.decode.pid, signal.SIGSTOP)
    with Stream(address, prompt.tokens, OUTPUT_TOKENS) as stream:
        wait_until("the prefill engine answers", lambda: stage.prefilled() > prefilled, 60)
        stage.decode.kill()
        seen = stream.read_all()
    stage.progress.say(f"decode engine killed before its first event: {_told(seen)}")
    checks.require(seen.status >= 500, f"status {seen.status}, which means success")
    checks.equal("tokens seen", len(seen.tokens), 0)
    checks.require(bool(seen.error), "no error text")
    stage.figures["killed_before"] = {"status": seen.status, "error": seen.error[:200]}
    wait_until("the server has noted its end", lambda: not stage.decode_is_known(), 30)
    return checks.claim(
        "2   The decode engine is killed before its first event: an error status",
        f"the client received {_told(seen)}",
    )


def comes_back(stage: PdStage, address: str) -> Claim:
    """A restarted decode engine has the prompts of the killed one at once."""
    checks = Checks()
    loaded = 0
    for prompt in stage.prompts:
        loaded += answered_as_by_one(stage, checks, address, prompt)[1]
    stage.progress.say(f"decode engine started again: {loaded} tokens came from the cache")
    return checks.claim(
        "3   It is started again: its prompts come from the cache",
        f"{loaded} tokens of {len(stage.prompts)} prompts came from the cache",
    )


def first_token(stage: PdStage, router: RouterServer) -> Claim:
    """The prefill engine's token is sent first, unless it ends within a character."""
    checks = Checks()
    sent = withheld = 0
    for prompt in stage.prompts:
        answer = complete_text(router.http, prompt.tokens, OUTPUT_TOKENS)
        alone = stage.texts[prompt.name]
        what = f"prompt of {prompt.name} tokens"
        checks.equal(f"{what}: text", answer.text, alone.text)
        checks.equal(f"{what}: usage", answer.usage, alone.usage)

    def counted() -> int:
        nonlocal sent, withheld
        metrics = router.metrics()
        sent, withheld = (
            int(metrics.total("pegaflow_router_first_token_total", reason=reason))
            for reason in ("sent", "text")
        )
        return sent + withheld

    wait_until("the router counts the last one", lambda: counted() >= len(stage.prompts), 10)
    checks.require(sent > 0, "no answer began with the prefill engine's token")
    stage.progress.say(f"--pd-first-token: {sent} answers began with the prefill engine's token")
    return checks.claim(
        "4   The prefill engine's token is sent first, without a seam in the answer",
        f"{sent} of {len(stage.prompts)} answers began with it (in {withheld} it was not a whole "
        "character); text and usage are those of one engine",
    )


def client_leaves(stage: PdStage, address: str) -> Claim:
    checks = Checks()
    prompt = Prompt("1000", stage.maker.tokens(1000))
    before = stage.generating()[1]
    with Stream(address, prompt.tokens, LONG_ANSWER) as stream:
        stream.read_tokens(3)
        checks.equal("requests at the decode engine", stage.generating()[0], 1)
    wait_until("the decode engine stops generating", lambda: stage.generating()[0] == 0, 60)
    computed = stage.generating()[1] - before
    checks.require(computed < LONG_ANSWER, f"it computed all {computed} tokens")
    stage.progress.say(f"client gone after 3 tokens: the decode engine stopped at {computed}")
    return checks.claim(
        "5   The client leaves: the decode engine stops generating",
        f"{computed} of {LONG_ANSWER} tokens were computed",
    )


def kill_server(stage: PdStage, address: str) -> Claim:
    """Kills the prefill node's server: then there is nothing to wait for or to fetch."""
    checks = Checks()
    before, fetched = stage.counted(), stage.fetched_bytes()
    stage.pega.kill()
    answer = complete(address, stage.last.tokens, OUTPUT_TOKENS)
    wait_until(
        "the decode engine counts the request",
        lambda: stage.counted()["answered"] > before["answered"],
        10,
    )
    after = stage.counted()
    checks.none("answer", computed_differences(answer, stage.baseline[stage.last.name]))
    checks.equal("loaded tokens", after["external"] - before["external"], 0)
    checks.equal("waits that ran out", after["timeout"] - before["timeout"], 0)
    checks.equal("fetched bytes", stage.fetched_bytes() - fetched, 0)
    stage.progress.say(f"prefill node's server killed: first token after {answer.ttft_s:.2f} s")
    return checks.claim(
        "6   The prefill node's server is killed: the decode engine computes without waiting",
        f"{len(stage.last)} tokens computed, answered as by one engine",
    )


def kill_after(stage: PdStage, address: str) -> Claim:
    checks = Checks()
    prompt = Prompt("1000", stage.maker.tokens(1000))
    with Stream(address, prompt.tokens, LONG_ANSWER) as stream:
        stream.read_tokens(3)
        stage.decode.kill()
        seen = stream.read_all()
    stage.progress.say(f"decode engine killed after its first event: {_told(seen)}")
    checks.equal("status", seen.status, 200)
    checks.require(len(seen.tokens) < LONG_ANSWER, "the kill was too late")
    checks.require(bool(seen.error), "no error event: the answer looks complete")
    checks.require(not seen.done, "[DONE] after half an answer")
    stage.figures["killed_after"] = {"tokens": len(seen.tokens), "error": seen.error[:200]}
    number = 7 if stage.has_two_nodes else 6
    return checks.claim(
        f"{number}   The decode engine is killed in the middle of an answer: an error, "
        "and no [DONE]",
        f"the client received {_told(seen)}",
    )


def _told(seen: Seen) -> str:
    end = "[DONE]" if seen.done else seen.error[:160] or "no further event"
    return f"status {seen.status}, {len(seen.tokens)} tokens, then {end}"
