"""--ssd: blocks come back from the disk, also after a stop, a kill and damage."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from demo.client import Answer, RequestFailed
from demo.compare import computed_differences
from demo.prompts import BLOCK_TOKENS, Prompt
from demo.report import Checks, Claim, Spread
from demo.ssd_stage import (
    CAPACITY,
    FULL_BYTES,
    MIB,
    PROMPT,
    PROMPTS,
    SMALL_CAPACITY,
    Loaded,
    SsdStage,
    small_file_system,
)
from demo.stage import kill_in_a_load
from tests.support.child_process import ChildFailed

#: More kills follow until one was in the middle of a load.
MAX_KILLS = 10


@dataclasses.dataclass(frozen=True)
class Pass:
    """Prompts that were sent one after the other."""

    prompts: Sequence[Prompt]
    loads: Sequence[Loaded]

    @property
    def blocks(self) -> int:
        return sum(one.blocks for one in self.loads)

    @property
    def from_disk(self) -> int:
        return sum(one.from_disk for one in self.loads)

    @property
    def whole(self) -> int:
        return sum(one.whole for one in self.loads)

    @property
    def incomplete(self) -> list[Prompt]:
        """Prompts of which a block was a miss."""
        return [
            prompt
            for prompt, one in zip(self.prompts, self.loads, strict=True)
            if one.blocks < one.whole
        ]

    def check_all_loaded(self, checks: Checks) -> None:
        for prompt, one in zip(self.prompts, self.loads, strict=True):
            checks.equal(f"{prompt.name}: blocks loaded", one.blocks, one.whole)
            checks.equal(
                f"{prompt.name}: tokens of external hits, by vLLM",
                one.hit_tokens,
                one.whole * BLOCK_TOKENS,
            )

    def __str__(self) -> str:
        return (
            f"{self.blocks} of {self.whole} blocks "
            f"({100 * self.blocks / max(1, self.whole):.0f} %), "
            f"{self.from_disk} read from the disk"
        )


def run_ssd(stage: SsdStage) -> Iterator[Claim]:
    """The claims in order, with the servers that they need."""
    with stage.running(stage.plain):
        for prompt in (*stage.prompts, *stage.late, *stage.in_flight):
            with stage.progress.step(f"without the connector: {prompt.name}"):
                stage.baseline[prompt.name] = stage.ask(prompt, stage.plain)
        stage.progress.say(f"vLLM without the connector has answered {len(stage.baseline)} prompts")
    with stage.running(stage.pega, stage.vllm):
        stage.wait_until_ready()
        warm, claim = come_back(stage)
        yield claim
        yield stopped(stage, warm)
        yield killed(stage)
        yield kept(stage)
        yield damaged(stage)
        yield wrapped(stage)
    yield from full_disk(stage)


def _send(stage: SsdStage, checks: Checks, prompts: Sequence[Prompt], when: str) -> Pass:
    """Sends prompts one after the other and compares each answer with the one of vLLM alone."""
    loads = []
    for prompt in prompts:
        one = stage.load(prompt)
        loads.append(one)
        stage.progress.say(
            f"{when}: {prompt.name}: {one.blocks} of {one.whole} blocks loaded, {one.from_disk} "
            f"read from the disk, first token after {one.answer.ttft_s:.2f} s"
        )
        checks.none(prompt.name, computed_differences(one.answer, stage.baseline[prompt.name]))
    return Pass(prompts, loads)


def _store(
    stage: SsdStage, checks: Checks, prompts: Sequence[Prompt], *, were_sent: bool = False
) -> Pass:
    """Sends new prompts, and returns when all of their blocks are stored.

    Args:
        were_sent: The server may have blocks of them from before it was killed.
    """
    loads: list[Loaded] = []
    for prompt in prompts:
        stage.make_room(prompt)
        loads += _send(stage, checks, [prompt], "new").loads
    stage.settle()
    sent = Pass(prompts, loads)
    stage.stored += sent.whole
    if not were_sent:
        checks.equal("blocks loaded of new prompts", sent.blocks, 0)
    return sent


def come_back(stage: SsdStage) -> tuple[Pass, Claim]:
    """Claim 1: more prompts than the pool has room for, sent again in the same order."""
    checks = Checks()
    room = stage.pool_blocks * BLOCK_TOKENS // PROMPT
    stage.mark(f"{PROMPTS} new prompts are stored; the pool has room for {room} of them")
    cold = _store(stage, checks, stage.prompts)
    checks.equal("blocks that left the pool before they were written", stage.disk().lost, 0)
    stage.mark("the same prompts again")
    warm = _send(stage, checks, stage.prompts, "again")
    warm.check_all_loaded(checks)
    least = warm.whole - stage.pool_blocks
    checks.require(
        warm.from_disk >= least,
        f"{warm.from_disk} blocks were read from the disk, and the pool had no room for {least}",
    )
    computed = Spread(tuple(one.answer.ttft_s for one in cold.loads))
    loaded = Spread(tuple(one.answer.ttft_s for one in warm.loads))
    stage.figures["ttft"] = {"computed_s": computed.as_json(), "loaded_s": loaded.as_json()}
    stage.figures["come_back"] = {"blocks": warm.blocks, "from_disk": warm.from_disk}
    return warm, checks.claim(
        "1   Prompts whose blocks left the pool come back from the SSD",
        f"{len(warm.prompts)} prompts of {len(warm.prompts[0])} tokens, a pool for "
        f"{stage.pool_blocks} blocks: {warm}; tokens equal to vLLM without the connector. First "
        f"token: computed {computed}, loaded {loaded}; one sample of each prompt, no measurement",
    )


def stopped(stage: SsdStage, before: Pass) -> Claim:
    """Claim 2: SIGTERM and a new start; a prompt that was stored just before is there, too."""
    checks = Checks()
    _store(stage, checks, stage.late)
    checks.equal("blocks that left the pool before they were written", stage.disk().lost, 0)
    unwritten = stage.unwritten()
    stage.mark("pegaflow-server is stopped (SIGTERM) and started")
    checks.equal("exit status of pegaflow-server", stage.pega.stop(), 0)
    stage.start_server()
    checks.equal("blocks that were found on the disk", stage.disk().blocks, stage.stored)
    after = _send(stage, checks, [*stage.prompts, *stage.late], "after the start")
    after.check_all_loaded(checks)
    stage.figures["stopped"] = {
        "written_at_the_stop": unwritten, "before": str(before), "after": str(after)
    }  # fmt: skip
    return checks.claim(
        "2   pegaflow-server is stopped and started: warm from the SSD",
        f"{unwritten} blocks were only in the pool, and were written at the stop. Hit rate before: "
        f"{before}; after: {after}; tokens equal to vLLM without the connector",
    )


@dataclasses.dataclass(frozen=True)
class Kill:
    """The state at one kill."""

    held: int
    answers: list[Answer | RequestFailed]


def killed(stage: SsdStage) -> Claim:
    """Claim 3: SIGKILL while prompts load and new ones are computed, and a new start."""
    checks = Checks()
    prompts = [*stage.prompts, *stage.late]
    sent = [*stage.prompts[:3], *stage.in_flight]
    kills: list[Kill] = []
    while not any(kill.held for kill in kills) and len(kills) < MAX_KILLS:
        stage.mark(f"pegaflow-server is killed (SIGKILL) while {len(sent)} prompts are in flight")
        kills.append(_kill_while_loading(stage, sent))
        stage.progress.say(f"kill {len(kills)}: {kills[-1].held} claims, pins and reads were held")
        for prompt, answer in zip(sent, kills[-1].answers, strict=True):
            if isinstance(answer, RequestFailed):
                checks.require(False, f"{prompt.name} was not answered: {answer}")
            else:
                checks.none(prompt.name, computed_differences(answer, stage.baseline[prompt.name]))
        stage.start_server()
    checks.require(kills[-1].held > 0, f"none of {len(kills)} kills was in the middle of a load")
    after = _send(stage, checks, prompts, "after the kill")
    after.check_all_loaded(checks)
    new = _store(stage, checks, stage.in_flight, were_sent=True)
    stage.figures["killed"] = {"kills": len(kills), "held": kills[-1].held, "after": str(after)}
    return checks.claim(
        "3   pegaflow-server is killed while requests are in flight: warm from the SSD",
        f"{len(kills) * len(sent)} requests in flight were answered right; afterwards {after}; of "
        f"the prompts that were new at the kill {new.blocks} of {new.whole} blocks; tokens equal "
        "to vLLM without the connector",
    )


def kept(stage: SsdStage) -> Claim:
    """Claim 4: SIGKILL with a keeper: the pool is as it was. Then the keeper is ended, too."""
    checks = Checks()
    prompts = [*stage.prompts, *stage.late]
    checks.equal("exit status of pegaflow-server", stage.pega.stop(), 0)
    stage.keep_pool()
    stage.mark("pegaflow-server is started with --keep yes")
    stage.start_server()
    before = _send(stage, checks, prompts, "with a keeper")
    stage.settle()
    resident, mappings = stage.resident(), stage.kept_mappings()
    stage.mark("pegaflow-server is killed (SIGKILL); its keeper lives")
    stage.pega.kill()
    stage.start_server()
    adopted = stage.adopted()
    checks.equal("blocks of the pool that were adopted", adopted, resident)
    checks.equal("mappings that the engine kept", stage.kept_mappings() - mappings, 1)
    stage.mark("and killed again while 3 prompts are in flight")
    kill = _kill_while_loading(stage, stage.prompts[:3])
    for prompt, answer in zip(stage.prompts[:3], kill.answers, strict=True):
        if isinstance(answer, RequestFailed):
            checks.require(False, f"{prompt.name} was not answered: {answer}")
        else:
            checks.none(prompt.name, computed_differences(answer, stage.baseline[prompt.name]))
    stage.start_server()
    after = _send(stage, checks, prompts, "after the kill")
    after.check_all_loaded(checks)
    stage.mark("pegaflow-server is killed, and its keeper is ended")
    stage.pega.kill()
    stage.release_pool()
    stage.use_file(stage.file.name, CAPACITY, is_new=False)
    stage.start_server()
    cold = _send(stage, checks, prompts[:3], "without the keeper")
    cold.check_all_loaded(checks)
    checks.equal("blocks that came from a pool", cold.blocks - cold.from_disk, 0)
    stage.figures["kept"] = {
        "resident": resident, "adopted": adopted, "before": str(before), "after": str(after)
    }  # fmt: skip
    return checks.claim(
        "4   pegaflow-server is killed and its keeper lives: the pool is as it was",
        f"{adopted} blocks of the pool were adopted, which had {resident}; the engine kept its "
        f"mapping. Hit rate before: {before}; after: {after}. The keeper is ended, too: {cold}; "
        "tokens equal to vLLM without the connector",
    )


def _kill_while_loading(stage: SsdStage, prompts: Sequence[Prompt]) -> Kill:
    stage.forget_local()
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [pool.submit(stage.ask, prompt) for prompt in prompts]
        held = kill_in_a_load(
            stage.pega, stage.vllm, stage.held, lambda: all(future.done() for future in asked)
        )
        return Kill(held, [_outcome(future) for future in asked])


def _outcome(future: Future[Answer]) -> Answer | RequestFailed:
    """The answer, or the failure: the other prompts are still pending."""
    try:
        return future.result()
    except RequestFailed as error:
        return error


def damaged(stage: SsdStage) -> Claim:
    """Claim 5: other bytes in blocks and in a table, written while the server is stopped."""
    checks = Checks()
    prompts = [*stage.prompts, *stage.late, *stage.in_flight]
    stored = stage.stored - stage.disk().lost
    checks.equal("exit status of pegaflow-server", stage.pega.stop(), 0)
    flipped = stage.flip_bits()
    stage.overwrite_table()
    stage.mark(f"{flipped} bits of blocks are flipped, and a page of a table is overwritten")
    stage.start_server()
    pages = re.findall(r" damaged_pages=(\d+)", stage.pega.log_text())
    checks.equal("damaged pages of tables that the server has logged", pages, ["1"])
    lost = stored - stage.disk().blocks
    checks.require(lost > 0, "all blocks were found although a page of a table is overwritten")
    after = _send(stage, checks, prompts, "damaged")
    failures = stage.disk().proof_failures
    checks.require(failures > 0, "no damaged block was noticed")
    checks.require(
        failures <= flipped, f"{failures} blocks failed their proof, and {flipped} were damaged"
    )
    checks.require(
        after.blocks + failures <= after.whole,
        f"{after.blocks} of {after.whole} blocks were loaded, although {failures} were damaged",
    )
    # A block that was just computed is evicted before one that was used often, also when it is not
    # on the disk yet: some may be missing again.
    again = _send(stage, checks, after.incomplete, "stored again")
    missed = after.whole - after.blocks
    missing = again.whole - again.blocks
    checks.require(missing < missed / 2, f"{missing} of {missed} blocks are still missing")
    stage.figures["damaged"] = {"flipped": flipped, "proof_failures": failures, "lost": lost}
    return checks.claim(
        "5   Damage on the disk is a miss and never another answer",
        f"{flipped} flipped bits: {failures} blocks failed their proof; {lost} blocks of the "
        f"overwritten page were not found; {after}; tokens equal to vLLM without the connector; "
        f"{len(again.prompts)} prompts were computed in part, and sent again: {again}",
    )


def wrapped(stage: SsdStage) -> Claim:
    """Claim 6: a new file that is far smaller than the prompts."""
    checks = Checks()
    checks.equal("exit status of pegaflow-server", stage.pega.stop(), 0)
    stage.use_file("small", SMALL_CAPACITY)
    stage.mark(f"pegaflow-server starts with a new file of {SMALL_CAPACITY // MIB} MiB")
    stage.start_server()
    stored = _store(stage, checks, stage.prompts)
    # The newest first: a miss is stored, and displaces older blocks.
    newest = _send(stage, checks, stage.prompts[:-3:-1], "the newest")
    newest.check_all_loaded(checks)
    oldest = _send(stage, checks, stage.prompts[:1], "the oldest")
    checks.equal(f"{stage.prompts[0].name}: blocks loaded", oldest.blocks, 0)
    counts = stage.disk()
    checks.require(counts.reclaimed > 0, "no segment was used again")
    size = stage.file.stat().st_size
    checks.require(size <= SMALL_CAPACITY, f"the file has {size} bytes")
    stage.figures["small_file"] = {"reclaimed": counts.reclaimed, "file_bytes": size}
    return checks.claim(
        "6   A file that is too small for the prompts gives misses for the oldest",
        f"{stored.whole} blocks were stored, with a file of {size // MIB} MiB and the pool of "
        f"{stage.pool_blocks} blocks; {counts.reclaimed} blocks of the file gave way to newer "
        f"ones. The newest prompts: {newest}; the oldest: {oldest}; tokens equal to vLLM without "
        "the connector",
    )


def full_disk(stage: SsdStage) -> Iterator[Claim]:
    """Claim 7, where this user may mount a file system: one without room for the file."""
    directory = stage.file.parent / "full"
    directory.mkdir()
    prefix = small_file_system(directory, FULL_BYTES)
    if prefix is None:
        stage.progress.say("a full file system is left out: this user may not mount a tmpfs")
        return
    checks = Checks()
    stage.on_full_disk.prefix = prefix
    error = _refusal(stage, checks, directory)
    fits = size_that_fits(error, directory)
    checks.require(fits is not None, f"the error does not name the size that fits: {error}")
    if fits is not None:
        stage.on_full_disk.arguments = _of_size(directory, fits)
        with stage.running(stage.on_full_disk):
            capacity = stage.on_full_disk.metrics().total("pegaflow_ssd_capacity_bytes")
        checks.require(capacity > 0, "the server has no SSD tier with the size of the error")
    yield checks.claim(
        "7   A file system without room for the file is refused by name, with the size that fits",
        f"exit status 1: {error}; with that size the server starts",
    )


def size_that_fits(error: str, directory: Path) -> int | None:
    """Bytes that are free, by the error of a server whose file in ``directory`` has no room."""
    place = re.escape(str(directory))
    words = (
        rf"allocate \d+ MiB for {place}/\S+: no space left; (\d+) MiB are free: choose a smaller"
    )
    found = re.search(words, error)
    return int(found[1]) * MIB if found else None


def _of_size(directory: Path, size_bytes: int) -> list[str]:
    return [
        *("--ssd-cache-path", str(directory)),
        *("--ssd-cache-capacity", str(size_bytes)),
        *("--ssd-segment-size", "16mb"),
    ]


def _refusal(stage: SsdStage, checks: Checks, directory: Path) -> str:
    """The last line of a server that must not start."""
    server = stage.on_full_disk
    server.arguments = _of_size(directory, SMALL_CAPACITY)
    try:
        server.start()
    except ChildFailed as error:
        checks.require("ended with status 1 before it was ready" in error.what, error.what)
        return server.log_text().splitlines()[-1]
    server.stop()
    return "pegaflow-server has started"
