"""--pd-first-token: the prefill engine's token is sent first, and no client sees a seam."""

import asyncio
import json
import pathlib
import signal
import sys
import unittest
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "support"))

from router_case import RouterTest
from router_process import Router
from streaming_engine import (
    KV_PARAMS,
    WHOLE_STREAM,
    Answer,
    Behavior,
    Request,
    StreamingEngine,
    event,
    serve_normally,
)

LONG = "eins zwei drei " * 200  # Beyond --min-prefill-tokens.
BODY = {"model": "m", "prompt": LONG, "max_tokens": 4, "stream": True, "temperature": 0.5}
TOKENS = [5, 6, 7]
USAGE = {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}
DONE = event("[DONE]")


def chunk(text: str) -> bytes:
    return event(json.dumps({"id": "cmpl-x", "choices": [{"index": 0, "text": text}]}))


async def prefill(request: Request, answer: Answer) -> None:
    """Responds as vLLM does: with token ids if the request has return_token_ids."""
    choice: dict[str, Any] = {"index": 0, "text": " uno", "finish_reason": "length"}
    if request.json.get("return_token_ids"):
        choice |= {"token_ids": [8], "prompt_token_ids": TOKENS}
    body = {"id": "cmpl-x", "created": 1, "model": "m", "choices": [choice]}
    await answer.whole(
        json.dumps(body).encode()[:-1] + b',"kv_transfer_params":' + KV_PARAMS + b"}"
    )


async def decode(request: Request, answer: Answer) -> None:
    if not isinstance(request.json["prompt"], list):
        await serve_normally(request, answer)
        return
    await answer.begin_stream()
    await answer.piece(chunk(" due"))
    await answer.piece(chunk(" tre") + event(json.dumps({"choices": [], "usage": USAGE})) + DONE)
    await answer.end_stream()


def texts(body: bytes) -> list[str]:
    events = [each.removeprefix(b"data: ") for each in body.split(b"\n\n")]
    parsed = [json.loads(each) for each in events if each.startswith(b"{")]
    return [each["choices"][0]["text"] for each in parsed if each.get("choices")]


