#!/usr/bin/env python3
"""Measures what the policy kv-aware costs the router, beside least-load in the same run.

    ./dev bench router_kv [--rounds N] [--requests N]

Four engines respond without computing, and publish KV events, so that every choice is made by cost.
Two routers with the same engines alternate: one with least-load, one with kv-aware. A prompt is
`known` (its blocks are in the index, as in a conversation), `new` (nothing is known of it, and the
engine is asked for a full report), or 100,000 token ids. Load, routers and engines share the cores,
so times show the latency that the policy adds, and CPU seconds its cost. On a machine with other
work the times are noise; the CPU time of a request is not.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import http.client
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import zmq
from vllm.distributed.kv_events import BlockStored, KVEventBatch

from perf.router import BENCH, BUILD, ROUTER, figure, load, load_with_cpu, process
from perf.support.figure import Figure, note, publish
from tests.support.prometheus import Metrics, read_metrics

ENGINES = 4
BLOCK = 16
MIB = 1 << 20
#: Bytes of a prompt of 100,000 token ids below 50,000.
IDS = 588_000
#: (kind, bytes of the body, microseconds that the p50 may grow)
CASES = (
    ("same", 4096, 60),
    ("same", 32_768, 60),
    ("same", MIB, 500),
    ("new", 4096, 60),
    ("new", 32_768, 60),
    ("new", MIB, 500),
    ("ids", IDS, 500),
)
#: The CPU time of a request at 300 a second and core.
MAX_CPU_US = 1e6 / 300


class Publisher:
    """Publishes the KV events of one engine, as vLLM does."""

    def __init__(self, context: zmq.Context[Any]) -> None:
        self._socket = context.socket(zmq.PUB)
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._encode = msgspec.msgpack.Encoder().encode
        self._number = 0

    def store(self, first: int, count: int, session: str | None) -> None:
        event = BlockStored(
            block_hashes=list(range(first, first + count)),
            parent_block_hash=None,
            token_ids=[0] * (count * BLOCK),
            block_size=BLOCK,
            lora_id=None,
            medium="GPU",
            lora_name=None,
            session_id=session,
        )
        batch = KVEventBatch(ts=time.time(), events=[event], data_parallel_rank=0)
        number = self._number.to_bytes(8, "big")
        self._socket.send_multipart([b"", number, self._encode(batch)])
        self._number += 1


@dataclasses.dataclass(frozen=True)
class Routers:
    """Ports and processes by policy."""

    ports: dict[str, int]
    pids: dict[str, int]

    def metrics(self, policy: str) -> Metrics:
        return read_metrics(f"127.0.0.1:{self.ports[policy]}")


@contextlib.contextmanager
def start() -> Iterator[tuple[Routers, list[Publisher]]]:
    context: zmq.Context[Any] = zmq.Context()
    with contextlib.ExitStack() as stack:
        stack.callback(context.destroy, linger=0)
        publishers = [Publisher(context) for _ in range(ENGINES)]
        engines: list[str] = []
        for publisher in publishers:
            _, port = stack.enter_context(process(BENCH, "engine", str(publisher.port)))
            engines += ["--decode", f"http://127.0.0.1:{port}"]
        routers = Routers({}, {})
        for policy in ("least-load", "kv-aware"):
            routers.pids[policy], routers.ports[policy] = stack.enter_context(
                process(ROUTER, "--listen", "127.0.0.1:0", *engines, "--decode-policy", policy,
                        "--prefill-policy", policy, "--access-log", "false", log=True)
            )  # fmt: skip
        yield routers, publishers


def send_once(port: int, prompt: Any, session: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    body = json.dumps({"model": "m", "max_tokens": 8, "prompt": prompt})
    headers = {"Content-Type": "application/json", "X-Session-ID": session}
    try:
        connection.request("POST", "/v1/completions", body, headers)
        connection.getresponse().read()
    finally:
        connection.close()


def teach(routers: Routers, publishers: Sequence[Publisher]) -> None:
    """The blocks of the prompts that all requests of a case have; the longest has the others."""

    def known() -> float:
        return routers.metrics("kv-aware").total("pegaflow_router_kv_text_learned_total")

    prompts: list[Any] = ["p" * (MIB - 44), ids(IDS - 44)]
    for number, prompt in enumerate(prompts, 1):
        tokens = len(prompt) // 4 if isinstance(prompt, str) else len(prompt)
        before = known()
        end = time.monotonic() + 60
        while known() <= before:
            if time.monotonic() > end:
                raise SystemExit("router_kv: after 60 s the router has not learned a prompt")
            send_once(routers.ports["kv-aware"], prompt, f"teach-{number}")
            for publisher in publishers:
                publisher.store(number << 32, tokens // BLOCK, f"teach-{number}")
            time.sleep(0.5)  # A tick of the router.
    note(f"{routers.metrics('kv-aware').total('pegaflow_router_kv_index_blocks'):.0f} blocks known")


def ids(size: int) -> list[int]:
    """The prompt of router_bench's load with `ids`."""
    made, length, number = [1], 2, 1
    while length < size:
        made.append(number * 2654435761 % (1 << 32) % 50_000)
        length += 1 + len(str(made[-1]))
        number += 1
    return made


