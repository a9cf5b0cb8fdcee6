"""The stage of the claims of --pd: a prefill and a decode engine, on one node or two, a router."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from demo.children import StartsChildren
from demo.client import Answer, TextAnswer
from demo.diagnosis import describe
from demo.pd_engines import Engines
from demo.progress import Progress
from demo.prompts import BLOCK_TOKENS, Prompt, PromptMaker
from demo.stage import LONG_DEADLINES, SMALL_POOL_SIZE, wait_until
from tests.support.vllm_server import (
    PegaServer,
    RouterServer,
    VllmOptions,
    VllmServer,
    ensure_model,
)

#: On and off the block grid, one of a single chunk and one of several.
LENGTHS = (500, 512, 1000, 3000)
#: Two servers and two engines share a few cores: a response within 15 ms is impossible.
PATIENT_PEERS = ("--peer-deadline", "500ms", "--fetch-deadline", "8s")

_LANE = re.compile(r"read out of the memory of another engine .*\blane=(\w+)")


class PdStage(StartsChildren):
    """One run's servers and results. Belongs to the main thread."""

    def __init__(
        self,
        build_dir: Path,
        logs: Path,
        sockets: Path,
        seed: int,
        nodes: int = 1,
        *,
        direct: bool = False,
        gpus: Sequence[str] = (),
    ) -> None:
        """
        Args:
            direct: The decode engine reads the prefill engine's memory.
            gpus: Names for CUDA_VISIBLE_DEVICES; none: both engines run on the CPU.
        """
        self.engines = Engines.on_gpus(gpus) if gpus else Engines()
        self.shape = self.engines.shape
        model = ensure_model(self.shape, self.engines.python)
        self.progress = Progress()
        self.maker = PromptMaker(seed, self.shape.vocabulary)
        self.prompts = [Prompt(str(length), self.maker.tokens(length)) for length in LENGTHS]
        #: Asked for when the prefill engine's server is gone.
        self.last = Prompt("last", self.maker.tokens(self.engines.last_tokens))
        #: For the requests that both engines receive at once.
        self.early = [Prompt(f"{n} (early)", self.maker.tokens(n)) for n in LENGTHS]
        #: Further ones, of several chunks.
        long = self.engines.long_tokens
        self.chunked = [Prompt(f"{long} (chunks {n})", self.maker.tokens(long)) for n in range(3)]
        #: One whose prefill is killed.
        self.killed = Prompt(f"{long} (killed)", self.maker.tokens(long))
        self.baseline: dict[str, Answer] = {}
        self.texts: dict[str, TextAnswer] = {}
        self.figures: dict[str, Any] = {}
        self.diagnosis = ""
        binary = build_dir / "server" / "pegaflow-server"
        #: The servers of the prefill and the decode engine: different ones with two nodes.
        self.pega = PegaServer(binary, sockets, self.engines.pool_size)
        self.pega.log_file = logs / "pegaflow-server.log"
        self.decode_pega = self.pega
        if nodes == 2:
            self.pega.arguments += ["--peer-listen", "127.0.0.1:0"]
            (sockets / "node-2").mkdir()
            self.decode_pega = PegaServer(binary, sockets / "node-2", SMALL_POOL_SIZE)
            self.decode_pega.log_file = logs / "pegaflow-server-2.log"
        self._make_engines(model, sockets, logs, build_dir / "python", direct=direct)
        self._router_binary = build_dir / "router" / "pegaflow-router"
        self._directory = sockets
        self._logs = logs
        self._is_direct = direct
        self.router: RouterServer | None = None

    def _make_engines(
        self, model: Path, sockets: Path, logs: Path, python: Path, *, direct: bool
    ) -> None:
        engines = self.engines
        chunks = ("--max-num-batched-tokens", str(engines.chunk_tokens))
        plain = VllmOptions(
            model,
            kv_cache_bytes=engines.kv_cache_bytes,
            dtype=engines.shape.dtype,
            max_model_len=engines.max_model_len,
            arguments=engines.arguments,
            python=engines.python,
        )
        connected = dataclasses.replace(
            plain,
            connector=self.pega.address,
            # A machine where two engines share a few cores is slower than any in production.
            extra_config=LONG_DEADLINES
            | {"pegaflow.handover_wait_ms": 10_000}
            | ({"pegaflow.direct_group": "demo"} if direct else {}),
            python_path=[python],
        )
        alone = dataclasses.replace(plain, arguments=(*engines.arguments, *chunks))
        # On a GPU the chunks are the same, too; on the CPU the type has enough digits.
        self.plain = VllmServer(
            alone if engines.device == "cuda" else plain, sockets / "plain", engines.prefill_env
        )
        self.prefill = VllmServer(
            dataclasses.replace(connected, arguments=(*engines.arguments, *chunks)),
            sockets / "prefill",
            engines.prefill_env,
        )
        self.decode = VllmServer(
            dataclasses.replace(connected, connector=self.decode_pega.address),
            sockets / "decode",
            engines.decode_env,
        )
        for vllm, name in (
            (self.plain, "without-connector"),
            (self.prefill, "prefill"),
            (self.decode, "decode"),
        ):
            vllm.log_file = logs / f"vllm-{name}.log"

    @contextlib.contextmanager
    def servers(self) -> Iterator[None]:
        """pegaflow-server of each node; the decode engine's has the other one as its peer."""
        with self.running(self.pega):
            if not self.has_two_nodes:
                yield
                return
            self.decode_pega.arguments = ["--peers", self.pega.peer_listen, *PATIENT_PEERS]
            with self.running(self.decode_pega):
                wait_until(
                    "the servers are connected",
                    lambda: self.decode_pega.metrics().total("pegaflow_peer_ready") == 1,
                    30,
                )
                yield

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
        """Keeps the servers' counters and logs at the first failure."""
        if self.diagnosis:
            return
        self.diagnosis = "\n\n".join(
            describe(vllm, pega)
            for vllm, pega in ((self.prefill, self.pega), (self.decode, self.decode_pega))
        )
        if self.router is not None:
            self.diagnosis += f"\n\nlog of the router:\n{self.router.log_text()[-4000:]}"

    def note_shift(self, shift: float) -> None:
        """Keeps the largest difference of log-probabilities to those of one engine alone."""
        self.figures["largest_shift"] = max(shift, self.figures.get("largest_shift", 0.0))

    # -- what is counted

    @property
    def has_two_nodes(self) -> bool:
        return self.decode_pega is not self.pega

    @property
    def page_bytes(self) -> int:
        """Bytes of one block in the pool: all layers, K and V."""
        return BLOCK_TOKENS * self.shape.kv_bytes_per_token()

    def counted(self) -> dict[str, int]:
        """The decode engine's tokens from the cache, and the results of its waits."""
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

    def fetched_bytes(self) -> int:
        """Bytes that the decode engine's node has read from the other one."""
        return int(self.decode_pega.metrics().total("pegaflow_fetch_bytes_total"))

    def lent_bytes(self) -> int:
        return int(self.pega.metrics().total("pegaflow_lent_bytes_total"))

    def decode_is_known(self) -> bool:
        """Whether its server still lists the decode engine."""
        others = 0 if self.has_two_nodes else 1
        return self.decode_pega.metrics().total("pegaflow_instances") > others

    def generating(self) -> tuple[int, int]:
        """The decode engine's running requests, and the tokens that it has computed so far."""
        metrics = self.decode.metrics()
        return (
            int(metrics.total("vllm:num_requests_running")),
            int(metrics.total("vllm:generation_tokens_total")),
        )

    def early_waits(self, result: str) -> int:
        """Requests of the decode engine that waited for a prefill that was sent with them."""
        metrics = self.decode.metrics()
        return int(metrics.total("vllm:pegaflow_early_handovers_total", result=result))

    def chunked_loads(self, result: str) -> int:
        """Loads of the decode engine that began before the prefill had ended."""
        metrics = self.decode.metrics()
        return int(metrics.total("vllm:pegaflow_chunked_loads_total", result=result))

    def missing_blocks(self) -> int:
        """Blocks that loads of the decode engine did not bring, so that it computed them."""
        return int(self.decode.metrics().total("vllm:pegaflow_load_failed_blocks_total"))

    def direct_bytes(self) -> int:
        """Bytes that the decode engine has read out of the prefill engine's memory."""
        return int(self.decode.metrics().total("vllm:pegaflow_direct_bytes_total"))

    def lanes(self) -> set[str]:
        """The lanes by which the decode engine reads, as its worker has logged them."""
        return set(_LANE.findall(self.decode.log_text()))

    def read_blocks(self) -> int:
        """Blocks of direct reads so far, as the server knows."""
        return int(self.pega.metrics().total("pegaflow_direct_read_blocks_total"))

    def wait_in_flight(self, read_before: int) -> None:
        """Returns when both engines have a request, and with direct reads, a block of it was read.

        Args:
            read_before: read_blocks() before the request.
        """
        what = "both engines have the request"
        if self.engines.device == "cuda":
            # The prefill is over before both engines have answered for their metrics. A block that
            # was read shows that both have the request.
            wait_until(what, lambda: self.read_blocks() > read_before, 60, poll_s=0.001)
            return

        def has_both() -> bool:
            was_read = not self._is_direct or self.read_blocks() > read_before
            return was_read and self.unfinished() == (1, 1)

        wait_until(what, has_both, 60)

    @staticmethod
    def kill(vllm: VllmServer) -> None:
        """Ends an engine like a crash. It makes no step from here on, though a kill takes time."""
        os.killpg(vllm.pid, signal.SIGSTOP)
        vllm.kill()

    def direct_reads(self) -> int:
        """Such reads in flight, as the server knows."""
        return int(self.pega.metrics().total("pegaflow_direct_reads"))

    def prefill_is_free(self) -> bool:
        return _is_free(self.prefill)

    def decode_is_free(self) -> bool:
        return _is_free(self.decode)

    def unfinished(self) -> tuple[int, int]:
        """Requests that the prefill engine and the decode engine have."""
        counts = [
            metrics.total("vllm:num_requests_running") + metrics.total("vllm:num_requests_waiting")
            for metrics in (self.prefill.metrics(), self.decode.metrics())
        ]
        return int(counts[0]), int(counts[1])

    def prefilled(self) -> int:
        """Requests that the prefill engine has answered."""
        return int(self.prefill.metrics().total("vllm:request_success_total"))


def _is_free(vllm: VllmServer) -> bool:
    """Whether no block of an engine's KV cache is in use."""
    return vllm.metrics().total("vllm:kv_cache_usage_perc") == 0


def loaded_tokens(prompt: Prompt) -> int:
    """The tokens that the decode engine must load: all but the last one.

    On the block grid vLLM counts a load of the whole prompt, and computes its last token again.
    """
    tokens = len(prompt)
    return tokens - 1 if tokens % BLOCK_TOKENS else tokens
