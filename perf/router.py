#!/usr/bin/env python3
"""Measures pegaflow-router beside a bare Beast relay and no relay at all, in the same run.

    ./dev bench router [--rounds N] [--requests N] [--streams N]

The engine responds without computing. Load, relay, router and engine are separate processes that
share two cores, so times show the latency that a hop adds, and CPU seconds its cost. The three
routes alternate, and each figure is the median of the rounds with their lowest and highest.
Sequential requests are measured in eight times as many short rounds, whose middle half is shown
too.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import resource
import statistics
import subprocess
import sys
from collections.abc import Iterator

from perf.support.figure import Figure, note, publish

BUILD = pathlib.Path(os.environ["PEGA_BUILD_DIR"])
BENCH = BUILD / "perf" / "router" / "router_bench"
ROUTER = BUILD / "router" / "pegaflow-router"

Times = dict[str, list[dict[str, float]]]  # Output of `load`, by route and round.


@contextlib.contextmanager
def process(*words: str | pathlib.Path, log: bool = False) -> Iterator[tuple[int, int]]:
    """A child that prints its port; yields (pid, port)."""
    child = subprocess.Popen(
        [str(word) for word in words],
        stdout=subprocess.DEVNULL if log else subprocess.PIPE,
        stderr=subprocess.PIPE if log else None,
        text=True,
    )
    try:
        output = child.stderr if log else child.stdout
        assert output is not None
        for line in output:
            if found := re.search(r"ready listen=\S+:(\d+)|^(\d+)$", line):
                port = int(found[1] or found[2])
                break
        else:
            raise SystemExit(f"{words[0]} did not start")
        yield child.pid, port
    finally:
        child.kill()
        child.wait()
        for pipe in (child.stdout, child.stderr):
            if pipe is not None:
                pipe.close()


def cpu_seconds(pid: int) -> float:
    """The CPU time of the process' threads, by the scheduler, to the nanosecond."""
    threads = pathlib.Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def resident_bytes(pid: int) -> int:
    return int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf(
        "SC_PAGE_SIZE"
    )


def streams_that_fit(wanted: int) -> int:
    """The number of streams that can be open at once; each is two files of the router.

    Raises the limit of open files if this user may.
    """
    spare = 100
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard < 2 * wanted + spare:
        with contextlib.suppress(ValueError, PermissionError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (2 * wanted + spare,) * 2)
            return wanted
        fit = (hard - spare) // 2
        note(
            f"{wanted} streams need {2 * wanted + spare} open files and {hard} are allowed "
            f"(ulimit -Hn, systemd's LimitNOFILE, a container's --ulimit nofile): {fit} streams"
        )
        return fit
    return wanted


