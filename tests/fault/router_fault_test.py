"""Faults of engines and clients: no request that can be answered is lost, and none hangs."""

import asyncio
import os
import pathlib
import resource
import signal
import sys
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "support"))

import name_server
from router_case import RouterTest
from router_process import IS_SANITIZED, Client, Router
from streaming_engine import (
    STREAM,
    WHOLE_STREAM,
    Answer,
    Request,
    event,
    serve_normally,
    wait_for_leaving,
)

LONG = "eins zwei drei " * 200  # Beyond --min-prefill-tokens.
STREAMED = {"prompt": "x", "stream": True}


async def die(request: Request, answer: Answer) -> None:
    answer.die()


async def die_before_the_first_event(request: Request, answer: Answer) -> None:
    await answer.begin_stream()
    await answer.piece(STREAM[0][:7])
    answer.die()


async def die_in_a_whole_answer(request: Request, answer: Answer) -> None:
    await answer.raw(b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"cho')
    answer.die()


async def close_in_a_whole_answer(request: Request, answer: Answer) -> None:
    await answer.raw(b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"cho')
    answer._writer.close()


async def overloaded(request: Request, answer: Answer) -> None:
    await answer.whole(b"{}", 503)


async def say_garbage(request: Request, answer: Answer) -> None:
    await answer.raw(b"HTTP/1.1 banana\r\n\r\n")


async def one_event(request: Request, answer: Answer) -> None:
    await answer.begin_stream()
    await answer.piece(STREAM[0])
    await request.gone.wait()


class DecodeEngine(RouterTest):
    async def test_another_engine_answers_when_one_fails_before_its_first_event(self) -> None:
        for behavior in (die, die_before_the_first_event, overloaded, say_garbage, None):
            for stream in (True, False):
                with self.subTest(behavior=behavior, stream=stream):
                    bad, good = await self.engine(behavior or die), await self.engine()
                    router = await self.router(
                        "--decode-policy",
                        "round-robin",
                        "--breaker-failures",
                        "1000",
                        d=[bad, good],
                    )
                    if behavior is None:
                        await bad.stop()
                    for _ in range(4):
                        reply = await router.post(
                            "/v1/completions", {"prompt": "x", "stream": stream}
                        )
                        self.assertEqual((reply.status, reply.is_whole), (200, True))
                        if stream:
                            self.assertEqual(reply.body, WHOLE_STREAM)
                    metrics = await router.metrics()
                    self.assertEqual(metrics['retries_total{role="decode"}'], 2)
                    await router.stop()

    async def test_a_truncated_response_without_a_stream_is_requested_again(self) -> None:
        for behavior in (die_in_a_whole_answer, close_in_a_whole_answer):
            bad, good = await self.engine(behavior), await self.engine()
            router = await self.router("--decode-policy", "round-robin", d=[bad, good])
            for _ in range(2):
                reply = await router.post("/v1/completions", {"prompt": "x"})
                self.assertEqual((reply.status, reply.json["n"]), (200, 1.5))
            await router.stop()

    async def test_a_request_that_all_engines_reject_gets_the_last_response(self) -> None:
        d = await self.engine(overloaded)
        router = await self.router("--retries", "1", d=[d])
        self.assertEqual((await router.post("/v1/completions", STREAMED)).status, 503)
        self.assertEqual(len(d.requests), 2)
        d.behavior = die
        reply = await router.post("/v1/completions", STREAMED)
        self.assertEqual((reply.status, reply.headers["retry-after"]), (502, "1"))
        # A request that an engine stores is never sent twice.
        d.requests.clear()
        self.assertEqual((await router.post("/v1/responses", {"input": "x"})).status, 502)
        self.assertEqual(len(d.requests), 1)

    async def test_a_silent_engine_is_abandoned_in_time(self) -> None:
        d = await self.engine(wait_for_leaving)
        router = await self.router("--answer-timeout", "150ms", d=[d])
        self.assertEqual((await router.post("/v1/completions", STREAMED)).status, 504)
        await asyncio.wait_for(d.requests[0].gone.wait(), 20)
        self.assertEqual(len(d.requests), 1)

    async def test_a_truncated_stream_ends_with_an_error_and_without_done(self) -> None:
        async def after(request: Request, answer: Answer) -> None:
            await answer.begin_stream()
            for each in STREAM[:2]:
                await answer.piece(each)
            await answer.piece(STREAM[2][: int(request.headers["x-cut"])])
            if request.headers["x-how"] == "die":
                answer.die()
            elif request.headers["x-how"] == "close":
                answer._writer.close()
            else:
                await request.gone.wait()

        d = await self.engine(after)
        router = await self.router("--event-timeout", "150ms", "--breaker-failures", "1000", d=[d])
        for path in ("/v1/completions", "/v1/messages"):
            for how in ("die", "close", "hang"):
                for cut in (1, 20, len(STREAM[2])):
                    async with router.client() as client:
                        await client.post(path, STREAMED, f"X-How: {how}\r\nX-Cut: {cut}\r\n")
                        reply = await client.reply()
                        whole = b"".join(STREAM[: 2 + (cut == len(STREAM[2]))])
                        self.assertEqual(reply.body[: len(whole)], whole)
                        rest = reply.body[len(whole) :]
                        self.assertTrue(reply.is_whole)
                        self.assertIn(b"error", rest)
                        self.assertNotIn(b"DONE", rest)
                        begins = b"data: " if path == "/v1/completions" else b"event: error\ndata: "
                        self.assertTrue(rest.startswith(begins), rest)
                        self.assertEqual(rest.count(b"\n\n"), 1)
                        # The connection is still usable.
                        await client.send(b"GET /version HTTP/1.1\r\nHost: r\r\n\r\n")
                        self.assertEqual((await client.reply()).status, 200)
        self.assertEqual((await router.metrics())["late_errors_total"], 18)

    async def test_a_complete_stream_needs_no_error(self) -> None:
        async def rude(request: Request, answer: Answer) -> None:
            await answer.begin_stream()
            await answer.piece(WHOLE_STREAM)
            answer.die()

        d = await self.engine(rude)
        router = await self.router(d=[d])
        reply = await router.post("/v1/completions", STREAMED)
        self.assertEqual((reply.body, reply.is_whole), (WHOLE_STREAM, True))

    async def test_an_engine_is_killed_before_and_after_its_first_event(self) -> None:
        process, url = await self.engine_process()
        router = await Router.start("--decode", url, "--health-interval", "20ms")
        self.stack.push_async_callback(router.stop)
        async with router.client() as client:
            await client.post("/v1/completions", STREAMED)
            await client.head()
            self.assertEqual(await client.chunk(), STREAM[0])
            process.kill()
            await process.wait()
            error = await client.chunk()
            self.assertIn(b"pd_decode_interrupted", error or b"")
            self.assertEqual(await client.chunk(), b"")
        await router.wait_for_line("engine is down")
        reply = await router.post("/v1/completions", STREAMED)
        self.assertEqual((reply.status, reply.headers["retry-after"]), (503, "1"))

    async def test_all_engines_go_down_and_return(self) -> None:
        d, e = await self.engine(), await self.engine()
        router = await self.router("--health-interval", "20ms", "--retries", "0", d=[d, e])
        await d.stop()
        await e.stop()
        await router.wait_for_metrics(
            lambda m: not any(m[f'engine_up{{role="decode",engine="{x.url}"}}'] for x in (d, e))
        )
        reply = await router.get("/health")
        self.assertEqual((reply.status, reply.json["status"]), (503, "down"))
        reply = await router.post("/v1/completions", STREAMED)
        self.assertEqual((reply.status, reply.headers["retry-after"]), (503, "1"))
        await e.start()
        await router.wait_for_line(f"engine is up role=decode engine={e.url}")
        reply = await router.post("/v1/completions", STREAMED)
        self.assertEqual((reply.status, reply.body), (200, WHOLE_STREAM))
        self.assertEqual((await router.get("/health")).json["status"], "degraded")

    async def test_the_breaker_keeps_requests_from_a_failing_engine(self) -> None:
        bad, good = await self.engine(die), await self.engine()
        router = await self.router(
            "--decode-policy",
            "round-robin",
            "--breaker-failures",
            "3",
            "--breaker-time",
            "5m",
            d=[bad, good],
        )
        for _ in range(20):
            self.assertEqual((await router.post("/v1/completions", STREAMED)).status, 200)
        label = f'{{role="decode",engine="{bad.url}"}}'
        metrics = await router.metrics()
        self.assertEqual(metrics[f"engine_failures_total{label}"], 3)
        self.assertEqual(metrics[f"engine_breaker{label}"], 1)
        self.assertEqual(metrics[f"engine_breaker_opened_total{label}"], 1)

    async def test_engines_restarted_one_after_the_other_lose_no_request(self) -> None:
        engines = [await self.engine() for _ in range(2)]
        router = await self.router("--health-interval", "20ms", d=engines)
        statuses: list[tuple[int, bool]] = []
        stop = asyncio.Event()

        async def ask(client: Client) -> None:
            while not stop.is_set():
                await client.post("/v1/completions", {"prompt": "x"})
                reply = await client.reply()
                statuses.append((reply.status, reply.is_whole))

        clients = [await router.connect() for _ in range(4)]
        asking = [asyncio.create_task(ask(client)) for client in clients]
        for engine in engines * 2:
            # Like an engine that drains: it finishes its requests, then rejects new ones.
            before = len(statuses)
            await engine.stop()
            await router.wait_for_line(f"engine is down role=decode engine={engine.url}")
            router.log.clear()
            while len(statuses) < before + 20:
                await asyncio.sleep(0.001)
            await engine.start()
            await router.wait_for_line(f"engine is up role=decode engine={engine.url}")
            router.log.clear()
        stop.set()
        await asyncio.gather(*asking)
        for client in clients:
            client.leave()
        self.assertEqual(set(statuses), {(200, True)})
        self.assertGreater(len(statuses), 80)

    async def test_engines_that_drain_and_return_lose_no_stream(self) -> None:
        async def slowly(request: Request, answer: Answer) -> None:
            await answer.begin_stream()
            for each in [*STREAM, b"data: [DONE]\n\n"]:
                await answer.piece(each)
                await asyncio.sleep(0.002)  # So that draining finds streams in each phase.
            await answer.end_stream()

        engines = [await self.engine(slowly) for _ in range(2)]
        router = await self.router("--health-interval", "20ms", "--retry-delay", "1ms", d=engines)
        answers: list[tuple[int, bool, bytes]] = []
        stop = asyncio.Event()

        async def ask() -> None:
            async with router.client() as client:
                while not stop.is_set():
                    await client.post("/v1/completions", STREAMED)
                    reply = await client.reply()
                    answers.append((reply.status, reply.is_whole, reply.body))

        asking = [asyncio.create_task(ask()) for _ in range(8)]
        for engine in engines * 2:
            before = len(answers)
            while len(answers) < before + 20:
                await asyncio.sleep(0.001)
            router.log.clear()
            await engine.drain()
            await router.wait_for_line(f"engine is down role=decode engine={engine.url}")
            await engine.start()
            await router.wait_for_line(f"engine is up role=decode engine={engine.url}")
        stop.set()
        await asyncio.gather(*asking)
        self.assertEqual(set(answers), {(200, True, WHOLE_STREAM)})
        self.assertGreater(len(answers), 80)
        self.assertEqual((await router.metrics())["late_errors_total"], 0)


class PrefillEngine(RouterTest):
    async def test_an_engine_is_killed_during_a_prefill_and_before_one(self) -> None:
        process, url = await self.engine_process("--silent")
        assert process.stdout is not None
        d = await self.engine()
        # No health check happens in between: each request detects it.
        router = await Router.start(
            "--prefill", url, "--decode", d.url, "--health-interval", "10m",
            "--breaker-failures", "1000",
        )  # fmt: skip
        self.stack.push_async_callback(router.stop)
        long = {"prompt": LONG, "stream": True}
        async with router.client() as first, router.client() as second:
            for client in (first, second):
                await client.post("/v1/completions", long)
                line = await asyncio.wait_for(process.stdout.readline(), 20)
                self.assertEqual(line, b"asked\n")
            process.kill()
            await process.wait()
            for client in (first, second):
                reply = await client.reply()
                self.assertEqual((reply.status, reply.body), (200, WHOLE_STREAM))
        for _ in range(2):
            reply = await router.post("/v1/completions", long)
            self.assertEqual((reply.status, reply.body), (200, WHOLE_STREAM))
        metrics = await router.metrics()
        for why in ("lost", "refused"):
            self.assertEqual(metrics[f'prefill_total{{reason="{why}"}}'], 2)
        self.assertEqual(len(d.requests), 4)
        await self.all_is_over(router)


class Leaving(RouterTest):
    async def test_the_engines_request_is_cancelled_in_each_phase(self) -> None:
        async def after_the_prefill(request: Request, answer: Answer) -> None:
            await (serve_normally if request.is_prefill else d_behavior)(request, answer)

        long = {"prompt": LONG, "stream": True}
        for p_behavior, d_behavior in (
            (wait_for_leaving, serve_normally),
            (serve_normally, wait_for_leaving),
            (serve_normally, one_event),
        ):
            p, d = await self.engine(p_behavior), await self.engine(d_behavior)
            router = await self.router(p=[p], d=[d])
            busy = p if p_behavior is wait_for_leaving else d
            async with router.client() as client:
                await client.post("/v1/completions", long)
                request = await busy.wait_for(1)
                if d_behavior is one_event:
                    await client.head()
            await asyncio.wait_for(request.gone.wait(), 20)
            await self.all_is_over(router)
            metrics = await router.metrics()
            self.assertEqual(metrics["cancelled_legs_total"], 1)
            self.assertEqual(metrics['requests_total{route="completions",status="gone"}'], 1)
            self.assertEqual(len(d.requests), 0 if busy is p else 1)

    async def test_a_client_that_leaves_the_queue_makes_room(self) -> None:
        d = await self.engine(wait_for_leaving)
        router = await self.router("--max-decode-inflight", "1", "--queue", "1", d=[d])
        first, second = await router.connect(), await router.connect()
        await first.post("/v1/completions", STREAMED)
        await d.wait_for(1)
        await second.post("/v1/completions", STREAMED)
        await router.wait_for_metrics(lambda m: m["queue_length"] == 1)
        reply = await router.post("/v1/completions", STREAMED)
        self.assertEqual((reply.status, reply.headers["retry-after"]), (429, "1"))
        second.leave()
        await router.wait_for_metrics(lambda m: m["queue_length"] == 0)
        async with router.client() as third:
            await third.post("/v1/completions", STREAMED)
            await router.wait_for_metrics(lambda m: m["queue_length"] == 1)
            d.behavior = serve_normally
            first.leave()  # The waiting client gets its place.
            self.assertEqual((await third.reply()).body, WHOLE_STREAM)
        await self.all_is_over(router)

    async def test_a_request_that_waits_too_long_is_rejected_with_retry_after(self) -> None:
        d = await self.engine(wait_for_leaving)
        router = await self.router("--max-decode-inflight", "1", "--queue-timeout", "100ms", d=[d])
        async with router.client() as client:
            await client.post("/v1/completions", STREAMED)
            await d.wait_for(1)
            reply = await router.post("/v1/completions", STREAMED)
            self.assertEqual((reply.status, reply.headers["retry-after"]), (503, "1"))

    async def test_a_slow_client_costs_no_memory_and_is_dropped(self) -> None:
        sent = 0

        async def flood(request: Request, answer: Answer) -> None:
            nonlocal sent
            await answer.begin_stream()
            while not request.gone.is_set():
                await answer.piece(event("x" * 16000))
                sent += 16000

        d = await self.engine(flood)
        router = await self.router("--client-timeout", "1s", d=[d])
        before = router.resident_bytes()
        async with router.client() as client:
            await client.post("/v1/completions", STREAMED)
            await client.head()  # Then the router reads no more.
            request = await d.wait_for(1)
            await asyncio.wait_for(request.gone.wait(), 30)
        self.assertLess(router.resident_bytes() - before, 16 << 20)
        await self.all_is_over(router)

    async def test_a_failed_allocation_ends_one_connection_only(self) -> None:
        if IS_SANITIZED:
            self.skipTest("the address sanitizer ends a program that gets no memory")
        # The decode engine's body is made when the prefill engine has answered.
        limits: list[tuple[int, int]] = []

        async def take_memory_away(request: Request, answer: Answer) -> None:
            if request.is_prefill and request.headers.get("x-starve"):
                pid = router.process.pid
                pages = int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[0])
                half = pages * os.sysconf("SC_PAGE_SIZE") // 2
                limits.append(resource.prlimit(pid, resource.RLIMIT_AS))
                resource.prlimit(pid, resource.RLIMIT_AS, (half, limits[0][1]))
            await serve_normally(request, answer)

        p, d = await self.engine(take_memory_away), await self.engine()
        router = await self.router("--max-body-bytes", "128mb", p=[p], d=[d])
        async with router.client() as client:
            body = b'{"prompt":"' + b"x" * (96 << 20) + b'"}'  # Each copy is a mapping of its own.
            await client.post("/v1/completions", body, "X-Starve: 1\r\n")
            self.assertEqual(await client.ended(), b"")
            resource.prlimit(router.process.pid, resource.RLIMIT_AS, limits[0])
        await router.wait_for_line("an exception ended a connection: .*bad_alloc")
        self.assertEqual((await router.post("/v1/completions", {"prompt": LONG})).status, 200)
        await self.all_is_over(router)

    async def test_a_silent_resolver_delays_no_client(self) -> None:
        _silent, address = name_server.bind(self)
        prefix = name_server.prefix(address, self.scratch(), attempts=5)
        words = ("--decode", "http://engine.test:1", "--retries", "0")
        # The resolver's own timeout is longer than that of this test: requests that end earlier did
        # not wait for it.
        router = await Router.start(*words, "--connect-timeout", "200ms", prefix=prefix)
        self.stack.push_async_callback(router.stop)
        reply = await router.post("/v1/completions", STREAMED)
        self.assertIn(reply.status, (502, 503))
        router = await Router.start(*words, "--connect-timeout", "1m", prefix=prefix)
        self.stack.push_async_callback(router.stop)
        async with router.client() as client:
            await client.post("/v1/completions", STREAMED)
            await router.wait_for_metrics(lambda m: m["requests_in_flight"] == 2)
        await self.all_is_over(router)

    async def test_an_unresolved_name_of_several_engines_delays_no_client(self) -> None:
        d = await self.engine()
        _silent, address = name_server.bind(self)
        router = await Router.start(
            "--decode", d.url, "dns://engines.test:1", "--health-timeout", "100ms",
            prefix=name_server.prefix(address, self.scratch()),
        )  # fmt: skip
        self.stack.push_async_callback(router.stop)
        reply = await router.post("/v1/completions", STREAMED)
        self.assertEqual((reply.status, reply.body), (200, WHOLE_STREAM))

    async def test_connections_beyond_the_limit_are_rejected_with_a_response(self) -> None:
        d = await self.engine(wait_for_leaving)
        router = await self.router("--max-connections", "2", d=[d])
        async with router.client() as a, router.client() as b:
            for client in (a, b):
                await client.post("/v1/completions", STREAMED)
            await d.wait_for(2)
            async with router.client() as third:
                reply = await third.reply()
            self.assertEqual((reply.status, reply.headers["retry-after"]), (503, "1"))
            # An unread request that has arrived already must not reset the response.
            router.signal(signal.SIGSTOP)
            await router.wait_until_stopped()
            async with router.client() as fourth:
                await fourth.post("/v1/completions", {"prompt": "x"})
                router.signal(signal.SIGCONT)
                self.assertEqual((await fourth.reply()).status, 503)
                self.assertEqual(await asyncio.wait_for(fourth.reader.read(), 20), b"")


class Ending(RouterTest):
    async def test_streams_end_before_the_router_does(self) -> None:
        go_on = asyncio.Event()

        async def two_parts(request: Request, answer: Answer) -> None:
            await answer.begin_stream()
            await answer.piece(STREAM[0])
            await go_on.wait()
            await answer.piece(STREAM[1] + b"data: [DONE]\n\n")
            await answer.end_stream()

        d = await self.engine(two_parts)
        router = await self.router(d=[d])
        async with router.client() as streaming, router.client() as idle:
            await idle.send(b"GET /version HTTP/1.1\r\nHost: r\r\n\r\n")
            await idle.reply()
            await streaming.post("/v1/completions", STREAMED)
            await streaming.head()
            self.assertEqual(await streaming.chunk(), STREAM[0])
            router.signal(signal.SIGTERM)
            await router.wait_for_line("draining")
            self.assertEqual(await idle.ended(), b"")
            with self.assertRaises(ConnectionError):
                await router.connect()
            go_on.set()
            self.assertEqual(await streaming.chunk(), STREAM[1] + b"data: [DONE]\n\n")
            self.assertEqual(await streaming.chunk(), b"")
            self.assertEqual(await router.ended(), 0)

    async def test_requests_that_are_still_in_sockets_are_answered(self) -> None:
        d = await self.engine()
        router = await self.router(d=[d])
        body = b'{"prompt":"x"}'
        async with router.client() as kept, router.client() as idle:
            for client in (kept, idle):
                await client.post("/v1/completions", body)
                self.assertEqual((await client.reply()).status, 200)
            # Continued once only: a SIGCONT while the leak sanitizer attaches to an ending process
            # removes the stop that the sanitizer waits for.
            router.signal(signal.SIGSTOP)
            await router.wait_until_stopped()
            async with router.client() as new, router.client() as silent:
                for client in (kept, new):
                    await client.post("/v1/completions", body)
                # Behind a response that closes the connection: this request may be lost, the
                # response not.
                await new.post("/v1/completions", body)
                router.signal(signal.SIGTERM)
                router.signal(signal.SIGCONT)
                for client in (kept, new):
                    reply = await client.reply()
                    self.assertEqual((reply.status, reply.is_whole), (200, True))
                    self.assertEqual(reply.headers.get("connection"), "close")
                    self.assertEqual(await client.ended(), b"")
                self.assertEqual(await idle.ended(), b"")
                self.assertEqual(await silent.ended(), b"")  # Well before --client-timeout.
            self.assertEqual(await router.ended(), 0)

    async def test_requests_that_exceed_the_shutdown_timeout_are_cut_off(self) -> None:
        p, d = await self.engine(wait_for_leaving), await self.engine(one_event)
        router = await self.router(
            "--shutdown-timeout", "100ms", "--max-decode-inflight", "1", p=[p], d=[d]
        )
        clients = [await router.connect() for _ in range(3)]
        await clients[0].post("/v1/completions", STREAMED)
        await clients[0].head()
        await clients[1].post("/v1/completions", STREAMED)  # In the queue.
        await router.wait_for_metrics(lambda m: m["queue_length"] == 1)
        await clients[2].post("/v1/completions", {"prompt": LONG})  # At P.
        await p.wait_for(1)
        began = time.monotonic()
        self.assertEqual(await router.terminate(), 0)
        self.assertLess(time.monotonic() - began, 20)
        await asyncio.wait_for(d.requests[0].gone.wait(), 20)
        for client in clients:
            client.leave()

    async def test_an_engine_that_trickles_delays_no_client(self) -> None:
        async def trickle(request: Request, answer: Answer) -> None:
            await answer.raw(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n{")
            while not request.gone.is_set():
                await answer.raw(b" ")
                await asyncio.sleep(0.005)

        slow, d = await self.engine(trickle), await self.engine()
        router = await self.router("--health-timeout", "300ms", d=[slow, d])
        reply = await router.get("/v1/models")
        self.assertEqual((reply.status, [each["id"] for each in reply.json["data"]]), (200, ["m"]))
        await asyncio.wait_for(slow.requests[0].gone.wait(), 20)

        # Neither does it delay the shutdown; nor does a client that left hold any resource.
        router = await self.router(
            "--health-timeout", "1m", "--shutdown-timeout", "100ms", d=[slow, d]
        )
        slow.requests.clear()
        async with router.client() as left:
            await left.send(b"GET /v1/models HTTP/1.1\r\nHost: r\r\n\r\n")
            await slow.wait_for(1)
        await router.wait_for_metrics(
            lambda m: m.get('requests_total{route="models",status="gone"}') == 1
        )
        async with router.client() as client:
            await client.send(b"GET /v1/models HTTP/1.1\r\nHost: r\r\n\r\n")
            await slow.wait_for(2)
            self.assertEqual(await router.terminate(), 0)
            self.assertEqual(await client.ended(), b"")

    async def test_a_stopped_engine_does_not_delay_the_shutdown(self) -> None:
        d = await self.engine()
        router = await self.router(d=[d])
        self.assertEqual(await router.terminate(), 0)
        self.assertIn("stopped", "".join(router.log[-1:]))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    os.environ.setdefault("PYTHONASYNCIODEBUG", "0")
    unittest.main()
