"""Claim 4: an engine that was killed and restarted loads the blocks of its former process."""

from __future__ import annotations

from demo.claims.reload import reload_written_by
from demo.report import Checks, Claim
from demo.stage import Stage


def kill_engine(stage: Stage) -> Claim:
    """SIGKILL to all processes of the engine, a new start, and one prompt of each length."""
    checks = Checks()
    stage.vllm.kill()
    stage.progress.say("vLLM was killed (SIGKILL, all of its processes)")
    restart_s = stage.start(stage.vllm, "it starts again")
    chosen = [prompt for prompt in stage.prompts if len(prompt) in (500, 1024, 3000)]
    blocks = reload_written_by(stage, checks, chosen, "after the kill", "the former process")
    stage.figures["engine_killed"] = {"restart_s": restart_s, "foreign_blocks": blocks}
    return checks.claim(
        "4   The engine is killed and started again: its blocks are still there",
        f"{blocks} blocks came back, all written by the killed process; {len(chosen)} prompts "
        "answered right",
    )
