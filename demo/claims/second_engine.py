"""Claim 3: a second engine beside the first loads the first's blocks, and the reverse."""

from __future__ import annotations

from demo.claims.reload import Reload, reload_written_by
from demo.compare import computed_differences
from demo.expectations import full_blocks, offered_blocks
from demo.prompts import BLOCK_TOKENS, Prompt
from demo.report import Checks, Claim
from demo.stage import Stage

#: Tokens of the prompt that goes the other way.
_NEW_TOKENS = 1000


def share(stage: Stage) -> Claim:
    """Another vLLM starts beside the first one; each loads the other's blocks."""
    checks = Checks()
    chosen = [prompt for prompt in stage.prompts if len(prompt) in (500, 1024, 3000)]
    fresh = Prompt("that the second computed", stage.maker.tokens(_NEW_TOKENS))
    with stage.second_vllm():
        blocks = reload_written_by(stage, checks, chosen, "second engine", "the first engine")
        with stage.progress.step("second engine: a new prompt"):
            computed = stage.store(fresh)
    # The first one is still running, and its own cache does not have that prompt.
    with stage.progress.step(f"first engine: prompt {fresh.name}"):
        answer, counted = stage.ask_emptied(fresh, max_tokens=1)
    expected = offered_blocks(
        len(fresh), BLOCK_TOKENS, stored_blocks=full_blocks(len(fresh), BLOCK_TOKENS)
    )
    returned = Reload(answer, counted, expected)
    stage.progress.say(
        f"first engine: prompt {fresh.name}: {counted.loaded_foreign_blocks} of {expected} blocks "
        "from the second"
    )
    checks.none(f"prompt {fresh.name}", returned.count_differences(stage.page_bytes))
    checks.equal("blocks written by the second engine", counted.loaded_foreign_blocks, expected)
    checks.none(f"prompt {fresh.name}", computed_differences(answer, computed))
    stage.figures["second_engine"] = {
        "blocks_from_the_first": blocks,
        "blocks_from_the_second": counted.loaded_foreign_blocks,
    }
    return checks.claim(
        "3   A second engine loads the first one's blocks, and the first the second one's",
        f"{blocks} blocks of {len(chosen)} prompts in one direction, "
        f"{counted.loaded_foreign_blocks} in the other, all written by the other process; "
        "answered right",
    )
