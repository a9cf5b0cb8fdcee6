"""The policy kv-aware with servers and engines that fail or lie: no request fails by it."""

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
