"""--model and --draft: exactly the expected blocks of each kind, and the answers of vLLM alone."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from demo.client import Answer, RequestFailed
from demo.compare import (
    COMPUTED_TOLERANCE,
    computed_differences,
    forced_differences,
    largest_shift,
)
from demo.kinds_stage import ANSWER, SHORT_ANSWER, KindsStage
from demo.prompts import Prompt
from demo.report import Checks, Claim
from demo.stage import forget_local, wait_until

#: More kills follow until one was in the middle of a load. Loads of small models last milliseconds;
#: about one kill in three hits one.
MAX_KILLS = 20
#: Drafts are accepted after a load at least this often, compared with a hit in the engine's cache.
LEAST_ACCEPTANCE = 0.99


@dataclasses.dataclass
class Sums:
    """What the requests of a claim have loaded and stored."""

    requests: int = 0
    tokens: int = 0
    forced: int = 0  #: Requests that continue an answer under teacher forcing.
    shift: float = 0.0  #: The largest one of a token's log-probability.
    loaded: dict[str, int] = dataclasses.field(default_factory=dict)
    stored: dict[str, int] = dataclasses.field(default_factory=dict)

    def add(self, counts: dict[str, int]) -> None:
        self.tokens += counts["tokens from the cache"]
        for sums, place in ((self.loaded, "loaded"), (self.stored, "stored")):
            for name, count in _by_kind(counts, place).items():
                sums[name] = sums.get(name, 0) + count


def _by_kind(counts: dict[str, int], place: str) -> dict[str, int]:
    begin = f"blocks {place}, by the server ("
    return {
        name.removeprefix(begin).rstrip(")"): count
        for name, count in counts.items()
        if name.startswith(begin)
    }


def _text(blocks: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in blocks.items())


def run_kinds(stage: KindsStage) -> Iterator[Claim]:
    """The claims in order, with the servers that they need."""
    with stage.running(stage.plain):
        reference = record_baseline(stage)
    with stage.running(stage.pega, stage.vllm):
        yield stored(stage)
        yield from loaded(stage, reference)
        yield shown(stage)
        yield engine_killed(stage)
        yield server_killed(stage)


# ---- vLLM without the connector


def record_baseline(stage: KindsStage) -> float:
    """Answers all prompts by vLLM alone, each computed as a whole; returns the share of drafts that
    are accepted in hits of its own cache.
    """
    asked = []
    for one in stage.conversations:
        asked += [one.first, one.longer, one.branch]
    for prompt in asked:
        _answer_alone(stage, prompt, ANSWER)
    for one in stage.conversations:
        first, answer = one.first, stage.baseline[one.first.name]
        turn = stage.next_turn(first, answer)
        stage.turns[first.name] = turn
        _answer_alone(stage, turn, ANSWER)
    for prompt in stage.long:
        _answer_alone(stage, prompt, SHORT_ANSWER)
    if stage.subject.speculation is None:
        return 0.0
    before = (0, 0)
    for _ in range(2):  # The second time from vLLM's own cache.
        before = stage.drafts(stage.plain)
        for one in stage.conversations:
            stage.ask(one.first.tokens, vllm=stage.plain)
    return _acceptance(stage, before, stage.drafts(stage.plain))


def _answer_alone(stage: KindsStage, prompt: Prompt, length: int) -> None:
    what = f"without the connector: prompt {prompt.name}"
    with stage.progress.step(what):
        forget_local(stage.plain, stage.maker)
        answer = stage.ask(prompt.tokens, length, stage.plain)
    stage.baseline[prompt.name] = answer
    stage.progress.say(f"{what}: first token after {answer.ttft_s:.2f} s")


def _acceptance(stage: KindsStage, before: tuple[int, int], after: tuple[int, int]) -> float:
    drafted, accepted = (now - then for now, then in zip(after, before, strict=True))
    share = accepted / drafted if drafted else 0.0
    stage.progress.say(f"{accepted} of {drafted} drafted tokens were accepted ({share:.3f})")
    return share


# ---- one prompt


def check_prompt(
    stage: KindsStage,
    counts: Checks,
    answers: Checks,
    sums: Sums,
    prompt: Prompt,
    *,
    length: int = ANSWER,
    is_foreign: bool = False,
) -> None:
    """Asks a prompt, and compares its counts with the calculator's and its answer with vLLM's.

    In bfloat16, an answer with another token is continued with the token of vLLM alone: a further
    request, whose counts are checked as well.
    """
    baseline = stage.baseline[prompt.name]
    tokens = prompt.tokens
    forced = 0
    while True:
        with stage.progress.step(f"prompt {prompt.name}"):
            answer, counted = stage.ask_counted(tokens, length - forced, is_foreign=is_foreign)
        sums.add(counted.counts)
        if forced:
            sums.forced += 1
        else:
            sums.requests += 1
        hit = counted.counts["tokens from the cache"]
        stage.progress.say(
            f"prompt {prompt.name}{' (forced)' if forced else ''}: {hit} of {len(tokens)} tokens "
            f"loaded: {_text(_by_kind(counted.counts, 'loaded'))} blocks; stored: "
            f"{_text(_by_kind(counted.counts, 'stored'))}"
        )
        counts.none(f"prompt {prompt.name}", counted.differences)
        rest = baseline.after(forced)
        sums.shift = max(sums.shift, largest_shift(answer, rest))
        place = None
        if stage.subject.bound:
            found, place = forced_differences(answer, rest, stage.subject.bound)
        else:
            found = computed_differences(answer, rest)
        answers.none(f"prompt {prompt.name}", found)
        if place is None or forced + place + 1 >= length:
            return
        forced += place + 1
        tokens = prompt.tokens + baseline.tokens[:forced]


def right(stage: KindsStage, sums: Sums) -> str:
    """The comparison that all answers have passed."""
    if stage.subject.bound:
        return (
            f"each token's log-probability is within {stage.subject.bound:g} of vLLM without the "
            f"connector, under teacher forcing (bfloat16; at most {sums.shift:.2g} off; "
            f"{sums.forced} answers were continued after another token)"
        )
    return (
        f"{ANSWER} tokens equal to vLLM without the connector, the first log-probability "
        f"within {COMPUTED_TOLERANCE:g}"
    )


# ---- the claims


def stored(stage: KindsStage) -> Claim:
    checks, sums = Checks(), Sums()
    checks.equal(
        "kinds of the engine: name, tokens of a block, and of a window or chunk",
        stage.registered_kinds(),
        [(one.name, one.block_tokens, one.reach) for one in stage.subject.layers],
    )
    for one in stage.conversations:
        check_prompt(stage, checks, checks, sums, one.first)
    stage.figures["stored_blocks"] = sums.stored
    return checks.claim(
        "1   Cold prompts: the answers of vLLM alone, and exactly the expected blocks are stored",
        f"{sums.requests} prompts; {_text(sums.stored)} blocks, counted by vLLM and by the server; "
        f"{right(stage, sums)}",
    )


def loaded(stage: KindsStage, reference: float) -> Iterator[Claim]:
    """Each prompt again, a longer one, a branch and the conversation's next turn."""
    counts, answers, sums = Checks(), Checks(), Sums()
    before = stage.drafts(stage.vllm)
    for one in stage.conversations:
        check_prompt(stage, counts, answers, sums, one.first)
    drafts = stage.drafts(stage.vllm)
    for one in stage.conversations:
        for prompt in (one.longer, one.branch, stage.turns[one.first.name]):
            check_prompt(stage, counts, answers, sums, prompt)
    counts.require(all(sums.loaded.values()), f"blocks of a kind were never loaded: {sums.loaded}")
    stage.figures["loaded_blocks"] = sums.loaded
    yield counts.claim(
        "2a  They are loaded after vLLM's own cache was emptied: exactly the expected blocks",
        f"{sums.requests} prompts (again, longer, branch, next turn): {_text(sums.loaded)} blocks, "
        f"{sums.tokens} tokens that vLLM counted as external hits; {_text(sums.stored)} blocks "
        "added; no more and no less, in blocks and bytes of each kind",
    )
    yield answers.claim(
        "2b  The answers are right", f"{sums.requests} prompts: {right(stage, sums)}"
    )
    if stage.subject.speculation is not None:
        yield _accepted(stage, reference, before, drafts)


