"""HTTP of browsers, monitors and proxies: preflights, HEAD, unusual but valid requests."""

import pathlib
import signal
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "support"))

from router_case import RouterTest
from router_process import Client, Reply
from streaming_engine import Answer, Request

BODY = b'{"prompt":"x"}'


async def allow_another_origin(request: Request, answer: Answer) -> None:
    await answer.whole(b"{}", 200, "Access-Control-Allow-Origin: http://engine\r\n")


class Browsers(RouterTest):
    async def ask(self, client: Client, method: str, path: str, headers: str = "") -> Reply:
        await client.send(f"{method} {path} HTTP/1.1\r\nHost: r\r\n{headers}\r\n".encode())
        reply = await client.head()
        if method != "HEAD" and "content-length" in reply.headers:
            reply.body = await client.reader.readexactly(int(reply.headers["content-length"]))
        return reply

    async def test_a_preflight_is_answered_as_vllm_does_without_a_key_or_an_engine(self) -> None:
        keys = self.scratch() / "keys"
        keys.write_text("ann k-ann\n")
        d = await self.engine()
        router = await self.router("--api-keys-file", str(keys), d=[d])
        asked = (
            "Origin: http://page\r\nAccess-Control-Request-Method: POST\r\n"
            "Access-Control-Request-Headers: authorization, content-type\r\n"
        )
        async with router.client() as client:
            reply = await self.ask(client, "OPTIONS", "/v1/chat/completions", asked)
            self.assertEqual((reply.status, reply.body), (200, b"OK"))
            self.assertEqual(reply.headers["access-control-allow-origin"], "*")
            self.assertIn("POST", reply.headers["access-control-allow-methods"])
            self.assertEqual(
                reply.headers["access-control-allow-headers"], "authorization, content-type"
            )
            # The page may also read the reason of a rejection, on the same connection.
            await client.post("/v1/chat/completions", BODY, "Origin: http://page\r\n")
            reply = await client.reply()
            self.assertEqual(
                (reply.status, reply.headers["access-control-allow-origin"]), (401, "*")
            )
        self.assertEqual(d.requests, [])

    async def test_answers_allow_the_origins_of_the_router_and_not_of_the_engine(self) -> None:
        d = await self.engine(allow_another_origin)
        every = await self.router(d=[d])
        some = await self.router("--cors-origins", "http://a,http://b", d=[d])
        engines = await self.router("--cors-origins", "none", d=[d])
        for router, origin, allowed in (
            (every, "http://x", "*"),
            (every, "", None),
            (some, "http://b", "http://b"),
            (some, "http://x", None),
            (engines, "http://x", "http://engine"),
        ):
            field = f"Origin: {origin}\r\n" if origin else ""
            reply = await router.post("/v1/completions", BODY, field)
            self.assertEqual(reply.status, 200)
            self.assertEqual(reply.headers.get("access-control-allow-origin"), allowed)
            if router is some:
                self.assertEqual(reply.headers["vary"], "Origin")
        async with some.client() as client:
            asked = "Origin: http://x\r\nAccess-Control-Request-Method: POST\r\n"
            reply = await self.ask(client, "OPTIONS", "/v1/completions", asked)
            self.assertEqual(reply.status, 400)
            self.assertNotIn("access-control-allow-origin", reply.headers)

    async def test_pages_may_read_rejections_of_incomplete_requests(self) -> None:
        words = ("--max-header-bytes", "1KiB", "--max-body-bytes", "1KiB", "--body-timeout", "1ms")
        d = await self.engine()
        every = await self.router(*words, d=[d])
        some = await self.router(*words, "--cors-origins", "http://a", d=[d])
        head = b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nOrigin: http://a\r\n"
        many = b"X-Y: z\r\n" * 200
        for request, status, of_some in (
            (
                b"GET / HTTP/1.1\r\n" + many + b"Origin: http://a\r\n",
                431,
                None,
            ),  # Its origin is not read.
            (b"GET\r\n\r\n", 400, None),
            (head + b"Content-Length: 5000\r\n\r\n", 413, "http://a"),
            (head + b"Content-Length: 5\r\n\r\n", 408, "http://a"),
        ):
            for router, allowed in ((every, "*"), (some, of_some)):
                async with router.client() as client:
                    await client.send(request)
                    reply = await client.reply()
                    self.assertEqual(reply.status, status)
                    self.assertEqual(reply.headers.get("access-control-allow-origin"), allowed)
        for limit, status in (("--max-connections-per-address", 429), ("--max-connections", 503)):
            router = await self.router(limit, "1", d=[d])
            async with router.client() as first:
                await self.ask(first, "GET", "/health")
                async with router.client() as second:
                    reply = await second.reply()
                    self.assertEqual(reply.status, status)
                    self.assertEqual(reply.headers["access-control-allow-origin"], "*")

    async def test_methods_of_a_path_are_named(self) -> None:
        d = await self.engine()
        router = await self.router("--pass", "/extra", d=[d])
        async with router.client() as client:
            for path, methods in (("/v1/completions", "POST"), ("/health", "GET, HEAD")):
                reply = await self.ask(client, "OPTIONS", path)
                self.assertEqual((reply.status, reply.headers["allow"]), (204, methods))
                reply = await self.ask(client, "DELETE", path)
                self.assertEqual((reply.status, reply.headers["allow"]), (405, methods))
            self.assertEqual((await self.ask(client, "OPTIONS", "*")).status, 204)
            self.assertEqual((await self.ask(client, "OPTIONS", "/sleep")).status, 404)
        self.assertEqual(d.requests, [])

    async def test_head_is_get_without_a_body_where_the_router_answers(self) -> None:
        d = await self.engine()
        router = await self.router("--pass", "/extra", d=[d])
        async with router.client() as client:
            for path in ("/health", "/metrics", "/version", "/v1/models"):
                reply = await self.ask(client, "HEAD", path)
                self.assertEqual(reply.status, 200, path)
                self.assertGreater(int(reply.headers["content-length"]), 0)
            for path, status in (("/extra", 405), ("/v1/completions", 405), ("/nothing", 404)):
                self.assertEqual((await self.ask(client, "HEAD", path)).status, status)
            await client.post("/v1/completions", BODY)
            self.assertEqual((await client.reply()).status, 200)
        self.assertEqual({each.method for each in d.requests}, {"GET", "POST"})
        d.is_healthy = False
        router = await self.router("--health-interval", "20ms", d=[d])
        await router.wait_for_line("engine is down")
        async with router.client() as client:
            self.assertEqual((await self.ask(client, "HEAD", "/health")).status, 503)


