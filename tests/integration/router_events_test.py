"""--kv-events: engines that report no endpoint are placed by their events all the same."""

from __future__ import annotations

import asyncio
import hashlib
import json
import pathlib
import sys
import time
import unittest
import urllib.request
from collections.abc import Callable
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "support"))

import name_server
from kv_engine import KvEngine, hashes_of
from publishing_engine import BLOCK, PublishingEngine, block_hashes, stored
from router_process import BINARY, INDEX, PATIENCE_S, Router
from score_test import ScoreTest, of, words
from streaming_engine import Answer, Request

OFTEN = ("--health-interval", "50ms", "--event-sources-interval", "50ms")


def stored_in_0_22(tokens: list[int]) -> list[Any]:
    """The event as vLLM wrote it before 0.24: an array, without a session."""
    hashes = block_hashes(tokens)
    return ["BlockStored", hashes, None, tokens[: len(hashes) * BLOCK], BLOCK, None, "GPU", None]


def trtllm_hashes(tokens: list[int]) -> list[int]:
    """The first 64 bits of the block keys of TensorRT-LLM's second cache manager."""
    parent, hashes = hashlib.sha256(b"\0").digest(), []
    for at in range(0, len(tokens) - BLOCK + 1, BLOCK):
        block = b"".join(token.to_bytes(4, "little") for token in tokens[at : at + BLOCK])
        parent = hashlib.sha256(parent + block).digest()
        hashes.append(int.from_bytes(parent[:8], "big"))
    return hashes


def trtllm_event(kind: str, hashes: list[int], tokens: list[int]) -> dict[str, Any]:
    """An event of TensorRT-LLM's publisher: hashes are signed, and there is no session."""
    signed = [h - (1 << 64) if h >> 63 else h for h in hashes]
    if kind == "BlockRemoved":
        return {"type": kind, "block_hashes": signed, "medium": "GPU"}
    return {
        "type": kind, "block_hashes": signed, "parent_block_hash": None, "token_ids": tokens,
        "block_size": BLOCK, "lora_id": None, "medium": "GPU", "lora_name": None,
    }  # fmt: skip


class NamedCase(ScoreTest):
    async def silent(self, rank: int = 0) -> PublishingEngine:
        """An engine that publishes events and does not report where."""
        engine = await PublishingEngine(rank).start()
        self.stack.push_async_callback(engine.stop)
        engine.event_sources = None
        return engine

    async def ready(self, router: Router, *publishers: PublishingEngine) -> None:
        for engine in publishers:
            await engine.wait_for_subscriber()
        await router.wait_for_metrics(
            lambda m: 0 not in [v for k, v in m.items() if k.startswith("engine_models")]
        )

    async def sources(
        self, router: Router, wanted: Callable[[list[dict[str, Any]]], bool] = lambda _: True
    ) -> list[dict[str, Any]]:
        """The sources of /health, in the order of their engines, once they are as wanted."""
        end = time.monotonic() + PATIENCE_S
        while True:
            sources = (await router.get("/health")).json["kv_aware"]["sources"]
            if wanted(sources):
                return sources
            assert time.monotonic() < end, sources
            await asyncio.sleep(0.01)

    async def ask(self, engine: KvEngine, prompt: str) -> None:
        """Sends a prompt to an engine past the router."""
        body = json.dumps({"prompt": prompt}).encode()
        url = f"{engine.url}/v1/completions"
        reply = await asyncio.to_thread(urllib.request.urlopen, url, body)
        reply.close()

    async def complete(self, router: Router, prompt: list[int] | str) -> None:
        reply = await router.post("/v1/completions", {"model": "m", "prompt": prompt})
        self.assertEqual(reply.status, 200, reply.body)


