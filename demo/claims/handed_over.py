"""--pd: one prompt through the router, compared with one engine alone."""

from __future__ import annotations

from demo.client import Answer, complete
from demo.compare import computed_differences, largest_shift
from demo.pd_stage import PdStage, loaded_tokens
from demo.prompts import Prompt
from demo.report import Checks
from demo.stage import OUTPUT_TOKENS, wait_until


def answered_as_by_one(
    stage: PdStage, checks: Checks, address: str, prompt: Prompt
) -> tuple[Answer, int]:
    """The answer, and how many tokens the decode engine loaded, when it has counted the request.

    Checks the tokens of the answer, and that all but the last one of the prompt were loaded.
    """
    before = stage.counted()
    answer = complete(address, prompt.tokens, OUTPUT_TOKENS)
    # The last event may arrive before vLLM has added up that step's statistics.
    wait_until(
        "the decode engine counts the request",
        lambda: stage.counted()["answered"] > before["answered"],
        10,
    )
    external = stage.counted()["external"] - before["external"]
    what = f"prompt of {prompt.name} tokens"
    alone = stage.baseline[prompt.name]
    checks.none(what, computed_differences(answer, alone))
    stage.note_shift(largest_shift(answer, alone))
    checks.equal(f"{what}: loaded tokens", external, loaded_tokens(prompt))
    return answer, external
