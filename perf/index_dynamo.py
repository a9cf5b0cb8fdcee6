"""A match of 8,192 blocks x 96 holders, warm: PegaFlow's index beside the RadixTree of Dynamo.

usage: index_dynamo.py BUILD_DIR [--rounds N]

Needs Dynamo's wheel in an environment of its own, whose Python runs this program:
    python3 -m venv VENV && VENV/bin/pip install --no-deps ai-dynamo-runtime==1.6.1

Both alternate, one round each at a time. The cost of Dynamo's Python binding, which takes a list of
numbers, is the time of a match that ends at its first block; it is subtracted.
"""

import argparse
import json
import pathlib
import random
import re
import statistics
import subprocess
import sys
import time

try:
    from dynamo._core import RadixTree
except ImportError as error:
    sys.exit(f"index_dynamo.py: {error}: install the wheel as its first lines say")

BLOCKS = 8192
HOLDERS = 96
EVENT = 128
CALLS = 400  # Of each kind in a round.


def stored_event(number: int, parent: int | None, hashes: list[int]) -> bytes:
    """Dynamo's event for blocks that one worker stored; local hashes equal the chained ones."""
    blocks = [{"block_hash": each, "tokens_hash": each} for each in hashes]
    return json.dumps(
        {
            "event_id": number,
            "data": {"stored": {"parent_hash": parent, "blocks": blocks}},
            "dp_rank": 0,
        }
    ).encode()


def filled_tree(chain: list[int]) -> RadixTree:
    tree = RadixTree()
    for worker in range(HOLDERS):
        for number, begin in enumerate(range(0, BLOCKS, EVENT)):
            parent = chain[begin - 1] if begin else None
            tree.apply_event(worker, stored_event(number, parent, chain[begin : begin + EVENT]))
    return tree


def medians_us(tree: RadixTree, chains: tuple[list[int], list[int]]) -> tuple[float, float]:
    """The median of what the first chain takes more than the second, and that of the second.

    The calls alternate, so a disturbance affects both.
    """
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(CALLS):
        for chain, samples in zip(chains, times, strict=True):
            begin = time.perf_counter_ns()
            tree.find_matches(chain)
            samples.append((time.perf_counter_ns() - begin) / 1000)
    more = [known - unknown for known, unknown in zip(*times, strict=True)]
    return statistics.median(more), statistics.median(times[1])


def our_median_us(program: pathlib.Path) -> float:
    run = subprocess.run([program, "warm"], capture_output=True, text=True, check=True)
    found = re.search(r"warm +p50 +([0-9.]+)", run.stdout)
    if found is None:
        sys.exit(f"index_dynamo.py: no median in the output of {program}: {run.stdout}")
    return float(found.group(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build_dir", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    draws = random.Random(17)
    chain = [draws.getrandbits(63) for _ in range(BLOCKS)]
    unknown = [draws.getrandbits(63), *chain[1:]]
    tree = filled_tree(chain)
    scores = tree.find_matches(chain).scores
    if len(scores) != HOLDERS or set(scores.values()) != {BLOCKS}:
        sys.exit(f"index_dynamo.py: Dynamo found {len(scores)} workers, not {HOLDERS} with all")
    ours, theirs, bindings = [], [], []
    for _ in range(options.rounds):
        ours.append(our_median_us(options.build_dir / "perf/index/index_bench"))
        beyond, binding = medians_us(tree, (chain, unknown))
        theirs.append(beyond)
        bindings.append(binding)
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    for name, values in (("PegaFlow", ours), ("Dynamo", theirs), ("its binding", bindings)):
        print(
            f"{name:12} median {statistics.median(values):7.1f} us, "
            f"{min(values):.1f} to {max(values):.1f}, n={len(values)}"
        )
    print(f"ratio {statistics.median(ratios):.2f} (<= 0.5), {min(ratios):.2f} to {max(ratios):.2f}")


if __name__ == "__main__":
    main()
