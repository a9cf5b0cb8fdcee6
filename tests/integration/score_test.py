"""pegaflow-index, and the scores of the router: callers get what engines announce."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import re
import shlex
import sys
import unittest
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "support"))
# The package needs its native module, and this file of it does not.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "pyclient/pegaflow/cli"))

from publishing_engine import BLOCK, PublishingEngine, block_hashes, stored, tokenize
from router_case import RouterTest
from router_process import INDEX, Reply, Router
from secret import http_token

ROOT = pathlib.Path(__file__).resolve().parents[2]
SECRET = b"0123456789abcdef-example"


def words(start: int, count: int) -> str:
    return " ".join(f"word{start + i}" for i in range(count))


def of(answer: dict[str, Any], engine: PublishingEngine) -> dict[str, Any]:
    return next(each for each in answer["engines"] if each["engine"] == engine.url)


class ScoreTest(RouterTest):
    async def publishing(self) -> PublishingEngine:
        engine = await PublishingEngine().start()
        self.stack.push_async_callback(engine.stop)
        return engine

    async def index(self, *options: str, engines: list[PublishingEngine]) -> Router:
        urls = [word for engine in engines for word in ("--engines", engine.url)]
        index = await Router.start(*urls, "--health-interval", "50ms", *options, binary=INDEX)
        self.stack.push_async_callback(index.stop)
        for engine in engines:
            await engine.wait_for_subscriber()
        await index.wait_for_metrics(
            lambda m: sum(v for k, v in m.items() if k.startswith("engine_models")) == len(engines)
        )
        return index

    async def with_blocks(self, index: Router, blocks: int) -> None:
        await index.wait_for_metrics(
            lambda m: sum(v for k, v in m.items() if k.startswith("kv_blocks{")) == blocks
        )

    def secret(self) -> str:
        path = self.scratch() / "secret"
        path.write_bytes(SECRET)
        os.chmod(path, 0o600)
        return str(path)

    async def score(self, index: Router, **body: Any) -> dict[str, Any]:
        reply = await index.post("/score", {"model": "m", **body})
        self.assertEqual(reply.status, 200, reply.body)
        return reply.json


class Index(ScoreTest):
    async def test_token_ids_keys_and_the_dump_agree_with_what_an_engine_announced(self) -> None:
        engines = [await self.publishing(), await self.publishing()]
        index = await self.index(engines=engines)
        prompt = list(range(1000, 1000 + 40 * BLOCK + 3))
        before = await self.score(index, token_ids=prompt)
        self.assertEqual((before["keys"], len(before["engines"])), ("unknown", 2))
        await engines[0].publish(stored(prompt))
        await engines[1].publish(stored(prompt[: 10 * BLOCK]))
        await self.with_blocks(index, 50)

        answer = await self.score(index, token_ids=prompt)
        self.assertEqual(answer["keys"], "computed")
        self.assertEqual(answer["engines"][0]["engine"], engines[0].url)
        self.assertEqual([of(answer, e)["gpu"] for e in engines], [40, 10])
        self.assertEqual(of(answer, engines[1])["uncached_tokens"], len(prompt) - 10 * BLOCK)
        given = await self.score(index, keys=block_hashes(prompt), candidates=[engines[1].url])
        self.assertEqual([each["gpu"] for each in given["engines"]], [10])

        health = (await index.get("/health")).json
        self.assertEqual({s["hashes"] for s in health["kv_aware"]["sources"]}, {"sha256_cbor"})
        listed = {}
        for source in (await index.get("/index/dump")).json["sources"]:
            cursor, keys = 0, set()
            while cursor is not None:
                target = f"/index/dump?source={source['source']}&cursor={cursor}"
                part = (await index.get(target)).json
                keys |= {int(key, 16) for key in part["keys"]}
                cursor = part["cursor"]
            listed[source["engine"]] = keys
        self.assertEqual(listed[engines[0].url], set(block_hashes(prompt)))
        self.assertEqual(listed[engines[1].url], set(block_hashes(prompt)[:10]))

    async def test_all_its_log_lines_have_its_own_name(self) -> None:
        engine = await self.publishing()
        index = await self.index(engines=[engine])
        await index.wait_for_line("the state of an engine's events")
        names = {line.split(": ", 1)[0].split()[-1] for line in index.log}
        self.assertEqual(names, {"index"}, index.log)

    async def test_a_salted_prompt_is_computed_once_a_salted_one_was_announced(self) -> None:
        engine = await self.publishing()
        index = await self.index(engines=[engine])
        prompt = list(range(500, 500 + 8 * BLOCK + 1))
        await engine.publish(stored(prompt), stored(prompt, "tenant-a"), stored(prompt, "tenant-b"))
        await self.with_blocks(index, 24)
        for salt in ("tenant-a", "tenant-b"):
            answer = await self.score(index, token_ids=prompt, cache_salt=salt)
            self.assertEqual((answer["keys"], of(answer, engine)["gpu"]), ("computed", 8))
        answer = await self.score(index, token_ids=prompt, cache_salt="tenant-c")
        self.assertEqual(of(answer, engine)["gpu"], 0)

    async def test_a_text_is_rendered_once_and_known_without_the_renderer_then(self) -> None:
        engine = await self.publishing()
        index = await self.index("--render", engine.url, "--render-timeout", "10s",
                                 engines=[engine])  # fmt: skip
        text = words(0, 400)
        body = {"prompt": text}
        await engine.publish(stored(tokenize(body)))
        await self.with_blocks(index, 400 // BLOCK)
        rendered = await self.score(index, **body)
        self.assertEqual(rendered["keys"], "rendered")
        self.assertTrue(rendered["prompt_tokens_exact"])
        self.assertEqual(of(rendered, engine)["gpu"], 400 // BLOCK - 1)  # The last is computed.
        asked = [r for r in engine.requests if r.target == "/tokenize"]
        again = await self.score(index, **body)
        self.assertEqual(again["keys"], "learned")
        self.assertGreater(of(again, engine)["gpu"], 0)
        self.assertEqual(len([r for r in engine.requests if r.target == "/tokenize"]), len(asked))
        engine.refuses_tokenize = True
        unknown = await self.score(index, prompt=words(5000, 400))
        self.assertEqual(unknown["keys"], "unknown")
        self.assertFalse(unknown["prompt_tokens_exact"])
        metrics = await index.metrics()
        self.assertEqual(metrics['renders_total{result="rendered"}'], 1)
        self.assertEqual(metrics['renders_total{result="failed"}'], 1)

    async def test_requests_that_are_wrong_are_refused_and_the_member_is_named(self) -> None:
        engine = await self.publishing()
        index = await self.index("--max-body-bytes", "64kb", engines=[engine])

        async def refused(body: bytes | dict[str, Any], status: int = 400) -> str:
            reply = await index.post("/score", body)
            self.assertEqual(reply.status, status, reply.body)
            return str(reply.json["error"]["message"])

        self.assertIn("exactly one of", await refused({"model": "m"}))
        self.assertIn('"token_ids": element 1', await refused({"token_ids": [1, "x"]}))
        self.assertIn('"keys": element 0', await refused({"keys": [-1]}))
        self.assertIn("not JSON", await refused(b'{"keys":[1'))
        self.assertIn("`other`", await refused({"model": "other", "keys": [1]}, 404))
        await refused(b" " * 100_000, 413)
        for method, path, status in (("GET", "/score", 405), ("GET", "/v1/models", 404)):
            async with index.client() as client:
                await client.send(f"{method} {path} HTTP/1.1\r\nHost: i\r\n\r\n".encode())
                self.assertEqual((await client.reply()).status, status)
        self.assertEqual(await index.terminate(), 0)

    async def test_an_engine_that_is_gone_gives_no_credit(self) -> None:
        engines = [await self.publishing(), await self.publishing()]
        index = await self.index(engines=engines)
        prompt = list(range(8 * BLOCK + 1))
        await engines[0].publish(stored(prompt))
        await self.with_blocks(index, 8)
        engines[0].is_healthy = False
        await index.wait_for_metrics(lambda m: 0 in [v for k, v in m.items() if "engine_up" in k])
        answer = await self.score(index, token_ids=prompt)
        self.assertFalse(of(answer, engines[0])["up"])
        await engines[0].publish({"type": "AllBlocksCleared"})
        await self.with_blocks(index, 0)
        answer = await self.score(index, token_ids=prompt)
        self.assertEqual(of(answer, engines[0])["gpu"], 0)


class Access(ScoreTest):
    async def test_an_address_that_others_reach_needs_a_key_or_the_secret(self) -> None:
        process = await asyncio.create_subprocess_exec(
            INDEX, "--engines", "http://127.0.0.1:1", "--listen", "0.0.0.0:0",
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        _, errors = await process.communicate()
        self.assertEqual(process.returncode, 1)
        self.assertIn(b"needs --api-keys-file or --peer-secret-file", errors)

    async def post(self, to: Router, path: str, body: bytes, authorization: str) -> Reply:
        return await to.post(path, body, f"Authorization: Bearer {authorization}\r\n")

    async def test_a_key_or_a_token_that_covers_the_body_gives_access(self) -> None:
        engine = await self.publishing()
        keys = self.scratch() / "keys"
        keys.write_text("gateway 0123456789abcdef\nslow fedcba9876543210 1\n")
        index = await self.index(
            "--api-keys-file", str(keys), "--peer-secret-file", self.secret(), engines=[engine]
        )
        body = b'{"keys":[1]}'
        self.assertEqual((await index.post("/score", body)).status, 401)
        for path in ("/health", "/metrics", "/version"):
            self.assertEqual((await index.get(path)).status, 200)
        self.assertEqual((await self.post(index, "/score", body, "wrong")).status, 401)
        self.assertEqual((await self.post(index, "/score", body, "0123456789abcdef")).status, 200)
        token = http_token(SECRET, "POST", "/score", body)
        self.assertEqual((await self.post(index, "/score", body, token)).status, 200)
        self.assertEqual((await self.post(index, "/score", b'{"keys":[2]}', token)).status, 401)
        statuses = [
            (await self.post(index, "/score", body, "fedcba9876543210")).status for _ in range(3)
        ]
        self.assertEqual(statuses[0], 200)
        self.assertIn(429, statuses[1:])
        self.assertEqual((await index.get("/index/dump")).status, 401)
        dump = http_token(SECRET, "GET", "/index/dump")
        reply = await index.get("/index/dump", f"Authorization: Bearer {dump}\r\n")
        self.assertEqual(reply.status, 200)


class AtTheRouter(ScoreTest):
    async def test_the_router_scores_for_those_who_have_the_secret(self) -> None:
        engine = await self.publishing()
        bare = await self.router(d=[engine])
        body = b'{"model":"m","token_ids":' + json.dumps(list(range(100))).encode() + b"}"
        self.assertEqual((await bare.post("/kv/score", body)).status, 403)
        router = await self.router(
            "--peer-secret-file", self.secret(), "--health-interval", "50ms", d=[engine]
        )
        self.assertEqual((await router.post("/kv/score", body)).status, 401)
        for _ in ("bare", "router"):
            await engine.wait_for_subscriber()
        await router.wait_for_metrics(
            lambda m: sum(v for k, v in m.items() if k.startswith("engine_models")) == 1
        )
        await engine.publish(stored(list(range(100))))
        await self.with_blocks(router, 6)
        token = http_token(SECRET, "POST", "/kv/score", body)
        reply = await router.post("/kv/score", body, f"Authorization: Bearer {token}\r\n")
        self.assertEqual(reply.status, 200, reply.body)
        self.assertEqual(of(reply.json, engine)["gpu"], 6)

    async def test_a_prompt_of_token_ids_is_placed_by_its_blocks_without_a_lesson(self) -> None:
        engines = [await self.publishing(), await self.publishing()]
        router = await self.router("--health-interval", "50ms", d=engines)
        for engine in engines:
            await engine.wait_for_subscriber()
        await router.wait_for_metrics(
            lambda m: sum(v for k, v in m.items() if k.startswith("engine_models")) == 2
        )
        prompt = list(range(64 * BLOCK + 5))
        await engines[1].publish(stored(prompt))
        await self.with_blocks(router, 64)
        for _ in range(8):
            reply = await router.post("/v1/completions", {"model": "m", "prompt": prompt})
            self.assertEqual(reply.status, 200)
        self.assertEqual(len(engines[1].requests), 8)
        sent = engines[1].requests[-1]
        self.assertNotIn("vllm_xargs", sent.json)  # There is nothing to learn.
        self.assertNotIn("x-session-id", sent.headers)
        metrics = await router.metrics()
        self.assertEqual(metrics['kv_token_prompts_total{keys="computed"}'], 8)


class Page(ScoreTest):
    async def test_the_examples_of_the_page_work_as_they_are_printed(self) -> None:
        engine = await self.publishing()
        index = await self.index(engines=[engine])
        await engine.publish(stored(list(range(1, 101))))
        await self.with_blocks(index, 6)
        page = (ROOT / "docs" / "score.md").read_text()
        commands = re.findall(r"^curl (?:.*\\\n)*.*(?:\n +\"token_ids.*)?$", page, re.MULTILINE)
        self.assertGreaterEqual(len(commands), 5)
        for command in commands:
            line = command.replace("127.0.0.1:8090", f"127.0.0.1:{index.port}")
            words = shlex.split(line.replace("\\\n", " "))
            process = await asyncio.create_subprocess_exec(
                *words, "--fail-with-body", stdout=asyncio.subprocess.PIPE
            )
            output, _ = await process.communicate()
            self.assertEqual(process.returncode, 0, (command, output))
            if "/metrics" not in command:
                json.loads(output)


if __name__ == "__main__":
    unittest.main()
