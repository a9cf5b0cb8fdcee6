"""--pd: both engines receive a request at once, and the decode engine waits for the prefill."""

from __future__ import annotations

from collections.abc import Iterator

from demo.claims.handed_over import answered_as_by_one
from demo.client import complete
from demo.pd_stage import PdStage
from demo.report import Checks, Claim
from demo.stage import OUTPUT_TOKENS, wait_until
from demo.streams import Stream
from tests.support.vllm_server import RouterServer


def run_early(stage: PdStage) -> Iterator[Claim]:
    """The claims, with servers and engines of their own."""
    first = 8 if stage.has_two_nodes else 7
    with stage.servers(), stage.running(stage.prefill), stage.running(stage.decode):
        with stage.routed("--flow", "auto") as router:
            # The router learns from an answer where the prefill engine's saves are.
            complete(router.http, stage.maker.tokens(1000), OUTPUT_TOKENS)
            yield both_at_once(stage, router, first)
            yield chunks_loaded(stage, router, first + 1)
            yield client_leaves(stage, router, first + 2)
            yield prefill_killed(stage, router, first + 3)


def handovers(router: RouterServer, result: str) -> int:
    """Requests that the router has counted."""
    return int(router.metrics().total("pegaflow_router_handover_total", result=result))


def both_at_once(stage: PdStage, router: RouterServer, number: int) -> Claim:
    checks = Checks()
    loaded = 0
    for prompt in stage.early:
        prefilled, over = stage.prefilled(), stage.early_waits("over")
        early = handovers(router, "early")
        loaded += answered_as_by_one(stage, checks, router.http, prompt)[1]
        what = f"prompt of {prompt.name} tokens"
        checks.equal(f"{what}: successful waits", stage.early_waits("over") - over, 1)
        checks.equal(f"{what}: requests at the prefill engine", stage.prefilled() - prefilled, 1)
        checks.equal(f"{what}: requests sent at once", handovers(router, "early") - early, 1)
    stage.progress.say(f"both engines at once: {loaded} tokens came from the prefill engine")
    return checks.claim(
        f"{number}   Both engines receive a request at once: prompts are answered as by one engine",
        f"{len(stage.early)} prompts; the decode engine waited for each and took {loaded} tokens",
    )


def chunks_loaded(stage: PdStage, router: RouterServer, number: int) -> Claim:
    checks = Checks()
    over, missing = stage.chunked_loads("over"), stage.missing_blocks()
    for prompt in stage.chunked:
        answered_as_by_one(stage, checks, router.http, prompt)
    chunked = stage.chunked_loads("over") - over
    checks.require(chunked > 0, "no load began before its prefill had ended")
    checks.equal("blocks that were not loaded", stage.missing_blocks() - missing, 0)
    stage.progress.say(f"chunks: {chunked} of {len(stage.chunked)} loads followed the prefill")
    return checks.claim(
        f"{number}   Chunks of a prompt are loaded while later ones are computed",
        f"{chunked} of {len(stage.chunked)} loads began before the end of a prefill in chunks of "
        f"{stage.engines.chunk_tokens} tokens; answered as by one engine",
    )


def client_leaves(stage: PdStage, router: RouterServer, number: int) -> Claim:
    checks = Checks()
    left = stage.early_waits("dropped")
    with Stream(router.http, stage.maker.tokens(3000), OUTPUT_TOKENS):
        wait_until("both engines have the request", lambda: stage.unfinished() == (1, 1), 60)
    wait_until("no engine has it any longer", lambda: stage.unfinished() == (0, 0), 60)
    checks.equal("waits that were dropped", stage.early_waits("dropped") - left, 1)
    wait_until("the router has none", lambda: _inflight(router) == 0, 10)
    stage.progress.say("client gone while the prompt was computed: both engines ended the request")
    return checks.claim(
        f"{number}   The client leaves while the prompt is computed: both engines end the request",
        "neither engine has the request any longer",
    )


def prefill_killed(stage: PdStage, router: RouterServer, number: int) -> Claim:
    checks = Checks()
    prompt, read = stage.killed, stage.read_blocks()
    with Stream(router.http, prompt.tokens, OUTPUT_TOKENS) as stream:
        stage.wait_in_flight(read)
        stage.kill(stage.prefill)
        seen = stream.read_all()
    checks.equal("status", seen.status, 200)
    checks.require(seen.done, f"no [DONE]: {seen.error}")
    checks.equal("tokens", tuple(seen.tokens), stage.baseline[prompt.name].tokens)
    checks.equal("requests sent again", handovers(router, "withdrawn"), 1)
    stage.progress.say("prefill engine killed: the decode engine computed the prompt")
    return checks.claim(
        f"{number}   The prefill engine is killed meanwhile: the decode engine computes the prompt",
        f"{len(prompt)} tokens, answered as by one engine; nothing was sent to the client before",
    )


def _inflight(router: RouterServer) -> int:
    return int(router.metrics().total("pegaflow_router_engine_inflight"))
