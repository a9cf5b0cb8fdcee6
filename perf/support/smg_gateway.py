"""SMG's gateway from its wheel, in front of engines that it reaches over HTTP."""

from __future__ import annotations

import http.client
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.child_process import ChildProcess
from tests.support.vllm_server import free_port

VERSION = "1.13.0"


class SmgGateway(ChildProcess):
    """``smg`` with a policy of its own, started again for each measurement."""

    start_timeout_s = 60.0

    def __init__(
        self, package: Path, directory: Path, engines: Sequence[str], policy: str = "cache_aware"
    ) -> None:
        """
        Args:
            package: Where ``pip install --no-deps --target`` has put the wheel.
            engines: HOST:PORT of each.

        Raises:
            FileNotFoundError: the wheel is not there.
        """
        if not (package / "smg").is_dir():
            raise FileNotFoundError(
                f"{package} has no smg: pip install --no-deps --target {package} smg=={VERSION}"
            )
        super().__init__("smg", directory / "smg.log", {"PYTHONPATH": str(package)})
        self.engines = list(engines)
        self.policy = policy
        self._port, self._prometheus = free_port(), free_port()

    @property
    def http(self) -> str:
        """HOST:PORT for clients."""
        return f"127.0.0.1:{self._port}"

    def command(self) -> list[str]:
        return [
            sys.executable,
            *("-m", "smg.launch_router", "--host", "127.0.0.1", "--port", str(self._port)),
            *("--worker-urls", *(f"http://{engine}" for engine in self.engines)),
            *("--policy", self.policy, "--prometheus-port", str(self._prometheus)),
            *("--disable-tokenizer-autoload", "--log-level", "warn"),
        ]

    def is_ready(self) -> bool:
        """Whether it serves and lists the engines' model."""
        connection = http.client.HTTPConnection(self.http, timeout=5)
        try:
            connection.request("GET", "/readiness")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False  # not listening yet
        finally:
            connection.close()