def load(
    port: int, connections: int, requests: int, body_bytes: int, kind: str = "same"
) -> dict[str, float]:
    done = subprocess.run(
        [BENCH, "load", str(port), str(connections), str(requests), str(body_bytes),
         "/v1/completions", kind],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def figure(
    run: str, values: list[float], unit: str, bound: float, bound_name: str, **params: int
) -> Figure:
    """A figure with the median of the rounds, whose target is at most the bound."""
    middle = ""
    if len(values) >= 20:
        low, _, high = statistics.quantiles(values, n=4)
        middle = f", half of them {low:.4g} to {high:.4g}"
    return Figure(
        run=run,
        params=params,
        figure=statistics.median(values),
        unit=unit,
        bound=bound,
        bound_name=bound_name,
        target=1.0,
        n=len(values),
        spread=f"rounds {min(values):.4g} to {max(values):.4g}{middle}",
    )


@dataclasses.dataclass(frozen=True)
class Routes:
    """The three routes to the same engine, by port, and the processes whose CPU time is counted."""

    ports: dict[str, int]
    pids: dict[str, int]


@contextlib.contextmanager
def start_routes() -> Iterator[Routes]:
    with contextlib.ExitStack() as stack:
        _, engine = stack.enter_context(process(BENCH, "engine"))
        relay_pid, relay = stack.enter_context(process(BENCH, "relay", str(engine)))
        router_pid, router = stack.enter_context(
            process(ROUTER, "--listen", "127.0.0.1:0", "--decode", f"http://127.0.0.1:{engine}",
                    "--access-log", "false", "--max-decode-inflight", "100000", log=True)
        )  # fmt: skip
        yield Routes(
            ports={"direct": engine, "relay": relay, "router": router},
            pids={"relay": relay_pid, "router": router_pid},
        )


@dataclasses.dataclass
class Measured:
    """The rounds of each route."""

    alone: Times  #: One connection, 4 KB.
    big: Times  #: One connection, 500 KB.
    many: Times  #: 16 connections, 4 KB.
    cpu: dict[str, list[float]]  #: Microseconds for one request of `many`, of relay and router.
    short: list[float]  #: The same for requests of 64 bytes through the router.


def load_with_cpu(
    pid: int | None, port: int, requests: int, body_bytes: int, kind: str = "same"
) -> tuple[dict[str, float], float]:
    """The output of `load` with 16 connections, and the process' microseconds for one request."""
    before = cpu_seconds(pid) if pid else 0.0
    times = load(port, 16, requests, body_bytes, kind)
    return times, ((cpu_seconds(pid) - before) / requests * 1e6 if pid else 0.0)


def measure(routes: Routes, rounds: int, requests: int) -> Measured:
    ports = routes.ports
    for port in ports.values():
        load(port, 1, 300, 4096)  # Warms up connections and caches.
    alone, big, many = ({name: [] for name in ports} for _ in range(3))
    made = Measured(alone, big, many, {name: [] for name in routes.pids}, [])
    # Many short rounds: another program can disturb a round of one route, and with five rounds that
    # was the p99. The order alternates, so that no route always follows the same one.
    for turn in range(rounds * 8):
        for name, port in sorted(ports.items(), reverse=turn % 2 == 1):
            alone[name].append(load(port, 1, max(requests // 3, 100), 4096))
    for _ in range(rounds):
        for name, port in ports.items():
            big[name].append(load(port, 1, max(requests // 10, 10), 500_000))
        for name, port in ports.items():
            times, cpu = load_with_cpu(routes.pids.get(name), port, requests * 3, 4096)
            many[name].append(times)
            if name in made.cpu:
                made.cpu[name].append(cpu)
        made.short.append(
            load_with_cpu(routes.pids["router"], ports["router"], requests * 3, 64)[1]
        )
    return made


def figures_of(made: Measured) -> list[Figure]:
    def pairs(of: Times, key: str, a: str, b: str) -> list[tuple[float, float]]:
        return [(x[key], y[key]) for x, y in zip(of[a], of[b], strict=True)]

    relayed = [x - y for x, y in pairs(made.alone, "p50_us", "relay", "direct")]
    note(f"the bare relay adds {statistics.median(relayed):.1f} us to the p50")
    note(f"the bare relay takes {statistics.median(made.cpu['relay']):.1f} us of CPU a request")
    added = [x - y for x, y in pairs(made.alone, "p50_us", "router", "direct")]
    figures = [figure("router p50 added", added, "us", 100, "target", body=4096)]
    for connections, of in ((1, made.alone), (16, made.many)):
        ratios = [x / y for x, y in pairs(of, "p99_us", "router", "relay")]
        figures.append(
            figure("router p99 / relay p99", ratios, "x", 1.3, "target",
                   body=4096, connections=connections)
        )  # fmt: skip
    added = [(x - y) / 1000 for x, y in pairs(made.big, "p50_us", "router", "relay")]
    return [
        *figures,
        figure("router p50 beyond relay", added, "ms", 2, "target", body=500_000),
        figure("router CPU", made.cpu["router"], "us", 200, "target", body=4096),
        figure("router CPU of a short request", made.short, "us", 200, "5,000 a second and core",
               body=64),
    ]  # fmt: skip


def memory_of_streams(routes: Routes, wanted: int) -> Figure:
    """The router's memory for one of `wanted` streams that are open at once."""
    before = resident_bytes(routes.pids["router"])
    streams = subprocess.Popen(
        [BENCH, "streams", str(routes.ports["router"]), str(wanted)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert streams.stdin is not None and streams.stdout is not None
    opened = json.loads(streams.stdout.readline())
    each = (resident_bytes(routes.pids["router"]) - before) / max(opened["open"], 1) / 1024
    streams.stdin.close()
    streams.wait()
    if opened["broken"]:
        raise SystemExit(f"{opened['broken']} streams broke")
    return figure("router memory an open stream", [each], "KiB", 40, "target",
                  streams=opened["open"])  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per figure")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=3000, help="requests of 4 KB in each round")
    parser.add_argument("--streams", type=int, default=10_000, help="streams open at once")
    options = parser.parse_args()
    streams_wanted = streams_that_fit(options.streams)
    subprocess.run(["ninja", "-C", BUILD, "--quiet", "perf/router/router_bench"], check=True)
    with start_routes() as routes:
        figures = figures_of(measure(routes, options.rounds, options.requests))
        figures.append(memory_of_streams(routes, streams_wanted))
    return 0 if publish(figures, options.json) else 1


if __name__ == "__main__":
    sys.exit(main())
