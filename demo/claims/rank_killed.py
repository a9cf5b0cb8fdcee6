"""With --tp: one rank of the engine is killed; all blocks that all ranks had stored are loaded."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from demo.claims.reload import reload_written_by
from demo.client import Answer, RequestFailed
from demo.prompts import Prompt
from demo.report import Checks, Claim
from demo.stage import Stage, wait_until
from tests.support.child_process import group_members


def kill_rank(stage: Stage) -> Claim:
    """Kills the last rank while all of them load, restarts, and asks one prompt of each length."""
    checks = Checks()
    chosen = [prompt for prompt in stage.prompts if len(prompt) in (500, 1024, 3000)]
    stage.forget_local()
    rank = _last_rank(stage)
    # Stopped first: the loads of the other ranks end, and this one's do not.
    os.kill(rank, signal.SIGSTOP)
    with ThreadPoolExecutor(len(chosen)) as pool, stage.progress.step("prompts load, a rank dies"):
        asked = [pool.submit(_ask, stage, prompt) for prompt in chosen]
        try:
            wait_until("a load is claimed", lambda: _total(stage, "pegaflow_claims") > 0, 60)
            claims = int(_total(stage, "pegaflow_claims"))
        finally:
            os.kill(rank, signal.SIGKILL)
        # vLLM ends an engine that has lost a rank, and its requests with it.
        answered = sum(future.result() is not None for future in asked)
        wait_until("vLLM ends", lambda: not stage.vllm.running(), 120)
    stage.vllm.kill()
    stage.progress.say(
        f"one of {stage.tp} ranks was killed (SIGKILL) with {claims} loads in flight; vLLM ended, "
        f"as designed, with {answered} of {len(chosen)} requests answered"
    )
    stage.start(stage.vllm, "it starts again")
    blocks = reload_written_by(stage, checks, chosen, "after the kill", "the former processes")
    for what in ("pegaflow_claims", "pegaflow_pins", "pegaflow_held_blocks"):
        wait_until(f"{what} is 0", lambda what=what: not _total(stage, what), 30)
    stage.figures["rank_killed"] = {"claims": claims, "foreign_blocks": blocks}
    return checks.claim(
        "4   One rank is killed in the middle of a load: the blocks of all ranks are still there",
        f"{claims} loads were cut off, and nothing is held for them; {blocks} blocks were loaded "
        f"on {stage.tp} ranks after a restart; {len(chosen)} prompts answered right",
    )


def _ask(stage: Stage, prompt: Prompt) -> Answer | None:
    try:
        return stage.ask(prompt)
    except RequestFailed:
        return None  # its engine has ended


def _total(stage: Stage, metric: str) -> float:
    return stage.pega.metrics().total(metric)


def _last_rank(stage: Stage) -> int:
    """The process of the rank with the highest number.

    Raises:
        Late: vLLM has other names for its workers.
    """
    found: list[int] = []

    def named() -> bool:
        found[:] = [
            pid
            for pid in group_members(stage.vllm.pid)
            if f"Worker_TP{stage.tp - 1}" in Path("/proc", str(pid), "cmdline").read_text()
        ]
        return len(found) == 1

    wait_until(f"one process is named Worker_TP{stage.tp - 1}", named, 5)
    return found[0]
