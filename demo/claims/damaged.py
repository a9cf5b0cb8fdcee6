"""`--prove`: the comparison of claim 2 must fail when one block of the pool is overwritten."""

from __future__ import annotations

from demo.claims.reload import answer_differences, reload
from demo.prompts import Prompt
from demo.report import Checks, Claim
from demo.stage import Stage, wait_until


class NoTestHooks(RuntimeError):
    """The server was built without the switch that damages a block."""


def damage_is_seen(stage: Stage) -> Claim:
    """For some prompts: a reload that is right, one block overwritten, a reload that is not."""
    checks = Checks()
    seen = []
    chosen = [p for p in stage.prompts if p.asked_before and not p.shared_tokens][:4]
    for prompt in chosen:
        with stage.progress.step(f"prompt {prompt.name}, undamaged"):
            before = reload(stage, prompt)
        checks.none(f"undamaged {prompt.name}", before.count_differences(stage.page_bytes))
        checks.none(f"undamaged {prompt.name}", answer_differences(stage, prompt, before.answer))
        _overwrite_one_block(stage, prompt, before.expected_blocks)
        with stage.progress.step(f"prompt {prompt.name}, one block overwritten"):
            after = reload(stage, prompt)
        # The same blocks come back: only what is in one of them differs.
        checks.none(f"damaged {prompt.name}", after.count_differences(stage.page_bytes))
        found = answer_differences(stage, prompt, after.answer)
        checks.require(bool(found), f"prompt {prompt.name}: the comparison saw no difference")
        seen += found
        stage.progress.say(f"prompt {prompt.name}: {'; '.join(found) or 'NOT DETECTED'}")
    stage.figures["damage_seen"] = seen
    return checks.claim(
        "P   One overwritten block of the pool makes the comparison of claim 2 fail",
        f"{len(chosen)} prompts, right before and wrong after: the check detects a wrong block",
    )


def _overwrite_one_block(stage: Stage, prompt: Prompt, blocks: int) -> None:
    """Overwrites a block in the middle of the prompt that was loaded last.

    Raises:
        NoTestHooks: this server has no test hooks.
    """
    # Only evictable blocks are counted, so those of the last load must no longer be held.
    wait_until("no block is claimed or pinned", lambda: not _held_blocks(stage), 10)
    # Its blocks are the most recently used ones, in any order: the middle one belongs to it.
    status, answer = stage.pega.post(f"/test/overwrite_block?recent={blocks // 2}")
    if status != 200:
        raise NoTestHooks(f"POST /test/overwrite_block: status {status}, {answer}")
    stage.progress.say(f"prompt {prompt.name}: one of its blocks is overwritten")


def _held_blocks(stage: Stage) -> float:
    return stage.pega.metrics().total("pegaflow_held_blocks")
