#!/usr/bin/env python3
"""The time to the first token of a prompt from a disk, beside LMCache's file tier.

    ./dev bench ssd_peers [--rounds N] [--prompts N] [--json]

The sides alternate: each starts its server with an empty directory on the same disk and one vLLM,
and is sent the same prompts. Each prompt is computed once; once it is on the disk, vLLM's cache and
the memory of the side's server are emptied, and it is sent again. That its bytes came from the disk
is checked by the bytes that the side's server has read from storage. LMCache's tier uses O_DIRECT
as PegaFlow's does, since files in the page cache would be a memory tier.

LMCache is installed from PyPI into build/lmcache if that is missing. vLLM's own file tier
(TieringOffloadingSpec) serves GPUs only, and is therefore not compared. Exits with 1 when PegaFlow
is not faster.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from demo.client import complete, post
from demo.stage import wait_until
from perf.support.figure import Figure, note, publish
from perf.support.lmcache_server import LMCacheServer
from perf.support.servers import parser
from tests.support.child_process import ChildProcess
from tests.support.vllm_server import (
    REPOSITORY,
    ModelShape,
    PegaServer,
    VllmOptions,
    VllmServer,
    ensure_model,
)

PACKAGES = REPOSITORY / "build" / "lmcache"
#: Without dependencies: vLLM's environment has the others, and those for GPUs are not needed.
REQUIREMENTS = (
    *("lmcache==0.5.6", "aiofile", "aiofiles", "awscrt", "blake3", "caio", "nvtx"),
    *("opentelemetry-exporter-prometheus==0.61b0", "redis", "sortedcontainers"),
)
MEMORY_GB = 2


@dataclasses.dataclass(frozen=True)
class Side:
    """One cache with its engine, both running."""

    name: str
    server: ChildProcess
    vllm: VllmServer
    #: Bytes of blocks on the disk.
    stored_bytes: Callable[[], int]
    #: Empties the memory of the server.
    forget_memory: Callable[[], None]


def install_lmcache() -> None:
    if (PACKAGES / "lmcache").is_dir():
        return
    note(f"installing LMCache into {PACKAGES}")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", PACKAGES]
        + list(REQUIREMENTS),
        check=True,
    )


def emptied(server: PegaServer) -> bool:
    status, report = server.post("/cache/memory/cleanup")
    return status == 200 and report["still_referenced_blocks"] == 0


@contextlib.contextmanager
def pegaflow(build_dir: Path, directory: Path, plain: VllmOptions) -> Iterator[Side]:
    (directory / "disk").mkdir()
    program = build_dir / "server" / "pegaflow-server"
    server = PegaServer(program, directory, f"{MEMORY_GB}gb")
    server.arguments += [
        *("--ssd-cache-path", str(directory / "disk" / "ssd"), "--ssd-cache-capacity", "4gb"),
        *("--ssd-write-ahead", f"{MEMORY_GB}gb"),
    ]
    options = dataclasses.replace(
        plain, connector=server.address, python_path=[build_dir / "python"]
    )
    with server, VllmServer(options, directory / "vllm") as vllm:
        yield Side(
            "PegaFlow",
            server,
            vllm,
            lambda: int(server.metrics().total("pegaflow_ssd_write_bytes_total")),
            lambda: wait_until("the pool is empty", lambda: emptied(server), 30),
        )


@contextlib.contextmanager
def lmcache(_: Path, directory: Path, plain: VllmOptions) -> Iterator[Side]:
    (directory / "disk").mkdir()
    server = LMCacheServer(PACKAGES, directory, directory / "disk", MEMORY_GB)
    options = dataclasses.replace(
        plain, kv_transfer_config=server.transfer_config(), python_path=[PACKAGES]
    )
    with server, VllmServer(options, directory / "vllm") as vllm:
        yield Side("LMCache", server, vllm, server.stored_bytes, server.forget_memory)


def read_from_storage(pid: int) -> int:
    """Bytes that a process has had read from disks so far."""
    for line in Path("/proc", str(pid), "io").read_text().splitlines():
        name, _, value = line.partition(": ")
        if name == "read_bytes":
            return int(value)
    raise RuntimeError(f"/proc/{pid}/io has no read_bytes")


def reload_seconds(side: Side, prompt: list[int]) -> float:
    """Seconds to the first token of a prompt that the disk alone has."""
    bytes_of_prompt = len(prompt) * ModelShape().kv_bytes_per_token()
    wanted = side.stored_bytes() + int(0.95 * bytes_of_prompt)
    complete(side.vllm.http, prompt, 1)
    wait_until("the prompt is on the disk", lambda: side.stored_bytes() >= wanted, 120)
    wait_until(
        "POST /reset_prefix_cache succeeds",
        lambda: post(side.vllm.http, "/reset_prefix_cache")[1] == {"success": True},
        30,
    )
    side.forget_memory()
    before = read_from_storage(side.server.pid)
    seconds = complete(side.vllm.http, prompt, 1).ttft_s
    came = read_from_storage(side.server.pid) - before
    if came < 0.95 * bytes_of_prompt:
        raise RuntimeError(
            f"{side.name} read {came / 1e6:.1f} MB from the disk, and the prompt has "
            f"{bytes_of_prompt / 1e6:.1f} MB"
        )
    return seconds


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    draw = random.Random(options.seed)
    plain = VllmOptions(ensure_model(), max_model_len=4096)
    taken: dict[str, list[float]] = {"PegaFlow": [], "LMCache": []}
    for number in range(options.rounds):
        # The first warms the engine up.
        prompts = [
            [draw.randrange(3, ModelShape().vocabulary) for _ in range(options.tokens)]
            for _ in range(options.prompts + 1)
        ]
        sides = [pegaflow, lmcache]
        for make in sides if number % 2 == 0 else reversed(sides):
            with (
                tempfile.TemporaryDirectory(prefix="pega-perf-", dir=options.path) as directory,
                make(options.build_dir, Path(directory), plain) as side,
            ):
                seconds = [reload_seconds(side, prompt) for prompt in prompts][1:]
            note(f"round {number}: {side.name} " + ", ".join(f"{s * 1e3:.0f} ms" for s in seconds))
            taken[side.name] += seconds
    return taken


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--tokens", type=int, default=3840, help="length of a prompt")
    arguments.add_argument("--rounds", type=int, default=2, help="starts of each side")
    arguments.add_argument("--prompts", type=int, default=4, help="prompts of each start")
    arguments.add_argument("--path", type=Path, help="a directory on the disk to measure")
    options = arguments.parse_args()
    note(f"seed {options.seed}")
    install_lmcache()
    taken = measure(options)
    ours, theirs = taken["PegaFlow"], taken["LMCache"]
    figure = Figure(
        run="first token of a prompt from the disk",
        params={"tokens": options.tokens, "rounds": options.rounds, "seed": options.seed},
        figure=statistics.median(ours),
        unit="s",
        bound=statistics.median(theirs),
        bound_name="LMCache 0.5.6, fs with O_DIRECT",
        target=1.0,
        n=len(ours),
        spread=f"{min(ours):.3f} to {max(ours):.3f} s; LMCache {min(theirs):.3f} to "
        f"{max(theirs):.3f} s",
    )
    return 0 if publish([figure], options.json) else 1


if __name__ == "__main__":
    sys.exit(main())
