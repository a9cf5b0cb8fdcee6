"""Slow clients, many clients, and a router that leaves while clients continue."""

import asyncio
import json
import os
import pathlib
import signal
import sys
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "support"))

from router_case import RouterTest
from router_process import Client, Router
from streaming_engine import STREAM, Answer, Request, wait_for_leaving

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: %d\r\n\r\n"
STREAMED = {"prompt": "x", "stream": True}


class SlowBodies(RouterTest):
    async def trickle(self, router: Router, piece: bytes, pause_s: float) -> tuple[int, float]:
        """The status that ends a body that is sent piece by piece, and the seconds until then."""
        async with router.client() as client:
            began = time.monotonic()
            await client.send(HEAD % 10_000_000)
            answer = asyncio.create_task(client.reply())
            while not answer.done():
                try:
                    await client.send(piece)
                except ConnectionError:
                    break
                await asyncio.sleep(pause_s)  # The client's pace.
            reply = await answer
            self.assertEqual(reply.headers["connection"], "close")
            return reply.status, time.monotonic() - began

    async def test_a_body_below_the_rate_ends_after_the_time_of_its_head(self) -> None:
        d = await self.engine()
        router = await self.router("--client-timeout", "300ms", d=[d])
        status, seconds = await self.trickle(router, b"x", 0.05)
        self.assertEqual(status, 408)
        self.assertLess(seconds, 10)
        self.assertEqual((await router.metrics())["slow_requests_total"], 1)
        self.assertEqual(d.requests, [])
        await self.all_is_over(router)

    async def test_a_body_above_the_rate_ends_at_its_own_deadline(self) -> None:
        d = await self.engine()
        router = await self.router(
            "--client-timeout", "300ms", "--body-timeout", "1s", "--min-body-rate", "1kb", d=[d]
        )
        status, seconds = await self.trickle(router, b"x" * 1024, 0.05)
        self.assertEqual(status, 408)
        self.assertGreaterEqual(seconds, 1)
        self.assertLess(seconds, 10)

    async def test_a_slow_body_that_keeps_the_rate_is_served(self) -> None:
        d = await self.engine()
        # Longer than a busy machine delays a piece.
        router = await self.router("--client-timeout", "1s", "--min-body-rate", "1kb", d=[d])
        body = json.dumps({"prompt": "x" * 8000}).encode()
        async with router.client() as client:
            await client.send(HEAD % len(body))
            for at in range(0, len(body), 400):
                await client.send(body[at : at + 400])
                await asyncio.sleep(0.1)  # The client's pace: 21 pieces, twice the timeout.
            self.assertEqual((await client.reply()).status, 200)

    async def test_an_incomplete_head_gets_408_and_an_idle_connection_nothing(self) -> None:
        d = await self.engine()
        # Longer than a busy machine delays the first bytes of a connection.
        router = await self.router("--client-timeout", "1s", d=[d])
        for begin in (b"POST /v1/comp", HEAD % 9 + b"{"):
            async with router.client() as client:
                await client.send(begin)
                self.assertEqual((await client.reply()).status, 408)
                client.writer.write_eof()
                self.assertEqual(await client.ended(), b"")
        async with router.client() as client:
            self.assertEqual(await client.ended(), b"")
        await self.all_is_over(router)

    async def test_three_slow_clients_do_not_take_the_places_of_others(self) -> None:
        d = await self.engine()
        # Longer than a busy machine delays this process: the last client itself must not be late.
        router = await self.router("--max-connections", "3", "--client-timeout", "2s", d=[d])
        slow = [asyncio.create_task(self.trickle(router, b"x", 0.05)) for _ in range(3)]
        for status, _ in await asyncio.gather(*slow):
            self.assertEqual(status, 408)
        self.assertEqual((await router.post("/v1/completions", {"prompt": "x"})).status, 200)


class Addresses(RouterTest):
    async def test_connections_of_one_address_are_limited_and_others_are_served(self) -> None:
        d = await self.engine(wait_for_leaving)
        router = await self.router("--max-connections-per-address", "2", d=[d])
        async with router.client() as a, router.client() as b:
            for client in (a, b):
                await client.post("/v1/completions", STREAMED)
            await d.wait_for(2)
            async with router.client() as third:
                reply = await third.reply()
            self.assertEqual((reply.status, reply.headers["retry-after"]), (429, "1"))
            other = Client(
                *await asyncio.open_connection(
                    "127.0.0.1", router.port, local_addr=("127.0.0.2", 0)
                )
            )
            await other.send(b"GET /health HTTP/1.1\r\nHost: r\r\n\r\n")
            self.assertEqual((await other.reply()).status, 200)
            await other.send(b"GET /metrics HTTP/1.1\r\nHost: r\r\n\r\n")
            page = (await other.reply()).body.decode()
            self.assertIn("pegaflow_router_connections_per_address_refused_total 1", page)
            other.leave()
        end = time.monotonic() + 20  # Their places become free.
        while (await router.get("/version")).status != 200:
            self.assertLess(time.monotonic(), end)
        await self.all_is_over(router)