def _accepted(
    stage: KindsStage, reference: float, before: tuple[int, int], after: tuple[int, int]
) -> Claim:
    checks = Checks()
    share = _acceptance(stage, before, after)
    stage.figures["accepted_drafts"] = {"own_hit": reference, "loaded": share}
    checks.require(reference > 0, "no draft was accepted by vLLM without the connector")
    checks.require(
        share >= LEAST_ACCEPTANCE * reference,
        f"{share:.3f} of the drafts were accepted, {reference:.3f} in a hit of vLLM's own cache",
    )
    return checks.claim(
        "2c  Drafts are accepted after a load as after a hit in vLLM's own cache",
        f"{share:.3f} of the drafted tokens of loaded prompts; {reference:.3f} without the "
        "connector, from vLLM's own cache",
    )


def shown(stage: KindsStage) -> Claim:
    """`pegaflow top` shows the same sums."""
    checks = Checks()
    command = [sys.executable, "-m", "pegaflow", "top", "--once", "--json"]
    done = subprocess.run(
        [*command, "--http-addr", stage.pega.http],
        env=os.environ | {"PYTHONPATH": str(stage.build_dir / "python")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    checks.equal(f"exit status of pegaflow top ({done.stderr.strip()})", done.returncode, 0)
    kinds = json.loads(done.stdout)["kinds"] if done.returncode == 0 else {}
    counts = stage.counts()
    for one in stage.subject.layers:
        name, row = one.name, kinds.get(one.name, {})
        for what in ("loaded", "stored"):
            shown_as = what.replace("stored", "saved")
            for unit, column in (
                (f"blocks {what}, by the server ({name})", f"{shown_as}_blocks"),
                (f"bytes {what} ({name})", f"{shown_as}_bytes"),
            ):
                checks.equal(f"top's {column} ({name})", row.get(column), counts[unit])
    return checks.claim(
        "3   `pegaflow top` shows blocks and bytes by kind",
        "the same sums: "
        + "; ".join(
            f"{name}: {row['saved_blocks']:,.0f} stored, {row['loaded_blocks']:,.0f} loaded"
            for name, row in kinds.items()
            if row["saved_blocks"]
        ),
    )


def engine_killed(stage: KindsStage) -> Claim:
    """SIGKILL to all processes of the engine, and a new start."""
    checks, sums = Checks(), Sums()
    stage.vllm.kill()
    stage.progress.say("vLLM was killed (SIGKILL, all of its processes)")
    stage.start(stage.vllm)
    for one in stage.conversations:
        check_prompt(stage, checks, checks, sums, one.first, is_foreign=True)
    checks.require(sums.tokens > 0, "nothing was loaded")
    return checks.claim(
        "4   The engine is killed and started again: its blocks are still there",
        f"{_text(sums.loaded)} blocks came back, all written by the killed process; "
        f"{sums.requests} prompts: {right(stage, sums)}",
    )


@dataclasses.dataclass(frozen=True)
class Kill:
    """The state at one kill."""

    held: int
    failed_loads: int
    answers: list[Answer | RequestFailed]

    @property
    def in_a_load(self) -> bool:
        return self.held > 0 and self.failed_loads > 0


def server_killed(stage: KindsStage) -> Claim:
    """Prompts at once, SIGKILL while they load, a restart, hits again; until it hit a load."""
    checks, sums = Checks(), Sums()
    kills: list[Kill] = []
    _store_long(stage, checks, sums)
    while not any(kill.in_a_load for kill in kills) and len(kills) < MAX_KILLS:
        number = len(kills) + 1
        with stage.progress.step(f"kill {number}: {len(stage.long)} prompts load"):
            kills.append(_kill_while_loading(stage))
        stage.progress.say(
            f"kill {number}: {kills[-1].held} claims and pins held, {kills[-1].failed_loads} loads "
            f"failed; {len(stage.long)} requests ended"
            + ("" if kills[-1].in_a_load else "; not in a load, so another kill follows")
        )
        for prompt, answer in zip(stage.long, kills[-1].answers, strict=True):
            what = f"kill {number}, prompt {prompt.name}"
            if isinstance(answer, RequestFailed):
                checks.require(False, f"{what}: not answered: {answer}")
            else:
                checks.none(what, _differences(stage, answer, stage.baseline[prompt.name]))
        stage.start(stage.pega)
        with stage.progress.step("until a prompt is stored again"):
            stage.start_empty()
        _store_long(stage, checks, sums)
    again = Sums()
    check_prompt(stage, checks, checks, again, stage.long[0], length=SHORT_ANSWER)
    checks.require(again.tokens > 0, "nothing came back after the last kill")
    in_a_load = sum(kill.in_a_load for kill in kills)
    checks.require(in_a_load > 0, f"none of {len(kills)} kills was in the middle of a load")
    stage.figures["server_killed"] = {"kills": len(kills), "kills_in_a_load": in_a_load}
    return checks.claim(
        "5   pegaflow-server is killed while prompts load: every request is answered, right",
        f"kills: {len(kills)}, in the middle of a load: {in_a_load}; "
        f"{len(kills) * len(stage.long)} requests answered right; afterwards prompts are stored "
        f"and loaded again ({_text(again.loaded)} blocks)",
    )


def _store_long(stage: KindsStage, checks: Checks, sums: Sums) -> None:
    for prompt in stage.long:
        check_prompt(stage, checks, checks, sums, prompt, length=SHORT_ANSWER)


def _differences(stage: KindsStage, answer: Answer, baseline: Answer) -> list[str]:
    """Those of an answer that was computed beside others, and partly from a load."""
    if stage.subject.bound:
        # After another token, which is as probable, the answer follows another text.
        return forced_differences(answer, baseline, stage.subject.bound)[0]
    return computed_differences(answer, baseline)


def _kill_while_loading(stage: KindsStage) -> Kill:
    """Asks all prompts at once and kills the server as soon as a load holds blocks."""
    failed, answered = stage.failed_loads(), stage.answered()
    with ThreadPoolExecutor(len(stage.long)) as pool:
        asked = [pool.submit(stage.ask, one.tokens, SHORT_ANSWER) for one in stage.long]
        held = 0
        while not held and not all(future.done() for future in asked):
            held = int(stage.held())
        stage.pega.kill()
        answers = [_outcome(future) for future in asked]
    whole = answered + sum(isinstance(answer, Answer) for answer in answers)
    wait_until("vLLM counts the requests", lambda: stage.answered() >= whole, 10)
    stage.forget_local()
    return Kill(held, stage.failed_loads() - failed, answers)


def _outcome(future: Future[Answer]) -> Answer | RequestFailed:
    """The answer, or the failure: the other prompts are still pending."""
    try:
        return future.result()
    except RequestFailed as error:
        return error