class AtTheRouter(NamedCase):
    async def test_engines_that_report_no_endpoint_are_placed_by_their_events(self) -> None:
        engines = [await self.silent(), await self.silent()]
        names = [f"{engine.url}={engine.endpoint}" for engine in engines]
        router = await self.router(*OFTEN, "--kv-events", ",".join(names), d=engines)
        await self.ready(router, *engines)
        prompts = [list(range(at, at + 64 * BLOCK + 5)) for at in (0, 5000)]
        await engines[1].publish(stored_in_0_22(prompts[0]))
        await engines[0].publish(stored_in_0_22(prompts[1]))
        await self.with_blocks(router, 128)
        for _ in range(6):
            await self.complete(router, prompts[0])
        self.assertEqual([len(e.requests) for e in engines], [0, 6])
        for _ in range(6):
            await self.complete(router, prompts[1])
        self.assertEqual([len(e.requests) for e in engines], [6, 6])
        for source in await self.sources(router):
            engine = next(e for e in engines if e.url == source["url"])
            self.assertEqual(source["endpoint"], engine.endpoint)
            self.assertEqual(source["endpoint_from"], "--kv-events")
            self.assertEqual((source["known_by"], source["events"]), ("events", "exact"))
            self.assertEqual(source["hashes"], "sha256_cbor")

    async def test_history_is_replayed_and_texts_are_learned(self) -> None:
        engines = [await KvEngine().start() for _ in range(2)]
        for engine in engines:
            self.stack.push_async_callback(engine.stop)
            engine.http.event_sources = None
        old = words(0, 400)
        await self.ask(engines[1], old)
        named = [
            word
            for e in engines
            for word in ("--kv-events", f"{e.url}={e.endpoint}+replay={e.replay_endpoint}")
        ]
        router = await self.router(*OFTEN, *named, d=[e.http for e in engines])
        sources = await self.sources(router, lambda all_: {s["events"] for s in all_} == {"exact"})
        blocks = {source["url"]: source["blocks"] for source in sources}
        self.assertEqual(blocks, {engines[0].url: 0, engines[1].url: len(hashes_of(old))})

        text = words(5000, 400)
        await self.complete(router, text)
        first = next(e for e in engines if text in e.prompts)
        await router.wait_for_metrics(lambda m: m["kv_text_learned_total"] > 0)
        for turn in range(6):
            text += words(10_000 * turn, 50)
            await self.complete(router, text)
        self.assertEqual(len([p for p in first.prompts if p != old]), 7)
        self.assertEqual((await router.metrics())['kv_texts_total{known="yes"}'], 6)

    async def test_texts_that_cannot_be_learned_are_not_held_against_the_events(self) -> None:
        engine = await KvEngine().start()
        self.stack.push_async_callback(engine.stop)
        engine.http.event_sources = None
        engine.names_sessions = False
        texts = [words(1000 * i, 100) for i in range(80)]  # More than two judgments take.
        for text in texts:
            await self.ask(engine, text)
        named = f"{engine.url}={engine.endpoint}+replay={engine.replay_endpoint}"
        router = await self.router(*OFTEN, "--kv-events", named, d=[engine.http])
        await self.sources(router, lambda all_: all_[0]["events"] == "exact")
        for text in texts:
            await self.complete(router, text)
        metrics = await router.metrics()
        self.assertEqual(metrics["kv_predicted_tokens_total"], 0)
        self.assertGreater(metrics["kv_cached_tokens_total"], 10_000)
        (source,) = await self.sources(router)
        self.assertEqual((source["events"], source["restarts"]), ("exact", 0))
        self.assertFalse(any("cached tokens were predicted" in line for line in router.log))

    async def test_tensorrt_llm_is_sent_no_members_that_it_would_reject(self) -> None:
        async def strict(request: Request, answer: Answer) -> None:
            extra = set(request.json) - {"model", "prompt"}
            await answer.whole(b'{"choices":[{"text":"x"}]}', 400 if extra else 200)

        trtllm, vllm = await self.silent(), await self.silent()
        trtllm.behavior = strict
        trtllm.models, vllm.models = ["t"], ["v"]
        router = await self.router(
            *OFTEN, "--kv-events", f"{trtllm.url}={trtllm.endpoint}+format=trtllm",
            "--kv-events", f"{vllm.url}={vllm.endpoint}", d=[trtllm, vllm],
        )  # fmt: skip
        await self.ready(router, trtllm, vllm)
        tokens = list(range(1000, 1000 + 40 * BLOCK))
        await trtllm.publish(trtllm_event("BlockStored", trtllm_hashes(tokens), tokens))
        await self.with_blocks(router, 40)
        for model in ("t", "v"):
            reply = await router.post("/v1/completions", {"model": model, "prompt": words(0, 800)})
            self.assertEqual(reply.status, 200, reply.body)
        self.assertEqual([len(trtllm.requests), len(vllm.requests)], [1, 1])
        self.assertIn("vllm_xargs", vllm.requests[0].json)
        await trtllm.publish(trtllm_event("BlockRemoved", trtllm_hashes(tokens)[8:], []))
        await self.with_blocks(router, 8)

    async def test_the_option_replaces_what_the_engine_reports(self) -> None:
        engine, other = await self.silent(), await self.silent()
        wrong = {"0": {"publisher": "zmq", "endpoint": other.endpoint}}
        engine.event_sources = json.dumps(wrong).encode()
        router = await self.router(
            *OFTEN, "--kv-events", f"{engine.url}={engine.endpoint}", d=[engine]
        )
        await self.ready(router, engine)
        await other.publish(stored(list(range(32 * BLOCK))))
        await engine.publish(stored(list(range(8 * BLOCK))))
        await self.with_blocks(router, 8)
        # The interval passes, and the engine comes back: neither changes the endpoint.
        engine.is_healthy = False
        await router.wait_for_line("engine is down")
        engine.is_healthy = True
        await router.wait_for_line("engine is up")
        (source,) = await self.sources(router)
        self.assertEqual((source["endpoint"], source["blocks"]), (engine.endpoint, 8))

    async def test_each_rank_has_its_endpoint_and_requests_name_the_rank(self) -> None:
        engine, second = await self.silent(), await self.silent(rank=1)
        router = await self.router(
            *OFTEN, "--kv-events", f"{engine.url}={engine.endpoint}",
            "--kv-events", f"{engine.url}={second.endpoint}+rank=1", d=[engine],
        )  # fmt: skip
        await self.ready(router, engine, second)
        prompts = [list(range(at, at + 64 * BLOCK + 5)) for at in (0, 5000)]
        await engine.publish(stored(prompts[0]))
        await second.publish(stored(prompts[1]))
        await self.with_blocks(router, 128)
        for prompt in prompts:
            await self.complete(router, prompt)
        ranks = [r.headers.get("x-data-parallel-rank") for r in engine.requests]
        self.assertEqual(ranks, ["0", "1"])

    async def test_the_endpoint_of_a_name_is_that_of_each_of_its_addresses(self) -> None:
        at, address = name_server.bind(self)
        names = await name_server.NameServer.start(at)
        self.stack.callback(names.close)
        engine = await self.silent()
        names.addresses["d.test"] = ["127.0.0.1"]
        port = engine.endpoint.rsplit(":", 1)[1]
        router = await Router.start(
            "--decode", f"dns://d.test:{engine.port}", *OFTEN,
            "--kv-events", f"dns://d.test:{engine.port}=tcp://d.test:{port}",
            prefix=name_server.prefix(address, self.scratch()),
        )  # fmt: skip
        self.stack.push_async_callback(router.stop)
        await self.ready(router, engine)
        await engine.publish(stored(list(range(8 * BLOCK))))
        await self.with_blocks(router, 8)
        (source,) = await self.sources(router)
        self.assertEqual((source["url"], source["endpoint"]), (engine.url, engine.endpoint))

    async def test_sglang_named_by_hand_gets_the_session_in_the_body(self) -> None:
        engine = await self.engine()
        named = f"{engine.url}=tcp://127.0.0.1:1+format=sglang"  # No one listens there.
        router = await self.router(*OFTEN, "--kv-events", named, d=[engine])
        await self.sources(router, lambda all_: all_[0]["endpoint"] is not None)
        await self.complete(router, "a" * 4096)
        self.assertTrue(engine.requests[0].json["session_id"].startswith("pf1:"))

    async def test_an_engine_may_be_named_before_the_file_lists_it(self) -> None:
        engine, later = await self.engine(), await self.silent()
        file = self.scratch() / "engines"
        file.write_text(f"decode {engine.url}\n")
        router = await self.router(
            *OFTEN, "--engines-file", str(file), "--kv-events", f"{later.url}={later.endpoint}"
        )
        await router.wait_for_line(f"--engines-file does not list now engine={later.url}")
        file.write_text(f"decode {engine.url}\ndecode {later.url}\n")
        await self.ready(router, later)
        sources = await self.sources(router)
        self.assertEqual({s["url"]: s["endpoint"] for s in sources},
                         {engine.url: None, later.url: later.endpoint})  # fmt: skip


