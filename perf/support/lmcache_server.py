"""A server of LMCache with a directory as its second tier, for comparisons."""

from __future__ import annotations

import http.client
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from demo.client import post
from tests.support.child_process import ChildProcess
from tests.support.vllm_server import free_port

#: Tokens of a chunk, LMCache's default.
CHUNK_TOKENS = 256


class LMCacheServer(ChildProcess):
    """``lmcache server`` for engines on this machine, on free ports.

    ``packages`` is a directory with LMCache and what it needs, as ``pip install --target`` makes
    it. ``disk`` is the directory that gets a file for each chunk, read and written with O_DIRECT.
    """

    def __init__(self, packages: Path, directory: Path, disk: Path, memory_gb: float) -> None:
        super().__init__(
            "lmcache server",
            directory / "lmcache.log",
            {
                "PYTHONPATH": str(packages),
                "LMCACHE_DISABLE_BANNER": "1",
                "DO_NOT_TRACK": "1",
                "LMCACHE_TRACK_USAGE": "false",
            },
        )
        self.packages = packages
        self.disk = disk
        self.memory_gb = memory_gb
        self.port = free_port()
        self.http = f"127.0.0.1:{free_port()}"

    def command(self) -> list[str]:
        adapter = {"type": "fs", "base_path": str(self.disk), "use_odirect": True}
        return [
            *(sys.executable, "-m", "lmcache.cli.main", "server"),
            *("--port", str(self.port), "--chunk-size", str(CHUNK_TOKENS)),
            *("--http-port", self.http.rpartition(":")[2]),
            *("--l1-size-gb", str(self.memory_gb), "--l1-init-size-gb", str(self.memory_gb)),
            *("--eviction-policy", "LRU", "--l2-adapter", json.dumps(adapter)),
            *("--disable-metrics", "--max-workers", "2"),
            *("--supported-transfer-mode", "auto"),
        ]

    def is_ready(self) -> bool:
        connection = http.client.HTTPConnection(self.http, timeout=5)
        try:
            connection.request("GET", "/healthcheck")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False  # not listening yet
        finally:
            connection.close()

    def transfer_config(self) -> Mapping[str, Any]:
        """For --kv-transfer-config of an engine, whose PYTHONPATH needs ``packages`` too."""
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": self.port,
            },
        }

    def forget_memory(self) -> None:
        """Empties the first tier.

        Raises:
            RuntimeError: the server refused.
        """
        status, answer = post(self.http, "/cache/clear")
        if status != 200:
            raise RuntimeError(f"POST /cache/clear: {status} {answer}")

    def stored_bytes(self) -> int:
        """Bytes of all files of the second tier."""
        return sum(file.stat().st_size for file in self.disk.rglob("*") if file.is_file())
