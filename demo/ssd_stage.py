"""The stage of the claims of --ssd: a pool smaller than the prompts, and a cache file on a disk."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from demo.chart import Event, Sample, svg_chart, text_chart
from demo.children import StartsChildren
from demo.client import Answer, complete
from demo.diagnosis import describe
from demo.expectations import full_blocks
from demo.progress import Progress
from demo.prompts import BLOCK_TOKENS, Prompt, PromptMaker
from demo.stage import LONG_DEADLINES, forget_local, wait_until
from tests.support.vllm_server import (
    ModelShape,
    PegaServer,
    VllmOptions,
    VllmServer,
    ensure_model,
)

#: Tokens of a prompt and of its answer. The answer fills no block.
PROMPT, ANSWER = 650, 8
PROMPTS = 10

MIB = 1 << 20
#: Room for 4 of the prompts, each of 20 blocks of 1.5 MiB. A quarter of it may be in flight from
#: the disk: a longer prompt would be loaded in part only.
POOL_BYTES = 128 * MIB
SEGMENT_BYTES = 64 * MIB
#: Room for all prompts several times, and for 4 of them.
CAPACITY, SMALL_CAPACITY = 1536 * MIB, 136 * MIB
#: Size of the file system that is too small for the cache file.
FULL_BYTES = 64 * MIB

#: The sides of an engine, which connect to the server one by one.
_SIDES = ("scheduler", "worker")

#: The beginning of a segment of the file: its header, then its table (engine/ssd/format.h).
_LOG_OFFSET, _SECTOR = 1 * MIB, 4096


@dataclasses.dataclass(frozen=True)
class Loaded:
    """The answer to one prompt that was sent alone, and what the server has loaded for it."""

    answer: Answer
    blocks: int
    #: Blocks read from the disk; those behind one that failed its proof are not loaded.
    from_disk: int
    #: Blocks that the prompt fills.
    whole: int
    #: Tokens that vLLM counted as external hits.
    hit_tokens: int


@dataclasses.dataclass(frozen=True)
class DiskCounts:
    """The server's counts of its disk since its start."""

    blocks: int
    proof_failures: int
    #: Blocks that gave way to newer ones.
    reclaimed: int
    #: Blocks that left the pool before they were written.
    lost: int


