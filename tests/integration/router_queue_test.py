"""The queue of the router: clients share the engines, and know when to come back."""

import asyncio
import os
import pathlib
import struct
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "support"))

from router_case import RouterTest
from router_process import Client, Router
from streaming_engine import STREAM, Answer, Request, StreamingEngine

SPACE = "ab" * 16
LINKS = (
    '{"node":"' + "5f" * 16 + '","links":[],"engines":[{"instance":"i","state":"connected",'
    '"namespace":"' + SPACE + '","block_bytes":1024,"block_tokens":16}]}'
).encode()
LIST, KEY_BYTES, BLOCK_TOKENS = 4, 8, 16
#: A pool without blocks (docs/router_api.md).
BLOCKS = (
    b"PEGABLK1"
    + bytes(16)
    + struct.pack("<QQIIIHHII", 1, 1, LIST, 0, 0, 0, KEY_BYTES, BLOCK_TOKENS, 0)
)
#: By which the router predicts an engine that it does not know.
TOKENS_PER_SECOND = 8000


async def server_of_a_pool(request: Request, answer: Answer) -> None:
    if request.target == "/links":
        await answer.whole(LINKS)
    elif request.target.startswith("/blocks"):
        await answer.whole(BLOCKS)
    elif request.target.startswith("/journal"):
        await request.gone.wait()
    else:
        await answer.whole(b"", 404)


