#!/usr/bin/env python3
"""Runs the scenarios of tests/gpu on this machine's GPUs, or rehearses them in ordinary memory.

    PYTHONPATH=REPOSITORY:PACKAGE python3 -m tests.gpu.run --server FILE [--device cuda:0,cuda:1]

The interpreter has PyTorch and `pegaflow`. Exits with 0 if every scenario passed, with 1 if not,
and with 77 and a message if there is no GPU and --device is not cpu.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from tests.gpu.direct import direct_reads, far_reads, killed_source, pool_reads
from tests.gpu.direct_faults import direct_faults
from tests.gpu.layouts import layouts
from tests.gpu.processes import OWN_IPC
from tests.gpu.scenarios import CPU_SIZES, GPU_SIZES, SCENARIOS, Place, prepared


def gpus() -> list[str]:
    import torch

    return [f"cuda:{number}" for number in range(torch.cuda.device_count())]


def main(argv: Sequence[str]) -> int:
    every = {"layouts": layouts, "direct_reads": direct_reads, "killed_source": killed_source}
    every |= {"direct_faults": direct_faults}
    every |= {"far_reads": far_reads, "pool_reads": pool_reads} | SCENARIOS
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--server", type=Path, required=True, help="the program pegaflow-server")
    parser.add_argument("--device", default="", help="cuda:0,cuda:1 or cpu; default: every GPU")
    parser.add_argument("--only", default="", help="names of scenarios, separated by commas")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--json", type=Path, help="file for the result of each scenario")
    parser.add_argument(
        "--expandable",
        action="store_true",
        help="PyTorch has expandable segments: memory of many allocations without IPC handles",
    )
    parser.add_argument(
        "--own-ipc",
        action="store_true",
        help="each engine in an IPC namespace of its own, as in containers (needs root)",
    )
    options = parser.parse_args(argv)
    if options.expandable:
        # Its newer name, and the one before PyTorch 2.9; the engines read it when they start.
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            os.environ[name] = "expandable_segments:True"
    if options.own_ipc:
        os.environ[OWN_IPC] = "1"
    devices = options.device.split(",") if options.device else gpus()
    if not devices:
        print("skipped: PyTorch sees no GPU here (--device cpu rehearses in ordinary memory)")
        return 77
    names = options.only.split(",") if options.only else list(every)
    if not options.only and devices[0] != "cpu" and "PEGA_UCX_LIBRARY" not in os.environ:
        names = [name for name in names if name not in ("far_reads", "pool_reads")]
        print(
            "far_reads and pool_reads are left out: PEGA_UCX_LIBRARY names no UCX with CUDA support"
        )
    sizes = CPU_SIZES if devices[0] == "cpu" else GPU_SIZES
    print(f"seed {options.seed}, on {', '.join(devices)}", flush=True)
    results = {}
    with tempfile.TemporaryDirectory(prefix="pega-") as folder:
        place = Place(options.server, Path(folder), devices, sizes, options.seed)
        place.prepare(prepared(names, sizes))
        try:
            for name in names:
                begin = time.monotonic()
                try:
                    said, held = every[name](place), True
                except Exception:
                    said, held = traceback.format_exc(), False
                finally:
                    place.end_scenario()
                took = time.monotonic() - begin
                results[name] = {"held": held, "said": said, "took_s": round(took, 1)}
                print(f"{'ok    ' if held else 'FAILED'} {name} ({took:.1f} s): {said}", flush=True)
                if options.json:
                    options.json.write_text(json.dumps(results, indent=1))
        finally:
            place.close()
    return 0 if all(result["held"] for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
