"""An engine as a router sees it: HTTP with responses of OpenAI's API, whole or as events.

It runs in the event loop of the test, which decides its response to each request and sees when
its caller leaves. As a program it is a process that can be killed: it prints its URL, and a line
for each request. It ends no stream, and with --silent responds to no prefill.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any


class Request:
    """One request that an engine received."""

    def __init__(self, method: str, target: str, headers: dict[str, str], body: bytes) -> None:
        self.method, self.target, self.headers, self.body = method, target, headers, body
        self.gone = asyncio.Event()  # The caller closed the connection during the answer.

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.body)

    @property
    def is_prefill(self) -> bool:
        params = self.json.get("kv_transfer_params") or {}
        return bool(params.get("do_remote_decode") or params.get("pegaflow", {}).get("save_tail"))


def event(text: str) -> bytes:
    return f"data: {text}\n\n".encode()


STREAM = [event(json.dumps({"choices": [{"text": f"wort {i} äöü"}]})) for i in range(5)]
WHOLE_STREAM = b"".join(STREAM) + b"data: [DONE]\n\n"
KV_PARAMS = b'{"pegaflow": {"node":"n-1", "incarnation":"00ff", "job":7, "tokens":1.50}}'


class Answer:
    """Writes one response piece by piece."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    async def raw(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def whole(
        self, body: bytes, status: int = 200, headers: str = "Content-Type: application/json\r\n"
    ) -> None:
        head = f"HTTP/1.1 {status} Said\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
        await self.raw(head.encode() + body)

    async def begin_stream(self) -> None:
        await self.raw(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )

    async def piece(self, data: bytes) -> None:
        await self.raw(b"%x\r\n%s\r\n" % (len(data), data))

    async def end_stream(self) -> None:
        await self.raw(b"0\r\n\r\n")

    def die(self) -> None:
        """Resets the connection, like the kernel does for a process that is killed."""
        self._writer.transport.abort()


Behavior = Callable[[Request, Answer], Awaitable[None]]


async def serve_normally(request: Request, answer: Answer) -> None:
    if request.target == "/health":
        await answer.whole(b"")
    elif request.target == "/v1/models":
        await answer.whole(b'{"object":"list","data":[{"id":"m","max_model_len":128}]}')
    elif request.is_prefill:
        await answer.whole(b'{"id":"p","choices":[],"kv_transfer_params":' + KV_PARAMS + b"}")
    elif request.json.get("stream"):
        await answer.begin_stream()
        for each in [*STREAM, b"data: [DONE]\n\n"]:
            await answer.piece(each)
        await answer.end_stream()
    else:
        await answer.whole(b'{"choices":[{"text":"hello"}], "n": 1.50}')


async def wait_for_leaving(request: Request, _answer: Answer) -> None:
    """Sends nothing until the caller leaves."""
    await request.gone.wait()


async def fail_with_status(request: Request, answer: Answer) -> None:
    """The status is the request's "user"."""
    await answer.whole(b"{}", int(request.json["user"]))


async def die(_request: Request, answer: Answer) -> None:
    answer.die()


async def report_no_params(_request: Request, answer: Answer) -> None:
    await answer.whole(b'{"kv_transfer_params":null}')


async def send_garbage(_request: Request, answer: Answer) -> None:
    await answer.raw(b"SSH-2.0\r\n\r\n")
    answer.die()