class AtTheIndex(NamedCase):
    """pegaflow-index, with the option in its environment."""

    async def named_index(self, *engines: PublishingEngine, fields: str = "") -> Router:
        value = ",".join(f"{engine.url}={engine.endpoint}{fields}" for engine in engines)
        urls = [word for engine in engines for word in ("--engines", engine.url)]
        index = await Router.start(
            *urls, *OFTEN, binary=INDEX, prefix=("env", f"PEGA_KV_EVENTS={value}")
        )
        self.stack.push_async_callback(index.stop)
        await self.ready(index, *engines)
        return index

    async def test_scores_count_the_events_of_a_named_endpoint(self) -> None:
        engines = [await self.silent(), await self.silent()]
        index = await self.named_index(*engines)
        prompt = list(range(40 * BLOCK + 3))
        await engines[1].publish(stored_in_0_22(prompt))
        await self.with_blocks(index, 40)
        answer = await self.score(index, token_ids=prompt)
        self.assertEqual(answer["keys"], "computed")
        self.assertEqual([of(answer, engine)["gpu"] for engine in engines], [0, 40])

    async def test_events_of_tensorrt_llm_count_for_keys_and_for_texts_that_were_taught(
        self,
    ) -> None:
        engines = [await self.silent(), await self.silent()]
        index = await self.named_index(*engines, fields="+format=trtllm")
        tokens = list(range(1000, 1000 + 40 * BLOCK))
        hashes = trtllm_hashes(tokens)
        self.assertTrue(any(h >> 63 for h in hashes))
        await engines[1].publish(trtllm_event("BlockStored", hashes, tokens))
        await self.with_blocks(index, 40)
        keys = [f"{h:016x}" for h in hashes]
        answer = await self.score(index, keys=keys, prompt_tokens=len(tokens) + 3)
        self.assertEqual([of(answer, engine)["gpu"] for engine in engines], [0, 40])
        self.assertEqual(answer["engines"][0]["engine"], engines[1].url)

        text = words(0, 400)
        taught = await index.post("/learn", {"model": "m", "prompt": text, "keys": keys})
        self.assertEqual(taught.status, 200, taught.body)
        answer = await self.score(index, prompt=text + words(500, 50))
        self.assertEqual(answer["keys"], "learned")
        self.assertGreater(of(answer, engines[1])["gpu"], 30)

        await engines[1].publish(trtllm_event("BlockRemoved", hashes[10:], []))
        await self.with_blocks(index, 10)
        answer = await self.score(index, keys=keys)
        self.assertEqual(of(answer, engines[1])["gpu"], 10)
        await engines[1].publish({"type": "AllBlocksCleared"})
        await self.with_blocks(index, 0)


