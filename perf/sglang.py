#!/usr/bin/env python3
"""Measures what PegaFlow's linker costs SGLang's scheduler: lookups, and passes without a hit.

A real tree of SGLang's with the linker, a real server, no model. A *pass* is one call of
check_hicache_events() and the matches of all waiting requests; its bound is the same pass over a
tree without a linker. The bound of a lookup is a call that asks for one page.

    ./dev bench sglang [--pages 8192] [--passes 2000] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support import sglang_classes
from tests.support.sglang_process import EngineProcess
from tests.support.vllm_server import REPOSITORY, PegaServer

MODULE = "tests.support.sglang_measured"
#: Deadlines that a busy machine does not miss, so that each call is counted with its whole time.
EXTRA = {
    "pegaflow.call_wait_ms": 100,
    "pegaflow.pass_wait_ms": 1000,
    "pegaflow.pin_s": 60,
    "pegaflow.lookup_deadline_ms": 20_000,
    "pegaflow.reserve_deadline_ms": 20_000,
    "pegaflow.open_deadline_ms": 20_000,
}


def spread(seconds: list[float]) -> dict[str, float]:
    """Percentiles in milliseconds."""
    values = sorted(seconds)

    def at(share: float) -> float:
        return 1e3 * values[min(len(values) - 1, int(share * len(values)))]

    return {"n": len(values), "p50_ms": at(0.5), "p99_ms": at(0.99), "max_ms": 1e3 * values[-1]}


def measure(server: PegaServer, pages: int, passes: int, repeats: int) -> dict[str, Any]:
    extra = {"pegaflow.host": server.address} | EXTRA
    with EngineProcess("MeasuredLinker", module=MODULE, extra=extra) as engine:
        if not engine.do("ready"):
            raise SystemExit("the engine is not served")
        found: dict[str, Any] = {"pages": pages}
        engine.do("store_chain", pages)
        for name, count in (("lookup", pages), ("lookup of one page", 1)):
            hits, seconds = engine.do("time_lookups", count, repeats)
            if hits % count:
                raise SystemExit(f"{name}: {hits} pages were found, no multiple of {count}")
            found[name] = spread(seconds) | {"unanswered": repeats - hits // count}
        found["SGLang's own part"] = spread(engine.do("time_reductions", pages, min(repeats, 50)))
        hits, seconds = engine.do("time_missing_lookups", pages, repeats)
        if hits:
            raise SystemExit(f"{hits} pages of unknown prompts were found")
        found["lookup, nothing stored"] = spread(seconds)
        whole, inside = engine.do("time_passes", passes, True)
        found["pass"] = spread(whole)
        found["in the linker"] = spread(inside)
    with EngineProcess("MeasuredLinker", module=MODULE, extra=extra) as engine:
        whole, _ = engine.do("time_passes", passes, False)
        found["pass without a linker"] = spread(whole)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev bench sglang", description=__doc__.split("\n")[0])
    parser.add_argument("--pages", type=int, default=8192, help="of one lookup")
    parser.add_argument("--passes", type=int, default=2000, help="scheduling passes")
    parser.add_argument("--repeats", type=int, default=500, help="lookups of each kind")
    parser.add_argument("--json", type=Path, help="writes the figures there, too")
    options = parser.parse_args()
    if reason := sglang_classes.missing():
        print(reason, file=sys.stderr)
        return 2
    build = Path(os.environ.get("PEGA_BUILD_DIR", REPOSITORY / "build" / "release"))
    with tempfile.TemporaryDirectory(prefix="pega-") as directory:
        binary = build / "server" / "pegaflow-server"
        with PegaServer(binary, Path(directory) / "s", pool_size="256mb") as server:
            found = measure(server, options.pages, options.passes, options.repeats)
    found["load_average"] = os.getloadavg()
    found["cpus"] = os.cpu_count()
    for name, value in found.items():
        if isinstance(value, dict):
            figures = ", ".join(f"{key} {number:.3f}" for key, number in value.items())
            print(f"{name:<24} {figures}")
    lookup, one = found["lookup"]["p50_ms"], found["lookup of one page"]["p50_ms"]
    print(f"a lookup of {options.pages} pages takes {lookup / one:.1f} times one of a page")
    print(f"load average {found['load_average'][0]:.1f} on {found['cpus']} cores")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    status = main()
    forkserver._forkserver._stop()
    sys.exit(status)
