"""What the claims of --pd stand on: a server, a prefill and a decode engine, and a router."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from demo.client import Answer, TextAnswer
from demo.diagnosis import describe
from demo.progress import Progress
from demo.prompts import BLOCK_TOKENS, Prompt, PromptMaker
from demo.stage import PATIENT, SMALL, SMALL_POOL_SIZE
from tests.support.child_process import ChildProcess
from tests.support.vllm_server import (
    PegaServer,
    RouterServer,
    VllmOptions,
    VllmServer,
    ensure_model,
)

#: On and off the block grid, one of a single chunk and one of several.
LENGTHS = (500, 512, 1000, 3000)
#: Two engines beside each other have one small model each.
KV_CACHE_BYTES = 1 << 29


class PdStage:
    """One run's servers and results. Belongs to the main thread."""

    def __init__(self, build_dir: Path, logs: Path, sockets: Path, seed: int) -> None:
        self.shape = SMALL
        model = ensure_model(self.shape)
        self.progress = Progress()
        self.maker = PromptMaker(seed, self.shape.vocabulary)
        self.prompts = [Prompt(str(length), self.maker.tokens(length)) for length in LENGTHS]
        self.baseline: dict[str, Answer] = {}
        self.texts: dict[str, TextAnswer] = {}
        self.figures: dict[str, Any] = {}
        self.diagnosis = ""
        self.pega = PegaServer(build_dir / "server" / "pegaflow-server", sockets, SMALL_POOL_SIZE)
        self.pega.log_file = logs / "pegaflow-server.log"
        plain = VllmOptions(model, kv_cache_bytes=KV_CACHE_BYTES)
        connected = dataclasses.replace(
            plain,
            connector=self.pega.address,
            # A machine where two engines share a few cores is slower than any that serves.
            extra_config=PATIENT | {"pegaflow.handover_wait_ms": 10_000},
            python_path=[build_dir / "python"],
        )
        self.plain = VllmServer(plain, sockets / "plain")
        self.prefill = VllmServer(connected, sockets / "prefill")
        self.decode = VllmServer(connected, sockets / "decode")
        for vllm, name in (
            (self.plain, "without-connector"),
            (self.prefill, "prefill"),
            (self.decode, "decode"),
        ):
            vllm.log_file = logs / f"vllm-{name}.log"
        self._router_binary = build_dir / "router" / "pegaflow-router"
        self._directory = sockets
        self._logs = logs
        self.router: RouterServer | None = None

    @contextlib.contextmanager
    def running(self, *children: ChildProcess) -> Iterator[None]:
        """These servers, one start after the other; nothing of them is left at the end."""
        started: list[ChildProcess] = []
        try:
            for child in children:
                started.append(child)
                self.start(child)
            yield
        except Exception:
            self.diagnose()
            raise
        finally:
            for child in reversed(started):
                child.stop()

    def start(self, child: ChildProcess) -> None:
        what = child.log_file.stem
        with self.progress.step(f"{what} starts"):
            child.start()
        self.progress.say(f"{what} is ready")

    @contextlib.contextmanager
    def routed(self, *options: str) -> Iterator[RouterServer]:
        """A router in front of both engines, which run."""
        router = RouterServer(
            self._router_binary, self._directory, [self.prefill.http], [self.decode.http]
        )
        router.arguments += options
        router.log_file = self._logs / "pegaflow-router.log"
        with self.running(router):
            self.router = router
            yield router

    def diagnose(self) -> None:
        """What the servers say of themselves at the first thing that went wrong."""
        if self.diagnosis:
            return
        self.diagnosis = "\n\n".join(
            describe(vllm, self.pega) for vllm in (self.prefill, self.decode)
        )
        if self.router is not None:
            self.diagnosis += f"\n\nthe router says:\n{self.router.log_text()[-4000:]}"

    # -- what is counted

    @property
    def page_bytes(self) -> int:
        """Bytes of one block in the pool: all layers, K and V."""
        return BLOCK_TOKENS * self.shape.kv_bytes_per_token()

    def counted(self) -> dict[str, int]:
        """Of the decode engine: what it took from the cache, and how its waits ended."""
        metrics = self.decode.metrics()
        waits = {
            result: int(metrics.total("vllm:pegaflow_handovers_total", result=result))
            for result in ("over", "gone", "timeout", "no_server")
        }
        return {
            "external": int(metrics.total("vllm:external_prefix_cache_hits_total")),
            "local": int(metrics.total("vllm:prefix_cache_hits_total")),
            "answered": int(metrics.total("vllm:request_success_total")),
        } | waits

    def engines(self) -> int:
        """Engines that the server knows."""
        return int(self.pega.metrics().total("pegaflow_instances"))

    def generating(self) -> tuple[int, int]:
        """Of the decode engine: requests under way, and tokens that it has computed so far."""
        metrics = self.decode.metrics()
        return (
            int(metrics.total("vllm:num_requests_running")),
            int(metrics.total("vllm:generation_tokens_total")),
        )

    def prefilled(self) -> int:
        """Requests that the prefill engine has answered."""
        return int(self.prefill.metrics().total("vllm:request_success_total"))
