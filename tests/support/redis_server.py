"""Starts a real Redis server, and sends it single commands."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from tests.support.child_process import ChildFailed, ChildProcess

#: Debian's redis-tools has the server under the last name, and installs no service.
_PROGRAMS = ("redis-server", "valkey-server", "redis-check-rdb")


class RedisError(RuntimeError):
    """An error reply of the server."""


class RedisServer(ChildProcess):
    """One Redis or Valkey without persistence and with a password: after kill() it starts empty.

    ``directory`` gets the log and, where only redis-check-rdb is installed, a link to it.

    Args:
        address: HOST:PORT for the nodes.
        control_host: A second listen address, for call(); None: the first one.

    Raises:
        ChildFailed: no program of the server is in PATH.
    """

    start_timeout_s = 30.0

    def __init__(
        self, directory: Path, address: str, password: str, control_host: str | None = None
    ) -> None:
        super().__init__("redis-server", directory / "redis-server.log")
        host, _, port = address.rpartition(":")
        self.address = address
        self.password = password
        self._hosts = [host] if control_host is None else [host, control_host]
        self._port = int(port)
        self._directory = directory
        self._program = self._find()

    def _find(self) -> Path:
        found = [path for path in map(shutil.which, _PROGRAMS) if path]
        if not found:
            raise ChildFailed("no redis-server in PATH (Debian package redis-tools)")
        program = Path(found[0])
        if program.name != _PROGRAMS[-1]:
            return program
        # One program, which looks at the name that it was started under.
        link = self._directory / "redis-server"
        link.unlink(missing_ok=True)
        link.symlink_to(program)
        return link

    @property
    def url(self) -> str:
        """The value of --directory; the password is for --directory-secret-file."""
        return f"redis://{self.address}"

    def command(self) -> list[str]:
        return [
            str(self._program),
            *("--bind", *self._hosts, "--port", str(self._port)),
            *("--requirepass", self.password),
            *("--save", "", "--appendonly", "no", "--dir", str(self._directory)),
        ]

    def is_ready(self) -> bool:
        try:
            return self.call("PING") == "PONG"
        except OSError:
            return False  # not listening yet

    def call(self, *arguments: str | bytes, timeout_s: float = 10.0) -> Any:
        """The reply to one command: text as str, bulk strings as bytes, int, list or None.

        Raises:
            OSError: the server does not answer.
            RedisError: it answered with an error.
        """
        return self.calls([arguments], timeout_s)[0]

    def calls(self, commands: list[tuple[str | bytes, ...]], timeout_s: float = 10.0) -> list[Any]:
        """The replies to several commands, on one connection; raises as call() does."""
        with socket.create_connection((self._hosts[-1], self._port), timeout_s) as connection:
            replies = connection.makefile("rb")
            sent = [("AUTH", self.password), *commands]
            connection.sendall(b"".join(map(encoded, sent)))
            return [read_reply(replies) for _ in sent][1:]

    def anchors(self) -> int:
        """Members of all sorted sets of anchors, which is what the nodes have announced."""
        keys = self.call("KEYS", "a:*")
        return sum(self.calls([("ZCARD", key) for key in keys])) if keys else 0


def encoded(arguments: Sequence[str | bytes]) -> bytes:
    """One command in Redis's protocol."""
    words = [word.encode() if isinstance(word, str) else word for word in arguments]
    parts = [b"$%d\r\n%s\r\n" % (len(word), word) for word in words]
    return b"*%d\r\n%s" % (len(words), b"".join(parts))


def read_reply(replies: BinaryIO) -> Any:
    """The next reply of a connection, as RedisServer.call() returns it.

    Raises:
        ConnectionError: it was closed.
        RedisError: the reply is an error.
    """
    line = replies.readline()
    if not line.endswith(b"\r\n"):
        raise ConnectionError("Redis closed the connection")
    kind, rest = line[:1], line[1:-2]
    if kind == b"+":
        return rest.decode()
    if kind == b"-":
        raise RedisError(rest.decode())
    if kind == b":":
        return int(rest)
    size = int(rest)
    if size < 0:
        return None
    if kind == b"*":
        return [read_reply(replies) for _ in range(size)]
    text = replies.read(size + 2)
    if len(text) != size + 2:
        raise ConnectionError("Redis closed the connection in a reply")
    return text[:-2]
