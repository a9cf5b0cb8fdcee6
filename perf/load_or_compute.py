#!/usr/bin/env python3
"""Whether a load is ever slower than computing: first tokens over links of several rates.

    ./dev bench load_or_compute [--links 0.2,1,0] [--tokens 1024,10240] [--in-flight 1,4] [--stuck]

Two pegaflow-servers run in their own network namespaces, joined by a virtual cable with a limited
rate (`tc tbf`). A third engine saves each prompt at the far server. The engines at the near end,
vLLM's scheduler and the connector, request it with `pegaflow.load_policy` auto, always load it, or
always compute it, in turns with fresh prompts. Nothing is computed: the worker sleeps according to
--tokens-per-second, as a GPU would keep it waiting. `auto` has its own near server, so that it
learns rates from its own loads alone.

The target for the p99 of first tokens with `auto` is 1.1 x that of the faster of the other two.
With few samples the p99 is the slowest sample.

With --stuck the far server is stopped during loads (SIGSTOP). The targets are a first token at most
20 ms later than with computing, and at most 20 ms from the stop until the engine computes the
rest.

Needs root, for the namespaces, and memory for twenty times the largest set of prompts
(--most-bytes).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from perf.support.figure import Figure, note, publish
from perf.support.limited_link import servers_on_link, wait_joined
from perf.support.prefill_engine import PrefillEngine, model_directory
from perf.support.servers import parser
from perf.support.veth import NoNamespaces
from tests.support.vllm_server import PegaServer

TARGET = 1.1
STUCK_S = 0.020
POLICIES = ("auto", "load", "compute")
#: Rounds of a cell that are not counted, in which the engine learns rates.
WARM_UP = 1
#: Loads after a change of the link's rate, in which the engine learns it; not measured.
WARM_UP_LOADS = 12
WARM_TOKENS = 4096


@dataclasses.dataclass(frozen=True)
class Cell:
    """The parameters of one measurement."""

    link: float  #: GB/s; 0: unlimited.
    tokens: int  #: Length of a prompt.
    in_flight: int

    def __str__(self) -> str:
        link = f"{self.link:g} GB/s" if self.link else "no limit"
        return f"{link}, {self.tokens:,} tokens, {self.in_flight} in flight"


class Bench:
    """The engines, and the source of fresh prompts."""

    def __init__(
        self,
        near: PegaServer,
        writer: PrefillEngine,
        engines: dict[str, PrefillEngine],
        draw: random.Random,
    ) -> None:
        """
        Args:
            near: The server of the engine with `auto`.
            engines: auto; load, which always loads; warm, which always loads at auto's server.
        """
        self._near = near
        self._writer = writer
        self._engines = engines
        self.draw = draw

    def prompts(self, tokens: int, count: int, saved: bool) -> list[list[int]]:
        """Fresh prompts; only the far server has their blocks, if ``saved``."""
        made = [[self.draw.randrange(10, 1000) for _ in range(tokens)] for _ in range(count)]
        if saved:
            self._writer.burst(made)
            self._writer.settle()
        return made

    def burst(
        self, policy: str, cell: Cell, begun: Callable[[], None] = lambda: None
    ) -> tuple[list[float], int]:
        """Seconds to the first tokens of prompts sent at once, and the computed tokens.

        Raises:
            RuntimeError: prompts of the policy `compute` were loaded.
        """
        computes = policy == "compute"
        prompts = self.prompts(cell.tokens, cell.in_flight, not computes)
        engine = self._engines["load" if computes else policy]
        before = engine.model.computed
        taken = engine.burst(prompts, skip_reading=True if computes else None, begun=begun)
        computed = engine.model.computed - before
        engine.settle()
        if computes and computed < cell.tokens * cell.in_flight:
            raise RuntimeError("prompts that should be computed were loaded")
        return taken, computed

    def auto_counts(self) -> dict[str, float]:
        """Counts of loads that `auto` declined or cut since the last call, by reason.

        With the bytes per second at which its server has read.
        """
        stats = self._engines["auto"].stats
        counts = {
            name: value
            for name, value in stats.items()
            if value and name.startswith(("declined", "misses", "load_cuts", "load_failures"))
        }
        for name in counts:
            stats[name] = 0
        metrics = self._near.metrics_by_socket()
        return counts | {"rate": metrics.total("pegaflow_peer_read_bytes_per_second")}


def percentile(samples: Sequence[float], part: float) -> float:
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def grid_figure(bench: Bench, cell: Cell, options: argparse.Namespace) -> Figure:
    samples: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    computed: dict[str, int] = dict.fromkeys(POLICIES, 0)
    for turn in range(-WARM_UP, options.rounds):
        first = turn % len(POLICIES)
        for policy in POLICIES[first:] + POLICIES[:first]:
            taken, tokens = bench.burst(policy, cell)
            if turn >= 0:
                samples[policy] += taken
                computed[policy] += tokens
            if options.verbose:
                why = bench.auto_counts() if policy == "auto" else ""
                note(f"  {turn} {policy}: {min(taken):.3f} to {max(taken):.3f} s, {tokens} {why}")
    p50, p99 = (
        {policy: percentile(taken, part) for policy, taken in samples.items()}
        for part in (0.5, 0.99)
    )
    other = min(("load", "compute"), key=lambda policy: p99[policy])
    asked = cell.tokens * cell.in_flight * options.rounds
    shares = {policy: 1 - tokens / asked for policy, tokens in computed.items()}
    words = ", ".join(
        f"{policy} {p50[policy]:.3f} / {p99[policy]:.3f} s (loaded {shares[policy]:.0%})"
        for policy in POLICIES
    )
    return Figure(
        run=f"first token with auto, {cell}, p99",
        params={
            **dataclasses.asdict(cell),
            "token_bytes": options.token_bytes,
            "tokens_per_second": options.tokens_per_second,
            "rounds": options.rounds,
            "seed": options.seed,
            "p50": p50,
            "p99": p99,
            "loaded": shares,
            "samples": samples,
        },
        figure=p99["auto"],
        unit="s",
        bound=p99[other],
        bound_name=other,
        target=TARGET,
        n=len(samples["auto"]),
        spread=f"p50 / p99: {words}",
    )


def stuck_figures(
    bench: Bench, far: PegaServer, near: PegaServer, cell: Cell, options: argparse.Namespace
) -> list[Figure]:
    """The figures of loads during which the far server is stopped.

    Raises:
        RuntimeError: loads end before the server can be stopped, or nothing is loaded.
    """
    added, noticed, parts = [], [], []
    tries = 0
    while len(added) < options.rounds:
        tries += 1
        if tries > 4 * options.rounds:
            raise RuntimeError(
                f"{cell}: prompts are not loaded, or loaded too fast to stop the server"
            )
        load_s = min(max(bench.burst("warm", cell)[0]) for _ in range(2))
        compute_s = max(bench.burst("compute", cell)[0])
        part = bench.draw.uniform(0.05, 0.95)
        stop = Stop(far, part * load_s)
        taken, computed = bench.burst("auto", cell, begun=stop.start)
        at_s = stop.end()
        wait_joined(near)
        if at_s is None or computed < cell.tokens * cell.in_flight // 20:
            continue
        added.append(max(taken) - compute_s)
        noticed.append(max(taken) - at_s - computed / options.tokens_per_second)
        parts.append(part)
        if options.verbose:
            note(
                f"  stopped at {at_s:.3f} of {load_s:.3f} s: {max(taken):.3f} s, {computed} "
                f"tokens; computing {compute_s:.3f} s"
            )
    figures = []
    for what, samples in (
        ("beyond computing", added),
        ("from the stop until the rest is computed", noticed),
    ):
        figures.append(
            Figure(
                run=f"first token when the source stops, {cell}, {what}, the worst",
                params={
                    **dataclasses.asdict(cell),
                    "token_bytes": options.token_bytes,
                    "tokens_per_second": options.tokens_per_second,
                    "seed": options.seed,
                    "samples": samples,
                    "parts": parts,
                },
                figure=max(samples),
                unit="s",
                bound=STUCK_S,
                bound_name="20 ms",
                target=1.0,
                n=len(samples),
                spread=f"median {statistics.median(samples):.4f}, least {min(samples):.4f} s",
            )
        )
    return figures


class Stop:
    """Stops a server after a delay, until end()."""

    def __init__(self, server: PegaServer, after_s: float) -> None:
        self._server = server
        self._timer = threading.Timer(after_s, self._stop)
        self._began = 0.0
        self._stopped_at: float | None = None

    def start(self) -> None:
        self._began = time.monotonic()
        self._timer.start()

    def _stop(self) -> None:
        os.kill(self._server.pid, signal.SIGSTOP)
        self._stopped_at = time.monotonic()

    def end(self) -> float | None:
        """Seconds from start() to the stop; None: the server was not stopped."""
        self._timer.cancel()
        self._timer.join()
        if self._stopped_at is None:
            return None
        os.kill(self._server.pid, signal.SIGCONT)
        return self._stopped_at - self._began


def measure(options: argparse.Namespace, directory: Path) -> Iterator[Figure]:
    """
    Raises:
        NoNamespaces: they need root.
    """
    sets = [tokens * count for tokens in options.tokens for count in options.in_flight]
    most = max(size for size in sets if size * options.token_bytes <= options.most_bytes)
    longest = max(options.tokens) + 16
    model = model_directory(directory / "model", options.token_bytes, longest)
    pool = most * options.token_bytes // (1 << 20)
    binary = options.build_dir / "server" / "pegaflow-server"
    size = f"{pool * 9 // 2 + 64}mb"  # at most a quarter is lent or fetched at a time

    with contextlib.ExitStack() as stack:
        link, far, (near, other) = stack.enter_context(
            servers_on_link(binary, directory, size, [size] * 2)
        )

        def engine(address: str, rate: float, policy: str) -> PrefillEngine:
            made = PrefillEngine(
                address, model, tokens=most, longest=longest, rate=rate, policy=policy
            )
            stack.enter_context(made)
            made.wait_ready()
            return made

        writer = engine(far.address, 0.0, "always")
        engines = {
            "auto": engine(near.address, options.tokens_per_second, "auto"),
            "warm": engine(near.address, options.tokens_per_second, "always"),
            "load": engine(other.address, options.tokens_per_second, "always"),
        }
        bench = Bench(near, writer, engines, random.Random(options.seed))
        # The first prompt teaches the engine its rate of computing.
        bench.burst("auto", Cell(0, min(WARM_TOKENS, max(options.tokens)), 1))
        for rate in options.links:
            link.limit(rate)
            for _ in range(WARM_UP_LOADS):
                bench.burst("warm", Cell(rate, min(WARM_TOKENS, max(options.tokens)), 1))
            for tokens in options.tokens:
                for count in options.in_flight:
                    if tokens * count * options.token_bytes > options.most_bytes:
                        continue
                    cell = Cell(rate, tokens, count)
                    if options.stuck:
                        yield from stuck_figures(bench, far, near, cell, options)
                    else:
                        yield grid_figure(bench, cell, options)


def numbers(kind: type) -> object:
    return lambda text: [kind(word) for word in text.split(",")]


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument(
        "--links", type=numbers(float), default=[0.2, 0.5, 1, 2, 0],
        help="GB/s, separated by commas; 0: unlimited",
    )  # fmt: skip
    arguments.add_argument("--tokens", type=numbers(int), default=[1024, 4096, 10240, 32768])
    arguments.add_argument("--in-flight", type=numbers(int), default=[1, 4, 32])
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument(
        "--token-bytes", type=int, default=16 << 10, help="bytes of KV cache per token"
    )
    arguments.add_argument("--tokens-per-second", type=float, default=50_000.0)
    arguments.add_argument(
        "--most-bytes",
        type=int,
        default=1 << 29,
        help="limit for the prompts in flight; larger sets are left out",
    )
    arguments.add_argument("--stuck", action="store_true", help="stop the far server during loads")
    arguments.add_argument(
        "--realtime",
        action="store_true",
        help="run ahead of all other programs, for a busy machine",
    )
    arguments.add_argument("--verbose", action="store_true", help="print each round")
    options = arguments.parse_args()
    note(f"seed {options.seed}")
    if options.realtime:  # threads and servers inherit it
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    directory = Path(tempfile.mkdtemp(prefix="pega-perf-"))
    figures = []
    try:
        for figure in measure(options, directory):
            note(figure.line())
            figures.append(figure)
    except NoNamespaces as why:
        note(f"load_or_compute: {why}")
        return 2
    except Exception:
        note(f"the servers' logs are in {directory}")
        raise
    shutil.rmtree(directory)
    return 0 if publish(figures, options.json) else 1


if __name__ == "__main__":
    sys.exit(main())
