"""Faults of engines and clients, repeated: the router's memory is bounded.

Each fault is repeated until a leak of one body for each request would be visible: in the router's
counts, which must return to zero, and in its resident memory when it is idle. Its peak is bounded
by the requests in flight.
"""

import asyncio
import contextlib
import os
import pathlib
import socket
import sys
import unittest
from collections.abc import Awaitable, Callable

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "support"))

from router_case import RouterTest
from router_process import IS_SANITIZED, PATIENCE_S, Client, Router
from streaming_engine import (
    STREAM,
    WHOLE_STREAM,
    Answer,
    Behavior,
    Request,
    StreamingEngine,
    serve_normally,
    wait_for_leaving,
)

COMPLETIONS = "/v1/completions"
PROMPT = "eins zwei drei " * 6000
BODY = {"prompt": PROMPT, "stream": True}
BODY_BYTES = len(PROMPT)
#: Requests before the measurement: buffers and connections exist by then.
WARM = 60
REPEATED = 120
AT_ONCE = 30
#: Half of a leak of one body for each request.
MOST_GROWTH = REPEATED * BODY_BYTES // 2
#: The requests in flight, each with its body, that of an engine and an event, twice for strings
#: that grow; and the router itself.
#: The address sanitizer keeps freed memory for a while.
MOST_AT_ONCE = (4 if IS_SANITIZED else 2) * AT_ONCE * (2 * BODY_BYTES + (256 << 10)) + (8 << 20)
#: The largest response of an engine to a prefill, twice for the same reason: one is accepted.
LONG_PREFILL = 2 * (8 << 20)

OPTIONS = (
    *("--prefill-timeout", "100ms", "--answer-timeout", "150ms", "--event-timeout", "100ms"),
    *("--client-timeout", "200ms", "--retries", "1", "--retry-delay", "1ms"),
    *("--breaker-failures", "1000", "--max-body-bytes", "256kb", "--max-header-bytes", "16kb"),
    *("--body-memory", "16mb", "--access-log", "false"),
)


# ---- faults of engines


async def die(request: Request, answer: Answer) -> None:
    answer.die()


async def overloaded(request: Request, answer: Answer) -> None:
    await answer.whole(b"{}", 503)


async def say_garbage(request: Request, answer: Answer) -> None:
    await answer.raw(b"HTTP/1.1 banana\r\n\r\n")


async def endless_head(request: Request, answer: Answer) -> None:
    await answer.raw(b"HTTP/1.1 200 OK\r\n")
    with contextlib.suppress(ConnectionError):
        while not request.gone.is_set():
            await answer.raw(b"X-Y: " + b"z" * 4000 + b"\r\n")


