"""The latency of a lookup of one key from Python, as the connector does it.

Starts a pegaflow-server, saves blocks through the client library and looks them up one by one: a
ticket, then its result. The bound is an absolute time on an idle machine, so the load average is
printed with it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from pegaflow import _native
from perf.support.figure import Figure, publish
from perf.support.servers import parser
from tests.support.vllm_server import PegaServer

KEY_BYTES = 32
PAGE_BYTES = 4096
BLOCKS = 1024
BOUND_US = 120.0
WARM_UP = 500
PATIENCE_S = 5.0


def wait_until_ready(client: _native.Mover | _native.CacheSession) -> None:
    """Waits until the client has connected.

    Raises:
        TimeoutError: it did not.
    """
    deadline = time.monotonic() + PATIENCE_S
    while client.status()["state"] != "ready":
        if time.monotonic() > deadline:
            raise TimeoutError(f"the client did not connect: {client.status()}")
        time.sleep(0.01)


def save_blocks(mover: _native.Mover, keys: list[bytes]) -> None:
    """Saves one block per key and waits until they are sealed.

    Raises:
        RuntimeError: some were not saved.
    """
    mover.save(_native.random_id(), 1, b"".join(keys), KEY_BYTES, list(range(len(keys))))
    deadline = time.monotonic() + PATIENCE_S
    while not (finished := mover.take_finished()):
        if time.monotonic() > deadline:
            raise TimeoutError("the save did not end")
        time.sleep(0.001)
    if finished[0].blocks != len(keys):
        raise RuntimeError(f"{finished[0].blocks} of {len(keys)} saved: {finished[0].error}")


def ask(session: _native.CacheSession, keys: list[bytes], calls: int) -> list[float]:
    """Microseconds of each call.

    Raises:
        RuntimeError: a saved key was not found.
    """
    samples = []
    for i in range(WARM_UP + calls):
        key = keys[i * 7 % len(keys)]
        begin = time.perf_counter_ns()
        answer = session.take(session.lookup(key, KEY_BYTES), PATIENCE_S)
        took = time.perf_counter_ns() - begin
        if answer is None or answer[0] != 1:
            raise RuntimeError(f"a saved key was not found: {answer}")
        if i >= WARM_UP:
            samples.append(took / 1e3)
    return samples


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--calls", type=int, default=10_000, help="lookups (default: %(default)s)")
    options = made.parse_args()
    chance = random.Random(options.seed)
    keys = [chance.randbytes(KEY_BYTES) for _ in range(BLOCKS)]
    memory = mmap.mmap(-1, BLOCKS * PAGE_BYTES)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    load = os.getloadavg()[0]
    binary = options.build_dir / "server" / "pegaflow-server"
    with (
        tempfile.TemporaryDirectory(prefix="pega-") as directory,
        PegaServer(binary, Path(directory), pool_size="64mb") as server,
    ):
        socket = str(server.socket)
        mover = _native.Mover(
            socket,
            "perf",
            _native.HostDevice(1),
            [(address, PAGE_BYTES, PAGE_BYTES)],
            BLOCKS,
            [("program", "lookup_one")],
        )
        session = _native.CacheSession(socket, "perf", "lookup_one", lookup_deadline=1.0)
        try:
            wait_until_ready(mover)
            wait_until_ready(session)
            save_blocks(mover, keys)
            samples = ask(session, keys, options.calls)
        finally:
            session.close()
            mover.close()
    hundredths = statistics.quantiles(samples, n=100)
    figure = Figure(
        run="lookup of one key, Python client, p50",
        params={"blocks": BLOCKS, "calls": options.calls, "seed": options.seed},
        figure=statistics.median(samples),
        unit="us",
        bound=BOUND_US,
        bound_name=f"{BOUND_US:.0f} us, on an idle machine only",
        target=1.0,
        n=len(samples),
        spread=f"p10 {hundredths[9]:.0f} to p90 {hundredths[89]:.0f}, p99 {hundredths[98]:.0f} us; "
        f"load average {load:.2f}",
    )
    publish([figure], options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