class OneAtATime:
    """An engine that answers each request when the test permits it, in the order of arrival."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._permits = asyncio.Semaphore(0)

    async def __call__(self, request: Request, answer: Answer) -> None:
        self.names.append(request.json["user"])
        await self._permits.acquire()
        await answer.whole(b'{"choices":[{"text":"hello"}]}')

    def permit(self, count: int) -> None:
        for _ in range(count):
            self._permits.release()


def bearer(key: str) -> str:
    return f"Authorization: Bearer {key}\r\n"


class Queue(RouterTest):
    async def send(self, router: Router, user: str, tokens: int, **more: object) -> Client:
        client = await self.stack.enter_async_context(router.client())
        body = {"prompt": [1] * tokens, "model": "m", "user": user, **more}
        await client.post("/v1/completions", body, bearer(user))
        return client

    async def waiting(self, router: Router, count: int) -> None:
        await router.wait_for_metrics(lambda m: m["queue_length"] == count)

    async def test_a_client_that_floods_the_queue_delays_another_by_one_request_at_a_time(
        self,
    ) -> None:
        behavior = OneAtATime()
        router = await self.router("--max-decode-inflight", "1", d=[await self.engine(behavior)])
        clients = [await self.send(router, "flood", 100)]
        await router.wait_for_metrics(
            lambda m: sum(v for k, v in m.items() if "inflight{" in k) == 1
        )
        clients += [await self.send(router, "flood", 100) for _ in range(20)]
        await self.waiting(router, 20)
        clients += [await self.send(router, "other", 100) for _ in range(4)]
        await self.waiting(router, 24)
        metrics = await router.metrics()
        self.assertEqual(metrics["queue_clients"], 2)
        self.assertEqual(metrics['queue_waits_total{reason="room"}'], 24)
        behavior.permit(25)
        for client in clients:
            self.assertEqual((await client.reply()).status, 200)
        places = [i for i, name in enumerate(behavior.names) if name == "other"]
        self.assertEqual(len(places), 4)
        for number, place in enumerate(places, 1):
            self.assertLessEqual(place, 2 * number, behavior.names)

    async def test_a_full_queue_keeps_room_for_other_clients(self) -> None:
        behavior = OneAtATime()
        router = await self.router(
            "--max-decode-inflight", "1", "--queue", "4", d=[await self.engine(behavior)]
        )
        await self.send(router, "flood", 100)
        await router.wait_for_metrics(
            lambda m: sum(v for k, v in m.items() if "inflight{" in k) == 1
        )
        flood = []
        for number in range(1, 5):
            flood.append(await self.send(router, "flood", 100))
            await self.waiting(router, number)
        refused = await (await self.send(router, "flood", 100)).reply()
        self.assertEqual(refused.status, 429)
        other = await self.send(router, "other", 100)
        # The newest one of the client with the most makes room.
        refused = await flood[-1].reply()
        self.assertEqual(refused.status, 429)
        self.assertGreaterEqual(int(refused.headers["retry-after"]), 1)
        behavior.permit(5)
        self.assertEqual((await other.reply()).status, 200)
        for client in flood[:-1]:
            self.assertEqual((await client.reply()).status, 200)
        self.assertEqual((await router.metrics())["queue_refused_total"], 2)

    async def known_engines(self, engine: StreamingEngine, *options: str) -> Router:
        """A router that places requests by cost."""
        server = await self.engine(server_of_a_pool)
        secret = self.scratch() / "secret"
        secret.write_text("0123456789abcdef-example\n")
        os.chmod(secret, 0o600)
        router = await self.router(
            "--servers", server.url, "--peer-secret-file", str(secret), *options, d=[engine]
        )
        await router.wait_for_metrics(
            lambda m: any(k.startswith("kv_pool_trusted") and v == 1 for k, v in m.items())
        )
        return router

    async def test_a_request_waits_in_the_router_while_its_engine_has_enough_to_compute(
        self,
    ) -> None:
        begins, ends = asyncio.Event(), asyncio.Event()

        async def long_prefill(request: Request, answer: Answer) -> None:
            if request.json["user"] == "first":
                await begins.wait()
            await answer.begin_stream()
            await answer.piece(STREAM[0])
            await ends.wait()
            await answer.piece(b"data: [DONE]\n\n")
            await answer.end_stream()

        engine = await self.engine(long_prefill)
        router = await self.known_engines(engine, "--queue", "1")
        # 100 s, so that the time that this test takes does not matter.
        first = await self.send(router, "first", 100 * TOKENS_PER_SECOND, stream=True)
        await engine.wait_for(1)
        second = await self.send(router, "second", 20 * TOKENS_PER_SECOND, stream=True)
        await self.waiting(router, 1)
        self.assertEqual((await router.metrics())['queue_waits_total{reason="time"}'], 1)
        third = await (await self.send(router, "second", 10 * TOKENS_PER_SECOND)).reply()
        self.assertEqual(third.status, 429)
        # What the engine has, what waits, and the request itself.
        wait = int(third.headers["retry-after"])
        self.assertLessEqual(wait, 131)
        self.assertGreater(wait, 131 - 40)
        self.assertEqual(len(engine.requests), 1)
        begins.set()
        await engine.wait_for(2)
        ends.set()
        for client in (first, second):
            self.assertTrue((await client.reply()).is_whole)

    async def test_a_request_that_has_waited_goes_to_an_engine_with_a_queue(self) -> None:
        behavior = OneAtATime()
        engine = await self.engine(behavior)
        router = await self.known_engines(engine, "--queue-timeout", "50ms")
        clients = [await self.send(router, "x", 100 * TOKENS_PER_SECOND) for _ in range(2)]
        await engine.wait_for(2)
        behavior.permit(2)
        for client in clients:
            self.assertEqual((await client.reply()).status, 200)
        self.assertEqual((await router.metrics())['queue_waits_total{reason="time"}'], 1)

    async def test_a_whole_answer_shows_that_its_engine_computes_another_prompt_now(self) -> None:
        events = {"first": asyncio.Event(), "second": asyncio.Event()}

        async def behavior(request: Request, answer: Answer) -> None:
            await events[request.json["user"]].wait()
            await answer.whole(b'{"choices":[{"text":"hello"}]}')

        engine = await self.engine(behavior)
        router = await self.known_engines(engine, "--engine-queue-time", "0s")

        async def queue() -> float:
            metrics = await router.metrics()
            (name,) = (name for name in metrics if name.startswith("kv_queue_seconds{"))
            return metrics[name]

        first = await self.send(router, "first", 2 * TOKENS_PER_SECOND)
        await engine.wait_for(1)
        second = await self.send(router, "second", 10)
        await engine.wait_for(2)
        self.assertGreater(await queue(), 0)
        # The first one takes longer than predicted, because the engine has begun with the second.
        await router.wait_for_metrics(
            lambda m: all(v < 0.1 for k, v in m.items() if k.startswith("kv_queue_seconds{"))
        )
        events["second"].set()
        self.assertEqual((await second.reply()).status, 200)
        self.assertGreater(await queue(), 0.2)
        events["first"].set()
        self.assertEqual((await first.reply()).status, 200)
        self.assertEqual(await queue(), 0)

    async def test_without_a_queue_time_requests_go_to_their_engine(self) -> None:
        behavior = OneAtATime()
        engine = await self.engine(behavior)
        router = await self.known_engines(engine, "--engine-queue-time", "0s")
        clients = [await self.send(router, "x", 100 * TOKENS_PER_SECOND) for _ in range(2)]
        await engine.wait_for(2)
        behavior.permit(2)
        for client in clients:
            self.assertEqual((await client.reply()).status, 200)


if __name__ == "__main__":
    unittest.main()