class StreamingEngine:
    """An engine on a port of its own. `behavior` may be changed at any time."""

    def __init__(
        self, behavior: Behavior = serve_normally, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        self.behavior = behavior
        self._host = host
        self.is_healthy = True
        # The response to a router's own requests for models; None: 404.
        self.models: list[str] | None = ["m"]
        self.event_sources: bytes | None = None
        self.server_info: dict[str, Any] | None = None  # As SGLang describes itself.
        self.load: str | None = None  # The page /metrics; without one: 404.
        self.load_status = 200
        self.load_questions = 0
        self._is_draining = False
        self._answering = 0
        self._rest = asyncio.Event()  # Set while no response is pending.
        self._rest.set()
        self.requests: list[Request] = []  # Without a router's own questions.
        self.model_questions = 0
        self.connections = 0
        self._port = port
        # Not asyncio's server: a connection that it has accepted and not begun when it is closed
        # stays open without a handler.
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._arrived = asyncio.Condition()

    @property
    def url(self) -> str:
        return f"http://{self._host}:{self._port}"

    @property
    def port(self) -> int:
        return self._port

    async def start(self) -> StreamingEngine:
        """On the same port as before, after a restart."""
        self._is_draining = False
        self._listener = socket.create_server((self._host, self._port), backlog=1000)
        self._listener.setblocking(False)
        self._port = self._listener.getsockname()[1]
        self._accepting = self._begin(self._accept(self._listener))
        return self

    async def stop(self) -> None:
        """Rejects connections from now on, and resets the open ones."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def drain(self) -> None:
        """As vLLM with --shutdown-timeout: ends its requests, rejects new ones, then exits."""
        self._is_draining = True
        assert self._listener is not None
        # Ends the accepting by an error. If cancelled, asyncio may lose a connection it has just
        # accepted.
        self._listener.shutdown(socket.SHUT_RDWR)
        await self._accepting
        self._listener.close()
        self._listener = None
        await asyncio.wait_for(self._rest.wait(), timeout=60)
        await self.stop()

    async def close_idle(self) -> None:
        """Closes all connections. The other side can see it when this returns."""
        writers = list(self._writers)
        for writer in writers:
            writer.close()
        for writer in writers:
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def wait_for(self, count: int) -> Request:
        """The request number `count`, once it has arrived."""
        async with self._arrived:
            await asyncio.wait_for(
                self._arrived.wait_for(lambda: len(self.requests) >= count), timeout=20
            )
        return self.requests[count - 1]

    def _begin(self, what: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            except OSError:
                if self._is_draining:
                    return
                raise
            self._begin(self._connected(connection))

    async def _connected(self, connection: socket.socket) -> None:
        # Like asyncio for its own sockets; otherwise pieces are delayed to be merged.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            reader, writer = await asyncio.open_connection(sock=connection)
        except asyncio.CancelledError:
            connection.close()
            raise
        self._writers.add(writer)
        try:
            await self._serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # The caller left, or the test ended.
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        counted = False
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
            method, target, _ = first.split(" ")
            headers = {k.lower(): v.strip() for k, v in (line.split(":", 1) for line in lines)}
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            request = Request(method, target, headers, body)
            if self._is_draining:
                await Answer(writer).whole(b"", 503, "Connection: close\r\n")
                return
            if target == "/health":
                await Answer(writer).whole(b"", 200 if self.is_healthy else 503)
                continue
            if target == "/kv_event_sources":
                # Without KV events: 404.
                sources = self.event_sources
                await Answer(writer).whole(sources or b"", 404 if sources is None else 200)
                continue
            if target == "/metrics" and self.load is None:
                await Answer(writer).whole(b"", 404)
                continue
            if target == "/metrics":
                self.load_questions += 1
                await Answer(writer).whole(self.load.encode(), self.load_status)
                continue
            if target == "/server_info":
                body = json.dumps(self.server_info or {}).encode()
                await Answer(writer).whole(body, 404 if self.server_info is None else 200)
                continue
            if target == "/v1/models" and "x-request-id" not in headers:
                self.model_questions += 1
                data = [{"id": model} for model in self.models or []]
                body = json.dumps({"object": "list", "data": data}).encode()
                await Answer(writer).whole(body, 404 if self.models is None else 200)
                continue
            if not counted:
                counted = True
                self.connections += 1
            self.requests.append(request)
            async with self._arrived:
                self._arrived.notify_all()
            watch = asyncio.create_task(self._watch(reader, request))
            self._answering += 1
            self._rest.clear()
            try:
                await self.behavior(request, Answer(writer))
            except ConnectionError:
                request.gone.set()  # Writing may detect it before the watch does.
                raise
            finally:
                self._answering -= 1
                if self._answering == 0:
                    self._rest.set()
                watch.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await watch
            if request.gone.is_set() or writer.transport.is_closing():
                return

    @staticmethod
    async def _watch(reader: asyncio.StreamReader, request: Request) -> None:
        # A router never sends its next request before our response has ended.
        try:
            data = await reader.read(1)
        except ConnectionError:
            data = b""
        if data:
            raise RuntimeError("the router sent more than its request")
        request.gone.set()


async def _program(is_silent: bool) -> None:
    async def endless(request: Request, answer: Answer) -> None:
        print("asked", flush=True)
        if request.json.get("stream") and not request.is_prefill:
            await answer.begin_stream()
            await answer.piece(STREAM[0])
            await request.gone.wait()
        elif is_silent and request.is_prefill:
            await request.gone.wait()
        else:
            await serve_normally(request, answer)

    engine = await StreamingEngine(endless).start()
    print(engine.url, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_program("--silent" in sys.argv))
