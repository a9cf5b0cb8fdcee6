"""Claim 1: with the connector, cold prompts are answered as by vLLM alone, and are stored."""

from __future__ import annotations

from demo.compare import computed_differences
from demo.expectations import full_blocks, local_hit_blocks
from demo.prompts import BLOCK_TOKENS, Prompt
from demo.report import Checks, Claim
from demo.stage import Stage


def record_baseline(stage: Stage) -> None:
    """Answers every prompt with a vLLM that has no connector; all claims compare with these."""
    with stage.plain_vllm():
        for prompt in stage.prompts:
            what = f"without the connector: prompt {prompt.name}"
            with stage.progress.step(what):
                answer = stage.ask(prompt)
            stage.baseline[prompt.name] = answer
            stage.progress.say(f"{what}: first token after {answer.ttft_s:.2f} s")


def warm_up(stage: Stage, lengths: tuple[int, ...] = (500, 1000, 3000)) -> None:
    """The first prompts of a length are slow in every server: their answers are discarded."""
    for length in lengths:
        prompt = Prompt(f"warm-up of {length}", stage.maker.tokens(length))
        with stage.progress.step(prompt.name):
            answer = stage.store(prompt)
        stage.progress.say(
            f"{prompt.name} tokens: first token after {answer.ttft_s:.2f} s (discarded)"
        )


def store_all(stage: Stage) -> Claim:
    """Asks every prompt cold, waits until it is stored, then asks it again as a local hit."""
    checks = Checks()
    for prompt in stage.prompts:
        if not prompt.asked_before:
            continue
        # A prefix that another prompt has stored is not stored again.
        known = full_blocks(prompt.shared_tokens, BLOCK_TOKENS)
        with stage.progress.step(f"cold: prompt {prompt.name}"):
            answer = stage.store(prompt, already_stored_blocks=known)
        if not known:
            stage.rows[prompt.name].cold_s = answer.ttft_s
        stage.progress.say(f"cold: prompt {prompt.name}: first token after {answer.ttft_s:.2f} s")
        checks.none(
            f"cold prompt {prompt.name}",
            computed_differences(answer, stage.baseline[prompt.name]),
        )
    for prompt in stage.prompts:
        if not prompt.asked_before:
            continue
        with stage.progress.step(f"local hit: prompt {prompt.name}"):
            answer, counted = stage.ask_counted(prompt)
        stage.progress.say(
            f"local hit: prompt {prompt.name}: first token after {answer.ttft_s:.2f} s"
        )
        stage.local_hits[prompt.name] = answer
        stage.rows[prompt.name].local_s = answer.ttft_s
        checks.none(
            f"local hit of prompt {prompt.name}",
            computed_differences(answer, stage.baseline[prompt.name]),
        )
        # Otherwise later claims would compare a load with a load.
        checks.equal(
            f"tokens of prompt {prompt.name} that vLLM's own cache had",
            counted.local_hit_tokens,
            local_hit_blocks(len(prompt), BLOCK_TOKENS) * BLOCK_TOKENS,
        )
        checks.equal(f"blocks loaded in a local hit of {prompt.name}", counted.loaded_blocks, 0)
    stage.progress.say(f"{stage.insertions()} blocks are in the pool")
    stage.figures["stored_blocks"] = stage.insertions()
    return checks.claim(
        "1   Cold prompts are answered as by vLLM alone, and are stored",
        f"{len(stage.local_hits)} prompts of 500 to 3,008 tokens; {stage.insertions()} blocks in "
        "the pool",
    )
