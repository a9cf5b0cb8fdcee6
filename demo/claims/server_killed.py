"""Claim 5: pegaflow-server is killed in the middle of loads, which only costs requests time."""

from __future__ import annotations

import dataclasses
import time
from concurrent.futures import Future, ThreadPoolExecutor

from demo.client import Answer, RequestFailed
from demo.compare import computed_differences
from demo.expectations import full_blocks
from demo.prompts import BLOCK_TOKENS, Prompt
from demo.report import Checks, Claim
from demo.stage import Stage, kill_in_a_load, wait_until

#: The least number of kills; more follow until one was in the middle of a load.
MIN_KILLS = 3
MAX_KILLS = 20

#: vLLM logs this when blocks of a load were reported bad and are computed again.
_RECOVERED = "Recovered from KV load failure"


@dataclasses.dataclass(frozen=True)
class Kill:
    """The state at one kill."""

    pins: int
    recovered: int
    answers: list[Answer | RequestFailed]

    @property
    def in_a_load(self) -> bool:
        """A load was cut off: the server had pins, and vLLM had to compute blocks after all."""
        return self.pins > 0 and self.recovered > 0


def kill_server(stage: Stage) -> Claim:
    """Several prompts at once, SIGKILL while they load, a restart, hits again; repeated."""
    checks = Checks()
    prompts = [prompt for prompt in stage.prompts if len(prompt) in (500, 1000, 1024, 3000)]
    prompts = [prompt for prompt in prompts if not prompt.shared_tokens]
    kills: list[Kill] = []
    back_s: list[float] = []
    while len(kills) < MIN_KILLS or not any(kill.in_a_load for kill in kills):
        if len(kills) == MAX_KILLS:
            break
        number = len(kills) + 1
        with stage.progress.step(f"kill {number}: {len(prompts)} prompts load"):
            kill = _kill_while_loading(stage, prompts)
        kills.append(kill)
        stage.progress.say(
            f"kill {number}: {kill.pins} pins held, {kill.recovered} times vLLM computed missing "
            f"blocks; {len(prompts)} requests ended"
        )
        for prompt, answer in zip(prompts, kill.answers, strict=True):
            what = f"kill {number}, prompt {prompt.name}"
            if isinstance(answer, RequestFailed):
                checks.require(False, f"{what}: not answered: {answer}")
            else:
                # Partly computed, in a batch: equal in tokens, not to the last bit.
                checks.none(what, computed_differences(answer, stage.baseline[prompt.name]))
        stage.start(stage.pega, "pegaflow-server starts again")
        with stage.progress.step("until a prompt comes from the cache again"):
            back_s.append(_wait_for_hits(stage, prompts[0]))
        stage.progress.say(f"hits are back after {back_s[-1]:.1f} s")
        for prompt in prompts[1:]:
            with stage.progress.step(f"prompt {prompt.name} is stored again"):
                stage.forget_local()
                stage.store(prompt)
        stage.progress.say(f"{len(prompts)} prompts are stored again")
    in_a_load = sum(kill.in_a_load for kill in kills)
    checks.require(in_a_load > 0, f"none of {len(kills)} kills was in the middle of a load")
    stage.figures["server_killed"] = {
        "kills": len(kills),
        "kills_in_a_load": in_a_load,
        "requests": len(kills) * len(prompts),
        "hits_back_s": back_s,
    }
    return checks.claim(
        "5   pegaflow-server is killed while prompts load: every request is answered, right",
        f"{len(kills)} kills, {in_a_load} in the middle of a load; "
        f"{len(kills) * len(prompts)} requests answered right; hits were back "
        f"{max(back_s):.1f} s after the server at the latest, the time to store a prompt included",
    )


def _kill_while_loading(stage: Stage, prompts: list[Prompt]) -> Kill:
    """Asks all prompts at once and kills the server as soon as one holds a pin."""
    stage.forget_local()
    recovered = stage.vllm.log_text().count(_RECOVERED)
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [pool.submit(stage.ask, prompt) for prompt in prompts]
        pins = kill_in_a_load(
            stage.pega,
            stage.vllm,
            lambda: int(stage.pega.metrics().total("pegaflow_pins")),
            lambda: all(future.done() for future in asked),
        )
        answers = [_outcome(future) for future in asked]
    return Kill(pins, stage.vllm.log_text().count(_RECOVERED) - recovered, answers)


def _outcome(future: Future[Answer]) -> Answer | RequestFailed:
    """The answer, or the failure: the other prompts are still pending."""
    try:
        return future.result()
    except RequestFailed as error:
        return error


def _wait_for_hits(stage: Stage, prompt: Prompt) -> float:
    """Asks a prompt until it comes from the cache; seconds from now until then."""
    begin = time.monotonic()

    def comes_back() -> bool:
        stage.forget_local()
        answer, counted = stage.ask_counted(prompt, max_tokens=1)
        return counted.loaded_blocks == full_blocks(len(prompt), BLOCK_TOKENS)

    wait_until(f"prompt {prompt.name} comes from the cache", comes_back, 60)
    return time.monotonic() - begin
