"""The router lets a real server fetch blocks from another one before it forwards a request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import signal
import sys
import unittest
from collections.abc import Iterator

import msgspec
import numpy as np
import zmq
import zmq.asyncio

from pegaflow.api import Cache
from perf.support.limited_link import wait_joined
from tests.support.vllm_server import PegaServer

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "support"))

from router_case import RouterTest
from router_process import Reply, Router
from streaming_engine import STREAM, Answer, Request, StreamingEngine, serve_normally

BUILD = pathlib.Path(os.environ["PEGA_BUILD_DIR"])
BLOCKS = 256
BLOCK_TOKENS = 16
PROMPT = "".join(f"word{i:04} " for i in range(2400))
CLEARED: dict[str, object] = {"type": "AllBlocksCleared"}
ANSWERED = [*STREAM, b"data: [DONE]\n\n"]


def low(block: int) -> int:
    """The low 64 bits of the block's hash, as an event has them."""
    return 0x1122334400000000 + block


def key(block: int) -> bytes:
    """The whole hash, of which the router has to learn the upper part from a server."""
    return b"upper-24-bytes-of-a-hash" + low(block).to_bytes(8, "big")


class PublishingEngine:
    """An engine without a model that publishes the events of its prompts, as vLLM does."""

    def __init__(self, http: StreamingEngine) -> None:
        self.http = http
        self._socket = zmq.asyncio.Context.instance().socket(zmq.PUB)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        config = {"publisher": "zmq", "endpoint": f"tcp://127.0.0.1:{port}", "block_size": 16}
        http.event_sources = json.dumps({"0": config}).encode()
        http.behavior = self.serve
        self._sequence = 0
        self.holds = False  #: Requests get no answer until their caller leaves.
        self.may_answer = asyncio.Event()  #: Other requests wait for it, and clear it.

    async def publish(self, *events: dict[str, object]) -> None:
        batch = msgspec.msgpack.encode([float(self._sequence), list(events), 0])
        number = self._sequence.to_bytes(8, "big")
        self._sequence += 1
        await self._socket.send_multipart([b"", number, batch])

    async def serve(self, request: Request, answer: Answer) -> None:
        if self.holds:
            await request.gone.wait()
            return
        stored = {
            "type": "BlockStored",
            "block_hashes": [low(i) for i in range(BLOCKS)],
            "parent_block_hash": None,
            "token_ids": [1] * BLOCKS * BLOCK_TOKENS,
            "block_size": BLOCK_TOKENS,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "session_id": request.headers.get("x-session-id"),
        }
        await self.publish(stored)
        await self.may_answer.wait()
        self.may_answer.clear()
        await answer.begin_stream()
        for piece in ANSWERED:
            await answer.piece(piece)
        await answer.end_stream()

    def close(self) -> None:
        self._socket.close(linger=0)


class Node:
    """A server with an engine of the namespace that all nodes have."""

    def __init__(self, server: PegaServer) -> None:
        self.server = server
        # Small blocks: a pull has to be faster than this engine, which computes nothing.
        self._kv = [np.ones((BLOCKS, 512), np.uint8)]
        factors = {"test": "router_prefetch", "block_tokens": str(BLOCK_TOKENS)}
        self.cache = Cache(self._kv, block_axis=0, factors=factors, endpoint=server.address)
        if not self.cache.wait_ready(30):
            raise TimeoutError(f"{server.address} does not serve the engine")

    def save(self) -> None:
        saved = self.cache.save([key(i) for i in range(BLOCKS)], list(range(BLOCKS)))
        assert saved.blocks == BLOCKS

    def total(self, name: str, **labels: str) -> float:
        return self.server.metrics().total(name, **labels)