class FirstToken(RouterTest):
    async def pair(
        self, p_behavior: Behavior, *d_behaviors: Behavior
    ) -> tuple[StreamingEngine, list[StreamingEngine], Router]:
        p, d = await self.engine(p_behavior), [await self.engine(each) for each in d_behaviors]
        router = await self.router(
            "--pd-first-token", "--decode-policy", "round-robin", "--retry-delay", "1ms", p=[p], d=d
        )
        return p, d, router

    async def counted(self, router: Router, reason: str) -> None:
        metrics = await router.metrics()
        counts = {k: v for k, v in metrics.items() if k.startswith("first_token_total") and v}
        self.assertEqual(counts, {f'first_token_total{{reason="{reason}"}}': 1})

    async def test_the_token_is_sent_before_the_decode_engine_has_one(self) -> None:
        may_go_on = asyncio.Event()

        async def slow(request: Request, answer: Answer) -> None:
            await answer.begin_stream()
            await may_go_on.wait()
            await answer.piece(chunk(" due") + DONE)
            await answer.end_stream()

        _, _, router = await self.pair(prefill, slow)
        async with router.client() as client:
            await client.post("/v1/completions", BODY)
            reply = await client.head()
            self.assertEqual((reply.status, reply.headers["x-request-id"] != ""), (200, True))
            self.assertEqual(texts(await client.chunk() or b""), [" uno"])
            may_go_on.set()
            self.assertEqual(await client.chunk(), chunk(" due") + DONE)
            self.assertEqual(await client.chunk(), b"")
            # The connection is still usable.
            await client.post("/v1/completions", BODY)
            self.assertEqual(texts((await client.reply()).body), [" uno", " due"])
        line = await router.wait_for_line("answered .*first_token=sent")
        self.assertIn("events=2", line)

    async def test_each_engine_gets_its_body_and_the_usage_counts_one_engine(self) -> None:
        p, (d,), router = await self.pair(prefill, decode)
        reply = await router.post("/v1/completions", BODY | {"kv_transfer_params": {"evil": 1}})
        self.assertEqual((reply.status, reply.is_whole), (200, True))
        self.assertEqual(texts(reply.body), [" uno", " due", " tre"])
        self.assertTrue(reply.body.endswith(DONE))
        usage = json.loads(reply.body.split(b"\n\n")[-3].removeprefix(b"data: "))["usage"]
        self.assertEqual(usage, {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7})
        to_p = p.requests[0].json
        self.assertEqual((to_p["prompt"], to_p["max_tokens"], to_p["stream"]), (LONG, 1, False))
        changed: dict[str, Any] = {"prompt": [*TOKENS, 8], "max_tokens": 3}
        changed["kv_transfer_params"] = json.loads(KV_PARAMS)
        self.assertEqual(d.requests[0].json, BODY | changed)
        self.assertEqual(len(d.requests), 1)
        await self.counted(router, "sent")
        await self.all_is_over(router)

    async def test_every_other_request_takes_the_store_flow_and_is_counted(self) -> None:
        async def no_tokens(request: Request, answer: Answer) -> None:
            await serve_normally(request, answer)

        async def fails(request: Request, answer: Answer) -> None:
            await answer.whole(b"{}", 500)

        cases: list[tuple[str, Behavior, str, dict[str, Any]]] = [
            ("route", prefill, "/v1/chat/completions", {"messages": [LONG], "stream": True}),
            ("not_streamed", prefill, "/v1/completions", BODY | {"stream": False}),
            ("choices", prefill, "/v1/completions", BODY | {"n": 2}),
            ("seed", prefill, "/v1/completions", BODY | {"seed": 1}),
            ("one_token", prefill, "/v1/completions", BODY | {"max_tokens": 1}),
            ("no_token", no_tokens, "/v1/completions", BODY),
            ("no_prefill", fails, "/v1/completions", BODY),
            ("no_prefill", prefill, "/v1/completions", BODY | {"prompt": "short"}),
        ]
        for reason, behavior, path, body in cases:
            with self.subTest(reason=reason):
                p, (d,), router = await self.pair(behavior, serve_normally)
                text = json.dumps(body).encode()
                reply = await router.post(path, text)
                self.assertEqual((reply.status, reply.is_whole), (200, True))
                if body["stream"]:
                    self.assertEqual(reply.body, WHOLE_STREAM)
                self.assertTrue(d.requests[0].body.endswith(text[1:]))
                wanted = [each.json.get("return_token_ids") for each in p.requests]
                self.assertLessEqual(set(wanted), {True} if reason.startswith("no_") else {None})
                await self.counted(router, reason)
                await router.stop()

    async def test_a_decode_engine_that_rejects_the_token_gets_the_clients_body(self) -> None:
        async def refuse(request: Request, answer: Answer) -> None:
            if isinstance(request.json["prompt"], list):
                await answer.whole(b'{"error":"too long"}', int(request.headers["x-status"]))
            else:
                await serve_normally(request, answer)

        async def die(request: Request, answer: Answer) -> None:
            if isinstance(request.json["prompt"], list):
                answer.die()
            else:
                await serve_normally(request, answer)

        for behavior, status in ((refuse, 400), (refuse, 503), (refuse, 200), (die, 0)):
            with self.subTest(status=status):
                # An engine that the request ended never gets it again.
                behaviors = [behavior] * (1 if status else 2)
                _, d, router = await self.pair(prefill, *behaviors)
                reply = await router.post("/v1/completions", BODY, f"X-Status: {status}\r\n")
                self.assertEqual((reply.status, reply.body), (200, WHOLE_STREAM))
                bodies = [each.json for engine in d for each in engine.requests]
                (whole,) = [body for body in bodies if body["prompt"] == LONG]
                self.assertEqual(whole["max_tokens"], 4)
                await self.counted(router, "decode")
                await self.all_is_over(router)
                await router.stop()

    async def test_another_engine_continues_until_one_has_sent_an_event(self) -> None:
        async def begin_and_die(request: Request, answer: Answer) -> None:
            await answer.begin_stream()
            await answer.piece(b"data: {")
            answer.die()

        async def die_later(request: Request, answer: Answer) -> None:
            await answer.begin_stream()
            await answer.piece(chunk(" due"))
            answer.die()

        _, (bad, good), router = await self.pair(prefill, begin_and_die, decode)
        reply = await router.post("/v1/completions", BODY)
        self.assertEqual((texts(reply.body), reply.is_whole), ([" uno", " due", " tre"], True))
        self.assertEqual(bad.requests[0].body, good.requests[0].body)
        self.assertEqual((await router.metrics())['retries_total{role="decode"}'], 1)
        await self.all_is_over(router)
        for behavior, seen in ((begin_and_die, [" uno"]), (die_later, [" uno", " due"])):
            _, _, router = await self.pair(prefill, behavior)
            async with router.client() as client:
                await client.post("/v1/completions", BODY)
                reply = await client.reply()
                self.assertEqual((reply.status, texts(reply.body)), (200, seen))
                self.assertIn(b"pd_decode_interrupted", reply.body)
                self.assertNotIn(b"DONE", reply.body)
                self.assertTrue(reply.is_whole)
                await client.send(b"GET /version HTTP/1.1\r\nHost: r\r\n\r\n")
                self.assertEqual((await client.reply()).status, 200)
            await self.counted(router, "sent")
            self.assertEqual((await router.metrics())["late_errors_total"], 1)
            await self.all_is_over(router)

    async def test_an_engine_that_has_continued_before_does_not_delay_the_token(self) -> None:
        may_accept = asyncio.Event()
        may_accept.set()

        async def accept_later(request: Request, answer: Answer) -> None:
            await may_accept.wait()
            await decode(request, answer)

        _, _, router = await self.pair(prefill, accept_later)
        async with router.client() as client:
            await client.post("/v1/completions", BODY)
            first = await client.reply()
            may_accept.clear()
            await client.post("/v1/completions", BODY)
            reply = await client.head()
            self.assertEqual((reply.status, reply.headers["x-request-id"] != ""), (200, True))
            self.assertEqual(reply.headers["content-type"], first.headers["content-type"])
            self.assertEqual(texts(await client.chunk() or b""), [" uno"])
            may_accept.set()
            self.assertEqual(texts(await client.chunk() or b"")[:1], [" due"])
        await self.all_is_over(router)

    async def test_after_the_token_a_rejection_is_up_to_another_engine_or_ends_the_stream(
        self,
    ) -> None:
        rejects = False

        async def accept_once(request: Request, answer: Answer) -> None:
            if rejects and isinstance(request.json["prompt"], list):
                await answer.whole(b'{"error":"too long"}', 400)
            else:
                await decode(request, answer)

        for others, seen in (([decode], [" uno", " due", " tre"]), ([], [" uno"])):
            with self.subTest(others=len(others)):
                rejects = False
                _, d, router = await self.pair(prefill, accept_once, *others)
                for _ in d:  # Each of them has continued once.
                    await router.post("/v1/completions", BODY)
                rejects = True
                reply = await router.post("/v1/completions", BODY)
                self.assertEqual((reply.status, texts(reply.body)), (200, seen))
                self.assertEqual(b"pd_decode_interrupted" in reply.body, not others)
                # Afterwards it has to accept the tokens first, and the client's body is the remedy.
                if not others:
                    again = await router.post("/v1/completions", BODY)
                    self.assertEqual((again.status, b"DONE" in again.body), (200, True))
                await self.all_is_over(router)
                await router.stop()

    async def test_a_client_that_leaves_after_the_token_ends_the_decode_request(self) -> None:
        async def begin(request: Request, answer: Answer) -> None:
            await answer.begin_stream()
            await request.gone.wait()

        _, (d,), router = await self.pair(prefill, begin)
        async with router.client() as client:
            await client.post("/v1/completions", BODY)
            await client.head()
            self.assertEqual(texts(await client.chunk() or b""), [" uno"])
        await asyncio.wait_for(d.requests[0].gone.wait(), 20)
        await self.all_is_over(router)

    async def test_http_1_0_gets_the_token_without_chunks(self) -> None:
        _, _, router = await self.pair(prefill, decode)
        body = json.dumps(BODY).encode()
        async with router.client() as client:
            head = f"POST /v1/completions HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n"
            await client.send(head.encode() + body)
            self.assertEqual(texts((await client.reply()).body), [" uno", " due", " tre"])


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    unittest.main()
