"""A name server with answers from the test, for processes with a resolv.conf of their own."""

from __future__ import annotations

import asyncio
import os
import pathlib
import socket
import struct
import subprocess
import unittest

A, AAAA = 1, 28
NO_SUCH_NAME = 3

#: Runs the following command with another /etc/resolv.conf; other processes keep theirs.
OWN_MOUNTS = ("unshare", "-m", "sh", "-c")


def bind(test: unittest.TestCase) -> tuple[socket.socket, str]:
    """A socket for a name server and its address, which no other process of this machine has; the
    test is skipped where that is not allowed."""
    address = f"127.1.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"
    at = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    test.addCleanup(at.close)
    try:
        at.bind((address, 53))
        subprocess.run([*OWN_MOUNTS, "mount --bind /dev/null /etc/hosts"], check=True,
                       capture_output=True)  # fmt: skip
    except (OSError, subprocess.CalledProcessError) as why:
        test.skipTest(f"no name server of its own: {why}")
    return at, address


def prefix(
    address: str, scratch: pathlib.Path, timeout_s: int = 30, attempts: int = 1
) -> tuple[str, ...]:
    """The prefix of a command that uses the name server at `address`, with these limits."""
    config = scratch / "resolv.conf"
    config.write_text(f"nameserver {address}\noptions timeout:{timeout_s} attempts:{attempts}\n")
    return (*OWN_MOUNTS, f'mount --bind {config} /etc/resolv.conf && exec "$0" "$@"')


class NameServer(asyncio.DatagramProtocol):
    """Answers at once, from `addresses` by name; a name without any does not exist."""

    def __init__(self) -> None:
        self.addresses: dict[str, list[str]] = {}
        self.questions = 0
        self._transport: asyncio.DatagramTransport | None = None

    @classmethod
    async def start(cls, at: socket.socket) -> NameServer:
        at.setblocking(False)
        _, server = await asyncio.get_running_loop().create_datagram_endpoint(cls, sock=at)
        return server

    def connection_made(self, transport: asyncio.DatagramTransport) -> None:  # type: ignore[override]
        self._transport = transport

    def datagram_received(self, data: bytes, sender: tuple[str, int]) -> None:
        labels, at = [], 12
        while data[at]:
            labels.append(data[at + 1 : at + 1 + data[at]].decode())
            at += 1 + data[at]
        question = data[12 : at + 5]
        kind = struct.unpack("!H", data[at + 1 : at + 3])[0]
        known = self.addresses.get(".".join(labels).lower(), [])
        family = {A: socket.AF_INET, AAAA: socket.AF_INET6}.get(kind)
        records = [
            b"\xc0\x0c" + struct.pack("!HHIH", kind, 1, 0, 4 if kind == A else 16)
            + socket.inet_pton(family, each)
            for each in known
            if family is not None and (":" in each) == (kind == AAAA)
        ]  # fmt: skip
        flags = 0x8180 | (0 if known else NO_SUCH_NAME)
        head = data[:2] + struct.pack("!HHHHH", flags, 1, len(records), 0, 0)
        self.questions += 1
        assert self._transport is not None
        self._transport.sendto(head + question + b"".join(records), sender)

    def close(self) -> None:
        assert self._transport is not None
        self._transport.close()
