"""With --tp: one page of one rank is overwritten; all ranks compute its block, and it is right."""

from __future__ import annotations

import mmap

from demo.client import Answer
from demo.compare import computed_differences, differences
from demo.expectations import full_blocks
from demo.prompts import BLOCK_TOKENS, Prompt
from demo.report import Checks, Claim
from demo.stage import Stage, wait_until
from tests.support.stray_client import pool_of

#: Off the grid, and the answer does not fill another block: only the prompt is stored.
_TOKENS = 15 * BLOCK_TOKENS + 4
_ANSWER_TOKENS = 8
#: The alignment of slots.
_UNIT = 4096


def damage_rank(stage: Stage) -> Claim:
    """Stores a new prompt, flips one bit of the last rank's page of one block, and asks again."""
    checks = Checks()
    prompt = Prompt("of a damaged page", stage.maker.tokens(_TOKENS))
    blocks = full_blocks(_TOKENS, BLOCK_TOKENS)
    with pool_of(stage.pega) as pool, stage.progress.step("a prompt is stored and damaged"):
        used = _used_units(pool)
        cold = _stored(stage, prompt, blocks)
        local = stage.ask(prompt, _ANSWER_TOKENS)
        new = sorted(_used_units(pool) - used)
        checks.equal("bytes written by all ranks", len(new) * _UNIT, blocks * stage.page_bytes)
        at = _page_of_last_rank(stage, new)
        pool[at + stage.page_bytes // stage.tp // 2] ^= 1

    sealed = stage.insertions()
    answer, _ = stage.ask_emptied(prompt, _ANSWER_TOKENS)
    # Computed from one block on, so rounding differs from both.
    checks.none("the damaged prompt", computed_differences(answer, cold))
    wait_until("the server has a report of the page", lambda: _corrupt(stage) > 0, 30)
    checks.equal("wrong pages reported to the server", _corrupt(stage), 1)
    failures = stage.vllm.metrics()
    failed = sum(
        failures.total("vllm:pegaflow_load_failures_total", error=error)
        # After that report the other rank's claim is gone when it opens its pages.
        for error in ("corrupt", "gone")
    )
    checks.equal("loads that failed for it", failed, 1)

    # Only that block had to be saved again, on all ranks.
    wait_until("the block is stored again", lambda: stage.insertions() > sealed, 30)
    again, counted = stage.ask_emptied(prompt, _ANSWER_TOKENS)
    checks.equal("blocks stored again", stage.insertions() - sealed, 1)
    checks.equal("blocks loaded afterwards", counted.loaded_blocks, blocks)
    checks.none("the prompt afterwards", differences(again, local, cold))
    checks.equal("wrong pages afterwards", _corrupt(stage), 1)
    return checks.claim(
        "3   One page of one rank is wrong: every rank computes its block, and no engine finds it",
        f"one bit of rank {stage.tp - 1}'s share of one of {blocks} blocks was flipped; the answer "
        "is right, and the block was stored once more on all ranks",
    )


def _stored(stage: Stage, prompt: Prompt, blocks: int) -> Answer:
    """The cold answer, once all blocks of the prompt are in the pool."""
    sealed = stage.insertions()
    cold = stage.ask(prompt, _ANSWER_TOKENS)
    if stage.insertions() < sealed + blocks:
        stage.store_until(prompt, sealed + blocks)
    return cold


def _used_units(pool: mmap.mmap) -> set[int]:
    """The units of the pool that were ever written: it begins as zeros, and nothing is evicted."""
    zeros = bytes(_UNIT)
    return {at for at in range(0, len(pool), _UNIT) if pool[at : at + _UNIT] != zeros}


def _page_of_last_rank(stage: Stage, units: list[int]) -> int:
    """The place of that page of a block in the middle. The ranks' pages of a block are adjacent."""
    middle = units[len(units) // 2]
    block = middle - middle % stage.page_bytes
    return block + stage.page_bytes // stage.tp * (stage.tp - 1)


def _corrupt(stage: Stage) -> int:
    return int(stage.pega.metrics().total("pegaflow_corrupt_pages_total"))
