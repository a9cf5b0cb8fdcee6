"""The router between real connections: forwarding, splitting, rejecting and limits."""

import asyncio
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "support"))

from router_case import RouterTest
from router_process import BINARY
from streaming_engine import (
    KV_PARAMS,
    WHOLE_STREAM,
    Answer,
    Request,
    die,
    fail_with_status,
    report_no_params,
    send_garbage,
    wait_for_leaving,
)

LONG = "eins zwei drei " * 200  # Beyond --min-prefill-tokens.


class Options(unittest.TestCase):
    def run_router(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([BINARY, *words], capture_output=True, text=True, timeout=30)

    def test_help_version_and_options_are_printed(self) -> None:
        self.assertIn("--prefill", self.run_router("--help").stdout)
        self.assertRegex(self.run_router("--version").stdout, r"^pegaflow-router \d+\.\d+\.\d+\n$")
        shown = self.run_router("--decode", "http://a:1", "--print-options").stdout
        self.assertIn("decode = http://a:1  # command line", shown)

    def test_an_invalid_option_ends_the_start_with_one_line(self) -> None:
        for words, what in (
            (["--decode", "http://a:1", "--servers", "a:1"], "--servers: "),
            ([], "no decode engine"),
            (["--decode", "https://a:1"], "only plain HTTP"),
            (["--decode", "http://a:0"], "the port is not a number"),
            (["--decode", "http://a/v1"], "only a host and a port"),
            (["--decode", "http://a:1", "--engines-file", "/nowhere"], "cannot be combined with"),
            (["--engines-file", "/nowhere"], "cannot be read"),
            (["--decode", "http://a:1", "--decode-policy", "best"], "--decode-policy: unknown"),
            (["--decode", "http://a:1", "--flow", "best"], "--flow: unknown flow"),
            (["--decode", "http://a:1", "--flow", "direct"], "--flow direct needs --servers"),
            (["--decode", "http://a:1", "--log-level", "best"], "--log-level: "),
            (["--decode", "http://a:1", "--pass", "x"], "--pass: "),
            (["--decode", "http://a:1", "--pass", "/x?y"], '--pass: "/x?y" has a query'),
            (["--decode", "http://a:1", "--pass", "/x,/v1/completions"], '"/v1/completions" is a'),
            (["--decode", "http://a:1", "--pass", "/v1/responses/x"], '"/v1/responses/x" is a'),
            (
                ["--decode", "http://a:1", "--cors-origins", "none,http://a"],
                '--cors-origins: "none"',
            ),
            (["--decode", "http://a:1", "--instances", "x"], "--instances needs --servers"),
            (["--decode", "http://a:1", "--api-keys-file", "/"], "Is a directory"),
            (["--decode", "http://a:1", "--engine-api-key-file", "/dev/zero"], "a regular file"),
            (["--engines-file", "/dev/zero"], "--engines-file /dev/zero: cannot be read: it is"),
            (["--decode", "http://a:1", "--listen", "nowhere"], "HOST:PORT"),
            (["--decode", "http://a:1", "--api-keys-file", "/nowhere"], "cannot be read"),
        ):
            done = self.run_router(*words)
            self.assertEqual(done.returncode, 1, words)
            self.assertIn(what, done.stderr)
            self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)


