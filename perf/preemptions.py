#!/usr/bin/env python3
"""Whether the connector makes vLLM preempt: requests that do not fit into its KV cache at once.

Two vLLMs with the same small KV cache, one with the connector and one without, receive the same
requests in turns. A round sends so many at once that the cache is full and some are preempted. The
prompts of a round are new at first, so that they are saved; then they are sent again, so that
blocks that vLLM has dropped are loaded. The script counts vLLM's preemptions and the requests that
finish, and compares every token of the answers. Targets: no more preemptions with the connector,
within the 95 % interval of the rounds' differences, and every request finishes with the tokens of
the vLLM without it.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor

from demo.client import RequestFailed, complete
from demo.stage import wait_until
from perf.support.figure import Figure, mean_interval, note, publish
from perf.support.servers import Servers, parser, servers
from tests.support.vllm_server import ModelShape, VllmOptions, VllmServer, ensure_model

#: Small, so that a step takes little time and many requests are in flight.
SHAPE = ModelShape(layers=4, hidden=256, heads=4, kv_heads=2)
BLOCK_TOKENS = 32
#: Limit of the ratio to preemptions without the connector.
TARGET = 1.0


@dataclasses.dataclass(frozen=True)
class Round:
    """The result of one burst at one vLLM."""

    answers: list[tuple[int, ...] | None]  #: None: it failed.
    preemptions: int


def burst(vllm: VllmServer, prompts: list[list[int]], output: int) -> Round:
    """Sends all prompts at once."""

    def ask(prompt: list[int]) -> tuple[int, ...] | None:
        try:
            return complete(vllm.http, prompt, output).tokens
        except RequestFailed as why:
            note(f"a request failed: {why}")
            return None

    before = preemptions(vllm)
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(ask, prompts))
    return Round(answers, preemptions(vllm) - before)


def preemptions(vllm: VllmServer) -> int:
    return int(vllm.metrics().total("vllm:num_preemptions_total"))


def loaded_blocks(run: Servers) -> int:
    return int(run.connected.metrics().total("vllm:pegaflow_loaded_blocks_total"))


@dataclasses.dataclass
class Bursts:
    """What was counted in all rounds after the one to warm up."""

    with_: list[int] = dataclasses.field(default_factory=list)  #: Preemptions of each burst.
    without: list[int] = dataclasses.field(default_factory=list)
    asked: int = 0
    finished: int = 0
    differ: int = 0  #: Answers with other tokens than those without the connector, or none.
    loaded_blocks: int = 0
    pin_waits: int = 0

    def add(self, ours: Round, theirs: Round) -> None:
        self.with_.append(ours.preemptions)
        self.without.append(theirs.preemptions)
        self.asked += len(ours.answers)
        self.finished += sum(answer is not None for answer in ours.answers)
        self.differ += sum(
            mine != other for mine, other in zip(ours.answers, theirs.answers, strict=True)
        )


def tokens_needed(options: argparse.Namespace) -> int:
    """Tokens of a prompt and its answer, in whole blocks."""
    return -(-(options.tokens + options.output) // BLOCK_TOKENS) * BLOCK_TOKENS


def run_bursts(run: Servers, options: argparse.Namespace) -> Bursts:
    draw = random.Random(options.seed)
    bursts = Bursts()
    for number in range(-1, options.rounds):  # one to warm up
        prompts = [
            [draw.randrange(3, SHAPE.vocabulary) for _ in range(options.tokens)]
            for _ in range(options.requests)
        ]
        for again in (False, True):
            made = {}
            for is_ours in (number % 2 == 0, number % 2 != 0):
                vllm = run.connected if is_ours else run.plain
                made[is_ours] = burst(vllm, prompts, options.output)
            note(
                f"round {number + 1}, {'again' if again else 'new'}: preemptions without "
                f"{made[False].preemptions}, with {made[True].preemptions}; "
                f"{loaded_blocks(run)} blocks loaded so far" + (" (warm-up)" if number < 0 else "")
            )
            if number >= 0:
                bursts.add(made[True], made[False])
    bursts.loaded_blocks = loaded_blocks(run)
    bursts.pin_waits = int(run.connected.metrics().total("vllm:pegaflow_pin_waits_total"))
    return bursts


def figures_of(bursts: Bursts, options: argparse.Namespace) -> list[Figure]:
    differences = [a - b for a, b in zip(bursts.with_, bursts.without, strict=True)]
    mean, low, high = mean_interval(differences)
    params = {
        "requests": options.requests,
        "prompt_tokens": options.tokens,
        "output_tokens": options.output,
        "fit": options.fit,
        "rounds": options.rounds,
        "seed": options.seed,
        "with": bursts.with_,
        "without": bursts.without,
        "difference_mean": mean,
        "difference_interval": [low, high],
        "loaded_blocks": bursts.loaded_blocks,
        "pin_waits": bursts.pin_waits,
    }
    return [
        Figure(
            run="preemptions of a burst with the connector, lower end of the 95 % interval",
            params=params,
            figure=statistics.fmean(bursts.without) + low,
            unit="preemptions",
            bound=statistics.fmean(bursts.without),
            bound_name="vLLM without the connector",
            target=TARGET,
            n=len(bursts.with_),
            spread=(
                f"bursts of {options.requests}; with {sum(bursts.with_)}, "
                f"without {sum(bursts.without)}, "
                f"difference {mean:+.2f} ({low:+.2f} to {high:+.2f}); "
                f"{bursts.loaded_blocks} blocks loaded"
            ),
        ),
        Figure(
            run="requests that finished with the connector, with the tokens of those without",
            params=params,
            figure=bursts.asked - bursts.differ,
            unit="requests",
            bound=bursts.asked,
            bound_name="requests asked",
            target=1.0,
            n=bursts.asked,
            spread=f"{bursts.finished} finished, {bursts.differ} with other tokens or none",
            at_least=True,
        ),
    ]


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=10, help="two bursts each; at least 5")
    arguments.add_argument("--requests", type=int, default=24, help="requests in flight")
    arguments.add_argument("--tokens", type=int, default=256, help="length of a prompt")
    arguments.add_argument("--output", type=int, default=128, help="tokens of an answer")
    arguments.add_argument(
        "--fit", type=int, default=8, help="requests that fit into the KV cache with their answers"
    )
    options = arguments.parse_args()
    note(f"seed {options.seed}")
    needed = tokens_needed(options)
    plain = VllmOptions(
        ensure_model(SHAPE),
        kv_cache_bytes=options.fit * needed * SHAPE.kv_bytes_per_token(),
        max_model_len=needed,
    )
    with servers(options.build_dir, "1gb", plain) as run:
        run.pega.start()
        for vllm in (run.plain, run.connected):
            vllm.start()
        wait_until("the cache is used", lambda: is_used(run), 60)
        bursts = run_bursts(run, options)
    if not sum(bursts.without):
        note("nothing was preempted: the KV cache was not full")
        return 1
    figures = figures_of(bursts, options)
    return 0 if publish(figures, options.json) else 1


def is_used(run: Servers) -> bool:
    """Whether the vLLM with the connector saves and loads."""
    complete(run.connected.http, [5] * (2 * BLOCK_TOKENS), 1)
    return run.pega.metrics().total("pegaflow_cache_block_insertions_total") > 0


if __name__ == "__main__":
    sys.exit(main())
