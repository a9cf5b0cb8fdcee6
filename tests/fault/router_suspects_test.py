"""Requests that end engines, engines that hang, and engines that hand over nothing."""

import asyncio
import pathlib
import signal
import sys
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "support"))

from router_case import RouterTest
from streaming_engine import (
    STREAM,
    WHOLE_STREAM,
    Answer,
    Request,
    StreamingEngine,
    serve_normally,
    wait_for_leaving,
)

LONG = "eins zwei drei " * 200  # Beyond --min-prefill-tokens.
POISON = {"prompt": LONG + "secret", "stream": True}
STREAMED = {"prompt": "x", "stream": True}


async def end_at_poison(request: Request, answer: Answer) -> None:
    if b"secret" in request.body:
        answer.die()
    else:
        await serve_normally(request, answer)


async def end_in_the_answer(request: Request, answer: Answer) -> None:
    if b"secret" not in request.body:
        await serve_normally(request, answer)
        return
    await answer.begin_stream()
    await answer.piece(STREAM[0][:7])
    answer.die()


def poisoned(engines: list[StreamingEngine]) -> int:
    """The number of connections that the request has ended."""
    return sum(b"secret" in request.body for e in engines for request in e.requests)


class Suspects(RouterTest):
    async def test_a_request_ends_two_engines_at_most(self) -> None:
        for p_count, d_count, behavior in (
            (2, 4, end_at_poison),
            (1, 4, end_at_poison),
            (0, 4, end_at_poison),
            (0, 4, end_in_the_answer),
        ):
            with self.subTest(p=p_count, d=d_count, behavior=behavior):
                p = [await self.engine(behavior) for _ in range(p_count)]
                d = [await self.engine(behavior) for _ in range(d_count)]
                router = await self.router("--retries", "5", "--retry-delay", "1ms", p=p, d=d)
                for _ in range(d_count):  # Connections that are kept.
                    await router.post("/v1/completions", {"prompt": LONG})
                reply = await router.post("/v1/completions", POISON)
                self.assertEqual((reply.status, reply.headers["x-should-retry"]), (502, "false"))
                self.assertNotIn("retry-after", reply.headers)
                self.assertEqual(poisoned(p + d), 2)
                self.assertEqual((await router.metrics())["suspect_requests_total"], 1)
                warning = await router.wait_for_line("a request is not tried again")
                self.assertNotIn("secret", "".join(router.log))
                self.assertEqual(warning.count("http://"), 2)
                reply = await router.post("/v1/completions", STREAMED)
                self.assertEqual((reply.status, reply.body), (200, WHOLE_STREAM))
                await router.stop()

    async def test_an_engine_never_gets_the_request_that_ended_it_again(self) -> None:
        d = await self.engine(end_at_poison)
        router = await self.router("--retries", "5", "--retry-delay", "1ms", d=[d])
        async with router.client() as client:
            for prompt in ("x", "secret"):  # The second one over the kept connection.
                await client.post("/v1/completions", {"prompt": prompt})
                reply = await client.reply()
            self.assertEqual((reply.status, reply.headers["retry-after"]), (502, "1"))
        self.assertEqual(poisoned([d]), 1)
        self.assertEqual((await router.metrics())["suspect_requests_total"], 0)

    async def test_a_request_whose_answer_breaks_off_is_not_reported_as_one_that_is_refused(
        self,
    ) -> None:
        async def end_after_an_event(request: Request, answer: Answer) -> None:
            await answer.begin_stream()
            await answer.piece(STREAM[0])
            answer.die()

        d = [await self.engine(end_at_poison), await self.engine(end_after_an_event)]
        router = await self.router("--decode-policy", "round-robin", "--retry-delay", "1ms", d=d)
        reply = await router.post("/v1/completions", POISON)
        self.assertEqual(reply.status, 200)
        self.assertTrue(reply.body.startswith(STREAM[0]))
        self.assertEqual(poisoned(d), 2)
        self.assertEqual((await router.metrics())["suspect_requests_total"], 0)

    async def test_a_request_that_ended_with_a_kept_connection_goes_to_another_engine(self) -> None:
        ending = True

        async def end_once(request: Request, answer: Answer) -> None:
            nonlocal ending
            if b"secret" in request.body and ending:
                ending = False
                answer.die()
            else:
                await serve_normally(request, answer)

        d = [await self.engine(end_once) for _ in range(2)]
        router = await self.router(d=d)
        async with router.client() as client:
            for _ in range(4):
                await client.post("/v1/completions", STREAMED)
                self.assertEqual((await client.reply()).status, 200)
            await client.post("/v1/completions", POISON)
            reply = await client.reply()
            self.assertEqual((reply.status, reply.body), (200, WHOLE_STREAM))
        self.assertEqual(poisoned(d), 2)

    async def test_a_request_without_a_permitted_engine_delays_no_other(self) -> None:
        end = asyncio.Event()  # Ends the long responses, by their prompts.
        end_second = asyncio.Event()

        async def hold_long(request: Request, answer: Answer) -> None:
            if b"first long" in request.body:
                await end.wait()
            elif b"second long" in request.body:
                await end_second.wait()
            await end_at_poison(request, answer)

        def has_got(engine: StreamingEngine, prompt: bytes) -> bool:
            return any(prompt in request.body for request in engine.requests)

        d = [await self.engine(hold_long) for _ in range(2)]
        router = await self.router(
            "--max-decode-inflight", "1", "--queue-timeout", "10m", "--retry-delay", "1ms", d=d
        )  # fmt: skip
        clients = [await self.stack.enter_async_context(router.client()) for _ in range(4)]
        long, suspect, second, innocent = clients
        await long.post("/v1/completions", {"prompt": "first long"})
        await router.wait_for_metrics(lambda _: any(has_got(e, b"first long") for e in d))
        busy, idle = d if has_got(d[0], b"first long") else d[::-1]
        await suspect.post("/v1/completions", POISON)
        await router.wait_for_metrics(lambda m: m["queue_length"] == 1)
        self.assertEqual((poisoned([busy]), poisoned([idle])), (0, 1))

        # A request behind it gets at once the engine that it may not use,
        await innocent.post("/v1/completions", STREAMED)
        self.assertEqual((await innocent.reply()).body, WHOLE_STREAM)
        # and when it has room again.
        await second.post("/v1/completions", {"prompt": "second long"})
        await router.wait_for_metrics(lambda _: has_got(idle, b"second long"))
        await innocent.post("/v1/completions", STREAMED)
        await router.wait_for_metrics(lambda m: m["queue_length"] == 2)
        end_second.set()
        self.assertEqual((await second.reply()).status, 200)
        self.assertEqual((await innocent.reply()).body, WHOLE_STREAM)
        self.assertEqual((len(busy.requests), len(idle.requests)), (1, 4))

        # It is served as soon as the engine that it waits for has room.
        busy.behavior = serve_normally
        end.set()
        self.assertEqual((await long.reply()).status, 200)
        self.assertEqual((await suspect.reply()).body, WHOLE_STREAM)
        self.assertEqual(poisoned([busy]), 1)
        await self.all_is_over(router)

    async def test_connections_that_were_closed_earlier_cost_no_request(self) -> None:
        d = await self.engine()
        router = await self.router("--health-interval", "10m", d=[d])
        async with router.client() as client:
            for _ in range(3):
                await client.post("/v1/completions", STREAMED)
                self.assertEqual((await client.reply()).status, 200)
                await d.close_idle()
        self.assertEqual(len(d.requests), 3)


