"""Claim 2: after vLLM's own cache was emptied, prompts are loaded: counted, right, and fast."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from demo.client import Answer
from demo.compare import COMPUTED_TOLERANCE, WHOLE_PROMPT_TOLERANCE, differences
from demo.expectations import full_blocks, offered_blocks
from demo.prompts import BLOCK_TOKENS, Prompt
from demo.report import Checks, Claim, Spread
from demo.stage import Counters, Stage

#: Pairs that count; one more goes before them and is discarded.
PAIRS = 5
#: A loaded prompt of 3,000 tokens must begin in at most this share of the cold time.
MAX_LOADED_SHARE = 1 / 3


@dataclasses.dataclass(frozen=True)
class Reload:
    """One prompt asked with vLLM's own cache empty."""

    answer: Answer
    counted: Counters
    expected_blocks: int

    def count_differences(self, page_bytes: int) -> list[str]:
        """The counters of engine and server that differ from the expectation."""
        found = []
        for what, got, expected in (
            (
                "external hits of vLLM in tokens",
                self.counted.external_hit_tokens,
                self.expected_blocks * BLOCK_TOKENS,
            ),
            ("local hits in tokens", self.counted.local_hit_tokens, 0),
            ("blocks loaded", self.counted.loaded_blocks, self.expected_blocks),
            ("bytes loaded", self.counted.loaded_bytes, self.expected_blocks * page_bytes),
        ):
            if got != expected:
                found.append(f"{what}: {got}, expected {expected}")
        return found


def reload(stage: Stage, prompt: Prompt) -> Reload:
    """Empties vLLM's own cache and asks the prompt."""
    whole = full_blocks(len(prompt), BLOCK_TOKENS)
    if prompt.asked_before:
        answer, counted = stage.ask_emptied(prompt)
        return Reload(answer, counted, offered_blocks(len(prompt), BLOCK_TOKENS, whole))
    known = full_blocks(prompt.shared_tokens, BLOCK_TOKENS)
    insertions = stage.insertions()
    stage.forget_local()
    answer, counted = stage.ask_counted(prompt)
    if counted.missed_deadlines:
        # The prompt is stored now: from here on all of it is loaded.
        stage.asked_again += 1
        stage.store_until(prompt, insertions + whole - known)
        answer, counted = stage.ask_emptied(prompt)
        known = whole
    return Reload(answer, counted, offered_blocks(len(prompt), BLOCK_TOKENS, known))


def reload_written_by(
    stage: Stage, checks: Checks, prompts: Sequence[Prompt], when: str, writer: str
) -> int:
    """Reloads prompts whose blocks all come from ``writer``, another process; their number.

    Args:
        when: The beginning of a line of progress.
        writer: As in "of 93 blocks from the first engine".
    """
    blocks = 0
    for prompt in prompts:
        with stage.progress.step(f"{when}: prompt {prompt.name}"):
            result = reload(stage, prompt)
        blocks += result.counted.loaded_foreign_blocks
        stage.progress.say(
            f"{when}: prompt {prompt.name}: {result.counted.loaded_foreign_blocks} of "
            f"{result.expected_blocks} blocks from {writer}"
        )
        checks.none(f"prompt {prompt.name}", result.count_differences(stage.page_bytes))
        checks.equal(
            f"blocks of prompt {prompt.name} written by {writer}",
            result.counted.loaded_foreign_blocks,
            result.expected_blocks,
        )
        checks.none(f"prompt {prompt.name}", answer_differences(stage, prompt, result.answer))
    return blocks


def answer_differences(stage: Stage, prompt: Prompt, answer: Answer) -> list[str]:
    """The errors in an answer to a loaded prompt. `--prove` tests this function."""
    return differences(
        answer,
        stage.local_hits.get(prompt.name),
        stage.baseline[prompt.name],
        whole_prompt=len(prompt) % BLOCK_TOKENS == 0,
    )