class Passing(RouterTest):
    async def test_requests_and_responses_pass_byte_for_byte(self) -> None:
        d = await self.engine()
        router = await self.router(d=[d])
        body = b' {"prompt":"hi",\n "temperature": 0.70, "seed":12345678901234567890123}'
        reply = await router.post(
            "/v1/completions?x=1",
            body,
            "X-Request-Id: my-1\r\ntraceparent: 00-ab-cd-01\r\nX-Session-ID: s\r\n"
            "Connection: keep-alive, X-Hop\r\nX-Hop: 1\r\nAuthorization: Bearer theirs\r\n",
        )
        self.assertEqual(
            (reply.status, reply.body), (200, b'{"choices":[{"text":"hello"}], "n": 1.50}')
        )
        self.assertEqual(reply.headers["x-request-id"], "my-1")
        got = d.requests[0]
        self.assertEqual((got.body, got.target), (body, "/v1/completions?x=1"))
        for name, value in (
            ("x-request-id", "my-1"),
            ("traceparent", "00-ab-cd-01"),
            ("x-session-id", "s"),
            ("authorization", "Bearer theirs"),
            ("host", d.url.removeprefix("http://")),
        ):
            self.assertEqual(got.headers.get(name), value)
        self.assertNotIn("x-hop", got.headers)
        self.assertNotIn("connection", got.headers)
        # An id that is unsafe in a header or a log is replaced.
        reply = await router.post("/v1/completions", body, "X-Request-Id: a b\r\n")
        self.assertRegex(reply.headers["x-request-id"], r"^[0-9a-f]{32}$")
        self.assertTrue(
            await router.wait_for_line(r"answered id=my-1 route=completions status=200")
        )

    async def test_a_stream_cut_at_every_byte_arrives_as_it_was_sent(self) -> None:
        async def cut(request: Request, answer: Answer) -> None:
            await answer.begin_stream()
            at = int(request.headers["x-cut"])
            if at < 0:  # Each byte alone.
                for i in range(len(WHOLE_STREAM)):
                    await answer.piece(WHOLE_STREAM[i : i + 1])
            else:
                for piece in (WHOLE_STREAM[:at], WHOLE_STREAM[at:]):
                    if piece:
                        await answer.piece(piece)
                        await asyncio.sleep(0)
            await answer.end_stream()

        d = await self.engine(cut)
        router = await self.router(d=[d])
        async with router.client() as client:
            for at in range(-1, len(WHOLE_STREAM), 1):
                await client.post(
                    "/v1/completions", {"prompt": "x", "stream": True}, f"X-Cut: {at}\r\n"
                )
                reply = await client.reply()
                self.assertEqual((reply.body, reply.is_whole), (WHOLE_STREAM, True), at)

    async def test_the_body_of_a_get_is_not_a_second_request(self) -> None:
        async def ok(request: Request, answer: Answer) -> None:
            await answer.whole(b"{}")

        d = await self.engine(ok)
        router = await self.router("--pass", "/extra", d=[d])
        inner = b"POST /sleep HTTP/1.1\r\nHost: e\r\nContent-Length: 0\r\n\r\n"
        for path in ("/v1/responses/resp_1", "/extra"):
            for framing, body in (
                (f"Content-Length: {len(inner)}", inner),
                ("Transfer-Encoding: chunked", b"%x\r\n%s\r\n0\r\n\r\n" % (len(inner), inner)),
            ):
                d.requests.clear()
                async with router.client() as client:
                    head = f"GET {path} HTTP/1.1\r\nHost: r\r\n{framing}\r\n\r\n"
                    await client.send(head.encode() + body)
                    self.assertEqual((await client.reply()).status, 200)
                    # Over the kept connection to the engine.
                    await client.post("/tokenize", b"{}")
                    self.assertEqual((await client.reply()).status, 200)
                self.assertEqual(
                    [(each.method, each.target, each.body) for each in d.requests],
                    [("GET", path, inner), ("POST", "/tokenize", b"{}")],
                )
        await router.get("/extra")
        self.assertNotIn("content-length", d.requests[-1].headers)

    async def test_unlisted_paths_are_denied(self) -> None:
        d = await self.engine()
        router = await self.router("--pass", "/extra", d=[d])
        for path in (
            "/reset_prefix_cache",
            "/sleep",
            "/collective_rpc",
            "/v1/load_lora_adapter",
            "/",
            "/v1/",
            "/v1/chat/completions/",
            "/inference/v1/generate",
            "/pause",
        ):
            self.assertEqual((await router.post(path, {})).status, 404, path)
        self.assertEqual((await router.get("/v1/completions")).status, 405)
        self.assertEqual(d.requests, [])
        for path in (
            "/v1/embeddings",
            "/v1/audio/transcriptions",
            "/rerank",
            "/score",
            "/classify",
            "/pooling",
            "/tokenize",
            "/detokenize",
            "/v1/responses",
            "/extra",
        ):
            self.assertEqual((await router.post(path, {"input": "x"})).status, 200, path)
        self.assertEqual(len(d.requests), 10)

    async def test_the_router_serves_its_own_pages(self) -> None:
        async def models(request: Request, answer: Answer) -> None:
            await answer.whole(b'{"data":[{"id":"m","x":1.0},{"id":"lora"}]}')

        d, e = await self.engine(), await self.engine(models)
        router = await self.router(d=[d, e])
        health = await router.get("/health")
        self.assertEqual((health.status, health.json["status"]), (200, "ok"))
        self.assertEqual({each["url"] for each in health.json["engines"]}, {d.url, e.url})
        self.assertIn("version", (await router.get("/version")).json)
        models = (await router.get("/v1/models")).json
        self.assertEqual(sorted(each["id"] for each in models["data"]), ["lora", "m"])
        await router.post("/v1/completions", {"prompt": "x"})
        metrics = await router.metrics()
        self.assertEqual(metrics['requests_total{route="completions",status="2xx"}'], 1)
        self.assertEqual(metrics["connections"], 1)

    async def test_connections_are_kept_and_replaced(self) -> None:
        d = await self.engine()
        router = await self.router(d=[d])
        # The router's own requests have ended.
        row = f'engine_models{{role="decode",engine="{d.url}"}}'
        await router.wait_for_metrics(lambda m: m[row] == 1)
        async with router.client() as client:
            for _ in range(3):
                await client.post("/v1/completions", {"prompt": "x"})
                self.assertEqual((await client.reply()).status, 200)
            self.assertEqual(d.connections, 1)
            await d.close_idle()
            await client.post("/v1/completions", {"prompt": "x"})
            self.assertEqual((await client.reply()).status, 200)

    async def test_requests_sent_together_are_answered_in_order(self) -> None:
        d = await self.engine()
        router = await self.router(d=[d])
        async with router.client() as client:
            one = b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: 14\r\n\r\n"
            one += b'{"prompt":"x"}'
            await client.send(one * 3 + one.replace(b"completions", b"nothing"))
            for status in (200, 200, 200, 404):
                self.assertEqual((await client.reply()).status, status)

    async def test_a_client_that_waits_for_100_continue_receives_it(self) -> None:
        d = await self.engine()
        router = await self.router(d=[d])
        async with router.client() as client:
            await client.send(
                b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: 14\r\n"
                b"Expect: 100-continue\r\n\r\n"
            )
            self.assertEqual((await client.head()).status, 100)
            await client.send(b'{"prompt":"x"}')
            self.assertEqual((await client.reply()).status, 200)
        self.assertNotIn("expect", d.requests[0].headers)

    async def test_http_1_0_gets_a_stream_that_ends_with_the_connection(self) -> None:
        d = await self.engine()
        router = await self.router(d=[d])
        async with router.client() as client:
            body = b'{"prompt":"x","stream":true}'
            await client.send(
                b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
            )
            reply = await client.reply()
            self.assertNotIn("transfer-encoding", reply.headers)
            self.assertEqual(reply.body, WHOLE_STREAM)