async def endless_prefill(request: Request, answer: Answer) -> None:
    await answer.raw(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n{")
    with contextlib.suppress(ConnectionError):
        while not request.gone.is_set():
            await answer.raw(b" " * 60_000)


async def one_event(request: Request, answer: Answer) -> None:
    await answer.begin_stream()
    await answer.piece(STREAM[0])


async def die_after_one_event(request: Request, answer: Answer) -> None:
    await one_event(request, answer)
    answer.die()


async def hang_after_one_event(request: Request, answer: Answer) -> None:
    await one_event(request, answer)
    await request.gone.wait()


async def endless_event(request: Request, answer: Answer) -> None:
    """An event of 2 MB without an end."""
    await answer.begin_stream()
    with contextlib.suppress(ConnectionError):
        await answer.piece(b"data: ")
        for _ in range(32):
            await answer.piece(b"x" * 65_536)
        answer.die()


async def byte_by_byte(request: Request, answer: Answer) -> None:
    await answer.begin_stream()
    for byte in WHOLE_STREAM:
        await answer.piece(bytes([byte]))
    await answer.end_stream()


async def broken_text(request: Request, answer: Answer) -> None:
    await answer.begin_stream()
    await answer.piece(b"data: \xff\xfe\xc0{\n\n" * 100)
    await answer.end_stream()


# ---- faults of clients


async def ask(router: Router) -> None:
    """Reads to the end of the response, or of the connection."""
    async with router.client() as client:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await client.post(COMPLETIONS, BODY)
            await client.reply()


async def leave_at_once(router: Router) -> None:
    async with router.client() as client:
        await client.post(COMPLETIONS, BODY)


async def leave_in_the_answer(router: Router) -> None:
    async with router.client() as client:
        await client.post(COMPLETIONS, BODY)
        await client.head()


class Signals:
    """Behaviors of an engine whose start a client waits for."""

    def __init__(self) -> None:
        self._signals: list[asyncio.Event] = []

    def tell(self, request: Request) -> None:
        self._signals[int(request.headers["x-number"])].set()

    async def hang(self, request: Request, _answer: Answer) -> None:
        self.tell(request)
        await request.gone.wait()

    async def flood(self, request: Request, answer: Answer) -> None:
        """Sends events until the router reads no more, and leaves."""
        await answer.begin_stream()
        with contextlib.suppress(ConnectionError):
            while not request.gone.is_set():
                await answer.piece(b"data: " + b"x" * 16_000 + b"\n\n")
        self.tell(request)

    async def leave(self, router: Router) -> None:
        """Leaves when an engine has the request."""
        async with router.client() as client:
            await self._post_and_wait(client)

    async def read_nothing(self, router: Router) -> None:
        small = socket.socket()
        small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        small.setblocking(False)
        await asyncio.get_running_loop().sock_connect(small, ("127.0.0.1", router.port))
        client = Client(*await asyncio.open_connection(sock=small, limit=4096))
        try:
            await self._post_and_wait(client)
        finally:
            client.leave()

    async def _post_and_wait(self, client: Client) -> None:
        signal = asyncio.Event()
        self._signals.append(signal)
        await client.post(COMPLETIONS, BODY, f"X-Number: {len(self._signals) - 1}\r\n")
        await asyncio.wait_for(signal.wait(), PATIENCE_S)


def send(data: bytes, status: int | None) -> Callable[[Router], Awaitable[None]]:
    """Sends raw bytes and expects this status and the end of the connection; None: no response."""

    async def do(router: Router) -> None:
        async with router.client() as client:
            with contextlib.suppress(ConnectionError):
                await client.send(data)
            said = await client.ended()
            # A client that still sends may see a reset in place of the response.
            if status is not None and said:
                assert said.startswith(b"HTTP/1.1 %d" % status), said[:200]

    return do


def post(body: bytes, headers: str = "Content-Type: application/json\r\n") -> bytes:
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: r\r\n{headers}Connection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def endless_body(router: Router) -> None:
    async with router.client() as client:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: r\r\nContent-Type: application/json\r\n"
        with contextlib.suppress(ConnectionError):
            await client.send(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n")
            for _ in range(20):
                await client.send(b"8000\r\n" + b"x" * 0x8000 + b"\r\n")
        await client.ended()


def both(prefill: Behavior, decode: Behavior) -> Behavior:
    async def behave(request: Request, answer: Answer) -> None:
        await (prefill if request.is_prefill else decode)(request, answer)

    return behave


QUEUE = ["--max-decode-inflight", "4", "--queue", "8", "--queue-timeout", "100ms"]
LARGE = b'{"prompt":"' + b"y" * 200_000
DO = Callable[[Router], Awaitable[None]]
ENGINE_FAULTS: dict[str, tuple[Behavior, Behavior]] = {
    "prefill dies": (die, serve_normally),
    "prefill answers 503": (overloaded, serve_normally),
    "prefill hangs": (wait_for_leaving, serve_normally),
    "prefill says garbage": (say_garbage, serve_normally),
    "prefill's head has no end": (endless_head, serve_normally),
    "decode dies": (serve_normally, die),
    "decode answers 503": (serve_normally, overloaded),
    "decode hangs": (serve_normally, wait_for_leaving),
    "decode says garbage": (serve_normally, say_garbage),
    "decode's head has no end": (serve_normally, endless_head),
    "decode dies after an event": (serve_normally, die_after_one_event),
    "decode hangs after an event": (serve_normally, hang_after_one_event),
    "an event has no end": (serve_normally, endless_event),
    "a stream byte by byte": (serve_normally, byte_by_byte),
    "a stream with invalid UTF-8": (serve_normally, broken_text),
}
CLIENT_FAULTS: dict[str, DO] = {
    "no JSON": send(post(b'{"prompt": ' + LARGE), 400),
    "invalid UTF-8": send(post(LARGE + b'\xff\xfe", "stream": true}'), None),
    "another content type": send(post(LARGE + b'"}', "Content-Type: text/plain\r\n"), 415),
    "a body that is too long": send(post(b"x" * 300_000), 413),
    "a body without an end": endless_body,
    "a head without an end": send(b"GET / HTTP/1.1\r\n" + b"X-Y: zzzz\r\n" * 5000, 431),
    "smuggling": send(
        post(LARGE + b'"}', "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n"), 400
    ),
    "half a head": send(b"POST /v1/comp", None),
    "half a body": send(post(LARGE + b'"}')[:150_000], None),
}


class EveryFault(RouterTest):
    async def asyncSetUp(self) -> None:
        await super().asyncSetUp()
        asyncio.get_running_loop().set_debug(
            False
        )  # Debug mode makes each request ten times as expensive.

    async def test_a_fault_leaves_nothing_behind_and_memory_does_not_grow(self) -> None:
        signals = Signals()
        faults: dict[str, tuple[Behavior, Behavior, DO, list[str]]] = {
            "a client leaves in the prefill": (signals.hang, serve_normally, signals.leave, []),
            "a client leaves before an event": (serve_normally, signals.hang, signals.leave, []),
            "a client leaves after an event": (
                serve_normally, hang_after_one_event, leave_in_the_answer, [],
            ),
            "a client leaves at once": (serve_normally, serve_normally, leave_at_once, []),
            "a client reads nothing": (serve_normally, signals.flood, signals.read_nothing, []),
            "the queue is full": (serve_normally, wait_for_leaving, ask, QUEUE),
            "a client leaves the queue": (serve_normally, wait_for_leaving, leave_at_once, QUEUE),
        }  # fmt: skip
        for name, (p_behavior, d_behavior) in ENGINE_FAULTS.items():
            faults[name] = (p_behavior, d_behavior, ask, [])
        for name, do in CLIENT_FAULTS.items():
            faults[name] = (serve_normally, serve_normally, do, [])
        for name, (p_behavior, d_behavior, do, options) in faults.items():
            with self.subTest(fault=name):
                p = await self.engine(both(p_behavior, serve_normally))
                d = await self.engine(both(serve_normally, d_behavior))
                await self.check(name, do, *options, p=p, d=d)

    async def test_engines_that_are_gone_and_engines_that_restart(self) -> None:
        p, d = await self.engine(), await self.engine()
        await p.stop()
        await d.stop()
        await self.check("gone", ask, "--health-interval", "10m", p=p, d=d)
        await self.check("known to be gone", ask, "--health-interval", "20ms", p=p, d=d)

        over = asyncio.Event()

        async def restart() -> None:
            while not over.is_set():
                for engine in (p, d):
                    await engine.start()
                    await asyncio.sleep(0.02)  # Up for a while, and down for a while.
                    await engine.drain()

        restarting = asyncio.create_task(restart())
        try:
            await self.check("coming and going", ask, "--health-interval", "10ms", p=p, d=d)
        finally:
            over.set()  # Not cancelled: asyncio.wait_for() in an engine may swallow that.
            await restarting

    async def test_a_prefill_response_without_an_end(self) -> None:
        p, d = await self.engine(endless_prefill), await self.engine()
        options = ("--max-prefill-inflight", "1")
        await self.check("endless prefill", ask, *options, p=p, d=d, may_have=LONG_PREFILL)

    async def check(
        self,
        name: str,
        do: DO,
        *options: str,
        p: StreamingEngine,
        d: StreamingEngine,
        may_have: int = 0,
    ) -> None:
        """Repeats the fault at a router of its own."""
        router = await self.router(*OPTIONS, *options, p=[p], d=[d])
        started = router.resident_bytes()

        async def repeat(count: int) -> int:
            for begin in range(0, count, AT_ONCE):
                # No more than that, so that the number of requests in flight is known.
                await asyncio.gather(*(do(router) for _ in range(min(AT_ONCE, count - begin))))
            await self.all_is_over(router)
            await router.wait_for_metrics(lambda m: m["connections"] == 1)  # This request's own.
            return router.resident_bytes()

        before = await repeat(WARM)
        for _ in range(2):
            after = await repeat(REPEATED)
            before, growth = after, after - before
            if growth < MOST_GROWTH:
                break
            # The first requests may have come one by one, so that more memory was needed only now.
            # That happens once; a leak shows again.
        most = router.most_resident_bytes() - started
        print(f"{name}: {growth >> 10} KiB more after {REPEATED}, {most >> 10} KiB at most")
        self.assertLess(most, MOST_AT_ONCE + may_have, name)
        if not IS_SANITIZED:
            self.assertLess(growth, MOST_GROWTH, name)
        # In a sanitized build this detects a leak.
        self.assertEqual(await router.terminate(), 0, name)
        await router.stop()


if __name__ == "__main__":
    # Freed memory is returned to the system at once, so that the memory of an idle router is its
    # own and not the allocator's.
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_TRIM_THRESHOLD_": "65536"}
    unittest.main()
