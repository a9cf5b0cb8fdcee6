"""An engine that saves and loads prompts in a thread, and compares every byte that it loads."""

from __future__ import annotations

import hashlib
import random
import threading

import numpy as np

from pegaflow.api import Cache, token_keys
from tests.support.vllm_server import PegaServer

PROMPTS = 60
BLOCKS = 12  #: Of each prompt.
BLOCK = 64 << 10  #: Bytes.
TOKENS = 16
PATIENCE_S = 60.0


class Engine:
    """Saves and loads prompts, and compares every byte that it loads. One thread works.

    The bytes of a block follow from its key and the state of the weights, which a reset changes.
    """

    def __init__(self, server: PegaServer, seed: int, name: str = "engine") -> None:
        self._chance = random.Random(seed)
        self.weights = 0
        self.operations = 0
        self.loaded = 0
        self.requested = 0
        self.wrong: list[str] = []
        self._memory = np.zeros((BLOCKS, BLOCK), np.uint8)
        self._cache = Cache(
            [self._memory],
            factors={"model": f"model of {name}"},
            endpoint=server.address,
            instance=name,
            load_patience=20.0,
            **dict.fromkeys(("lookup_deadline", "open_deadline", "reserve_deadline"), 5.0),
        )
        self._prompts = [
            token_keys(range(first * 1000, first * 1000 + BLOCKS * TOKENS), TOKENS)
            for first in range(PROMPTS)
        ]
        self._progress = threading.Condition()
        self._is_ending = False
        self._wants_reset = False
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def close(self) -> None:
        self._is_ending = True
        self._thread.join()
        self._cache.close()

    def wait_ready(self) -> None:
        assert self._cache.wait_ready(timeout_s=PATIENCE_S)

    def wait_operations(self, count: int) -> None:
        """Until so many more operations have ended."""
        until = self.operations + count
        with self._progress:
            assert self._progress.wait_for(
                lambda: self.operations >= until or not self._thread.is_alive(), PATIENCE_S
            )
        assert self._thread.is_alive(), "the engine's thread has ended"

    def reset(self) -> None:
        """The weights change before the next operation."""
        self._wants_reset = True
        with self._progress:
            assert self._progress.wait_for(lambda: not self._wants_reset, PATIENCE_S)

    def _page(self, key: bytes) -> np.ndarray:
        name = hashlib.sha256(key + self.weights.to_bytes(4, "little")).digest()
        return np.resize(np.frombuffer(name, np.uint8), BLOCK)

    def _work(self) -> None:
        while not self._is_ending:
            if self._wants_reset:
                # Nothing is loaded before a server has confirmed it.
                while not self._cache.reset(timeout_s=PATIENCE_S) and not self._is_ending:
                    pass
                self.weights += 1
                self._wants_reset = False
            keys = self._prompts[min(int(self._chance.expovariate(6 / PROMPTS)), PROMPTS - 1)]
            blocks = list(range(BLOCKS))
            self._memory[:] = 0
            found = self._cache.load(keys, blocks).blocks
            for index in range(found):
                if not np.array_equal(self._memory[index], self._page(keys[index])):
                    self.wrong.append(f"block {index} of {keys[0].hex()}")
            for index in range(found, BLOCKS):
                self._memory[index] = self._page(keys[index])
            if found < BLOCKS:
                self._cache.save(keys[found:], blocks[found:])
            with self._progress:
                self.operations += 1
                self.loaded += found
                self.requested += BLOCKS
                self._progress.notify_all()
