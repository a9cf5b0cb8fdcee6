"""The time to the first token of a prompt that comes back from a disk.

Each round sends a new prompt, which vLLM computes; waits until its blocks are on the disk; and then
sends it again, alternating between the pool, whose blocks are loaded, and the disk, after the pool
was emptied. The bound of a reload from the disk is that from the pool in the same round, the time
in which fio reads as many bytes from the same file (random reads of 1 MiB with io_uring into huge
pages, with as many bytes in flight), and 10 ms. Exits with 1 when the target is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path

from demo.client import complete, post
from demo.stage import wait_until
from perf.support.figure import Figure, note, publish
from perf.support.servers import Servers, parser, servers
from tests.support.vllm_server import ModelShape, VllmOptions, ensure_model

BLOCK_TOKENS = 32
#: Seconds that a reload from the disk may take beyond its reads.
BEYOND_S = 0.01
MAX_RATIO = 1.0
#: Of a load before the run ends with an error.
ATTEMPTS = 3
#: What the server passes to a disk at once.
BYTES_IN_FLIGHT = 16 << 20


@dataclasses.dataclass(frozen=True)
class Reload:
    """Seconds to the first token of one prompt."""

    computed_s: float
    pool_s: float
    disk_s: float
    #: Bytes read from the disk.
    disk_bytes: int


def total(run: Servers, name: str) -> int:
    return int(run.pega.metrics().total(f"pegaflow_{name}"))


def forget(run: Servers, pool: bool) -> None:
    """Empties vLLM's own cache, and the pool if ``pool``."""
    wait_until(
        "POST /reset_prefix_cache succeeds",
        lambda: post(run.connected.http, "/reset_prefix_cache")[1] == {"success": True},
        30,
    )
    if pool:
        wait_until("the pool is empty", lambda: emptied(run), 30)


def emptied(run: Servers) -> bool:
    status, report = run.pega.post("/cache/memory/cleanup")
    return status == 200 and report["still_referenced_blocks"] == 0


def loaded(run: Servers, prompt: list[int], pool: bool) -> tuple[float, int]:
    """Seconds to the first token, and the bytes read from the disk.

    On a busy machine the connector's deadlines may pass, and vLLM computes: that is tried again.
    """
    for _ in range(ATTEMPTS):
        forget(run, pool)
        opened, restored = total(run, "load_bytes_total"), total(run, "ssd_read_bytes_total")
        seconds = complete(run.connected.http, prompt, 1).ttft_s
        if total(run, "load_bytes_total") != opened:
            return seconds, total(run, "ssd_read_bytes_total") - restored
        note("the prompt is stored, and was computed")
    raise RuntimeError(f"the prompt is stored, and was computed {ATTEMPTS} times")


def measure(run: Servers, prompt: list[int], disk_first: bool) -> Reload:
    stored = total(run, "ssd_blocks") + len(prompt) // BLOCK_TOKENS
    computed_s = complete(run.connected.http, prompt, 1).ttft_s
    wait_until("the prompt is on the disk", lambda: total(run, "ssd_blocks") >= stored, 60)
    pool: list[float] = []
    disk: list[tuple[float, int]] = []
    for from_disk in (disk_first, not disk_first):
        seconds, read = loaded(run, prompt, pool=from_disk)
        if from_disk:
            disk.append((seconds, read))
        elif read:
            raise RuntimeError(f"{read} bytes came from the disk, and not from the pool")
        else:
            pool.append(seconds)
    return Reload(computed_s, pool[0], *disk[0])


def fio_bytes_per_second(file: Path, written: int, seconds: float = 3.0) -> float:
    """What fio reads from the file, with as many bytes in flight as the server has.

    Its memory lies on huge pages, as the pool does: a disk is slower with scattered small ones.

    ``written``: the bytes from its beginning on that hold blocks; the kernel reads no others from
    the disk.
    """
    ran = subprocess.run(
        [
            "fio",
            "--name=read",
            f"--filename={file}",
            "--readonly",
            f"--size={written >> 20}m",
            "--rw=randread",
            "--bs=1m",
            f"--iodepth={BYTES_IN_FLIGHT >> 20}",
            "--ioengine=io_uring",
            "--direct=1",
            "--time_based",
            f"--runtime={seconds}",
            "--output-format=json",
        ],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
    )
    return float(json.loads(ran.stdout)["jobs"][0]["read"]["bw_bytes"])


def run_rounds(options: argparse.Namespace) -> tuple[list[Reload], list[float]]:
    """The rounds after one to warm up, and fio's rate before and after the last."""
    draw = random.Random(options.seed)
    plain = VllmOptions(ensure_model(), max_model_len=4096)
    rounds: list[Reload] = []
    with servers(options.build_dir, "2gb", plain) as run:
        directory = run.pega.socket.parent / "disk"
        run.pega.arguments += [
            *("--ssd-cache-path", str(directory / "ssd"), "--ssd-cache-capacity", "8gb"),
            *("--ssd-write-ahead", "2gb"),
        ]
        directory.mkdir()
        run.pega.start()
        run.connected.start()
        rates = []
        for number in range(options.rounds + 1):
            prompt = [draw.randrange(3, ModelShape().vocabulary) for _ in range(options.tokens)]
            result = measure(run, prompt, disk_first=number % 2 == 0)
            note(
                f"round {number}: computed {result.computed_s:.3f} s, from the pool "
                f"{result.pool_s * 1e3:.1f} ms, from the disk {result.disk_s * 1e3:.1f} ms "
                f"({result.disk_bytes / 1e6:.1f} MB)" + (" (warm-up)" if number == 0 else "")
            )
            if number:
                rounds.append(result)
            if number >= options.rounds - 1:
                written = total(run, "ssd_write_bytes_total")
                rates.append(fio_bytes_per_second(directory / "ssd", written))
                note(f"fio reads {rates[-1] / 1e9:.2f} GB/s")
    return rounds, rates


def figures_of(
    rounds: list[Reload], rates: list[float], options: argparse.Namespace
) -> list[Figure]:
    rate = statistics.fmean(rates)
    bounds = [each.pool_s + each.disk_bytes / rate + BEYOND_S for each in rounds]
    ratios = [each.disk_s / bound for each, bound in zip(rounds, bounds, strict=True)]
    params = {
        "tokens": options.tokens,
        "rounds": options.rounds,
        "seed": options.seed,
        "fio_bytes_per_second": rates,
        "computed_s": statistics.median(each.computed_s for each in rounds),
    }
    return [
        Figure(
            run="first token of a prompt from the disk",
            params=params,
            figure=statistics.median(each.disk_s for each in rounds),
            unit="s",
            bound=statistics.median(bounds),
            bound_name="from the pool + fio's time + 10 ms",
            target=MAX_RATIO,
            n=len(rounds),
            spread=f"medians of rounds, ratios {min(ratios):.2f} to {max(ratios):.2f}; "
            f"computed {params['computed_s']:.2f} s",
        )
    ]


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--tokens", type=int, default=3840, help="length of a prompt")
    arguments.add_argument("--rounds", type=int, default=9)
    options = arguments.parse_args()
    note(f"seed {options.seed}")
    rounds, rates = run_rounds(options)
    return 0 if publish(figures_of(rounds, rates, options), options.json) else 1


if __name__ == "__main__":
    sys.exit(main())
