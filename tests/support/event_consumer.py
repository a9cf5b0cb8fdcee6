"""A consumer of vLLM's KV events, as in routers: vLLM's own types, live and by replay."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import zmq
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

HANG_MS = 30_000


class EventConsumer:
    """A router's view of the blocks of one engine. Every event is checked against earlier ones.

    The blocks of each medium are {hash: (kind, parent, token ids, extra keys, LoRA)}.
    """

    def __init__(self, endpoint: str, replay: str) -> None:
        self.blocks: dict[str, dict[Any, tuple[Any, ...]]] = {"GPU": {}, "CPU": {}}
        self.batches: dict[int, bytes] = {}
        self.events: list[Any] = []  # All events of the cache so far.
        self._decode = msgspec.msgpack.Decoder(KVEventBatch).decode
        self._context = zmq.Context()
        self._live = self._context.socket(zmq.SUB)
        self._live.subscribe(b"")
        self._live.connect(endpoint)
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.connect(replay)
        for socket in (self._live, self._replay):
            socket.linger = 0
            socket.rcvtimeo = HANG_MS

    def close(self) -> None:
        self._context.destroy()

    def read(self) -> "EventConsumer":
        """Reads all published batches, by replay of the new ones."""
        start = len(self.batches)
        self._replay.send_multipart([b"", start.to_bytes(8, "big")])
        while True:
            _, _, number, payload = self._replay.recv_multipart()
            if int.from_bytes(number, "big", signed=True) < 0:
                return self
            assert int.from_bytes(number, "big") == len(self.batches), "a batch is missing"
            self._take(payload)

    def live(self) -> dict[int, bytes]:
        """The batches that arrived live; as with any SUB socket the first may be missing."""
        came = {}
        with contextlib.suppress(zmq.Again):
            while True:
                _, number, payload = self._live.recv_multipart(zmq.NOBLOCK)
                came[int.from_bytes(number, "big")] = payload
        return came

    def _take(self, payload: bytes) -> None:
        self.batches[len(self.batches)] = payload
        for event in self._decode(payload).events:
            if isinstance(event, AllBlocksCleared):
                self.blocks = {"GPU": {}, "CPU": {}}
                continue
            known = self.blocks[event.medium]
            if event.medium == "CPU":
                self.events.append(event)
                assert event.locality == "LOCAL", event
            assert event.group_idx == 0, event
            if isinstance(event, BlockRemoved):
                self._removed(event, known)
            else:
                self._stored(event, known)

    def _removed(self, event: BlockRemoved, known: dict[Any, Any]) -> None:
        for block_hash in event.block_hashes:
            if event.medium == "CPU" and block_hash not in known and self._cleared():
                continue  # a consumer forgot it with AllBlocksCleared
            assert known.pop(block_hash, None) is not None, f"{event.medium}: was never stored"

    def _cleared(self) -> bool:
        return any(b"AllBlocksCleared" in payload for payload in self.batches.values())

    def _stored(self, event: BlockStored, known: dict[Any, Any]) -> None:
        size, parent = event.block_size, event.parent_block_hash
        assert len(event.token_ids) == size * len(event.block_hashes), event
        extra_keys = event.extra_keys or [None] * len(event.block_hashes)
        assert len(extra_keys) == len(event.block_hashes), event
        for i, block_hash in enumerate(event.block_hashes):
            tokens = tuple(event.token_ids[i * size : (i + 1) * size])
            extra = tuple(extra_keys[i]) if extra_keys[i] else None
            kind = event.kv_cache_spec_kind
            said = (kind, parent, tokens, extra, event.lora_name, event.lora_id)
            if event.medium == "CPU":
                assert block_hash not in known, "stored twice"
            for blocks in self.blocks.values():
                # vLLM repeats the same event for the same block.
                assert blocks.get(block_hash, said) == said
            known[block_hash] = said
            parent = block_hash


@contextlib.contextmanager
def consumer(directory: Path, name: str = "events") -> Iterator[tuple[dict[str, Any], Any]]:
    """(vLLM's kv_events_config, a function that connects a consumer once the engine runs)."""
    endpoints = {
        "endpoint": f"ipc://{directory}/{name}.pub",
        "replay_endpoint": f"ipc://{directory}/{name}.replay",
    }
    made: list[EventConsumer] = []

    def connect() -> EventConsumer:
        made.append(EventConsumer(*endpoints.values()))
        return made[-1]

    try:
        yield {"enable_kv_cache_events": True, "publisher": "zmq", **endpoints}, connect
    finally:
        for one in made:
            one.close()
