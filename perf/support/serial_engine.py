"""Engines without a model that take real time: each computes one prompt after the other."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from kv_engine import BLOCK_BYTES, BLOCK_TOKENS, KvEngine
from streaming_engine import Answer, Request, event


def chained_hashes(prompt: str) -> list[int]:
    """A name for each full block of 64 bytes, which depends on all bytes before its end."""
    data, parent, hashes = prompt.encode(), b"", []
    for begin in range(0, len(data) - BLOCK_BYTES + 1, BLOCK_BYTES):
        block = data[begin : begin + BLOCK_BYTES]
        parent = hashlib.blake2b(parent + block, digest_size=8).digest()
        hashes.append(int.from_bytes(parent, "big"))
    return hashes


class SerialEngine(KvEngine):
    """Computes the prompts in the order of their arrival, one at a time, each token in the same
    time; what it has computed stays cached. It announces the blocks of a prompt and answers with
    one token when the prompt is computed, as a stream if the request wants one.
    """

    def __init__(self, tokens_per_second: float) -> None:
        super().__init__()
        self._tokens_per_second = tokens_per_second
        self._slot = asyncio.Lock()  # Its waiters get it in the order of their arrival.
        self.busy_s = 0.0

    async def _behave(self, request: Request, answer: Answer) -> None:
        prompt = request.json["prompt"]
        tokens = len(prompt.encode()) // 4
        async with self._slot:
            hashes = chained_hashes(prompt)
            known = next((i for i, h in enumerate(hashes) if h not in self._blocks), len(hashes))
            # The last token is computed in any case.
            cached = min(known * BLOCK_TOKENS, (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS)
            took = (tokens - cached) / self._tokens_per_second
            await asyncio.sleep(took)
            self.busy_s += took
            self.cached.append(cached)
            self._blocks.update(hashes)
            await self._publish(hashes, request.headers.get("x-session-id", ""))
        usage = {
            "prompt_tokens": tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        whole = json.dumps({"choices": [{"text": "hello"}], "usage": usage})
        if not request.json.get("stream"):
            await answer.whole(whole.encode())
            return
        await answer.begin_stream()
        await answer.piece(event(whole) + event("[DONE]"))
        await answer.end_stream()