class RouterPrefetch(RouterTest):
    async def asyncSetUp(self) -> None:
        await super().asyncSetUp()
        scratch = self.scratch()
        self.secret = scratch / "secret"
        self.secret.write_text("0123456789abcdef-example\n")
        self.secret.chmod(0o600)
        self.far, self.near = self.stack.enter_context(self.nodes(scratch))
        self.engine_ = PublishingEngine(await self.engine())
        self.stack.callback(self.engine_.close)

    @contextlib.contextmanager
    def nodes(self, scratch: pathlib.Path) -> Iterator[tuple[Node, Node]]:
        """A server that holds the blocks, and one that can read from it."""
        binary = BUILD / "server" / "pegaflow-server"
        secret = ["--peer-secret-file", str(self.secret)]
        lends = ["--peer-listen", "127.0.0.1:0", *secret]
        with PegaServer(binary, scratch / "far", "64mb", lends) as far:
            reads = ["--peers", far.peer_listen, "--peer-deadline", "5s", *secret]
            with PegaServer(binary, scratch / "near", "64mb", reads) as near:
                nodes = (Node(far), Node(near))
                wait_joined(near)
                yield nodes
                for node in nodes:
                    node.cache.close()

    async def prepared(self, *options: str, near: str = "", key: str = "") -> Router:
        """A router that knows the prompt's blocks, which only the far server has.

        ``near``: the URL of another server in place of the near one. ``key``: an API key.
        """
        near = near or f"http://{self.near.server.http}"
        far = f"http://{self.far.server.http}"
        router = await self.router(
            "--servers", near, far, "--engine-servers", f"{self.engine_.http.url}={near}",
            "--peer-secret-file", str(self.secret), "--health-interval", "100ms", *options,
            d=[self.engine_.http],
        )  # fmt: skip

        def trusted(metrics: dict[str, float]) -> bool:
            pools = [v for k, v in metrics.items() if k.startswith("kv_pool_trusted")]
            return pools == [1, 1] and any('state="partial"' in k for k in metrics)

        await router.wait_for_metrics(trusted)
        # What a publisher sends before it knows its subscriber is lost.
        applied = f'kv_batches_total{{engine="{self.engine_.http.url}",rank="0"}}'
        while (await router.metrics())[applied] == 0:
            await self.engine_.publish(CLEARED)
        self.far.save()
        await router.wait_for_metrics(lambda m: m["kv_keys"] == BLOCKS)
        learned = (await router.metrics())["kv_text_learned_total"]
        self.assertEqual((await self.ask(router, key)).status, 200)
        await router.wait_for_metrics(lambda m: m["kv_text_learned_total"] > learned)
        return router

    async def ask(self, router: Router, key: str = "") -> Reply:
        """The answer to the prompt; then the engine forgets its blocks."""
        body = {"prompt": PROMPT, "stream": True}
        fields = f"x-api-key: {key}\r\n" if key else ""
        asking = asyncio.create_task(router.post("/v1/completions", body, fields))
        held = f'kv_blocks{{engine="{self.engine_.http.url}",rank="0"}}'
        await router.wait_for_metrics(lambda m: m[held] == BLOCKS)
        self.engine_.may_answer.set()
        reply = await asking
        await self.engine_.publish(CLEARED)
        await router.wait_for_metrics(lambda m: m[held] == 0)
        return reply

    async def wait_for(self, node: Node, name: str, least: float, **labels: str) -> None:
        end = asyncio.get_running_loop().time() + 30
        while node.total(name, **labels) < least:
            results = ("finished", "cancelled", "ended", "rejected")
            had = {result: node.total(name, result=result) for result in results}
            self.assertLess(asyncio.get_running_loop().time(), end, f"{name} {labels}: {had}")
            await asyncio.sleep(0.01)

    async def test_the_blocks_are_at_the_node_before_the_engine_has_answered(self) -> None:
        router = await self.prepared()
        self.engine_.holds = True
        async with router.client() as client:
            await client.post("/v1/completions", {"prompt": PROMPT, "stream": True})
            name = "pegaflow_prefetches_total"
            await self.wait_for(self.near, name, 1, result="finished")
            # All but the block of the last token.
            blocks = self.near.total("pegaflow_prefetched_blocks_total")
            self.assertGreaterEqual(blocks, BLOCKS - 1)
            await router.wait_for_metrics(
                lambda m: (
                    m['prefetches_total{result="accepted"}'] == 1
                    and m["prefetched_blocks_total"] == blocks
                )
            )

    async def test_an_announced_request_finds_its_blocks_at_its_node(self) -> None:
        router = await self.prepared()
        asked = len(self.engine_.http.requests)
        # The next turn has more text than the announcement.
        reply = await router.post("/kv/prefetch/v1/completions", {"prompt": PROMPT})
        self.assertEqual((reply.status, reply.body), (202, b"{}\n"))
        await self.wait_for(self.near, "pegaflow_prefetches_total", 1, result="finished")
        blocks = self.near.total("pegaflow_prefetched_blocks_total")
        self.assertGreaterEqual(blocks, BLOCKS - 1)
        self.assertEqual(len(self.engine_.http.requests), asked)  # Nothing was sent there.
        metrics = await router.metrics()
        self.assertEqual(metrics['announced_requests_total{result="fetched"}'], 1)

        self.engine_.holds = True
        async with router.client() as client:
            await client.post("/v1/completions", {"prompt": PROMPT + "more", "stream": True})
            await self.engine_.http.wait_for(asked + 1)
            # The whole prefix is at the node: the request itself fetches nothing.
            metrics = await router.metrics()
            self.assertEqual(metrics['prefetches_total{result="sent"}'], 1)
            self.assertEqual(metrics['prefetches_total{result="accepted"}'], 1)
            sent = self.engine_.http.requests[-1].json
            self.assertNotIn("hints", json.dumps(sent.get("kv_transfer_params", {})))

    async def test_an_announcement_does_not_tell_what_caches_hold(self) -> None:
        router = await self.prepared()
        for prompt in ("a text that no request had", PROMPT, PROMPT):
            reply = await router.post("/kv/prefetch/v1/completions", {"prompt": prompt})
            self.assertEqual((reply.status, reply.body), (202, b"{}\n"))
        await router.wait_for_metrics(
            lambda m: m['announced_requests_total{result="nothing"}'] >= 1
        )
        reply = await router.post("/kv/prefetch/v1/completions", b"no JSON")
        self.assertEqual(reply.status, 400)

    async def test_a_router_that_makes_no_prefetches_refuses_announcements(self) -> None:
        servers = [f"http://{node.server.http}" for node in (self.near, self.far)]
        with_servers = ("--servers", *servers, "--peer-secret-file", str(self.secret))
        for options in ((), (*with_servers, "--prefetch-key-bytes", "0")):
            router = await self.router(*options, d=[self.engine_.http])
            reply = await router.post("/kv/prefetch/v1/chat/completions", {"messages": []})
            self.assertEqual(reply.status, 404, options)
            self.assertIn("--prefetch-key-bytes", reply.body.decode())

    async def refusing_server(self) -> tuple[str, list[Request]]:
        """The URL of a server that is the near one, but refuses prefetches, and those it got."""
        received: list[Request] = []

        async def serve(request: Request, answer: Answer) -> None:
            if request.target.startswith("/prefetch"):
                received.append(request)
                await answer.whole(b'{"error": "no"}', 403)
            else:
                await self.forward(request, answer)

        return (await self.engine(serve)).url, received

    async def test_a_request_is_not_expected_where_its_blocks_were_refused(self) -> None:
        near, received = await self.refusing_server()
        router = await self.prepared(near=near)
        reply = await router.post("/kv/prefetch/v1/completions", {"prompt": PROMPT})
        self.assertEqual((reply.status, reply.body), (202, b"{}\n"))
        await router.wait_for_metrics(lambda m: m['prefetches_total{result="refused"}'] == 1)
        # All that have no key share one part of the server's bytes.
        self.assertEqual([r.json.get("tenant") for r in received], ["announced"])
        # The request itself tries it again.
        self.assertEqual((await self.ask(router)).status, 200)
        await router.wait_for_metrics(lambda m: m['prefetches_total{result="refused"}'] == 2)
        self.assertNotIn("tenant", received[1].json)

    async def test_each_tenant_has_its_own_part_of_what_is_fetched(self) -> None:
        near, received = await self.refusing_server()
        keys = self.scratch() / "keys"
        keys.write_text("ann k-ann\nann k-ann-2\nbob k-bob\n")
        options = ("--api-keys-file", str(keys), "--share-cache-among-tenants")
        router = await self.prepared(*options, near=near, key="k-ann")
        path, body = "/kv/prefetch/v1/completions", {"prompt": PROMPT}
        for count, key in enumerate(("k-ann", "k-ann-2", "k-bob"), 1):
            reply = await router.post(path, body, f"x-api-key: {key}\r\n")
            self.assertEqual((reply.status, reply.body), (202, b"{}\n"))
            await router.wait_for_metrics(
                lambda m, c=count: m['prefetches_total{result="refused"}'] == c
            )
        ann, again, bob = (request.json["tenant"] for request in received)
        self.assertEqual(ann, again)
        self.assertNotEqual(ann, bob)
        # Names of clients do not leave the router.
        for tenant in (ann, bob):
            self.assertRegex(tenant, "^[0-9a-f]{16}$")

        known = "x-api-key: k-ann\r\n"
        for status, more, fields in (
            (401, {}, ""),
            (401, {}, "x-api-key: wrong\r\n"),
            (404, {"model": "another"}, known),
            (415, {}, known + "Content-Type: text/plain\r\n"),
        ):
            reply = await router.post(path, body | more, fields)
            self.assertEqual(reply.status, status, reply.body)
        self.assertEqual(len(received), 3)

    async def test_a_client_that_leaves_cancels_the_prefetch(self) -> None:
        router = await self.prepared()
        self.engine_.holds = True
        # The far server is stopped, so that the prefetch cannot end.
        os.kill(self.far.server.pid, signal.SIGSTOP)
        try:
            async with router.client() as client:
                await client.post("/v1/completions", {"prompt": PROMPT, "stream": True})
                await router.wait_for_metrics(
                    lambda m: m['prefetches_total{result="accepted"}'] == 1
                )
                self.assertEqual(self.near.total("pegaflow_prefetches"), 1)
            name = "pegaflow_prefetches_total"
            await self.wait_for(self.near, name, 1, result="cancelled")
            await router.wait_for_metrics(lambda m: m["prefetches_cancelled_total"] == 1)
        finally:
            os.kill(self.far.server.pid, signal.SIGCONT)

    async def test_a_server_that_refuses_hangs_or_lies_disturbs_no_request(self) -> None:
        behavior = ""
        received: list[Request] = []

        async def serve(request: Request, answer: Answer) -> None:
            """The near server, except for prefetches."""
            if not request.target.startswith("/prefetch"):
                await self.forward(request, answer)
                return
            received.append(request)
            if behavior == "refuses":
                await answer.whole(b'{"error": "no"}', 403)
            elif behavior == "hangs":
                await request.gone.wait()
            elif behavior == "dies":
                answer.die()
            else:
                await answer.raw(
                    b"HTTP/1.1 202 \r\nContent-Length: 99999999\r\n\r\n" + b"x" * 99999
                )

        server = await self.engine(serve)
        router = await self.prepared(near=server.url)
        for count, behavior in enumerate(("refuses", "hangs", "dies", "lies"), 1):
            reply = await self.ask(router)
            self.assertEqual((reply.status, reply.is_whole), (200, True), behavior)
            ended = ('refused"', 'failed"')
            await router.wait_for_metrics(
                lambda m, c=count, e=ended: (
                    sum(m[f'prefetches_total{{result="{result}}}'] for result in e) == c
                )
            )
        # A connection that broke is tried again.
        self.assertEqual(len({r.json["id"] for r in received if r.method == "POST"}), 4)
        # After five failures in a row it is not asked for some time.
        for _ in range(3):
            self.assertEqual((await self.ask(router)).status, 200)
        metrics = await router.metrics()
        self.assertGreaterEqual(metrics['prefetches_total{result="suspended"}'], 1)

    async def test_one_cost_decides_about_prefill_and_decode_engine(self) -> None:
        async def serve(request: Request, answer: Answer) -> None:
            if "hold" in request.json["prompt"]:
                await request.gone.wait()
            else:
                await serve_normally(request, answer)

        prefill, decode = await self.engine(), await self.engine(serve)
        near, far = (f"http://{each.server.http}" for each in (self.near, self.far))
        router = await self.router(
            "--servers", near, far, "--peer-secret-file", str(self.secret),
            "--engine-servers", f"{prefill.url}={far}", f"{decode.url}={near}",
            "--engine-queue-time", "0s", p=[prefill], d=[decode],
        )  # fmt: skip
        await router.wait_for_metrics(
            lambda m: [v for k, v in m.items() if k.startswith("kv_pool_trusted")] == [1, 1]
        )
        async with router.client() as client:
            # The decode engine is idle, and needs no transfer.
            held = {"prompt": "hold" + "x" * 1_000_000, "stream": True}
            await client.post("/v1/completions", held)
            await decode.wait_for(1)
            metrics = await router.metrics()
            self.assertEqual(metrics['prefill_total{reason="cost"}'], 1)
            self.assertEqual(metrics['kv_pairs_total{prefill="skipped"}'], 1)
            self.assertEqual(prefill.requests, [])

            # Now a long prompt waits there.
            reply = await router.post("/v1/completions", {"prompt": PROMPT, "stream": True})
            self.assertTrue(reply.is_whole)
            metrics = await router.metrics()
            self.assertEqual(metrics['prefill_total{reason="done"}'], 1)
            self.assertEqual(metrics['kv_pairs_total{prefill="sent"}'], 1)
            self.assertTrue((await prefill.wait_for(1)).is_prefill)

            # The leg of a pair fails: the decode engine computes the prompt.
            async def die(_request: Request, answer: Answer) -> None:
                answer.die()

            prefill.behavior = die
            reply = await router.post("/v1/completions", {"prompt": PROMPT[9:], "stream": True})
            self.assertEqual((reply.status, reply.is_whole), (200, True))
            metrics = await router.metrics()
            self.assertEqual(metrics['prefill_total{reason="lost"}'], 1)

    async def forward(self, request: Request, answer: Answer) -> None:
        host, port = self.near.server.http.rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            head = f"{request.method} {request.target} HTTP/1.1\r\nHost: n\r\n"
            if token := request.headers.get("authorization"):
                head += f"Authorization: {token}\r\n"
            writer.write((head + "Connection: close\r\n\r\n").encode())
            waits = asyncio.create_task(request.gone.wait())
            reads = asyncio.create_task(reader.readuntil(b"\r\n\r\n"))
            await asyncio.wait((waits, reads), return_when=asyncio.FIRST_COMPLETED)
            waits.cancel()
            if not reads.done():
                reads.cancel()
                return
            fields = reads.result().decode().lower().split("\r\n")
            length = next(int(f.split(":")[1]) for f in fields if f.startswith("content-length"))
            body = await reader.readexactly(length)
            await answer.whole(body, int(fields[0].split(" ")[1]))
        finally:
            writer.close()


if __name__ == "__main__":
    unittest.main()
