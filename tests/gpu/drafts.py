#!/usr/bin/env python3
"""EAGLE drafts in a real vLLM on a GPU: the share of accepted drafts after a reload.

    PYTHONPATH=REPOSITORY:PACKAGE python3 -m tests.gpu.drafts --server FILE --model DIR --out DIR

DIR is tools/vllm-cpu/make_eagle.py's: a model and a draft that predicts it. One engine without a
connector gives the tokens and the acceptance after hits on its GPU; one with the connector saves;
a second one loads; a third one, with the planted mistake of tests/python/shifted_drafts.py, loads
draft KV that is shifted by a token. Exits with 0 if all checks passed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.gpu.vllm import GpuVllm
from tests.support.child_process import started_together
from tests.support.vllm_server import PegaServer

ANSWER, AT_ONCE = 40, 16


class Drafting(GpuVllm):
    """`vllm serve` with a draft model."""

    weights = ()
    block_tokens = 32

    def command(self) -> list[str]:
        speculation = {"method": "eagle", "model": self._options.draft, "num_speculative_tokens": 3}
        return [*super().command(), "--speculative-config", json.dumps(speculation)]


class Shifted(Drafting):
    """The planted mistake."""

    connector = ("ShiftedDrafts", "tests.python.shifted_drafts")


@dataclasses.dataclass
class Round:
    """All prompts once."""

    answers: list[list[str]]
    accepted: float  #: Share of all drafted tokens.
    loaded: float  #: Tokens.


def play(vllm: GpuVllm, prompts: Sequence[list[int]]) -> Round:
    names = (
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:external_prefix_cache_hits_total",
    )
    before = [vllm.total(name) for name in names]
    answers: list[list[str]] = []
    for first in range(0, len(prompts), AT_ONCE):
        answers += vllm.ask_all(prompts[first : first + AT_ONCE], ANSWER)
    drafted, accepted, loaded = (
        vllm.total(name) - then for name, then in zip(names, before, strict=True)
    )
    assert drafted > 0, "nothing was drafted"
    return Round(answers, accepted / drafted, loaded)


def equal(one: Round, other: Round) -> int:
    return sum(a == b for a, b in zip(one.answers, other.answers, strict=True))


def measure(options: argparse.Namespace, server: PegaServer) -> bool:
    chance = random.Random(options.seed)
    prompts = [
        [chance.randrange(10, 2000) for _ in range(chance.randrange(200, 1000))]
        for _ in range(options.requests)
    ]
    plain = Drafting("plain", None, options)
    saves, loads = (Drafting(name, server, options) for name in ("saves", "loads"))
    planted = Shifted("shifted", server, options)
    with started_together([plain, saves, loads, planted]):
        play(plain, prompts)
        gpu_hit = play(plain, prompts)
        cold = play(saves, prompts)
        saves.reset()  # The last blocks are saved when their requests have ended.
        reload = play(loads, prompts)
        shifted = play(planted, prompts)

    block = Drafting.block_tokens
    # The last block of a prompt only proves the one before.
    expected = sum((len(tokens) // block - 1) * block for tokens in prompts)
    ratio = reload.accepted / gpu_hit.accepted
    print(
        f"{len(prompts)} requests, accepted drafts: GPU hit {gpu_hit.accepted:.4f}, computed "
        f"{cold.accepted:.4f}, reload {reload.accepted:.4f} ({ratio:.4f} of the GPU hit), shifted "
        f"by a token {shifted.accepted:.4f}; tokens loaded {reload.loaded:.0f} and "
        f"{shifted.loaded:.0f} of {expected}; "
        f"answers equal to the GPU hit: {equal(reload, gpu_hit)} after the reload, "
        f"{equal(cold, gpu_hit)} computed, {equal(shifted, gpu_hit)} shifted",
        flush=True,
    )
    checks = {
        "the draft predicts enough to show a fault": gpu_hit.accepted >= 0.6,
        "nothing was loaded into the first engine": cold.loaded == 0,
        # A lookup that misses its deadline is computed.
        "nearly all blocks were loaded": min(reload.loaded, shifted.loaded) >= 0.95 * expected,
        "reloaded drafts are accepted": ratio >= 0.99,
        "the planted mistake shows": shifted.accepted < 0.9 * gpu_hit.accepted,
    }
    for text, good in checks.items():
        print(f"{'ok    ' if good else 'FAILED'} {text}", flush=True)
    return all(checks.values())


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--server", type=Path, required=True, help="the program pegaflow-server")
    parser.add_argument("--model", type=Path, required=True, help="make_eagle.py's folder")
    parser.add_argument("--out", type=Path, required=True, help="folder of the logs")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--pool", default="8gb")
    parser.add_argument("--gpu-blocks", type=int, default=40000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--vllm-arguments", default="", help="more arguments of vLLM")
    options: Any = parser.parse_args(argv)
    options.tensor_parallel = 1
    options.draft = str(options.model / "draft")
    options.model = options.model / "target"
    options.out.mkdir(parents=True, exist_ok=True)
    print(f"seed {options.seed}", flush=True)
    with PegaServer(options.server, options.out / "pega", options.pool) as server:
        return 0 if measure(options, server) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
