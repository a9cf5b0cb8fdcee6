"""A ZeroMQ publisher without a library: the test decides every byte. And MessagePack, as far as
KV events need it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import Any, Self

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
COMMAND, MORE, LONG = 4, 1, 2


def frame(data: bytes, flags: int = 0) -> bytes:
    if len(data) < 256:
        return bytes((flags, len(data))) + data
    return struct.pack(">BQ", flags | LONG, len(data)) + data


def message(*parts: bytes) -> bytes:
    return b"".join(frame(p, MORE if i + 1 < len(parts) else 0) for i, p in enumerate(parts))


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    flags = (await reader.readexactly(1))[0]
    size = await reader.readexactly(8 if flags & LONG else 1)
    return flags, await reader.readexactly(int.from_bytes(size, "big"))


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: bytes) -> None:
    """Greets as a socket of that type, and returns when the other side has."""
    writer.write(GREETING)
    await reader.readexactly(64)
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
    writer.write(frame(ready, COMMAND))
    await read_frame(reader)


async def answer_ping(writer: asyncio.StreamWriter, flags: int, data: bytes) -> bool:
    if flags & COMMAND and data.startswith(b"\x04PING"):
        writer.write(frame(b"\x04PONG" + data[7:], COMMAND))
        return True
    return bool(flags & COMMAND)


class _Socket:
    """A listening socket on a port of its own, which greets those who connect."""

    kind: bytes

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self) -> Self:
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self._server = await asyncio.start_server(self._serve, sock=listener)
        return self

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        # The subscriber left, or the test ended.
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            try:
                await greet(reader, writer, self.kind)
                while True:
                    flags, data = await read_frame(reader)
                    if not await answer_ping(writer, flags, data):
                        await self._received(writer, data)
            finally:
                self._left(writer)
                self._tasks.discard(task)
                writer.close()

    async def _received(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        raise NotImplementedError

    def _left(self, writer: asyncio.StreamWriter) -> None:
        pass


class Publisher(_Socket):
    """A PUB socket. Subscribers receive what is sent while they are there."""

    kind = b"PUB"

    def __init__(self) -> None:
        super().__init__()
        self._writers: set[asyncio.StreamWriter] = set()
        self._changed = asyncio.Condition()

    async def wait_for_subscribers(self, count: int) -> None:
        async with self._changed:
            await asyncio.wait_for(
                self._changed.wait_for(lambda: len(self._writers) >= count), timeout=20
            )

    async def send(self, *parts: bytes) -> None:
        for writer in list(self._writers):
            writer.write(message(*parts))

    async def _received(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        async with self._changed:
            self._writers.add(writer)
            self._changed.notify_all()

    def _left(self, writer: asyncio.StreamWriter) -> None:
        self._writers.discard(writer)


class Replayer(_Socket):
    """A ROUTER socket that answers vLLM's requests for former batches."""

    kind = b"ROUTER"

    def __init__(self, history: list[bytes]) -> None:
        super().__init__()
        self._history = history
        self.oldest = 0  # Batches before it are no longer there.

    async def _received(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        if len(data) != 8:
            return
        first = max(self.oldest, int.from_bytes(data, "big"))
        for number, payload in enumerate(self._history[first:], first):
            writer.write(message(b"", number.to_bytes(8, "big"), payload))
        writer.write(message(b"", (-1).to_bytes(8, "big", signed=True), b""))


async def subscribe(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that receives all messages of a publisher."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    await greet(reader, writer, b"SUB")
    writer.write(frame(b"\x01"))
    return reader, writer


async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """The next message of one frame."""
    while True:
        flags, data = await read_frame(reader)
        if not await answer_ping(writer, flags, data):
            return data


def pack(value: Any) -> bytes:
    """MessagePack of None, float, int, str, list and dict."""
    if value is None:
        return b"\xc0"
    if isinstance(value, float):
        return struct.pack(">Bd", 0xCB, value)
    if isinstance(value, int):
        return struct.pack(">BQ", 0xCF, value)
    if isinstance(value, str):
        data = value.encode()
        return struct.pack(">BH", 0xDA, len(data)) + data
    if isinstance(value, list):
        return struct.pack(">BH", 0xDC, len(value)) + b"".join(map(pack, value))
    if isinstance(value, dict):
        pairs = b"".join(pack(k) + pack(v) for k, v in value.items())
        return struct.pack(">BH", 0xDE, len(value)) + pairs
    raise TypeError(f"no MessagePack for {type(value)}")
