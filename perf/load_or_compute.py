#!/usr/bin/env python3
"""Whether a load is ever slower than computing: first tokens over links of several rates.

    ./dev bench load_or_compute [--links 0.2,1,0] [--tokens 1024,10240] [--in-flight 1,4] [--stuck]

Two pegaflow-servers in network namespaces of their own, joined by a virtual cable whose rate is
limited (`tc tbf`). A third engine has saved each prompt at the far one; engines at the near end,
which are vLLM's scheduler and the connector, ask for it with `pegaflow.load_policy` auto, load it
always, or compute it always, in turns with fresh prompts. Nothing is computed: the worker sleeps
as long as --tokens-per-second says, as a GPU would keep it waiting. `auto` has a near server of
its own, so that it learns rates from its own loads alone.

The p99 of the first tokens with `auto` may be 1.1 x that of the faster of the other two. With few
samples the p99 is the slowest of them.

With --stuck the far server is stopped in the middle of loads (SIGSTOP). A first token may come
20 ms later than computing, and 20 ms after the stop the engine may have begun to compute the rest.

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
#: Rounds of a cell that are not counted: rates become known.
WARM_UP = 1
#: A change of the link's rate is not what is measured: loads of such prompts make it known.
WARM_UP_LOADS = 12
WARM_TOKENS = 4096


@dataclasses.dataclass(frozen=True)
class Cell:
    """What is measured together."""

    link: float  #: GB/s; 0: not limited.
    tokens: int  #: Of a prompt.
    in_flight: int

    def __str__(self) -> str:
        link = f"{self.link:g} GB/s" if self.link else "no limit"
        return f"{link}, {self.tokens:,} tokens, {self.in_flight} in flight"


class Bench:
    """The engines, and prompts that nobody had before."""

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
            engines: auto; load, which loads always; warm, which does so at the server of auto.
        """
        self._near = near
        self._writer = writer
        self._engines = engines
        self.draw = draw

    def prompts(self, tokens: int, count: int, saved: bool) -> list[list[int]]:
        """Prompts that the far server has, if ``saved``, and no other one."""
        made = [[self.draw.randrange(10, 1000) for _ in range(tokens)] for _ in range(count)]
        if saved:
            self._writer.burst(made)
            self._writer.settle()
        return made

    def burst(
        self, policy: str, cell: Cell, begun: Callable[[], None] = lambda: None
    ) -> tuple[list[float], int]:
        """Seconds to the first tokens of prompts that are sent at once; tokens that it computed.

        Raises:
            RuntimeError: a policy of always did not do that.
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
        """Why the engine with `auto` did not load what it did not, or not to the end; since last.

        And at how many bytes a second its server has read.
        """
        stats = self._engines["auto"].stats
        told = {
            name: value
            for name, value in stats.items()
            if value and name.startswith(("declined", "misses", "load_cuts", "load_failures"))
        }
        for name in told:
            stats[name] = 0
        metrics = self._near.metrics_by_socket()
        return told | {"rate": metrics.total("pegaflow_peer_read_bytes_per_second")}


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
    """The far server is stopped at some part of a load's time.

    Raises:
        RuntimeError: loads end before they can be stopped, or there are none.
    """
    added, noticed, parts = [], [], []
    tries = 0
    while len(added) < options.rounds:
        tries += 1
        if tries > 4 * options.rounds:
            raise RuntimeError(f"{cell}: prompts are not loaded, or too fast to stop that")
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
    """Stops a server for a while from some time on."""

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
        """How many seconds after start() it stopped; None: it had not until now."""
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
    size = f"{pool * 9 // 2 + 64}mb"  # of which a quarter may be lent, or fetched, at a time

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
        # As long as an engine does not know how fast it computes, it is held to nothing.
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
        help="GB/s, with commas; 0: as fast as this machine can",
    )  # fmt: skip
    arguments.add_argument("--tokens", type=numbers(int), default=[1024, 4096, 10240, 32768])
    arguments.add_argument("--in-flight", type=numbers(int), default=[1, 4, 32])
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--token-bytes", type=int, default=16 << 10, help="KV cache a token")
    arguments.add_argument("--tokens-per-second", type=float, default=50_000.0)
    arguments.add_argument(
        "--most-bytes", type=int, default=1 << 29, help="of the prompts in flight; more is left out"
    )
    arguments.add_argument("--stuck", action="store_true", help="stop the far server in mid-load")
    arguments.add_argument(
        "--realtime", action="store_true", help="before all other programs; on a busy machine"
    )
    arguments.add_argument("--verbose", action="store_true", help="each round")
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
