"""An engine that publishes KV events, as vLLM does: its blocks are 64 bytes of the prompt."""

from __future__ import annotations

import asyncio
import hashlib
import json

from streaming_engine import Answer, Request, StreamingEngine
from zmtp import Publisher, Replayer, pack

BLOCK_BYTES = 64
BLOCK_TOKENS = 16


def hashes_of(prompt: str) -> list[int]:
    data = prompt.encode()
    ends = range(BLOCK_BYTES, len(data) + 1, BLOCK_BYTES)
    return [
        int.from_bytes(hashlib.blake2b(data[:end], digest_size=8).digest(), "big") for end in ends
    ]


class KvEngine:
    """Announces the blocks of each prompt when it arrives, and answers once it may."""

    def __init__(self) -> None:
        self.http = StreamingEngine(self._behave)
        self.events = Publisher()
        self._history: list[bytes] = []
        self._replays = Replayer(self._history)
        self._blocks: set[int] = set()
        self.cached: list[int] = []  # Tokens that each request found.
        self.names_sessions = True  # In its events, as vLLM since 0.32.
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def start(self) -> KvEngine:
        await self.events.start()
        await self._replays.start()
        await self.http.start()
        source = {
            "enable_kv_cache_events": True, "publisher": "zmq", "block_size": BLOCK_TOKENS,
            "endpoint": f"tcp://*:{self.events.port}",
            "replay_endpoint": f"tcp://*:{self._replays.port}",
        }  # fmt: skip
        self.http.event_sources = json.dumps({"0": source}).encode()
        return self

    async def stop(self) -> None:
        self.may_answer.set()
        await self.http.stop()
        await self._replays.stop()
        await self.events.stop()

    def forget_history(self) -> None:
        """Replays have the last batch only from now on, as with a full buffer."""
        self._replays.oldest = max(0, len(self._history) - 1)

    @property
    def url(self) -> str:
        return self.http.url

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.events.port}"

    @property
    def replay_endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self._replays.port}"

    @property
    def prompts(self) -> list[str]:
        return [r.json["prompt"] for r in self.http.requests]

    async def _publish(self, hashes: list[int], session: str) -> None:
        event = {
            "type": "BlockStored", "block_hashes": hashes, "block_size": BLOCK_TOKENS,
            "token_ids": [], "medium": "GPU", "session_id": session,
        }  # fmt: skip
        number = len(self._history)
        self._history.append(pack([float(number + 1), [event], 0]))
        await self.events.send(b"", number.to_bytes(8, "big"), self._history[-1])

    async def _behave(self, request: Request, answer: Answer) -> None:
        hashes = hashes_of(request.json["prompt"])
        known = next((i for i, h in enumerate(hashes) if h not in self._blocks), len(hashes))
        self._blocks.update(hashes)
        self.cached.append(known * BLOCK_TOKENS)
        session = request.headers.get("x-session-id", "") if self.names_sessions else ""
        await self._publish(hashes, session)
        await self.may_answer.wait()
        usage = {
            "prompt_tokens": len(request.json["prompt"]) // 4,
            "prompt_tokens_details": {"cached_tokens": known * BLOCK_TOKENS},
        }
        await answer.whole(json.dumps({"choices": [{"text": "hello"}], "usage": usage}).encode())
