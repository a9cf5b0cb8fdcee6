"""Two network namespaces and a virtual cable between them, as `pegaflow-perf net` makes its own."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from typing import NamedTuple

_DEVICES = ("pega-near", "pega-far")
_ADDRESSES = ("10.77.0.1", "10.77.0.2")

#: Prefix of a command that the kernel ends together with this process.
ENDS_WITH_US = ("setpriv", "--pdeathsig", "KILL", "--")


class NoNamespaces(RuntimeError):
    """This machine or user cannot create network namespaces; the message has the reason."""


class End(NamedTuple):
    """One end of the cable."""

    address: str
    #: Prefix of a command that runs there.
    prefix: list[str]


@contextlib.contextmanager
def cable() -> Iterator[tuple[End, End]]:
    """The two ends. A namespace has no name and ends with its last process.

    Raises:
        NoNamespaces: a program, the permission or kernel support is missing.
    """
    with contextlib.ExitStack() as stack:
        keepers = [stack.enter_context(_namespace()) for _ in _DEVICES]
        ends = [
            End(address, [*ENDS_WITH_US, "nsenter", f"--net=/proc/{keeper.pid}/ns/net", "--"])
            for address, keeper in zip(_ADDRESSES, keepers, strict=True)
        ]
        near, far = _DEVICES
        _run(
            *(*ends[0].prefix, "ip", "link", "add", near, "type", "veth"),
            *("peer", "name", far, "netns", str(keepers[1].pid)),
        )
        for end, device in zip(ends, _DEVICES, strict=True):
            _run(*end.prefix, "ip", "address", "add", f"{end.address}/30", "dev", device)
            for name in (device, "lo"):
                _run(*end.prefix, "ip", "link", "set", name, "up")
        yield ends[0], ends[1]


@contextlib.contextmanager
def _namespace() -> Iterator[subprocess.Popen[bytes]]:
    """A process in its own network namespace, until the context ends."""
    try:
        keeper = subprocess.Popen(
            [*ENDS_WITH_US, "unshare", "--net", "--", "cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    except FileNotFoundError as error:
        raise NoNamespaces("`setpriv` is missing (Debian package util-linux)") from error
    assert keeper.stdin is not None and keeper.stdout is not None and keeper.stderr is not None
    try:
        # The echo proves that the process has moved.
        with contextlib.suppress(BrokenPipeError):
            keeper.stdin.write(b"there\n")
            keeper.stdin.flush()
        if keeper.stdout.readline() != b"there\n":
            raise NoNamespaces(keeper.stderr.read().decode().strip() or "`unshare --net` failed")
        yield keeper
    finally:
        keeper.kill()
        keeper.communicate()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NoNamespaces(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
