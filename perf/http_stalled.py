"""The time that /health takes while 128 HTTP clients send requests and never read.

Starts a pegaflow-server and keeps 128 connections to its HTTP server, each with a small receive
buffer and --requests pipelined requests, sent as fast as the server reads them. A connection that
the server closes is replaced by a new one. Meanwhile probes ask for /health one after the other,
each on a connection of its own. The bound is an absolute time, so the load average is printed too.
"""

from __future__ import annotations

import os
import select
import socket
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

from perf.support.figure import Figure, publish
from perf.support.servers import parser
from tests.support.vllm_server import PegaServer

BOUND_MS = 100.0
CLIENTS = 128
PATIENCE_S = 10.0


class StalledClients:
    """Connections that send requests and never read. A context manager with its own thread."""

    def __init__(self, address: tuple[str, int], path: str, requests: int) -> None:
        self._address = address
        self._bytes = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() * requests
        self._epoll = select.epoll()
        self._clients: dict[int, tuple[socket.socket, memoryview]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        #: Connections that the server closed or refused.
        self.closed = 0

    def __enter__(self) -> StalledClients:
        for _ in range(CLIENTS):
            self._connect()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        for client, _left in self._clients.values():
            client.close()
        self._epoll.close()

    def _connect(self) -> None:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        client.connect_ex(self._address)
        self._clients[client.fileno()] = (client, memoryview(self._bytes))
        self._epoll.register(client, select.EPOLLOUT | select.EPOLLRDHUP)

    def _run(self) -> None:
        while not self._stop.is_set():
            for descriptor, events in self._epoll.poll(0.05):
                client, left = self._clients[descriptor]
                is_closed = bool(events & (select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR))
                if not is_closed:
                    try:
                        left = left[client.send(left) :]
                    except BlockingIOError:
                        continue
                    except OSError:
                        is_closed = True
                if is_closed:
                    self.closed += 1
                    self._epoll.unregister(descriptor)
                    del self._clients[descriptor]
                    client.close()
                    self._connect()
                    continue
                self._clients[descriptor] = (client, left)
                if not left:
                    self._epoll.modify(descriptor, select.EPOLLRDHUP)


def ask(address: tuple[str, int]) -> float:
    """Milliseconds until /health has answered on a new connection.

    Raises:
        OSError: the connection was refused or closed, or PATIENCE_S passed.
        RuntimeError: the response is not 200.
    """
    begin = time.perf_counter()
    with socket.create_connection(address, timeout=PATIENCE_S) as probe:
        probe.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        response = probe.recv(4096)
    if not response.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"/health answered {response[:60]!r}")
    return (time.perf_counter() - begin) * 1e3


def main() -> int:
    made = parser(__doc__)
    made.add_argument(
        "--probes", type=int, default=500, help="requests for /health (default: %(default)s)"
    )
    made.add_argument(
        "--pause-ms", type=float, default=20, help="pause between them (default: %(default)s)"
    )
    made.add_argument(
        "--requests", type=int, default=3000, help="requests per client (default: %(default)s)"
    )
    made.add_argument(
        "--path", default="/metrics", help="path of these requests (default: %(default)s)"
    )
    options = made.parse_args()
    load = os.getloadavg()[0]
    samples = []
    failed = 0
    binary = options.build_dir / "server" / "pegaflow-server"
    with (
        tempfile.TemporaryDirectory(prefix="pega-") as directory,
        PegaServer(binary, Path(directory), pool_size="64mb") as server,
    ):
        host, _, port = server.http.rpartition(":")
        address = (host, int(port))
        ask(address)
        with StalledClients(address, options.path, options.requests) as stalled:
            for _ in range(options.probes):
                try:
                    samples.append(ask(address))
                except (OSError, RuntimeError) as problem:
                    failed += 1
                    print(f"a probe failed: {problem!r}", file=sys.stderr)
                time.sleep(options.pause_ms / 1e3)
            closed = stalled.closed
    if len(samples) < 2:
        raise RuntimeError(f"{failed} of {options.probes} probes failed")
    hundredths = statistics.quantiles(samples, n=100, method="inclusive")
    figure = Figure(
        run=f"/health beside {CLIENTS} clients that never read {options.path}, longest",
        params={"requests": options.requests, "pause_ms": options.pause_ms},
        figure=max(samples),
        unit="ms",
        bound=BOUND_MS,
        bound_name=f"{BOUND_MS:.0f} ms",
        target=1.0,
        n=len(samples),
        spread=f"p50 {hundredths[49]:.1f}, p99 {hundredths[98]:.1f} ms; {failed} probes failed; "
        f"{closed} of the clients' connections were closed; load average {load:.2f}",
    )
    return 0 if publish([figure], options.json) and failed == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
