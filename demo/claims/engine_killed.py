"""Claim 4: an engine that was killed and started again gets its former life's blocks back."""

from __future__ import annotations

from demo.claims.reload import answer_differences, reload
from demo.report import Checks, Claim
from demo.stage import Stage


def kill_engine(stage: Stage) -> Claim:
    """SIGKILL to all processes of the engine, a new start, and one prompt of each length."""
    checks = Checks()
    stage.vllm.kill()
    stage.progress.say("vLLM was killed (SIGKILL, all of its processes)")
    restart_s = stage.start(stage.vllm, "it starts again")
    blocks = 0
    chosen = [prompt for prompt in stage.prompts if len(prompt) in (500, 1024, 3000)]
    for prompt in chosen:
        with stage.progress.step(f"after the kill: prompt {prompt.name}"):
            result = reload(stage, prompt)
        blocks += result.counted.loaded_foreign_blocks
        stage.progress.say(
            f"after the kill: prompt {prompt.name}: {result.counted.loaded_foreign_blocks} of "
            f"{result.expected_blocks} blocks from the engine's former life"
        )
        checks.none(f"prompt {prompt.name}", result.count_differences(stage.page_bytes))
        checks.equal(
            f"blocks of prompt {prompt.name} written by the former process",
            result.counted.loaded_foreign_blocks,
            result.expected_blocks,
        )
        checks.none(f"prompt {prompt.name}", answer_differences(stage, prompt, result.answer))
    stage.figures["engine_killed"] = {"restart_s": restart_s, "foreign_blocks": blocks}
    return checks.claim(
        "4   The engine is killed and started again: its blocks are still there",
        f"{blocks} blocks came back, all written by the killed process; {len(chosen)} prompts "
        "answered right",
    )
