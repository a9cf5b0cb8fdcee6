"""Servers at both ends of a virtual cable with a limited rate; the near ones read from the far."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from perf.support.veth import End, NoNamespaces, cable
from tests.support.vllm_server import PegaServer

#: Burst of the limit: some timer ticks at the highest rate.
_BURST = "2mb"
#: Length of the limit's queue before packets are dropped.
_LATENCY = "50ms"


class Link:
    """The two ends of the cable."""

    def __init__(self, near: End, far: End) -> None:
        self.near = near
        self.far = far

    def limit(self, gigabytes_per_second: float) -> None:
        """Limits the rate at which the far end sends; 0: unlimited.

        Raises:
            NoNamespaces: `tc` failed.
        """
        device = ["dev", "pega-far", "root"]
        subprocess.run(
            [*self.far.prefix, "tc", "qdisc", "del", *device], capture_output=True, check=False
        )
        if not gigabytes_per_second:
            return
        rate = f"{gigabytes_per_second * 8e9:.0f}bit"
        limit = ["tbf", "rate", rate, "burst", _BURST, "latency", _LATENCY]
        done = subprocess.run(
            [*self.far.prefix, "tc", "qdisc", "add", *device, *limit],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise NoNamespaces(f"`tc qdisc add ... tbf` failed: {done.stderr.strip()}")


@contextlib.contextmanager
def servers_on_link(
    binary: Path,
    directory: Path,
    far_pool: str,
    near_pools: Sequence[str],
    near_arguments: Sequence[str] = (),
) -> Iterator[tuple[Link, PegaServer, list[PegaServer]]]:
    """The far server, and servers at the near end that read from it and not from each other.

    ``near_arguments``: more options of the latter.

    Raises:
        NoNamespaces: this machine or user cannot create namespaces.
    """
    with contextlib.ExitStack() as stack:
        link = Link(*stack.enter_context(cable()))
        lends = ["--peer-listen", f"{link.far.address}:0"]
        far = PegaServer(binary, directory / "far", far_pool, lends)
        far.prefix = link.far.prefix
        stack.enter_context(far)
        nears = []
        for number, pool in enumerate(near_pools):
            reads = ["--peers", far.peer_listen, *near_arguments]
            near = PegaServer(binary, directory / f"near{number}", pool, reads)
            near.prefix = link.near.prefix
            nears.append(stack.enter_context(near))
        for near in nears:
            wait_joined(near)
        yield link, far, nears


def wait_joined(server: PegaServer, timeout_s: float = 30.0) -> None:
    """Waits until the server can read from its peer.

    Raises:
        TimeoutError: it cannot in time.
    """
    end = time.monotonic() + timeout_s
    while server.metrics_by_socket().total("pegaflow_peer_ready") != 1:
        if time.monotonic() > end:
            raise TimeoutError(f"{server.address} does not reach its peer")
        time.sleep(0.01)