class Leaving(RouterTest):
    async def test_connections_are_accepted_while_health_reports_that_the_router_leaves(
        self,
    ) -> None:
        go_on = asyncio.Event()

        async def two_parts(request: Request, answer: Answer) -> None:
            await answer.begin_stream()
            await answer.piece(STREAM[0])
            await go_on.wait()
            await answer.piece(b"data: [DONE]\n\n")
            await answer.end_stream()

        d = await self.engine(two_parts)
        router = await self.router("--drain-delay", "1h", d=[d])
        async with router.client() as streaming, router.client() as kept:
            await streaming.post("/v1/completions", STREAMED)
            await streaming.head()
            self.assertEqual(await streaming.chunk(), STREAM[0])
            await kept.send(b"GET /health HTTP/1.1\r\nHost: r\r\n\r\n")
            self.assertEqual((await kept.reply()).status, 200)
            router.signal(signal.SIGTERM)
            await router.wait_for_line("leaving signal=15")
            reply = await router.get("/health")  # Over a new connection.
            self.assertEqual((reply.status, reply.json["status"]), (503, "draining"))
            self.assertEqual((await router.get("/version")).status, 200)
            await kept.send(b"GET /health HTTP/1.1\r\nHost: r\r\n\r\n")
            self.assertEqual((await kept.reply()).status, 503)
            # A second signal ends the delay.
            router.signal(signal.SIGTERM)
            await router.wait_for_line("draining signal=15")
            self.assertEqual(await kept.ended(), b"")
            with self.assertRaises(ConnectionError):
                await router.connect()
            go_on.set()
            self.assertEqual(await streaming.chunk(), b"data: [DONE]\n\n")
            self.assertEqual(await streaming.chunk(), b"")
            self.assertEqual(await router.ended(), 0)

    async def test_the_delay_ends_by_itself(self) -> None:
        d = await self.engine()
        router = await self.router("--drain-delay", "200ms", d=[d])
        began = time.monotonic()
        self.assertEqual(await router.terminate(), 0)
        self.assertGreaterEqual(time.monotonic() - began, 0.2)
        await router.wait_for_line("draining signal=15")


class SharedPort(RouterTest):
    async def test_two_routers_share_a_port_and_one_leaves_without_losing_a_request(self) -> None:
        d = await self.engine()
        first = await self.router("--reuse-port", "--own-listen", "127.0.0.1:0", d=[d])
        port = first.port
        ready = self.scratch() / "ready"
        second = await self.router(
            "--reuse-port", "--own-listen", "127.0.0.1:0", "--listen", f"127.0.0.1:{port}",
            "--ready-file", str(ready), d=[d],
        )  # fmt: skip
        self.assertEqual(second.port, port)
        own = []
        for router in (first, second):
            line = await router.wait_for_line(" own=")
            router.port = int(line.split(" own=")[1].split()[0].rsplit(":", 1)[1])
            own.append(router.port)
        self.assertEqual(json.loads(ready.read_text())["own_listen"], f"127.0.0.1:{own[1]}")

        async def requests_of(router: Router) -> float:
            metrics = await router.metrics()
            return metrics.get('requests_total{route="completions",status="2xx"}', 0)

        async def ask() -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            client = Client(reader, writer)
            await client.post("/v1/completions", {"prompt": "x"})
            self.assertEqual((await client.reply()).status, 200)
            client.leave()

        # The kernel chooses by the client's port: a router gets none with probability 2^-40.
        for _ in range(40):
            await ask()
        counts = [await requests_of(router) for router in (first, second)]
        self.assertEqual(sum(counts), 40)
        self.assertGreater(min(counts), 0)
        self.assertEqual(await second.terminate(), 0)
        for _ in range(10):
            await ask()
        self.assertEqual(await requests_of(first), counts[0] + 10)

    async def test_without_the_option_one_router_has_the_port(self) -> None:
        d = await self.engine()
        first = await self.router(d=[d])
        process = await asyncio.create_subprocess_exec(
            pathlib.Path(os.environ["PEGA_BUILD_DIR"], "router", "pegaflow-router"),
            "--decode", d.url, "--listen", f"127.0.0.1:{first.port}",
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        _, text = await process.communicate()
        self.assertEqual(process.returncode, 1)
        self.assertIn(b"Address already in use", text)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    unittest.main()
