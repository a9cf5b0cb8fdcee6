"""A server with an SSD tier that is killed, stopped, reset and damaged while an engine uses it.

PEGA_SSD_KILLS sets the number of ends of the server.
"""

from __future__ import annotations

import hashlib
import os
import random
import threading
from pathlib import Path

import numpy as np

from pegaflow.api import Cache, token_keys
from tests.python.conftest import server_binary
from tests.support.disk_server import AT_ONCE
from tests.support.vllm_server import PegaServer

KILLS = int(os.environ.get("PEGA_SSD_KILLS", "20"))
PROMPTS = 60
BLOCKS = 12  #: Of each prompt.
BLOCK = 64 << 10  #: Bytes.
TOKENS = 16
#: A sixth of all blocks; the disk has room for three quarters of them.
POOL = "8mb"
DISK = "36mb"
#: Operations between two ends of the server.
LEAST_OPERATIONS = 15
PATIENCE_S = 60.0


class Engine:
    """Saves and loads prompts, and compares every byte that it loads. One thread works.

    The bytes of a block follow from its key and the state of the weights, which a reset changes.
    """

    def __init__(self, server: PegaServer, seed: int) -> None:
        self._chance = random.Random(seed)
        self.weights = 0
        self.operations = 0
        self.loaded = 0
        self.wrong: list[str] = []
        self._memory = np.zeros((BLOCKS, BLOCK), np.uint8)
        self._cache = Cache(
            [self._memory],
            factors={"model": "m"},
            endpoint=server.address,
            instance="engine",
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
                self._progress.notify_all()


def damage(file: Path, chance: random.Random) -> None:
    """Overwrites bytes of some pages behind the superblocks and the names."""
    size = file.stat().st_size
    with file.open("r+b") as opened:
        for _ in range(20):
            opened.seek(chance.randrange(1 << 20, size - 8))
            opened.write(chance.randbytes(8))


def test_no_wrong_byte_comes_back_whatever_ends_the_server(short_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    file = short_path / "disk" / "pegaflow.ssd"
    file.parent.mkdir()
    (short_path / "s").mkdir()
    arguments = [
        *("--ssd-cache-path", str(file), "--ssd-cache-capacity", DISK),
        *("--ssd-segment-size", "2mb", "--ssd-drain", "5s", *AT_ONCE),
    ]
    restored = damaged = warm = 0
    with PegaServer(server_binary(), short_path / "s", POOL, arguments) as server:
        engine = Engine(server, seed)
        try:
            engine.wait_ready()
            for _ in range(KILLS):
                engine.wait_operations(chance.randrange(LEAST_OPERATIONS, 3 * LEAST_OPERATIONS))
                if chance.random() < 0.2:
                    engine.reset()
                    engine.wait_operations(LEAST_OPERATIONS)
                page = server.metrics()
                restored += int(page.total("pegaflow_ssd_hits_blocks_total"))
                damaged += int(page.total("pegaflow_ssd_proof_failures_total"))
                if chance.random() < 0.7:
                    server.kill()
                else:
                    assert server.stop() == 0
                if chance.random() < 0.3:
                    damage(file, chance)
                server.start()
                engine.wait_ready()
                warm += int(server.metrics().total("pegaflow_ssd_blocks")) > 0
        finally:
            engine.close()
    print(
        f"{engine.operations} operations, {engine.loaded} blocks loaded, {restored} from the disk, "
        f"{damaged} failed proofs, {warm} of {KILLS} starts warm"
    )
    assert engine.wrong == []
    assert restored > 0
    assert warm > KILLS / 2
