"""Lists the problems of this machine, each with its fix.

Checks the server's socket and its permissions, the versions of client, server and wire, huge pages,
memory limits, NUMA nodes, RDMA cards and UCX, the server's health and metrics, the keeper of its
pool, the disks of its SSD tier, other nodes and the lane to each, and the connected engines: the
namespace of each, and the factors that separate two engines of one model. Changes nothing.

The address is found as an engine's connector finds it: PEGAFLOW_ENGINE_ENDPOINT, PEGAFLOW_HOST and
PEGAFLOW_PORT, or --addr. Exits with 1 if there is a problem.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pegaflow import _native
from pegaflow.cli import (
    direct,
    directory,
    disk_path,
    disks,
    endpoint,
    keeper,
    machine,
    rdma,
    routers,
    server_view,
)
from pegaflow.cli.finding import OK, PROBLEM, Finding, as_json, as_text, exit_status

#: The doctor's instance name; it is not an engine, and not shown as one.
INSTANCE = "pegaflow-doctor"
_HELLO_TIMEOUT_S = 3.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--addr",
        help="the server's --addr: HOST:PORT or unix:/path/x.sock "
        f"(default: as an engine would find it, else {endpoint.DEFAULT_ADDR})",
    )
    parser.add_argument(
        "--http-addr",
        default=server_view.DEFAULT_HTTP,
        help="the server's --http-addr (default: %(default)s)",
    )
    parser.add_argument(
        "--ssd-cache-path",
        action="append",
        default=[],
        metavar="PATH",
        help="also check a file, or a directory for one, for the server's --ssd-cache-path; may be "
        "repeated",
    )
    parser.add_argument(
        "--ucx-library",
        metavar="PATH",
        help="the file libucp.so.0 to examine; empty: the one that the system finds (default: the "
        "running server's, PEGA_UCX_LIBRARY, or the one that the system finds)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    _native.set_log_level("off")  # the findings contain what the client would log
    addr = options.addr or endpoint.addr_from(os.environ)
    findings = [
        *examine(addr, options.http_addr, options.ucx_library),
        *_paths(options.ssd_cache_path),
    ]
    if options.json:
        print(as_json(_native.__version__, findings))
    else:
        width = min(shutil.get_terminal_size((100, 24)).columns, 120)
        print(as_text(_native.__version__, findings, width))
    return exit_status(findings)


def examine(addr: str, http_addr: str, ucx_library: str | None = None) -> Iterator[Finding]:
    """All findings, in the order in which to fix them."""
    try:
        path = endpoint.socket_path(addr)
    except (endpoint.BadAddress, _native.PegaFlowError) as error:
        yield Finding("socket", PROBLEM, str(error), "name the server's --addr")
        yield from _machine({}, 0, None, ucx_library)
        return
    finding, listener = endpoint.check_socket(path, addr)
    yield finding
    if listener is None:
        yield Finding("client", OK, f"version {_native.__version__}")
        yield from _machine({}, 0, None, ucx_library)
        return
    server = server_view.ServerHttp(http_addr)
    # Before the hello, which opens a connection.
    health_finding, health, samples, instances = _look(server)
    yield check_versions(path)
    yield health_finding
    nodes = None if health is None else health.get("nodes")
    yield from _machine(_pool(samples), listener.pid, nodes, ucx_library)
    if health is not None:
        yield from rdma.check_peers(nodes)
        yield from server_view.check_numa(health, instances, machine.memory_nodes())
    if health is not None and samples is not None:
        yield from keeper.check_keeper(health.get("keeper"), samples)
        yield from disks.check_disks(health.get("ssd", []), samples, listener.pid)
        yield from directory.check_directory(nodes, samples)
    if samples is not None:
        yield from server_view.check_metrics(samples)
        yield from server_view.check_instances(instances)
        yield from direct.check_direct(samples, instances, nodes)
        yield from routers.check_routers(server, instances)


def _look(
    server: server_view.ServerHttp,
) -> tuple[Finding, dict[str, Any] | None, server_view.Samples | None, list[dict[str, Any]]]:
    """The findings from HTTP: health, and metrics and instances if the server is healthy."""
    finding, health = server_view.check_health(server)
    if health is None:
        return finding, None, None, []
    try:
        _, page = server.get("/metrics")
        _, body = server.get_json("/instances")
    except server_view.Unreachable as error:
        gone = Finding(
            "health", PROBLEM, f"healthy a moment ago, now {error}", "run the doctor again"
        )
        return gone, None, None, []
    return finding, health, server_view.Samples(page), body.get("instances", [])


def check_versions(path: Path) -> Finding:
    """Sends hello as an engine does: the only way to know that both have a common version."""
    session = _native.CacheSession(str(path), INSTANCE, f"pegaflow doctor {_native.__version__}")
    try:
        deadline = time.monotonic() + _HELLO_TIMEOUT_S
        status = session.status()
        while status["state"] == "connecting" and time.monotonic() < deadline:
            time.sleep(0.01)
            status = session.status()
    finally:
        session.close()
    ours = f"client {_native.__version__}"
    if status["state"] == "ready":
        return Finding("versions", OK, f"{ours}, server {status['server_build']}: they agree")
    if status["state"] == "refused":
        return Finding(
            "versions",
            PROBLEM,
            f"{ours}; the server rejects this client: {status['detail']}",
            "upgrade the side that the text names, or start the server with --allow-uid if it "
            "is about the user",
        )
    return Finding(
        "versions",
        PROBLEM,
        f"{ours}; no hello within {_HELLO_TIMEOUT_S:.0f} s: {status['state']}, {status['detail']}",
        "is the server stopped or overloaded? See its log and `ps -o stat` of its process",
    )


def _pool(samples: server_view.Samples | None) -> dict[str, int]:
    if samples is None:
        return {}
    return {
        "bytes": int(samples.get("pegaflow_pool_capacity_bytes")),
        "page_bytes": int(samples.get("pegaflow_pool_page_bytes")),
        "huge_bytes": int(samples.get("pegaflow_pool_huge_bytes")),
    }


def _machine(
    pool: dict[str, int], server_pid: int, nodes: dict[str, Any] | None, ucx_library: str | None
) -> Iterator[Finding]:
    size = pool.get("bytes", 0)
    yield machine.check_huge_pages(
        size, pool.get("page_bytes", 0), pool_huge_bytes=pool.get("huge_bytes", 0)
    )
    yield machine.check_memory(size, server_pid if size else 0)
    ports = rdma.ports()
    yield rdma.check_locked_memory(ports, size, server_pid)
    yield from rdma.check_ports(ports, nodes)
    yield from rdma.check_devices(ports)
    library = rdma.ucx_name(ucx_library, nodes)
    if finding := rdma.check_ucx(rdma.find_ucx(library), ports):
        yield finding


def _paths(paths: Sequence[str]) -> Iterator[Finding]:
    # The server takes a list in one option too.
    each = [path for text in paths for path in text.split(",") if path]
    for path in each:
        yield from disk_path.check_path(path)
    if each:
        yield disk_path.check_io_uring()
        yield disk_path.check_registration()
