"""A real pegaflow-router, and a client that sees every byte of its responses."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import re
import signal
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

BINARY = pathlib.Path(os.environ["PEGA_BUILD_DIR"], "router", "pegaflow-router")
INDEX = BINARY.with_name("pegaflow-index")
PATIENCE_S = 30
IS_SANITIZED = b"__asan_init" in BINARY.read_bytes()
# The sanitizer keeps freed memory to detect its use; a little suffices where memory is measured.
SANITIZER_OPTIONS = f"{os.environ.get('ASAN_OPTIONS', '')}:quarantine_size_mb=1"


class Reply:
    """A response; `is_whole` is false if the connection ended before the response did."""

    def __init__(self, status: int, headers: dict[str, str]) -> None:
        self.status, self.headers = status, headers
        self.body = b""
        self.is_whole = False

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """One connection to the router."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def post(self, path: str, body: bytes | dict[str, Any], headers: str = "") -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        if "content-type" not in headers.lower():
            headers += "Content-Type: application/json\r\n"
        head = f"POST {path} HTTP/1.1\r\nHost: r\r\n{headers}Content-Length: {len(data)}\r\n\r\n"
        await self.send(head.encode() + data)

    async def head(self) -> Reply:
        text = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
        first, *lines = text.decode("latin-1").rstrip("\r\n").split("\r\n")
        headers = {k.lower(): v.strip() for k, v in (line.split(":", 1) for line in lines)}
        return Reply(int(first.split(" ")[1]), headers)

    async def chunk(self) -> bytes | None:
        """The next chunk; b"" is the last one, None means that the connection ended."""
        try:
            size = await asyncio.wait_for(self.reader.readuntil(b"\r\n"), PATIENCE_S)
            data = await asyncio.wait_for(
                self.reader.readexactly(int(size, 16) + 2), timeout=PATIENCE_S
            )
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        assert data.endswith(b"\r\n")
        return data[:-2]

    async def reply(self) -> Reply:
        reply = await self.head()
        if reply.headers.get("transfer-encoding") == "chunked":
            while (chunk := await self.chunk()) is not None:
                reply.body += chunk
                if not chunk:
                    reply.is_whole = True
                    break
            return reply
        length = int(reply.headers["content-length"]) if "content-length" in reply.headers else -1
        try:
            reading = self.reader.read() if length < 0 else self.reader.readexactly(length)
            reply.body = await asyncio.wait_for(reading, PATIENCE_S)
            reply.is_whole = True
        except asyncio.IncompleteReadError as error:
            reply.body = error.partial
        return reply

    async def ended(self) -> bytes:
        """All bytes until the connection ends."""
        try:
            return await asyncio.wait_for(self.reader.read(), PATIENCE_S)
        except ConnectionError:
            return b""

    def leave(self) -> None:
        self.writer.transport.abort()


class Router:
    """A router process. Its log is kept line by line."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self._pidfd: int | None = None
        with contextlib.suppress(ProcessLookupError):  # It may have ended already.
            self._pidfd = os.pidfd_open(process.pid)
        self.log: list[str] = []
        self.port = 0
        self._said = asyncio.Condition()
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(
        cls, *options: str, prefix: tuple[str, ...] = (), binary: pathlib.Path = BINARY
    ) -> Router:
        """`prefix` is a command that ends with exec of its arguments."""
        process = await asyncio.create_subprocess_exec(
            *prefix, binary, "--listen", "127.0.0.1:0", *options, stderr=asyncio.subprocess.PIPE,
            env=os.environ | {"ASAN_OPTIONS": SANITIZER_OPTIONS},
        )  # fmt: skip
        router = cls(process)
        line = await router.wait_for_line(r"ready listen=\S+")
        router.port = int(line.rsplit("listen=", 1)[1].split()[0].rsplit(":", 1)[1])
        return router

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.log.append(line.decode(errors="replace"))
            async with self._said:
                self._said.notify_all()
        async with self._said:
            self._said.notify_all()

    async def wait_for_line(self, pattern: str) -> str:
        def found() -> str | None:
            return next((line for line in self.log if re.search(pattern, line)), None)

        async with self._said:
            await asyncio.wait_for(
                self._said.wait_for(lambda: found() or self.process.returncode is not None),
                PATIENCE_S,
            )
        line = found()
        assert line, f"no line with {pattern}:\n{''.join(self.log)}"
        return line

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal; nothing is sent to a router that has ended.

        Not with ``process.send_signal``: that polls first, and if the router has just ended it
        takes the return code from asyncio, which then reports 255.
        """
        with contextlib.suppress(ProcessLookupError):
            if self._pidfd is not None:
                signal.pidfd_send_signal(self._pidfd, number)

    async def ended(self) -> int:
        """The return code, once the router has ended and its log is complete."""
        code = await asyncio.wait_for(self.process.wait(), PATIENCE_S)
        await asyncio.wait_for(self._reading, PATIENCE_S)
        return code

    async def stop(self) -> None:
        self.signal(signal.SIGKILL)
        await self.ended()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        text = "".join(self.log)
        assert "Sanitizer" not in text and "runtime error:" not in text, text

    async def terminate(self) -> int:
        self.signal(signal.SIGTERM)
        return await self.ended()

    async def wait_until_stopped(self) -> None:
        """Waits for the effect of a SIGSTOP; until then its sockets may still be read."""
        end = time.monotonic() + PATIENCE_S
        while pathlib.Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(") ")[1][0] != "T":
            assert time.monotonic() < end
            await asyncio.sleep(0.001)

    async def connect(self) -> Client:
        return Client(*await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 24))

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        client = await self.connect()
        try:
            yield client
        finally:
            client.leave()

    async def get(self, path: str, headers: str = "") -> Reply:
        async with self.client() as client:
            await client.send(f"GET {path} HTTP/1.1\r\nHost: r\r\n{headers}\r\n".encode())
            return await client.reply()

    async def post(self, path: str, body: bytes | dict[str, Any], headers: str = "") -> Reply:
        async with self.client() as client:
            await client.post(path, body, headers)
            return await client.reply()

    async def metrics(self) -> dict[str, float]:
        """Values by name, with labels as they are printed, without the program's prefix."""
        text = (await self.get("/metrics")).body.decode()
        rows = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {
            name.removeprefix("pegaflow_router_").removeprefix("pegaflow_index_"): float(value)
            for name, value in rows
        }

    async def wait_for_metrics(self, wanted: Callable[[dict[str, float]], bool]) -> None:
        """Waits until the metrics match: events are visible there a moment later."""
        end = time.monotonic() + PATIENCE_S
        while not wanted(metrics := await self.metrics()):
            assert time.monotonic() < end, {k: v for k, v in metrics.items() if "bucket" not in k}
            await asyncio.sleep(0.01)

    def resident_bytes(self) -> int:
        text = pathlib.Path(f"/proc/{self.process.pid}/statm").read_text()
        return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def most_resident_bytes(self) -> int:
        """The peak since the start."""
        text = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s*(\d+) kB", text)[1]) << 10  # type: ignore[index]
