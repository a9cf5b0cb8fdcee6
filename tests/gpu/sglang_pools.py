#!/usr/bin/env python3
"""SGLang's real tree and pools on a GPU with PegaFlow's linker, without a model.

    PYTHONPATH=REPOSITORY:PACKAGE python3 -m tests.gpu.sglang_pools --server FILE

Two engine processes share one GPU and one server. Each loaded page is compared with what its tokens
determine. `--measure` times loads of a prompt of 8B's shape, alone and beside matrix products, with
a bare copy as the bound. Exits with 0 if all checks passed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("PEGA_SGLANG_DEVICE", "cuda")

from tests.gpu.vllm import play
from tests.support.sglang_process import EngineProcess
from tests.support.vllm_server import PegaServer

PAGE = 16
SHAPES: dict[str, dict[str, Any]] = {
    "full": {},
    "windows": {"components": ("FULL", "SWA"), "sliding_window_size": 2 * PAGE, "layers": 3},
    "states": {
        "components": ("FULL", "MAMBA"),
        "enable_mamba_extra_buffer": True,
        "layers": 3,
        "mamba_cache_size": 60,
    },
}
#: Pins of requests that have gone end soon, so that a drained engine has none.
EXTRA = {"pegaflow.call_wait_ms": 20, "pegaflow.pass_wait_ms": 100, "pegaflow.pin_s": 0.02}
IDLE = {"offloads": 0, "locked": 0, "pins": 0, "queued": 0, "off": ""}


class Pools:
    """The scenarios; each returns its observations."""

    def __init__(self, server: PegaServer, options: argparse.Namespace) -> None:
        self.server, self._options = server, options

    def engine(self, kind: str = "LinkerEngine", **options: Any) -> EngineProcess:
        extra = {"pegaflow.host": self.server.address} | EXTRA
        module = "tests.support.sglang_linker_engine"
        if kind == "GpuLinker":
            module = "tests.support.sglang_on_gpu"
        return EngineProcess(kind, module=module, extra=extra, **options)

    def random_steps(self, shape: str) -> dict[str, int]:
        rng = random.Random(f"{self._options.seed} {shape}")
        stem = [rng.randrange(10, 1000) for _ in range(6 * PAGE)]
        prompts = [
            stem[: rng.randrange(7) * PAGE] + [rng.randrange(10, 1000) for _ in range(14 * PAGE)]
            for _ in range(8)
        ]
        total = dict.fromkeys(("put", "get", "loaded", "wrong", "failed", "evicted", "reset"), 0)
        with self.engine(**SHAPES[shape]) as one, self.engine(**SHAPES[shape]) as two:
            pair = (one, two)
            assert all(each.do("ready") for each in pair), [each.do("status") for each in pair]
            for _ in range(self._options.sequences):
                for each in pair:
                    each.start("random_steps", rng.randrange(1 << 30), 12, prompts)
                for each in pair:
                    for name, count in each.wait().items():
                        total[name] += count
                held = [each.do("drain") for each in pair]
                assert held == [IDLE, IDLE], held
        return total

    def equal_bytes(self, shape: str) -> str:
        total = self.random_steps(shape)
        assert (total["wrong"], total["failed"]) == (0, 0), total
        assert total["loaded"] > self._options.sequences, total
        return f"{2 * self._options.sequences} sequences, {total}"

    def reclaimed_pages(self) -> str:
        """Loads wait for passes in flight that write their pages; without that, pages are wrong."""
        tokens = [random.Random(self._options.seed).randrange(10, 1000) for _ in range(30 * PAGE)]
        with self.engine() as made:
            assert made.do("ready"), made.do("status")
            good = made.do("reclaimed", tokens, True)
            planted = made.do("reclaimed", tokens, False)
        assert (good["loaded"], good["wrong"], good["failed"]) == (30, 0, False), good
        assert planted["wrong"] > 0, f"no page shows the race: {planted}"
        return f"{good['loaded']} pages are right; without the wait {planted['wrong']} are wrong"

    def speed(self) -> str:
        config = {"layers": 32, "head_num": 8, "head_dim": 128, "page_size": 64, "slots": 64 * 320}
        with self.engine("GpuLinker", max_context_len=20_480, **config) as made:
            assert made.do("ready"), made.do("status")
            found = made.do("measure", 157, 12)  # 10,048 tokens, 1.317 GB
        if self._options.json:
            self._options.json.write_text(json.dumps(found, indent=2) + "\n")
        return json.dumps(found)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--server", type=Path, required=True, help="the program pegaflow-server")
    parser.add_argument("--sequences", type=int, default=100, help="of each engine and shape")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--only", default="", help="names of scenarios, separated by commas")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args(argv)
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="pega-") as folder:
        pool = "8gb" if options.measure else "64mb"
        with PegaServer(options.server, Path(folder) / "s", pool) as server:
            pools = Pools(server, options)
            every: list[tuple[str, Any]] = [
                (shape, lambda shape=shape: pools.equal_bytes(shape)) for shape in SHAPES
            ]
            every.append(("reclaimed_pages", pools.reclaimed_pages))
            if options.measure:
                every.append(("speed", pools.speed))
            wanted = options.only.split(",") if options.only else None
            held = play(one for one in every if wanted is None or one[0] in wanted)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