class HangingPrefill(RouterTest):
    async def test_the_decode_engine_takes_over_when_health_checks_fail(self) -> None:
        p, d = await self.engine(wait_for_leaving), await self.engine()
        router = await self.router(
            "--health-interval", "200ms", "--health-timeout", "200ms", "--prefill-timeout", "10m",
            p=[p], d=[d],
        )  # fmt: skip
        async with router.client() as client:
            await client.post("/v1/completions", {"prompt": LONG, "stream": True})
            await p.wait_for(1)
            p.is_healthy = False
            began = time.monotonic()
            reply = await client.reply()
            seconds = time.monotonic() - began
        self.assertEqual((reply.status, reply.body), (200, WHOLE_STREAM))
        # Two checks, each within its interval and timeout, and the delays of a busy machine.
        self.assertLess(seconds, 5)
        print(f"\nprefill engine down: the client waited {seconds:.3f} s")
        metrics = await router.metrics()
        self.assertEqual(metrics['prefill_total{reason="engine_down"}'], 1)
        await asyncio.wait_for(p.requests[0].gone.wait(), 20)
        await self.all_is_over(router)

    async def test_an_engine_that_went_down_with_the_request_counts_as_ended(self) -> None:
        p, d = await self.engine(wait_for_leaving), await self.engine(end_at_poison)
        e = await self.engine()
        router = await self.router("--health-interval", "20ms", "--retries", "5", p=[p], d=[d, e])
        d_first = {"prompt": LONG + "secret", "stream": True}
        async with router.client() as client:
            e.behavior = end_at_poison
            await client.post("/v1/completions", d_first)
            await p.wait_for(1)
            p.is_healthy = False
            self.assertEqual((await client.reply()).status, 502)
        self.assertEqual(poisoned([p, d, e]), 2)

    async def test_a_long_prompt_has_a_later_deadline(self) -> None:
        p, d = await self.engine(wait_for_leaving), await self.engine()
        router = await self.router(
            "--prefill-timeout", "1ms", "--min-prefill-rate", "1000", p=[p], d=[d]
        )
        began = time.monotonic()
        await router.post("/v1/completions", {"prompt": "x" * 6000})
        self.assertGreaterEqual(time.monotonic() - began, 1.5)  # 1,500 tokens.


class NoHandover(RouterTest):
    async def test_an_engine_that_announces_nothing_is_suspended_until_it_does(self) -> None:
        serves = False

        async def plain(request: Request, answer: Answer) -> None:
            if serves:
                await serve_normally(request, answer)
            else:
                await answer.whole(b'{"choices":[]}')

        p, d = await self.engine(plain), await self.engine()
        router = await self.router(p=[p], d=[d])
        body = {"prompt": LONG, "stream": True}
        async with router.client() as client:
            for _ in range(40):
                await client.post("/v1/completions", body)
                self.assertEqual((await client.reply()).body, WHOLE_STREAM)
            self.assertEqual(len(p.requests), 32)
            metrics = await router.metrics()
            suspended = f'engine_handover_suspended{{role="prefill",engine="{p.url}"}}'
            self.assertEqual(metrics[suspended], 1)
            self.assertEqual(metrics['prefill_total{reason="suspended"}'], 8)
            self.assertEqual(metrics['prefill_total{reason="no_params"}'], 32)
            await router.wait_for_line("a prefill engine is suspended: 32 responses in a row")
            serves = True
            end = time.monotonic() + 30  # One request in 10 s is tried.
            while (await router.metrics())[suspended]:
                self.assertLess(time.monotonic(), end)
                await client.post("/v1/completions", body)
                await client.reply()
                await asyncio.sleep(0.1)  # The client's pace.
            self.assertEqual(len(p.requests), 33)
            await client.post("/v1/completions", body)
            await client.reply()
        self.assertEqual(len(p.requests), 34)
        await router.wait_for_line("a prefill engine announces blocks again")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    unittest.main()