def reload_all(stage: Stage) -> list[Claim]:
    """Each prompt once, with its counters and its answer checked."""
    hits, answers = Checks(), Checks()
    blocks = 0
    for prompt in stage.prompts:
        with stage.progress.step(f"loaded: prompt {prompt.name}"):
            result = reload(stage, prompt)
        blocks += result.counted.loaded_blocks
        row = stage.rows[prompt.name]
        row.loaded_s = result.answer.ttft_s
        row.blocks, row.expected_blocks = result.counted.loaded_blocks, result.expected_blocks
        stage.progress.say(
            f"loaded: prompt {prompt.name}: {row.blocks} of {row.expected_blocks} blocks, "
            f"first token after {row.loaded_s:.2f} s"
        )
        hits.none(f"prompt {prompt.name}", result.count_differences(stage.page_bytes))
        hits.equal(
            f"blocks of prompt {prompt.name} that another process had written",
            result.counted.loaded_foreign_blocks,
            0,
        )
        answers.none(f"prompt {prompt.name}", answer_differences(stage, prompt, result.answer))
    mebibytes = blocks * stage.page_bytes / (1 << 20)
    stage.figures["reloaded_blocks"] = blocks
    return [
        hits.claim(
            "2a  They are loaded after vLLM's own cache was emptied: exactly the expected blocks",
            f"{blocks} blocks ({mebibytes:,.0f} MiB) counted as external hits by vLLM and as "
            "bytes by the server, no more and no less",
        ),
        answers.claim(
            "2b  The answers are right",
            f"{len(stage.prompts)} prompts: 32 tokens equal to a local hit of the same prompt and "
            "to vLLM without the connector; the first log-probability to the last bit that of the "
            "local hit (on the grid, where vLLM computes less than for a local hit, within "
            f"{WHOLE_PROMPT_TOLERANCE:g}), and within {COMPUTED_TOLERANCE:g} that of vLLM without "
            "the connector",
        ),
    ]


def compare_ttft(stage: Stage) -> Claim:
    """Cold and loaded prompts of 3,000 tokens in turn."""
    checks = Checks()
    stored = next(prompt for prompt in stage.prompts if len(prompt) == 3000)
    expected = offered_blocks(3000, BLOCK_TOKENS, stored_blocks=full_blocks(3000, BLOCK_TOKENS))
    cold, loaded = [], []
    for pair in range(PAIRS + 1):
        # A prompt is cold only once, so each sample needs a new one of the same length.
        fresh = Prompt(f"fresh {pair}", stage.maker.tokens(3000))
        with stage.progress.step(f"pair {pair} of {PAIRS}"):
            # Returns when its blocks are stored: the save does not overlap the next sample.
            cold_s = stage.store(fresh).ttft_s
            answer, counted = stage.ask_emptied(stored, max_tokens=1)
        note = " (warm-up, discarded)" if pair == 0 else ""
        stage.progress.say(f"3,000 tokens: cold {cold_s:.2f} s, loaded {answer.ttft_s:.2f} s{note}")
        checks.equal("blocks loaded", counted.loaded_blocks, expected)
        if pair:
            cold.append(cold_s)
            loaded.append(answer.ttft_s)
    cold_spread, loaded_spread = Spread(tuple(cold)), Spread(tuple(loaded))
    share = loaded_spread.median / cold_spread.median
    checks.require(
        share <= MAX_LOADED_SHARE,
        f"a loaded prompt takes {share:.2f} of the cold time, more than {MAX_LOADED_SHARE:.2f}: "
        f"loaded {loaded_spread}, cold {cold_spread}",
    )
    stage.figures["ttft_3000_tokens"] = {
        "cold_s": cold_spread.as_json(),
        "loaded_s": loaded_spread.as_json(),
        "loaded_share_of_cold": share,
        "bound": MAX_LOADED_SHARE,
    }
    return checks.claim(
        "2c  3,000 tokens begin in a third of the time or less",
        f"first token: cold {cold_spread}, loaded {loaded_spread}, medians and ranges of {PAIRS} "
        f"alternating pairs; {1 / share:.1f} times as fast",
    )