class Refused(ScoreTest):
    async def test_a_wrong_value_ends_the_start_with_the_value_and_the_fix(self) -> None:
        known, other = "http://127.0.0.1:1", "http://127.0.0.1:2"
        by_load = ("--decode-policy", "least-load", "--prefill-policy", "least-load")
        for program, option, value, more, expected in (
            (BINARY, "--decode", f"{known}=tcp://*:5557", (),
             f"--kv-events: \"{known}=tcp://*:5557\": event endpoint: 'tcp://*:5557' is an address "
             "to listen at; name the host to connect to, as in tcp://10.0.0.1:5557"),
            (BINARY, "--decode", f"{other}=tcp://a:5557", (),
             f'--kv-events: "{other}" is not the URL of an engine; add it to --decode or '
             "--prefill, or correct it"),
            (INDEX, "--engines", f"{other}=tcp://a:5557", (),
             f'--kv-events: "{other}" is not the URL of an engine; add it to --engines, or '
             "correct it"),
            (INDEX, "--engines", f"{known}=tcp://a:1,{known}=tcp://a:2", (),
             f'--kv-events: "{known}=tcp://a:2": rank 0 of {known} is named twice; give each rank '
             "one value, with rank=R"),
            (BINARY, "--decode", f"{known}=tcp://a:1", by_load,
             "--kv-events has no effect: no policy is kv-aware"),
        ):  # fmt: skip
            process = await asyncio.create_subprocess_exec(
                program, "--listen", "127.0.0.1:0", option, known, "--kv-events", value, *more,
                stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            _, errors = await asyncio.wait_for(process.communicate(), PATIENCE_S)
            self.assertEqual(process.returncode, 1, value)
            self.assertIn(expected, errors.decode())


if __name__ == "__main__":
    unittest.main()
