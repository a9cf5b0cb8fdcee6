"""The regression list: figures of an older build beside this one's, from alternating runs.

Each pair runs one benchmark with the old and with the new programs; they alternate in beginning.
A ratio above 1 means that the new build is better. A figure is held when the lower end of the 95 %
interval of its ratio lies above 0.97. Exits with 1 when a figure is missed or was not measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

from perf.support.figure import mean_interval, note

HELD_ABOVE = 0.97


@dataclasses.dataclass(frozen=True)
class Listed:
    """One figure of the list, by its name in the output of `pegaflow-perf`."""

    benchmark: str
    run: str
    #: Whether a smaller value is better: times and bytes, not rates.
    less_is_better: bool = True


#: The list of docs/benchmarks.md, "The regression list".
CPU = (
    Listed("lookup", "lookup of 8,192 keys, p50"),
    Listed("lookup", "lookup of 8,192 keys, p99"),
    Listed("lookup", "lookup of 8,192 keys, CPU of the server"),
    Listed("lookup", "lookup of one key, C++ client, p50"),
    Listed("server", "memory beside the pool, a block"),
    Listed("server", "reserve + publish of 4,096 blocks with eviction, CPU of the server"),
    Listed("server", "longest turn, saves with eviction, processor time"),
    Listed("server", "longest turn, end of a client with 100,000 pins, processor time"),
    Listed("copy", "save, pages of 64 KiB", less_is_better=False),
    Listed("copy", "load, pages of 64 KiB", less_is_better=False),
    Listed("net", "get, pages of 64 KiB in batches of 64", less_is_better=False),
    Listed("net", "get of one page of 64 KiB, p50"),
)


def program(build: Path, name: str) -> Path:
    """A program of a build directory (``server/NAME``) or of a bundle (``bin/NAME``).

    Raises:
        FileNotFoundError: neither exists.
    """
    folder = "perf" if name == "pegaflow-perf" else "server"
    for path in (build / folder / name, build / "bin" / name):
        if path.is_file():
            return path
    raise FileNotFoundError(f"{build}: neither {folder}/{name} nor bin/{name} exists")


def measure(build: Path, benchmark: str, arguments: list[str]) -> dict[str, float]:
    """The figures of one run, by name. A missed target is not an error here."""
    server = program(build, "pegaflow-server")
    command = [program(build, "pegaflow-perf"), benchmark, "--json", "--server", server, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not rows:
        raise RuntimeError(
            f"{' '.join(map(str, command))} measured nothing:\n{done.stderr[-2000:]}"
        )
    return {row["run"]: row["figure"] for row in rows}


def ratios(listed: Listed, pairs: list[tuple[dict[str, float], dict[str, float]]]) -> list[float]:
    """Logarithms of the ratios of the pairs, positive if the new build is better.

    Empty if a run lacks the figure.
    """
    if not all(listed.run in old and listed.run in new for old, new in pairs):
        return []
    both = [(old[listed.run], new[listed.run]) for old, new in pairs]
    if any(value <= 0 for pair in both for value in pair):
        return []
    return [math.log(o / n if listed.less_is_better else n / o) for o, n in both]


def report(listed: Listed, logarithms: list[float]) -> bool:
    """Prints the row; returns whether the figure is held."""
    if not logarithms:
        print(f"{listed.run:75} not measured by both")
        return False
    mean, low, high = (math.exp(value) for value in mean_interval(logarithms))
    held = low > HELD_ABOVE
    print(
        f"{listed.run:75} ratio {mean:5.3f}, 95 % {low:5.3f} to {high:5.3f}, "
        f"n={len(logarithms)} {'held' if held else 'MISSED'}",
        flush=True,
    )
    return held


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--old", type=Path, required=True, help="build directory or bundle")
    parser.add_argument("--new", type=Path, default=Path("build/release"), help="likewise")
    parser.add_argument("--pairs", type=int, default=9, help="at least 9")
    parser.add_argument("--benchmark", action="append", help="only these: lookup, server, ...")
    parser.add_argument("arguments", nargs="*", help="after --: options for pegaflow-perf")
    options = parser.parse_args()
    if options.pairs < 9:
        parser.error("--pairs: an interval needs at least 9")
    held = True
    for benchmark in dict.fromkeys(listed.benchmark for listed in CPU):
        if options.benchmark and benchmark not in options.benchmark:
            continue
        pairs: list[tuple[dict[str, float], dict[str, float]]] = []
        for number in range(options.pairs):
            sides = {}
            for side in ("old", "new") if number % 2 else ("new", "old"):
                build = options.old if side == "old" else options.new
                sides[side] = measure(build.resolve(), benchmark, options.arguments)
            pairs.append((sides["old"], sides["new"]))
            note(f"{benchmark}: pair {number + 1} of {options.pairs}")
        for listed in CPU:
            if listed.benchmark == benchmark:
                held = report(listed, ratios(listed, pairs)) and held
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
