"""Engines and routers of one test, ended with it."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import sys
import tempfile
import unittest

import streaming_engine
from router_process import Router
from streaming_engine import Behavior, StreamingEngine, serve_normally


class RouterTest(unittest.IsolatedAsyncioTestCase):
    async def asyncSetUp(self) -> None:
        self.stack = contextlib.AsyncExitStack()

    async def asyncTearDown(self) -> None:
        await self.stack.aclose()

    async def engine(self, behavior: Behavior = serve_normally) -> StreamingEngine:
        engine = await StreamingEngine(behavior).start()
        self.stack.push_async_callback(engine.stop)
        return engine

    async def engine_process(self, *options: str) -> tuple[asyncio.subprocess.Process, str]:
        """An engine that can be killed, and its URL."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, streaming_engine.__file__, *options, stdout=asyncio.subprocess.PIPE
        )

        async def end() -> None:
            if process.returncode is None:
                process.kill()
            await process.wait()

        self.stack.push_async_callback(end)
        assert process.stdout is not None
        return process, (await process.stdout.readline()).decode().strip()

    async def router(
        self,
        *options: str,
        p: list[StreamingEngine] | None = None,
        d: list[StreamingEngine] | None = None,
    ) -> Router:
        words = [word for e in p or [] for word in ("--prefill", e.url)]
        words += [word for e in d or [] for word in ("--decode", e.url)]
        router = await Router.start(*words, *options)
        self.stack.push_async_callback(router.stop)
        return router

    async def all_is_over(self, router: Router) -> None:
        """Returns when no request is left."""
        await router.wait_for_metrics(
            lambda m: (
                m["requests_in_flight"] == 1  # This request itself.
                and m["body_bytes"] == 0
                and m["queue_length"] == 0
                and not any(v for k, v in m.items() if k.startswith("engine_inflight"))
            )
        )

    def scratch(self) -> pathlib.Path:
        return pathlib.Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