class Requests(RouterTest):
    async def test_a_target_in_absolute_form_and_empty_lines_are_accepted(self) -> None:
        d = await self.engine()
        router = await self.router(d=[d])
        request = b"POST %s HTTP/1.1\r\nHost: r\r\nContent-Length: %d\r\n\r\n%s"
        async with router.client() as client:
            for target, path in (
                (b"http://router:8080/v1/completions?a=b", "/v1/completions?a=b"),
                (b"HTTPS://r/v1/completions", "/v1/completions"),
            ):
                await client.send(b"\r\n" + request % (target, len(BODY), BODY) + b"\r\n")
                self.assertEqual((await client.reply()).status, 200)
                self.assertEqual(d.requests[-1].target, path)
                self.assertEqual(d.requests[-1].headers["host"], d.url.removeprefix("http://"))
            await client.send(request % (b"http://r", 0, b""))
            self.assertEqual((await client.reply()).status, 404)
        for many in (b"\r\n" * 5, b"\n", b"\r\r\n"):
            async with router.client() as client:
                await client.send(many + request % (b"/v1/completions", len(BODY), BODY))
                self.assertEqual((await client.reply()).status, 400, many)

    async def test_an_empty_line_after_a_request_does_not_delay_a_drain(self) -> None:
        d = await self.engine()
        router = await self.router(d=[d])
        async with router.client() as client:
            await client.post("/v1/completions", BODY)
            self.assertEqual((await client.reply()).status, 200)
            await client.send(b"\r\n")
            await router.metrics()  # The empty line has been read.
            self.assertEqual(await router.terminate(), 0)
            self.assertEqual(await client.ended(), b"")

    async def test_targets_with_invalid_bytes_are_rejected(self) -> None:
        d = await self.engine()
        router = await self.router("--pass", "/extra", d=[d])
        for target in (b"/extra?\xe4", b"/extra?a\x80", b"/extra\xff", b"http:///extra",
                       b"http://user@r/extra"):  # fmt: skip
            async with router.client() as client:
                await client.send(b"GET %s HTTP/1.1\r\nHost: r\r\n\r\n" % target)
                self.assertEqual((await client.reply()).status, 400, target)
        self.assertEqual(d.requests, [])

    async def test_an_authorization_without_a_key_does_not_hide_a_key(self) -> None:
        keys = self.scratch() / "keys"
        keys.write_text("ann k-ann\n")
        d = await self.engine()
        router = await self.router("--api-keys-file", str(keys), d=[d])
        key = "x-api-key: k-ann\r\n"
        for field in ("Authorization: Basic dTpw\r\n", "Authorization: Bearer other\r\n"):
            self.assertEqual((await router.post("/v1/completions", BODY, field + key)).status, 200)
            self.assertEqual((await router.post("/v1/completions", BODY, field)).status, 401)
        for got in d.requests:
            self.assertNotIn("k-ann", str(got.headers))

    async def test_an_unrequested_upgrade_reaches_no_client(self) -> None:
        async def upgrade(request: Request, answer: Answer) -> None:
            await answer.raw(
                b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nx"
            )

        odd = await self.engine(upgrade)
        router = await self.router("--retries", "0", d=[odd])
        async with router.client() as client:
            for path in ("/v1/completions", "/v1/responses"):
                await client.post(path, {"prompt": "x"}, "Upgrade: x\r\nConnection: upgrade\r\n")
                reply = await client.reply()
                self.assertEqual((reply.status, reply.headers.get("upgrade")), (502, None))
        good = await self.engine()
        router = await self.router("--decode-policy", "round-robin", d=[odd, good])
        for _ in range(4):
            self.assertEqual((await router.post("/v1/completions", {"prompt": "x"})).status, 200)

    async def test_engines_receive_the_via_field_of_the_router(self) -> None:
        d = await self.engine()
        router = await self.router(d=[d])
        await router.post("/v1/completions", BODY, "Via: 1.1 proxy\r\n")
        # The test's engine keeps the last of several fields.
        self.assertEqual(d.requests[0].headers["via"], "1.1 pegaflow-router")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    unittest.main()
