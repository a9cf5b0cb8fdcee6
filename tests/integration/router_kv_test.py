"""The policy kv-aware with servers and engines that fail or lie: no request fails by it."""

import os
import pathlib
import signal
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "support"))

from router_case import RouterTest
from streaming_engine import Answer, Request

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


if __name__ == "__main__":
    unittest.main()
