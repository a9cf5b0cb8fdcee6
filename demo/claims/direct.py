"""--pd --direct: the decode engine reads blocks out of the prefill engine's memory."""

from __future__ import annotations

from collections.abc import Iterator

from demo.claims.early_legs import handovers, prefill_killed
from demo.claims.handed_over import answered_as_by_one
from demo.client import complete
from demo.compare import computed_differences
from demo.pd_stage import PdStage
from demo.report import Checks, Claim
from demo.stage import OUTPUT_TOKENS, wait_until
from demo.streams import Stream
from tests.support.vllm_server import RouterServer


def run_direct(stage: PdStage) -> Iterator[Claim]:
    """The claims, one after the other."""
    record_baseline(stage)
    # On the CPU one start takes every core.
    together = stage.engines.device == "cuda"
    with stage.servers(), stage.running(stage.prefill, stage.decode, together=together):
        with stage.routed("--flow", "auto") as router:
            # The router learns from an answer where the prefill engine's saves are.
            complete(router.http, stage.maker.tokens(1000), OUTPUT_TOKENS)
            yield read_directly(stage, router)
            yield client_leaves(stage, router)
            yield decode_killed(stage, router)
        with stage.running(stage.decode), stage.routed("--flow", "auto") as router:
            complete(router.http, stage.maker.tokens(1000), OUTPUT_TOKENS)
            yield prefill_killed(stage, router, 4)
    with stage.servers(), stage.running(stage.prefill, stage.decode, together=together):
        with stage.routed("--flow", "auto") as router:
            complete(router.http, stage.maker.tokens(1000), OUTPUT_TOKENS)
            yield server_killed(stage, router)


def record_baseline(stage: PdStage) -> None:
    """Answers every prompt with one vLLM that has no connector."""
    with stage.running(stage.plain):
        for prompt in (*stage.early, *stage.chunked, stage.killed, stage.last):
            stage.baseline[prompt.name] = complete(stage.plain.http, prompt.tokens, OUTPUT_TOKENS)
            stage.progress.say(f"one engine alone: prompt {prompt.name}")


def read_directly(stage: PdStage, router: RouterServer) -> Claim:
    checks = Checks()
    direct, missing, early = (
        stage.direct_bytes(),
        stage.missing_blocks(),
        handovers(router, "early"),
    )
    loaded = 0
    prompts = (*stage.early, *stage.chunked)
    for prompt in prompts:
        loaded += answered_as_by_one(stage, checks, router.http, prompt)[1]
    direct = stage.direct_bytes() - direct
    all_bytes = loaded * stage.shape.kv_bytes_per_token()
    checks.require(direct > 0, "no block was read out of the prefill engine's memory")
    checks.equal("lanes", stage.lanes(), {stage.engines.lane})
    checks.equal("blocks that were not loaded", stage.missing_blocks() - missing, 0)
    checks.equal("requests sent at once", handovers(router, "early") - early, len(prompts))
    free_again(stage, checks)
    share = direct / max(1, all_bytes)
    lane = stage.engines.lane
    stage.progress.say(f"{direct / (1 << 20):.1f} MiB ({share:.0%}) were read directly, by {lane}")
    stage.figures |= {"loaded_tokens": loaded, "direct_bytes": direct, "lane": lane}
    return checks.claim(
        "1   Blocks are read out of the prefill engine's memory while they are saved",
        f"{len(prompts)} prompts, answered as by one engine; of {all_bytes / (1 << 20):.1f} MiB "
        f"{direct / (1 << 20):.1f} MiB came directly, over the lane {lane}, the others from the "
        "cache",
    )


def client_leaves(stage: PdStage, router: RouterServer) -> Claim:
    checks, read = Checks(), stage.read_blocks()
    with Stream(router.http, stage.maker.tokens(stage.engines.long_tokens), OUTPUT_TOKENS):
        stage.wait_in_flight(read)
    wait_until("no engine has it any longer", lambda: stage.unfinished() == (0, 0), 60)
    free_again(stage, checks)
    stage.progress.say("client gone while the prompt was computed: no block is left in use")
    return checks.claim(
        "2   The client leaves meanwhile: no block of either engine is left in use",
        "both engines ended the request",
    )


def decode_killed(stage: PdStage, router: RouterServer) -> Claim:
    checks, read = Checks(), stage.read_blocks()
    prompt = stage.maker.tokens(stage.engines.long_tokens)
    with Stream(router.http, prompt, OUTPUT_TOKENS) as stream:
        stage.wait_in_flight(read)
        stage.kill(stage.decode)
        seen = stream.read_all()
    checks.require(seen.status >= 500, f"status {seen.status}, which means success")
    checks.equal("tokens seen", len(seen.tokens), 0)
    wait_until("the prefill engine is idle", stage.prefill_is_free, 60)
    stage.progress.say("decode engine killed: the prefill engine has released its blocks")
    return checks.claim(
        "3   The decode engine is killed meanwhile: the prefill engine releases its blocks",
        f"the client received status {seen.status}",
    )


def server_killed(stage: PdStage, router: RouterServer) -> Claim:
    checks, read = Checks(), stage.read_blocks()
    with Stream(router.http, stage.last.tokens, OUTPUT_TOKENS) as stream:
        stage.wait_in_flight(read)
        stage.pega.kill()
        seen = stream.read_all()
    checks.equal("status", seen.status, 200)
    checks.require(seen.done, f"no [DONE]: {seen.error}")
    checks.equal("tokens", tuple(seen.tokens), stage.baseline[stage.last.name].tokens)
    again = complete(router.http, stage.killed.tokens, OUTPUT_TOKENS)
    checks.none("the next answer", computed_differences(again, stage.baseline[stage.killed.name]))
    free_again(stage, checks)
    stage.progress.say("server killed: the decode engine computed the prompt")
    return checks.claim(
        "5   The server is killed meanwhile: the request and the next one are answered right",
        f"{len(stage.last)} tokens, answered as by one engine",
    )


def free_again(stage: PdStage, checks: Checks) -> None:
    """Both engines have released all blocks, and the server knows of no read."""
    wait_until(
        "all blocks are free", lambda: stage.prefill_is_free() and stage.decode_is_free(), 30
    )
    if stage.pega.running():
        checks.equal("direct reads", stage.direct_reads(), 0)
