"""An engine that publishes KV events, with the block hashes of vLLM's sha256_cbor."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import pathlib
import struct
from typing import Any

from streaming_engine import Answer, Request, StreamingEngine, serve_normally

PUBLISHER = pathlib.Path(os.environ["PEGA_BUILD_DIR"], "tests", "integration", "event_publisher")
BLOCK = 16
SEED = "vllm-none-hash"


def _cbor_head(major: int, value: int) -> bytes:
    if value < 24:
        return bytes([major << 5 | value])
    for code, size in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if value < 1 << 8 * size:
            return bytes([major << 5 | code]) + value.to_bytes(size, "big")
    raise ValueError(value)


def _cbor(value: Any) -> bytes:
    if value is None:
        return b"\xf6"
    if isinstance(value, int):
        return _cbor_head(0, value)
    if isinstance(value, bytes):
        return _cbor_head(2, len(value)) + value
    if isinstance(value, str):
        return _cbor_head(3, len(value.encode())) + value.encode()
    return _cbor_head(4, len(value)) + b"".join(_cbor(each) for each in value)


def _msgpack(value: Any) -> bytes:
    if value is None:
        return b"\xc0"
    if isinstance(value, float):
        return b"\xcb" + struct.pack(">d", value)
    if isinstance(value, int) and value < 0:
        return b"\xd3" + value.to_bytes(8, "big", signed=True)
    if isinstance(value, int):
        return b"\xcf" + value.to_bytes(8, "big")
    if isinstance(value, str):
        return b"\xdb" + len(value.encode()).to_bytes(4, "big") + value.encode()
    if isinstance(value, dict):
        pairs = b"".join(_msgpack(key) + _msgpack(each) for key, each in value.items())
        return b"\xdf" + len(value).to_bytes(4, "big") + pairs
    return b"\xdd" + len(value).to_bytes(4, "big") + b"".join(_msgpack(each) for each in value)


def block_hashes(tokens: list[int], salt: str = "") -> list[int]:
    """The low 64 bits of vLLM's hashes (sha256_cbor, tagged extras) of the full blocks."""
    parent, hashes = hashlib.sha256(_cbor(SEED)).digest(), []
    for at in range(0, len(tokens) - BLOCK + 1, BLOCK):
        extras = [["cache_salt", salt]] if salt and at == 0 else None
        parent = hashlib.sha256(_cbor([parent, tokens[at : at + BLOCK], extras])).digest()
        hashes.append(int.from_bytes(parent[-8:], "big"))
    return hashes


def stored(tokens: list[int], salt: str = "", session: str | None = None) -> dict[str, Any]:
    """The event about all full blocks of a prompt."""
    hashes = block_hashes(tokens, salt)
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None,
        "token_ids": tokens[: len(hashes) * BLOCK],
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [[salt] if salt and i == 0 else None for i in range(len(hashes))],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        "session_id": session,
    }


class PublishingEngine(StreamingEngine):
    """An engine of the model ``m`` that publishes the events of one rank."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__(self._respond)
        self._rank = rank
        self.models = ["m"]
        self._publisher: asyncio.subprocess.Process | None = None
        self._events_port = 0
        self._time = 1.0
        self.refuses_tokenize = False
        self.renders = False  # As vLLM with --enable-scale-out.
        self.answers_renders = True
        self.rendered: tuple[int, bytes] | None = None  # Status and body instead of the tokens.

    @property
    def endpoint(self) -> str:
        """The address of its events."""
        return f"tcp://127.0.0.1:{self._events_port}"

    async def start(self) -> PublishingEngine:
        self._publisher = await asyncio.create_subprocess_exec(
            PUBLISHER, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        self._events_port = int(await self._line())
        sources = {str(self._rank): {"enable_kv_cache_events": True, "publisher": "zmq",
                         "endpoint": f"tcp://*:{self._events_port}", "replay_endpoint": None,
                         "topic": ""}}  # fmt: skip
        self.event_sources = json.dumps(sources).encode()
        await super().start()
        return self

    async def stop(self) -> None:
        await super().stop()
        if self._publisher is not None and self._publisher.returncode is None:
            assert self._publisher.stdin is not None
            self._publisher.stdin.close()
            await self._publisher.wait()

    async def _respond(self, request: Request, answer: Answer) -> None:
        if request.target.endswith("/render"):
            await self._render(request, answer)
            return
        if request.target == "/tokenize":
            if self.refuses_tokenize:
                await answer.whole(b"{}", 500)
                return
            tokens = tokenize(request.json)
            await answer.whole(json.dumps({"count": len(tokens), "tokens": tokens}).encode())
            return
        await serve_normally(request, answer)

    async def _render(self, request: Request, answer: Answer) -> None:
        if not self.renders:
            await answer.whole(b'{"detail":"Not Found"}', 404)
            return
        if not self.answers_renders:
            await request.gone.wait()
            return
        if self.rendered is not None:
            await answer.whole(self.rendered[1], self.rendered[0])
            return
        rendered: Any = {"request_id": "r", "token_ids": tokenize(request.json), "features": None}
        if request.target == "/v1/completions/render":
            rendered = [rendered]
        await answer.whole(json.dumps(rendered).encode())

    async def _line(self) -> bytes:
        assert self._publisher is not None and self._publisher.stdout is not None
        return (await asyncio.wait_for(self._publisher.stdout.readline(), 30)).strip()

    async def _say(self, line: str, wanted: bytes) -> None:
        assert self._publisher is not None and self._publisher.stdin is not None
        self._publisher.stdin.write(line.encode() + b"\n")
        await self._publisher.stdin.drain()
        said = await self._line()
        assert said == wanted, said

    async def wait_for_subscriber(self) -> None:
        await self._say("wait", b"subscribed")

    async def publish(self, *events: dict[str, Any] | list[Any]) -> None:
        self._time += 1
        batch = _msgpack([self._time, list(events), self._rank])
        await self._say(batch.hex(), b"published")


def tokenize(body: dict[str, Any]) -> list[int]:
    """A tokenizer: one token for each word."""
    text = body.get("prompt") or json.dumps(body["messages"])
    return [int.from_bytes(hashlib.sha256(word.encode()).digest()[:2], "big")
            for word in text.split()]  # fmt: skip
