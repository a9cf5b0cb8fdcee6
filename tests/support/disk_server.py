"""A server with an SSD tier, and an engine whose blocks reach its disks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from pegaflow.api import Cache, token_keys
from tests.support.vllm_server import PegaServer

SEGMENT = 4 << 20
BLOCKS = 16
#: Bytes of a block.
BLOCK = 256 << 10
#: Blocks are written as soon as they are saved.
AT_ONCE = ["--ssd-write-ahead", "1gb"]
_TOKENS = 16
_PATIENCE_S = 30.0


def disk_options(folders: Sequence[Path], capacity: str = "64mb") -> list[str]:
    """Options for a disk in each folder, which exist afterwards."""
    words = []
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        words += ["--ssd-cache-path", str(folder)]
    return [*words, "--ssd-cache-capacity", capacity, "--ssd-segment-size", str(SEGMENT), *AT_ONCE]


class DiskEngine:
    """An engine with 16 blocks of 256 KiB. A context manager."""

    def __init__(self, server: PegaServer, instance: str = "engine") -> None:
        self._server = server
        self.memory = np.zeros((BLOCKS, BLOCK), np.uint8)
        patient = dict.fromkeys(("lookup_deadline", "open_deadline", "reserve_deadline"), 20.0)
        self._cache = Cache(
            [self.memory],
            factors={"model": "m"},
            endpoint=server.address,
            instance=instance,
            load_patience=20.0,
            **patient,
        )
        self._keys = token_keys(range(BLOCKS * _TOKENS), _TOKENS)
        self._blocks = list(range(BLOCKS))

    def wait_ready(self) -> None:
        """Waits until the server serves this engine, for example after a restart."""
        assert self._cache.wait_ready(timeout_s=_PATIENCE_S)

    def __enter__(self) -> Self:
        self.wait_ready()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._cache.close()

    def save_to_pool(self, seed: int = 1) -> None:
        """Saves random blocks."""
        self.memory[:] = np.random.default_rng(seed).integers(0, 256, self.memory.shape, np.uint8)
        assert self._cache.save(self._keys, self._blocks).error is None

    def save(self, seed: int = 1) -> None:
        """Saves random blocks, and waits until a disk has all of them."""
        self.save_to_pool(seed)
        end = time.monotonic() + _PATIENCE_S
        while self._server.metrics().total("pegaflow_ssd_blocks") < BLOCKS:
            assert time.monotonic() < end, "the blocks reach no disk"

    def load(self) -> int:
        """Loads what the cache has of them; returns how many blocks."""
        self.memory[:] = 0
        return self._cache.load(self._keys, self._blocks).blocks