def measure(routers: Routers, rounds: int, requests: int) -> list[Figure]:
    figures = []
    for kind, size, most_us in CASES:
        count = max(20, requests * 4096 // max(size, 4096))
        p50: dict[str, list[float]] = {policy: [] for policy in routers.ports}
        p99: dict[str, list[float]] = {policy: [] for policy in routers.ports}
        cpu: dict[str, list[float]] = {policy: [] for policy in routers.ports}
        for port in routers.ports.values():
            load(port, 1, 10, size, kind)
        for turn in range(rounds):
            for policy, port in sorted(routers.ports.items(), reverse=turn % 2 == 1):
                times = load(port, 1, count, size, kind)
                p50[policy].append(times["p50_us"])
                p99[policy].append(times["p99_us"])
                cpu[policy].append(
                    load_with_cpu(routers.pids[policy], port, count * 2, size, kind)[1]
                )
        added = [b - a for a, b in zip(p50["least-load"], p50["kv-aware"], strict=True)]
        late = [b - a for a, b in zip(p99["least-load"], p99["kv-aware"], strict=True)]
        note(
            f"{kind} {size}: p50 {statistics.median(p50['least-load']):.0f} us with least-load; "
            f"p99 {statistics.median(late):+.0f} us; CPU "
            f"{statistics.median(cpu['least-load']):.0f} us with least-load"
        )
        figures.append(
            figure(f"kv-aware p50 added, {kind}", added, "us", most_us, "target", body=size)
        )
        more = [b - a for a, b in zip(cpu["least-load"], cpu["kv-aware"], strict=True)]
        figures += [
            figure(f"kv-aware CPU added, {kind}", more, "us", most_us, "target", body=size),
            figure(f"kv-aware CPU, {kind}", cpu["kv-aware"], "us", MAX_CPU_US,
                   "300 a second and core", body=size),
        ]  # fmt: skip
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per figure")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--requests", type=int, default=1000, help="requests of 4 KB in each round")
    options = parser.parse_args()
    subprocess.run(["ninja", "-C", BUILD, "--quiet", "perf/router/router_bench"], check=True)
    with start() as (routers, publishers):
        teach(routers, publishers)
        figures = measure(routers, options.rounds, options.requests)
        metrics = routers.metrics("kv-aware")
        chosen = metrics.total("pegaflow_router_kv_decisions_total", policy="kv-aware")
        other = metrics.total("pegaflow_router_kv_decisions_total", policy="fallback")
        note(f"{chosen:.0f} decisions by cost, {other:.0f} by another policy")
        if other > 100:
            raise SystemExit("router_kv: kv-aware had no credit, so nothing was measured")
    return 0 if publish(figures, options.json) else 1


if __name__ == "__main__":
    sys.exit(main())