class SsdStage(StartsChildren):
    """One run's servers and results. Belongs to the main thread; ask() is thread-safe."""

    def __init__(self, build_dir: Path, logs: Path, sockets: Path, seed: int, files: Path) -> None:
        """
        Args:
            files: An empty directory on a disk, for the cache file.
        """
        self.shape = ModelShape()
        self.progress = Progress()
        self.maker = PromptMaker(seed, self.shape.vocabulary)
        self.prompts = self._made("prompt", PROMPTS)
        #: Stored just before the server is stopped, and first sent while it is killed.
        self.late, self.in_flight = self._made("late prompt", 1), self._made("new prompt", 2)
        self.baseline: dict[str, Answer] = {}
        self.samples: list[Sample] = []
        self.events: list[Event] = []
        self.figures: dict[str, Any] = {}
        self.diagnosis = ""
        self.logs = logs
        self.files = files
        #: Blocks of prompts that were stored since the file was new.
        self.stored = 0
        self.file = files / "cache"
        binary = build_dir / "server" / "pegaflow-server"
        self.pega = PegaServer(binary, sockets, str(POOL_BYTES))
        self.use_file("cache", CAPACITY)
        self.pega.log_file = logs / "pegaflow-server.log"
        self.on_full_disk = PegaServer(binary, sockets / "full", "64mb")
        self.on_full_disk.log_file = logs / "pegaflow-server-on-a-full-disk.log"
        plain = VllmOptions(ensure_model(self.shape), kv_cache_bytes=512 * MIB)
        connected = dataclasses.replace(
            plain,
            connector=self.pega.address,
            # All prompts that are sent at once may hold blocks that wait for their save.
            extra_config=LONG_DEADLINES | {"pegaflow.max_pinned_percent": 50},
            python_path=[build_dir / "python"],
        )
        self.plain = VllmServer(plain, sockets / "plain")
        self.plain.log_file = logs / "vllm-without-connector.log"
        self.vllm = VllmServer(connected, sockets / "pega")
        self.vllm.log_file = logs / "vllm-with-connector.log"

    def _made(self, name: str, count: int) -> list[Prompt]:
        return [
            Prompt(f"{name} {number}", self.maker.tokens(PROMPT)) for number in range(1, count + 1)
        ]

    def keep_pool(self) -> None:
        """From its next start on the pool outlives the server."""
        self.pega.arguments += ["--keep", "yes"]

    def release_pool(self) -> None:
        """Ends the keeper, and with it the pool of a server that was killed."""
        command = [str(self.pega.binary), "--release", "--addr", self.pega.address]
        subprocess.run(command, check=True, capture_output=True, timeout=60)

    def use_file(self, name: str, capacity_bytes: int, *, is_new: bool = True) -> None:
        """From its next start on the server uses this cache file, and keeps no pool."""
        self.file = self.files / name
        if is_new:
            self.stored = 0
        self.pega.arguments = [
            *("--ssd-cache-path", str(self.file)),
            *("--ssd-cache-capacity", str(capacity_bytes)),
            *("--ssd-segment-size", str(SEGMENT_BYTES)),
            # One engine uses all of it, on a machine whose cores it needs itself.
            *("--instance-share-percent", "80", "--fetch-deadline", "5s"),
        ]

    @property
    def page_bytes(self) -> int:
        """Bytes of one block: all layers, K and V."""
        return BLOCK_TOKENS * self.shape.kv_bytes_per_token()

    @property
    def pool_blocks(self) -> int:
        """The pool never has more."""
        return POOL_BYTES // self.page_bytes

    def diagnose(self) -> None:
        """Keeps the servers' counters and logs at the first failure."""
        vllm = self.vllm if self.vllm.running() else self.plain
        self.diagnosis = self.diagnosis or describe(vllm, self.pega)

    def mark(self, text: str) -> None:
        """An event of the chart, and a line of progress."""
        self.events.append(Event(self.progress.elapsed_s(), text))
        self.progress.say(text)

    def chart(self) -> str:
        """The hit rate over time; also written as SVG beside the logs."""
        picture = self.logs / "hit-rate.svg"
        picture.write_text(svg_chart(self.samples, self.events))
        return text_chart(self.samples, self.events)

    # -- servers

    def start_server(self) -> None:
        """Starts pegaflow-server again, for an engine that is running."""
        links = self._links()
        self.start(self.pega)
        self.wait_until_ready(links)

    def wait_until_ready(self, former_links: int = 0) -> None:
        """Returns when both sides of the engine use the server, and the disk was scanned."""
        links = former_links + len(_SIDES)
        wait_until("both sides of the engine use the server", lambda: self._links() >= links, 60)
        wait_until("the disk was scanned", self._is_ready, 60)

    def _links(self) -> int:
        """Connections to a server that the engine's scheduler and its worker have logged."""
        log = self.vllm.log_text()
        return sum(
            "the cache is in use" in line and any(f" side={side} " in line for side in _SIDES)
            for line in log.splitlines()
        )

    def _is_ready(self) -> bool:
        metrics = self.pega.metrics()
        return metrics.total("pegaflow_ssd_disk_state", disk=str(self.file), state="ready") == 1

    # -- requests

    def ask(self, prompt: Prompt, vllm: VllmServer | None = None) -> Answer:
        return complete((vllm or self.vllm).http, prompt.tokens, ANSWER)

    def forget_local(self) -> None:
        forget_local(self.vllm, self.maker)

    def settle(self) -> None:
        """Empties vLLM's own cache, which it permits once all blocks are saved, and waits until no
        block is being written.
        """
        self.forget_local()
        wait_until("no block is being written", lambda: not self._disk_is_busy(), 30)

    def make_room(self, prompt: Prompt) -> None:
        """Waits until the blocks that a new prompt displaces are on the disk."""
        self.settle()
        room = self.pool_blocks - full_blocks(len(prompt), BLOCK_TOKENS)
        wait_until(
            f"the blocks that {prompt.name} displaces are on the disk",
            lambda: self.unwritten() <= room,
            30,
        )

    def load(self, prompt: Prompt) -> Loaded:
        """Sends a prompt that vLLM's own cache does not have; it must be the only one."""
        self.settle()
        before = self._counts()
        with self.progress.step(prompt.name):
            answer = self.ask(prompt)
        # The answer's last event may arrive before vLLM has added up that step's statistics.
        wait_until("vLLM counts the request", lambda: self._counts()[0] > before[0], 10)
        _, tokens, blocks, from_disk = (
            now - then for now, then in zip(self._counts(), before, strict=True)
        )
        whole = full_blocks(len(prompt), BLOCK_TOKENS)
        # A block that was read and is behind one that failed its proof is not loaded.
        used = min(from_disk, blocks)
        self.samples.append(
            Sample(self.progress.elapsed_s(), (blocks - used) / whole, used / whole)
        )
        return Loaded(answer, blocks, from_disk, whole, tokens)

    def _counts(self) -> tuple[int, int, int, int]:
        """Answered requests, tokens of external hits, blocks loaded, blocks read from the disk."""
        engine, server = self.vllm.metrics(), self.pega.metrics()
        return (
            int(engine.total("vllm:request_success_total")),
            int(engine.total("vllm:external_prefix_cache_hits_total")),
            int(server.total("pegaflow_load_blocks_total")),
            int(server.total("pegaflow_ssd_hits_blocks_total", disk=str(self.file))),
        )

    # -- what is counted

    def unwritten(self) -> int:
        """Blocks saved since the server's start that were not written to the disk yet."""
        metrics = self.pega.metrics()
        saved = metrics.total("pegaflow_cache_block_insertions_total")
        written = metrics.total("pegaflow_ssd_written_blocks_total", disk=str(self.file))
        return int(saved - written - metrics.total("pegaflow_ssd_rejected_blocks_total"))

    def _disk_is_busy(self) -> bool:
        return self.pega.metrics().total("pegaflow_ssd_bytes_in_flight") > 0

    def disk(self) -> DiskCounts:
        metrics, disk = self.pega.metrics(), str(self.file)
        return DiskCounts(
            blocks=int(metrics.total("pegaflow_ssd_blocks", disk=disk)),
            proof_failures=int(metrics.total("pegaflow_ssd_proof_failures_total", disk=disk)),
            reclaimed=int(metrics.total("pegaflow_ssd_reclaimed_blocks_total", disk=disk)),
            lost=int(metrics.total("pegaflow_ssd_rejected_blocks_total")),
        )

    def resident(self) -> int:
        """Blocks in the pool."""
        return int(self.pega.metrics().total("pegaflow_cache_resident_blocks"))

    def adopted(self) -> int:
        """Blocks of the former server that this one found in the pool."""
        return int(self.pega.metrics().total("pegaflow_adopted_blocks"))

    def kept_mappings(self) -> int:
        """How often the engine has found the pool that it had mapped already, by its log."""
        return self.vllm.log_text().count("the server has the pool that is mapped already")

    def held(self) -> int:
        """What loads in flight hold: claims, pins, and reads from the disk."""
        metrics = self.pega.metrics()
        names = ("pegaflow_claims", "pegaflow_pins", "pegaflow_ssd_reads_in_flight")
        return int(sum(metrics.total(name) for name in names))

    # -- damage

    def segments(self) -> Iterator[int]:
        """Offsets of the segments of the cache file."""
        size = self.file.stat().st_size
        yield from range(_LOG_OFFSET, size - SEGMENT_BYTES + 1, SEGMENT_BYTES)

    def flip_bits(self) -> int:
        """Flips one bit in the middle of each segment that has blocks there; their number."""
        flipped = 0
        with self.file.open("r+b") as file:
            for segment in self.segments():
                file.seek(segment + SEGMENT_BYTES // 2)
                found = file.read(64)
                if not any(found):
                    continue  # It was never written.
                file.seek(segment + SEGMENT_BYTES // 2)
                file.write(bytes([found[0] ^ 1]))
                flipped += 1
        return flipped

    def overwrite_table(self) -> None:
        """Overwrites the first table page of the second segment."""
        with self.file.open("r+b") as file:
            file.seek(_LOG_OFFSET + SEGMENT_BYTES + _SECTOR)
            file.write(b"damage" * (_SECTOR // 6))


def small_file_system(directory: Path, size_bytes: int) -> list[str] | None:
    """A prefix of a command that sees a new, empty tmpfs of that size at ``directory``.

    The file system is in a mount namespace of the command, so it ends with it. None where this
    user may not create one.
    """
    unshare = shutil.which("unshare")
    if unshare is None:
        return None
    as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    mount = 'mount -t tmpfs -o "size=$1,mode=700" tmpfs "$2" && shift 2 && exec "$@"'
    prefix = [
        unshare,
        *as_root,
        "--mount",
        "sh",
        "-c",
        mount,
        "sh",
        str(size_bytes),
        str(directory),
    ]
    probe = subprocess.run([*prefix, "true"], capture_output=True, timeout=60, check=False)
    return prefix if probe.returncode == 0 else None
