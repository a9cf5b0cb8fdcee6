"""The policy kv-aware with servers and engines that fail or lie: no request fails by it."""

import json
import os
import pathlib
import signal
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "support"))

from router_case import RouterTest
from streaming_engine import STREAM, Answer, Request

LINKS = (
    b'{"node":"5f0c5f0c5f0c5f0c5f0c5f0c5f0c5f0c","links":[],"engines":[{"instance":"i",'
    b'"state":"connected","namespace":"abababababababababababababababab",'
    b'"block_bytes":1024,"block_tokens":16}]}'
)


async def without_blocks(request: Request, answer: Answer) -> None:
    """A server that tells its links, and no blocks."""
    if request.target == "/links":
        await answer.whole(LINKS)
    else:
        await answer.whole(b"", 404)


async def one_event(request: Request, answer: Answer) -> None:
    request.body = b""
    await answer.begin_stream()
    await answer.piece(STREAM[0])
    await request.gone.wait()


class KvAware(RouterTest):
    def secret(self) -> str:
        path = self.scratch() / "secret"
        path.write_text("0123456789abcdef-example\n")
        os.chmod(path, 0o600)
        return str(path)

    async def test_a_router_that_waits_to_list_a_pool_again_ends_at_once(self) -> None:
        server = await self.engine(without_blocks)
        router = await self.router(
            "--servers", server.url, "--peer-secret-file", self.secret(),
            "--health-interval", "10m",
            d=[await self.engine()],
        )  # fmt: skip
        await router.wait_for_metrics(
            lambda m: (
                any(k.startswith("kv_pool_trusted") for k in m)
                and any(r.target.startswith("/blocks") for r in server.requests)
            )
        )
        router.signal(signal.SIGTERM)
        self.assertEqual(await router.ended(), 0)

    async def test_sglang_names_its_events_and_gets_the_session_in_the_body(self) -> None:
        # No one listens there: without events an engine serves as before.
        events = {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 1, "topic": "",
                  "block_size": 64, "dp_size": 1}  # fmt: skip
        engine = await self.engine()
        engine.server_info = {"kv_events": events, "version": "0.5.23"}
        router = await self.router("--health-interval", "100ms", d=[engine])
        await router.wait_for_metrics(
            lambda m: any('state="unknown"' in k or 'state="syncing"' in k for k in m)
        )
        async with router.client() as client:
            own = {"prompt": "a" * 4096, "session_id": "mine"}
            for body in ({"prompt": "a" * 4096}, own):
                await client.post("/v1/completions", body)
                await client.reply()
        named, kept = (json.loads(r.body) for r in engine.requests if r.method == "POST")
        self.assertTrue(named["session_id"].startswith("pf1:"), named)
        self.assertEqual(kept["session_id"], "mine")

    async def test_sglang_with_sessions_of_its_tree_gets_no_session(self) -> None:
        engine = await self.engine()
        events = {"publisher": "zmq", "endpoint_port_base": 1, "dp_size": 1}
        engine.server_info = {"enable_session_radix_cache": True, "kv_events": events}
        router = await self.router("--health-interval", "100ms", d=[engine])
        await router.wait_for_metrics(
            lambda m: any('state="unknown"' in k or 'state="syncing"' in k for k in m)
        )
        async with router.client() as client:
            await client.post("/v1/completions", {"prompt": "a" * 4096})
            await client.reply()
        (sent,) = (json.loads(r.body) for r in engine.requests if r.method == "POST")
        self.assertNotIn("session_id", sent)

    async def test_an_engine_whose_metrics_fail_is_asked_again_before_one_without_them(
        self,
    ) -> None:
        fails, has_none = await self.engine(), await self.engine()
        fails.load, fails.load_status = "", 503
        has_none.load = "# A page without the load.\n"
        times = ("--health-interval", "20ms", "--engine-load-interval", "20ms")
        router = await self.router(*times, d=[fails, has_none])
        await router.wait_for_metrics(
            lambda _: fails.load_questions >= 4 and has_none.load_questions >= 1
        )
        self.assertEqual(has_none.load_questions, 1)

    async def test_open_streams_keep_nothing_of_their_prompts(self) -> None:
        router = await self.router(d=[await self.engine(one_event)])
        grown = []
        for i in range(48):
            if i == 8:  # Buffers and the index exist by then.
                grown.append(router.resident_bytes())
            client = await self.stack.enter_async_context(router.client())
            await client.post("/v1/completions", {"prompt": f"{i:7} " * 125_000, "stream": True})
            await client.head()
            await client.chunk()
        metrics = await router.metrics()
        self.assertEqual(metrics["body_bytes"], 0)
        self.assertEqual(metrics["requests_in_flight"], 49)
        # 40 prompts of 1 MB.
        self.assertLess(router.resident_bytes() - grown[0], 10_000_000)


if __name__ == "__main__":
    unittest.main()
