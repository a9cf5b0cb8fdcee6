"""Engines of the router: from flags, files and names; their choice, and their servers' reports."""

import asyncio
import json
import os
import pathlib
import signal
import sys
import unittest
from collections.abc import Callable

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "support"))

import name_server
from router_case import RouterTest
from router_process import Router
from streaming_engine import Answer, Request, StreamingEngine, wait_for_leaving


class Choosing(RouterTest):
    async def test_a_session_stays_at_its_engine(self) -> None:
        engines = [await self.engine() for _ in range(3)]
        router = await self.router("--decode-policy", "consistent-hash", d=engines)
        used = set()
        for session in range(12):
            before = [len(e.requests) for e in engines]
            for i in range(4):
                await router.post(
                    "/v1/completions", {"prompt": f"{i}"}, f"X-Session-ID: {session}\r\n"
                )
            grown = [len(e.requests) - b for e, b in zip(engines, before, strict=True)]
            self.assertEqual(sorted(grown), [0, 0, 4])
            used.add(grown.index(4))
        self.assertGreater(len(used), 1)

    async def test_a_follow_up_goes_to_the_engine_of_its_response(self) -> None:
        async def respond(request: Request, answer: Answer) -> None:
            name = f"resp_{d.index(next(e for e in d if request in e.requests))}"
            await answer.whole(json.dumps({"id": name}).encode())

        d = [await self.engine(respond) for _ in range(3)]
        router = await self.router("--decode-policy", "round-robin", d=d)
        for _ in range(3):
            await router.post("/v1/responses", {"input": "x"})
        for i in (2, 0, 1, 1):
            reply = await router.post("/v1/responses", {"previous_response_id": f"resp_{i}"})
            self.assertEqual(reply.json["id"], f"resp_{i}")
            self.assertEqual((await router.get(f"/v1/responses/resp_{i}")).json["id"], f"resp_{i}")

    async def test_engines_are_added_and_removed_with_their_file(self) -> None:
        a, b = await self.engine(wait_for_leaving), await self.engine()
        file = self.scratch() / "engines"
        file.write_text(f"# one\ndecode {a.url}\n")
        router = await self.router("--engines-file", str(file), "--health-interval", "20ms")
        async with router.client() as client:
            await client.post("/v1/completions", {"prompt": "x"})
            await a.wait_for(1)
            file.write_text("nonsense\n")
            await router.wait_for_line("the list of engines stays unchanged")
            file.write_text(f"decode {b.url}\n")
            await router.wait_for_line("engines changed engines=1")
            self.assertEqual((await router.post("/v1/completions", {"prompt": "x"})).status, 200)
            self.assertEqual(len(b.requests), 1)
            self.assertFalse(a.requests[0].gone.is_set())
            self.assertEqual((await router.metrics())["engine_list_errors_total"], 1)

    async def test_each_address_of_a_name_is_an_engine(self) -> None:
        at, address = name_server.bind(self)
        names = await name_server.NameServer.start(at)
        self.stack.callback(names.close)
        a, hosts = await self.engine(), [f"127.2.{i}.{os.getpid() & 255}" for i in range(1, 4)]
        b, c, d = [StreamingEngine(host=host, port=a.port) for host in hosts]
        for engine in (b, c, d):
            await engine.start()
            self.stack.push_async_callback(engine.stop)

        def up(*engines: StreamingEngine) -> Callable[[dict[str, float]], bool]:
            wanted = {f'engine_up{{role="decode",engine="{each.url}"}}' for each in engines}
            return lambda m: {k for k in m if k.startswith("engine_up")} == wanted

        # Addresses of both families are mostly one engine's: IPv6 is for names without IPv4.
        names.addresses["d.test"] = [*hosts[:2], "::1"]
        router = await Router.start(
            "--decode", f"dns://D.test:{a.port}", "--health-interval", "20ms",
            prefix=name_server.prefix(address, self.scratch()),
        )  # fmt: skip
        self.stack.push_async_callback(router.stop)
        self.assertIn("engines=2", await router.wait_for_line("ready listen="))
        self.assertTrue(up(b, c)(await router.metrics()))
        for _ in range(4):
            self.assertEqual((await router.post("/v1/completions", {"prompt": "x"})).status, 200)
        self.assertEqual((len(b.requests), len(c.requests)), (2, 2))

        # An engine that leaves its name finishes its requests; a new one gets requests.
        b.behavior = c.behavior = wait_for_leaving
        async with router.client() as one, router.client() as two:
            for client in (one, two):
                await client.post("/v1/completions", {"prompt": "stays"})
            await asyncio.gather(b.wait_for(3), c.wait_for(3))
            names.addresses["d.test"] = hosts[1:]
            await router.wait_for_metrics(up(c, d))
            for _ in range(4):
                reply = await router.post("/v1/completions", {"prompt": "x"})
                self.assertEqual(reply.status, 200)
            self.assertEqual((len(b.requests), len(c.requests), len(d.requests)), (3, 3, 4))
            self.assertFalse(b.requests[-1].gone.is_set())

        # Without a reply the engines stay as they were.
        names.addresses.clear()
        await router.wait_for_line("a name could not be resolved: dns://D.test")
        await router.wait_for_metrics(lambda m: m["name_errors_total"] > 3)
        self.assertTrue(up(c, d)(await router.metrics()))
        self.assertEqual(sum("a name could not be resolved" in line for line in router.log), 1)
        names.addresses["d.test"] = ["::1"]
        await router.wait_for_metrics(
            lambda m: f'engine_up{{role="decode",engine="http://[::1]:{a.port}"}}' in m
        )

    async def test_a_server_with_invalid_responses_is_down(self) -> None:
        async def instances(request: Request, answer: Answer) -> None:
            self.assertEqual((request.method, request.target), ("GET", "/instances"))
            await answer.whole(said[0], said[1])

        d, server = await self.engine(), await self.engine(instances)
        said: tuple[bytes, int] = (b'{"instances":[]}', 200)
        router = await self.router("--servers", server.url, "--health-interval", "20ms", d=[d])
        up = f'server_up{{server="{server.url}"}}'
        await router.wait_for_metrics(lambda m: m[up] == 1)
        self.assertEqual((await router.get("/health")).json["status"], "ok")
        for said, why in (
            ((b"{}", 503), "status 503"),
            ((b"{}", 200), "is missing"),
            ((b"no", 200), "at byte"),
        ):
            router.log.clear()
            line = await router.wait_for_line("a server does not return its namespaces")
            self.assertIn(why, line)
            await router.wait_for_metrics(lambda m: m[up] == 0)
            health = await router.get("/health")
            self.assertEqual((health.status, health.json["status"]), (200, "degraded"))
            said = (b'{"instances":[]}', 200)
            await router.wait_for_line("a server returns its namespaces again")
        await server.stop()
        await router.wait_for_metrics(lambda m: m[up] == 0)
        self.assertEqual((await router.post("/v1/completions", {"prompt": "x"})).status, 200)

    async def test_keys_are_reloaded_when_their_files_change(self) -> None:
        folder, d = self.scratch(), await self.engine()
        keys, engine_key = folder / "keys", folder / "engine"
        keys.write_text("ann k-ann\nbob k-bob 1\n")
        engine_key.write_text("first\n")
        router = await self.router(
            "--api-keys-file", str(keys), "--engine-api-key-file", str(engine_key),
            "--health-interval", "20ms", d=[d],
        )  # fmt: skip

        async def status(key: str) -> int:
            headers = f"Authorization: Bearer {key}\r\n"
            return (await router.post("/v1/completions", {"prompt": "x"}, headers)).status

        self.assertEqual([await status(key) for key in ("k-ann", "k-new")], [200, 401])
        self.assertEqual(await status("k-bob"), 200)

        def replace(file: pathlib.Path, text: str) -> None:
            (folder / "next").write_text(text)
            (folder / "next").rename(file)

        replace(keys, "eve k-new\nbob k-bob 1\n")
        replace(engine_key, "second\n")
        await router.wait_for_line("API keys were read again keys=2")
        await router.wait_for_line("the engines' API key was read again")
        self.assertEqual([await status(key) for key in ("k-ann", "k-new")], [401, 200])
        self.assertEqual(d.requests[-1].headers["authorization"], "Bearer second")
        # An invalid file changes nothing: one that is being written, or is gone.
        replace(keys, "eve\n")
        await router.wait_for_line("the API keys stay unchanged: .*line 1")
        replace(keys, "")
        await router.wait_for_line("the API keys stay unchanged: .*the file has no key")
        keys.unlink()
        await router.wait_for_line("the API keys stay unchanged: .*cannot be read")
        engine_key.unlink()
        await router.wait_for_line("the engines' API key stays unchanged: .*cannot be read")
        self.assertEqual(await status("k-new"), 200)
        self.assertEqual((await router.metrics())["key_file_errors_total"], 4)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    unittest.main()