class Refusing(RouterTest):
    async def test_ambiguous_requests_are_rejected(self) -> None:
        d = await self.engine()
        router = await self.router(d=[d])
        head = b"POST /v1/completions HTTP/1.1\r\nHost: r\r\n"
        for bad in (
            head + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            head + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
            head + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
            head + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
            head + b"Content-Length: -1\r\n\r\n",
            head + b"Content-Length: 2, 2\r\n\r\n{}",
            head + b"Content-Length: 99999999999999999999\r\n\r\n",
            head + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
            head + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            head + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
            head + b"Content-Length : 2\r\n\r\n{}",
            head + b"Host: s\r\nContent-Length: 2\r\n\r\n{}",
            b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}",
            b"POST /v1/completions HTTP/1.1\nHost: r\nContent-Length: 2\n\n{}",
            b"POST /v1/completions HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            b"POST /v1/completions HTTP/2.0\r\nHost: r\r\n\r\n",
            head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        ):
            async with router.client() as client:
                await client.send(bad)
                reply = await client.reply()
                self.assertIn(reply.status, (400, 413), bad)
                self.assertEqual(reply.headers.get("connection"), "close")
                client.writer.write_eof()
                self.assertEqual(await client.ended(), b"", bad)
        self.assertEqual(d.requests, [])
        self.assertEqual((await router.metrics())["bad_requests_total"], 18)

    async def test_a_folded_field_arrives_as_one_line(self) -> None:
        d = await self.engine()
        router = await self.router(d=[d])
        async with router.client() as client:
            await client.send(
                b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nX-Folded: a\r\n b\r\n\tc\r\n"
                b"Content-Length:\r\n 14\r\n\r\n" + b'{"prompt":"x"}'
            )
            self.assertEqual((await client.reply()).status, 200)
        self.assertEqual(d.requests[0].headers["x-folded"], "a b c")
        self.assertEqual(d.requests[0].body, b'{"prompt":"x"}')

    async def test_the_copy_for_a_prefill_engine_counts_as_memory(self) -> None:
        p, d = await self.engine(wait_for_leaving), await self.engine()
        router = await self.router(p=[p], d=[d])
        body = json.dumps({"prompt": "x" * 100_000}).encode()
        async with router.client() as client:
            await client.post("/v1/completions", body)
            request = await p.wait_for(1)
            held = (await router.metrics())["body_bytes"]
            # The policy kv-aware keeps the prompt without its closing quote.
            text = len('"') + 100_000
            self.assertEqual(held, len(body) + len(request.body) + text)
        await router.wait_for_metrics(lambda m: m["body_bytes"] == 0)

    async def test_sizes_have_limits(self) -> None:
        d = await self.engine()
        router = await self.router("--max-body-bytes", "64kb", "--max-header-bytes", "4kb", d=[d])
        self.assertEqual((await router.post("/v1/completions", b"x" * 65537)).status, 413)
        reply = await router.get("/health", f"X: {'y' * 5000}\r\n")
        self.assertEqual(reply.status, 431)
        async with router.client() as client:  # A body without an end.
            await client.send(
                b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            with contextlib.suppress(ConnectionError):
                for _ in range(200):
                    await client.send(b"400\r\n" + b"x" * 1024 + b"\r\n")
            self.assertEqual((await client.reply()).status, 413)
        for begin in (b"2;a=", b"0\r\nT: "):  # A chunk's first line, and a trailer, without an end.
            async with router.client() as client:
                await client.send(
                    b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n"
                    + b"\r\n"
                    + begin
                    + b"x" * 100_000
                )
                self.assertEqual((await client.reply()).status, 400)
        self.assertEqual(d.requests, [])
        # All bodies together.
        small = await self.router("--body-memory", "1mb", "--max-body-bytes", "8mb", d=[d])
        reply = await small.post("/v1/completions", b"x" * (2 << 20))
        self.assertEqual((reply.status, reply.headers["retry-after"]), (503, "1"))
        await small.wait_for_metrics(lambda m: m["body_bytes"] == 0)

    async def test_a_body_that_is_not_json_is_rejected(self) -> None:
        d = await self.engine()
        router = await self.router(d=[d])
        for bad in (
            b"",
            b"[]",
            b'{"a":1',
            b'{"a":"\xff"}',
            b'{"a":"\xed\xa0\x80"}',
            b'{"a":nan}',
            b'{"a":1}{"b":2}',
            b'{"a":01}',
            b"{'a':1}",
            b'{"a":' + b"[" * 300,
        ):
            reply = await router.post("/v1/chat/completions", bad)
            self.assertEqual((reply.status, reply.json["error"]["code"]), (400, 400), bad)
        reply = await router.post("/v1/messages", b"[]")
        self.assertEqual(reply.json["type"], "error")
        reply = await router.post("/v1/completions", b"{}", "Content-Type: text/plain\r\n")
        self.assertEqual(reply.status, 415)
        self.assertEqual(d.requests, [])

    async def test_an_engine_may_be_named_by_its_host(self) -> None:
        d = await self.engine()
        url = d.url.replace("127.0.0.1", "localhost")
        router = await self.router("--decode", url, "--health-interval", "10m")
        self.assertEqual((await router.post("/v1/completions", {"prompt": "x"})).status, 200)
        lost = await self.router("--decode", "http://nowhere.invalid:1", "--retries", "0")
        self.assertIn((await lost.post("/v1/completions", {"prompt": "x"})).status, (502, 503))

    async def test_keys_are_required_and_never_forwarded(self) -> None:
        folder = self.scratch()
        (folder / "keys").write_text("# who may\nann k-ann\nbob k-bob 1\n")
        (folder / "engine").write_text("k-engine\n")
        d = await self.engine()
        router = await self.router(
            "--api-keys-file",
            str(folder / "keys"),
            "--engine-api-key-file",
            str(folder / "engine"),
            d=[d],
        )
        body = {"prompt": "x"}
        for headers in ("", "Authorization: Bearer wrong\r\n", "Authorization: Basic k-ann\r\n"):
            self.assertEqual((await router.post("/v1/completions", body, headers)).status, 401)
        self.assertEqual((await router.get("/v1/models")).status, 401)
        self.assertEqual((await router.get("/health")).status, 200)
        for headers in ("Authorization: Bearer k-ann\r\n", "x-api-key: k-ann\r\n"):
            self.assertEqual((await router.post("/v1/completions", body, headers)).status, 200)
        for got in d.requests:
            self.assertEqual(got.headers["authorization"], "Bearer k-engine")
            self.assertNotIn("k-ann", str(got.headers))
        bob = "Authorization: Bearer k-bob\r\n"
        statuses = [(await router.post("/v1/completions", body, bob)).status for _ in range(20)]
        self.assertEqual(statuses[0], 200)
        self.assertIn(429, statuses)
        self.assertNotIn("k-ann", "".join(router.log))


class Splitting(RouterTest):
    async def test_each_engine_gets_its_body(self) -> None:
        p, d = await self.engine(), await self.engine()
        router = await self.router(p=[p], d=[d])
        start = (
            '{"model" : "m", "max_tokens": 50, "n":2,"min_tokens":1,"logprobs":3,"top_logprobs":2,'
        )
        start += '"seed":12345678901234567890123, "stream_options":{"include_usage":true},'
        for path, prompt in (
            ("/v1/completions", f'"prompt":"{LONG}"'),
            (
                "/v1/chat/completions",
                f'"messages":[{{"role":"user","content":"{LONG}"}}],"tools":[]',
            ),
            ("/v1/messages", f'"system":"{LONG}","messages":[]'),
        ):
            for stream in ("true", "false"):
                p.requests.clear()
                d.requests.clear()
                body = f'{start}{prompt} , "stream": {stream} }}'.encode()
                reply = await router.post(path, body, "X-Request-Id: one\r\ntraceparent: t\r\n")
                self.assertEqual(reply.status, 200)
                if stream == "true":
                    self.assertEqual(reply.body, WHOLE_STREAM)
                (to_p,), (to_d,) = p.requests, d.requests
                kept = prompt.encode().rstrip()
                self.assertEqual(
                    to_p.body,
                    b'{"model" : "m","seed":12345678901234567890123,' + kept + b',"max_tokens":1,'
                    b'"max_completion_tokens":1,"n":1,"stream":false,"kv_transfer_params":'
                    b'{"pegaflow":{"save_tail":true}}}',
                )
                self.assertEqual(to_d.body, b'{"kv_transfer_params":' + KV_PARAMS + b"," + body[1:])
                for got in (to_p, to_d):
                    self.assertEqual(got.headers["x-request-id"], "one")
                    self.assertEqual(got.headers["traceparent"], "t")
                    self.assertEqual(got.target, path)
        self.assertEqual((await router.metrics())['prefill_total{reason="done"}'], 6)

    async def test_some_requests_go_to_the_decode_engine_without_a_prefill(self) -> None:
        p, d = await self.engine(), await self.engine()
        router = await self.router(p=[p], d=[d])
        prompt = {"prompt": LONG}
        for reason, body in (
            ("short", {"prompt": "hi"}),
            ("prompt_logprobs", prompt | {"prompt_logprobs": 0}),
            ("echo", prompt | {"echo": True, "logprobs": 1}),
            ("prompt_embeds", prompt | {"prompt_embeds": "AAAA"}),
            ("beam_search", prompt | {"use_beam_search": True}),
        ):
            self.assertEqual((await router.post("/v1/completions", body)).status, 200)
            self.assertEqual((await router.metrics())[f'prefill_total{{reason="{reason}"}}'], 1)
        choice = {"type": "tool", "name": "t"}
        body = {"system": LONG, "messages": [], "tool_choice": choice}
        self.assertEqual((await router.post("/v1/messages", body)).status, 200)
        self.assertEqual((await router.metrics())['prefill_total{reason="tool_choice"}'], 1)
        self.assertEqual(p.requests, [])
        # echo alone, and log-probabilities alone, are split.
        for body in (prompt | {"echo": True}, prompt | {"logprobs": 1, "prompt_logprobs": None}):
            await router.post("/v1/completions", body)
        self.assertEqual(len(p.requests), 2)

    async def test_after_any_failure_of_the_prefill_engine_the_decode_engine_serves(self) -> None:
        async def die_in_the_answer(request: Request, answer: Answer) -> None:
            await answer.raw(b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"kv_')
            answer.die()

        d = await self.engine()
        for reason, behavior, user in (
            ("status", fail_with_status, "500"),
            ("status", fail_with_status, "400"),
            ("status", fail_with_status, "503"),
            ("lost", die, ""),
            ("lost", die_in_the_answer, ""),
            ("lost", send_garbage, ""),
            ("no_params", report_no_params, ""),
            ("timeout", wait_for_leaving, ""),
            ("refused", None, ""),
        ):
            with self.subTest(reason=reason, user=user):
                p = await self.engine(behavior or die)
                router = await self.router("--prefill-timeout", "200ms", p=[p], d=[d])
                if behavior is None:
                    await p.stop()
                d.requests.clear()
                body = json.dumps({"prompt": LONG, "user": user}).encode()
                reply = await router.post("/v1/completions", body)
                self.assertEqual((reply.status, d.requests[0].body), (200, body))
                metrics = await router.metrics()
                self.assertEqual(metrics[f'prefill_total{{reason="{reason}"}}'], 1)
                await router.stop()

    async def test_one_other_prefill_engine_is_tried(self) -> None:
        bad, p, d = await self.engine(), await self.engine(), await self.engine()
        await bad.stop()
        router = await self.router(
            "--prefill-policy", "round-robin", "--health-interval", "10s", p=[bad, p], d=[d]
        )
        for _ in range(2):
            await router.post("/v1/completions", {"prompt": LONG})
        self.assertEqual((await router.metrics())['prefill_total{reason="done"}'], 2)
        self.assertEqual(len(p.requests), 2)

    async def test_a_body_that_one_prefill_engine_rejects_goes_to_no_other(self) -> None:
        async def status(request: Request, answer: Answer) -> None:
            await answer.whole(b"{}", int(request.json["user"]))

        d, engines = await self.engine(), [await self.engine(status) for _ in range(2)]
        router = await self.router("--prefill-policy", "round-robin", p=engines, d=[d])
        for code, asked in ((400, 1), (404, 1), (422, 1), (500, 2), (503, 2)):
            for engine in engines:
                engine.requests.clear()
            body = {"prompt": LONG, "user": str(code)}
            self.assertEqual((await router.post("/v1/completions", body)).status, 200)
            self.assertEqual(sum(len(engine.requests) for engine in engines), asked, code)
        metrics = await router.metrics()
        self.assertEqual(metrics['prefill_total{reason="status"}'], 5)
        self.assertEqual(metrics['retries_total{role="prefill"}'], 2)

    async def test_a_busy_or_absent_prefill_engine_is_skipped(self) -> None:
        p, d = await self.engine(wait_for_leaving), await self.engine()
        router = await self.router(
            "--max-prefill-inflight", "1", "--health-interval", "20ms", p=[p], d=[d]
        )
        async with router.client() as client:
            await client.post("/v1/completions", {"prompt": LONG})
            await p.wait_for(1)
            self.assertEqual((await router.post("/v1/completions", {"prompt": LONG})).status, 200)
            self.assertEqual((await router.metrics())['prefill_total{reason="busy"}'], 1)
        p.is_healthy = False
        await router.wait_for_line("engine is down role=prefill")
        self.assertEqual((await router.post("/v1/completions", {"prompt": LONG})).status, 200)
        self.assertEqual((await router.metrics())['prefill_total{reason="engine_down"}'], 1)

    async def test_parameters_in_the_format_of_nixl_are_handed_over(self) -> None:
        p, d = await self.engine(), await self.engine()
        router = await self.router("--flow", "kv-params", "--pd-first-token", p=[p], d=[d])
        self.assertEqual((await router.post("/v1/completions", {"prompt": LONG})).status, 200)
        params = p.requests[0].json["kv_transfer_params"]
        self.assertEqual((params["do_remote_decode"], params["remote_engine_id"]), (True, None))
        self.assertIn(KV_PARAMS, d.requests[0].body)
        await router.wait_for_line("--pd-first-token has no effect with --flow kv-params")


if __name__ == "__main__":
    os.environ.setdefault("PEGA_TEST_SEED", "1")
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    unittest.main()
