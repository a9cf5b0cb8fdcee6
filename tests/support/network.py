"""Nodes on one machine, each in a network namespace of its own, and faults of their links.

    with Network(["a", "b"]) as network:
        PegaServer(..., prefix=network["a"].prefix)   # a program on node a
        network["a"].limit("20mbit")                  # slow in the direction from a
        network["b"].cut()                            # a black hole: no packet, no reset

Nothing is named and nothing is mounted: a namespace lives as long as a process in it or a
descriptor on it, so that none is left behind however this process ends. The caller itself moves
into a namespace of its own, with the bridge between the nodes; no address here conflicts with the
machine's.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

_CLONE_NEWNET = 0x40000000

#: Subnets that only Network uses: between the nodes, and between each node and the caller.
_DATA, _CONTROL = "10.77.0", "10.78"

_BRIDGE = "nodes"


class NoNetwork(RuntimeError):
    """This machine or this user cannot have network namespaces; the text names the requirement."""


def _libc_call(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)


def _open_namespace() -> int:
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _run(*command: str) -> str:
    """Raises NoNetwork when the command fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NoNetwork(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


class Node:
    """One network namespace: a link to the other nodes, and one to the caller."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        #: Its address for the other nodes; faults are on this link only.
        self.address = f"{_DATA}.{number}"
        #: Its address for the caller, which reads metrics and sends requests of clients here.
        self.control_address = f"{_CONTROL}.{number}.2"
        self._port = f"to-{name}"
        self._namespace = -1
        self._number = number

    @property
    def prefix(self) -> list[str]:
        """The prefix of a command that runs on this node."""
        return ["nsenter", f"--net=/proc/{os.getpid()}/fd/{self._namespace}", "--"]

    def limit(self, rate: str | None) -> None:
        """Limits the rate at which the node sends to the others, as "20mbit"; None: no limit.

        The limit's queue holds 64 KiB, so that a cut link still delivers no more than that.
        """
        self._limit((*self.prefix, "tc"), "data", rate)

    def limit_received(self, rate: str | None) -> None:
        """Limits the rate at which the others send to the node."""
        self._limit(("tc",), self._port, rate)

    def cut(self) -> None:
        """A black hole: packets from and to the node vanish without an error."""
        _run("ip", "link", "set", self._port, "nomaster")

    def mend(self) -> None:
        """Ends cut()."""
        _run("ip", "link", "set", self._port, "master", _BRIDGE)

    def set_link(self, *, up: bool) -> None:
        """As if a cable was pulled: the node's link has no carrier."""
        _run("ip", "link", "set", self._port, "up" if up else "down")

    def sent_bytes(self) -> int:
        """Bytes that the node has sent to the others so far, headers included."""
        for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
            device, _, counters = line.partition(":")
            if device.strip() == self._port:
                return int(counters.split()[0])  # received by the bridge's end
        raise NoNetwork(f"{self._port} is not in /proc/net/dev")

    def _limit(self, tc: Sequence[str], device: str, rate: str | None) -> None:
        if rate is None:
            _run(*tc, "qdisc", "del", "dev", device, "root")
        else:
            shape = ("tbf", "rate", rate, "burst", "32kb", "limit", "64kb")
            _run(*tc, "qdisc", "replace", "dev", device, "root", *shape)

    def _set_up(self, home: int) -> None:
        """Makes its namespace and both links. The caller is in ``home``, before and after."""
        _libc_call("unshare", _CLONE_NEWNET)
        self._namespace = _open_namespace()
        _libc_call("setns", home, _CLONE_NEWNET)
        there = f"/proc/{os.getpid()}/fd/{self._namespace}"
        near, far = f"{_CONTROL}.{self._number}.1/30", f"{self.control_address}/30"
        control = f"at-{self.name}"
        for device, inside in ((self._port, "data"), (control, "control")):
            _run(
                *("ip", "link", "add", device, "type", "veth"),
                *("peer", "name", inside, "netns", there),
            )
        _run("ip", "address", "add", near, "dev", control)
        _run("ip", "link", "set", control, "up")
        _run("ip", "link", "set", self._port, "master", _BRIDGE, "up")
        for command in (
            ("link", "set", "lo", "up"),
            ("address", "add", f"{self.address}/24", "dev", "data"),
            ("address", "add", far, "dev", "control"),
            ("link", "set", "data", "up"),
            ("link", "set", "control", "up"),
        ):
            _run(*self.prefix, "ip", *command)

    def _close(self) -> None:
        if self._namespace >= 0:
            os.close(self._namespace)
            self._namespace = -1


class Network:
    """Some nodes, and a bridge between them. A context manager; belongs to the main thread.

    Inside of it the calling thread, and every process and thread that it starts, is in the
    namespace of the bridge: they cannot reach the machine's networks.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._nodes = {name: Node(name, 1 + number) for number, name in enumerate(names)}
        self._outside = -1
        self._home = -1

    def __getitem__(self, name: str) -> Node:
        return self._nodes[name]

    def __enter__(self) -> Self:
        """
        Raises:
            NoNetwork: the programs, the permission or the kernel's modules are missing.
        """
        for program in ("ip", "tc", "nsenter"):
            if shutil.which(program) is None:
                package = "util-linux" if program == "nsenter" else "iproute2"
                raise NoNetwork(f"the program `{program}` is missing (Debian package {package})")
        self._outside = _open_namespace()
        try:
            self._unshare()
            self._home = _open_namespace()
            _run("ip", "link", "set", "lo", "up")
            _run("ip", "link", "add", _BRIDGE, "type", "bridge")
            _run("ip", "link", "set", _BRIDGE, "up")
            for node in self._nodes.values():
                node._set_up(self._home)
        except OSError as error:
            self._leave()
            raise NoNetwork(f"network namespaces: {error}") from error
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leave()

    def _unshare(self) -> None:
        try:
            _libc_call("unshare", _CLONE_NEWNET)
        except PermissionError as error:
            raise NoNetwork("network namespaces need root (CAP_SYS_ADMIN)") from error

    def _leave(self) -> None:
        for node in self._nodes.values():
            node._close()
        _libc_call("setns", self._outside, _CLONE_NEWNET)
        for descriptor in (self._outside, self._home):
            if descriptor >= 0:
                os.close(descriptor)
        self._outside = self._home = -1
