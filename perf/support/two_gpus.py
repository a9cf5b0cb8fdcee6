"""Two vLLMs, one on each of two GPUs or both on one, with routers in front of them."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import pathlib
import subprocess
import sys
import threading
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
TOOLS = ROOT / "tools" / "vllm-gpu"
sys.path[:0] = [str(ROOT), str(TOOLS)]

from bench_ttft import Answer, Server, prompt, run_burst, shuffle_free_blocks  # noqa: E402

from perf.gpu_report import process, wait_until  # noqa: E402

__all__ = [
    "BLOCK",
    "COMPARED",
    "CONFIGURATIONS",
    "TOOLS",
    "VOCABULARY",
    "Answer",
    "Rig",
    "Server",
    "prompt",
    "run_burst",
]

VOCABULARY = 30000
BLOCK = 16

OURS = {
    "kv_connector": "PegaKVConnector",
    "kv_role": "kv_both",
    "kv_connector_module_path": "pegaflow.connector",
}
EXTRA = {
    "pegaflow.weights_id": "pegaflow_seeded",
    "pegaflow.load_policy": "always",
    "pegaflow.untested": True,
}
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
#: Configurations without PegaFlow.
PEERS = {"nixl": NIXL, "push": {"kv_connector": "NixlPushConnector", "kv_role": "kv_both"}}

ALONE = ("--flow", "store")
FLOWS = {
    "serial": ("--flow", "store"),
    "early": ("--flow", "auto"),
    "first": ("--flow", "store", "--pd-first-token"),
    "kv-params": ("--flow", "kv-params"),
}
#: What each configuration measures beside the prefill engine alone.
CONFIGURATIONS = {
    "ours": ("serial", "early", "first"),
    "early": ("early",),
    "direct": ("early",),
    "far": ("early",),
    "whole": ("early",),
    "nixl": ("kv-params",),
    "push": ("kv-params", "both"),
    "multi": ("kv-params", "serial"),
}
#: Of "far": the decode engine's server asks that of the prefill engine.
PEER_ADDRESS = "127.0.0.1:9192"
PEER_OPTIONS = ("--peer-listen", "--peers")
#: Arms in which the decode engine computes the last token as the prefill engine does.
COMPARED = ("serial", "early", "kv-params", "both")


def connector(name: str) -> dict:
    """The value of --kv-transfer-config."""
    extra = dict(EXTRA)
    if name in ("direct", "far"):
        extra["pegaflow.direct_group"] = "pd"
    if name == "far":
        extra["pegaflow.direct_nics"] = "auto"
        extra["pegaflow.ucx_library"] = os.environ.get("PEGA_UCX_LIBRARY", "")
        if "PEGAFLOW_TEST_UCX_OVER_TCP" in os.environ:  # some 60 MB/s
            extra["pegaflow.load_patience_ms"] = 5000
    if name == "whole":
        extra["pegaflow.early_load_percent"] = 0
    ours = OURS | {"kv_connector_extra_config": extra}
    if name in PEERS:
        return PEERS[name]
    if name == "multi":
        return {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": [NIXL, ours]},
        }
    return ours


class BothLegs:
    """Sends a prompt to both engines at once, as NixlPushConnector allows: the decode engine
    registers its blocks with the prefill engine, which is known from an earlier response.
    """

    def __init__(self, prefill: Server, decode: Server) -> None:
        self._prefill, self._decode = prefill, decode
        self._place: dict = {}
        self._numbers = itertools.count()

    def complete(self, tokens: list[int], output_tokens: int) -> Answer:
        name = f"both-{next(self._numbers)}"
        if not self._place:
            self._place = self._learn(tokens, name)
        begun = threading.Thread(target=self._compute, args=(tokens, name))
        begun.start()
        # One token is computed by the decode engine itself.
        own = {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": []}
        own |= {"remote_request_id": name, "remote_num_tokens": len(tokens)}
        answer = self._decode.complete(
            tokens, output_tokens, {"kv_transfer_params": self._place | own}, name
        )
        begun.join()
        return answer

    def _compute(self, tokens: list[int], name: str) -> dict:
        body = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
        return self._prefill.post(tokens, 1, body, name)

    def _learn(self, tokens: list[int], name: str) -> dict:
        found = self._compute(tokens[:100], f"{name}-first")["kv_transfer_params"]
        names = ("remote_engine_id", "remote_host", "remote_port", "tp_size", "pp_size")
        return {each: found[each] for each in names}


class Rig:
    """Two engines, one on each GPU, and a router for each arm."""

    def __init__(self, options: argparse.Namespace, name: str) -> None:
        self.options = options
        self.name = name
        self.arms = ("alone", *CONFIGURATIONS[name])
        self.most_tokens = max(options.lengths) + 1000  #: Of a prompt and what follows it.
        self.timeline: pathlib.Path | None = None  #: The folder of the engines' notes.
        self.children: dict[str, subprocess.Popen] = {}  #: server, server-1, engine-0, engine-1
        self._runtime = options.out / f"run-{name}"
        self._env = os.environ | {
            "PYTHONPATH": f"{TOOLS / 'plugin'}:{os.environ.get('PYTHONPATH', '')}",
            "VLLM_SERVER_DEV_MODE": "1",
            "PYTHONHASHSEED": "0",
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
        }
        self.engines = [Server("127.0.0.1", 8000 + gpu, "model", 120) for gpu in (0, 1)]
        self.routers: dict[str, Server | BothLegs] = {
            arm: Server("127.0.0.1", 8080 + number, "model", 120)
            for number, arm in enumerate(self.arms)
        }
        if "both" in self.arms:
            self.routers["both"] = BothLegs(*self.engines)
        if options.timeline:
            self.timeline = options.out / f"timeline-{name}"
            self._env["PEGA_TIMELINE"] = str(self.timeline)

    @contextlib.contextmanager
    def running(self) -> Iterator[contextlib.ExitStack]:
        """Yields what ends the children."""
        with contextlib.ExitStack() as stack:
            if self.timeline:
                self.timeline.mkdir(exist_ok=True)
            if self.name not in PEERS:
                self._runtime.mkdir(exist_ok=True)
                for node in self._nodes():
                    self.start_server(stack, node)
            for gpus in ((0,), (1,)) if self.options.one_gpu else ((0, 1),):
                begun = [self.begin_engine(gpu, stack) for gpu in gpus]
                for gpu, (url, log) in zip(gpus, begun, strict=True):
                    wait_until(self.children[f"engine-{gpu}"], url, log, 240)
            for arm in self.arms:
                if arm != "both":
                    self._router(arm, stack)
            yield stack

    def _nodes(self) -> tuple[int, ...]:
        """Each engine of "far" has a server of its own."""
        return (0, 1) if self.name == "far" else (0,)

    def _address(self, node: int) -> str:
        return f"unix:{self._runtime}/pega-{node}.sock"

    def start_server(self, stack: contextlib.ExitStack, node: int = 0) -> None:
        options = self.options
        command = [str(options.bin / "pegaflow-server"), "--addr", self._address(node)]
        command += ["--http-addr", f"127.0.0.1:{9092 + node}"]
        command += ["--pool-size", f"{options.pool_gib}gb"]
        if len(self._nodes()) > 1:
            command += [PEER_OPTIONS[node], PEER_ADDRESS]
        log = options.out / f"{self.name}-server-{node}.log"
        name = f"server-{node}" if node else "server"
        child = self.children[name] = stack.enter_context(process(command, log, self._env))
        wait_until(child, f"http://127.0.0.1:{9092 + node}/health", log, 90)

    def begin_engine(self, gpu: int, stack: contextlib.ExitStack) -> tuple[str, pathlib.Path]:
        options = self.options
        log = options.out / f"{self.name}-engine-{gpu}.log"
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(options.model)]
        command += ["--served-model-name", "model", "--host", "127.0.0.1"]
        command += ["--port", str(8000 + gpu), "--load-format", "pegaflow_seeded"]
        command += ["--max-model-len", str(self.most_tokens), "--max-num-seqs", "64"]
        command += ["--block-size", str(BLOCK), "--gpu-memory-utilization"]
        command += ["0.4" if options.one_gpu else "0.6"]
        command += ["--num-gpu-blocks-override", str(options.gpu_blocks)]
        command += ["--disable-uvicorn-access-log", "--compilation-config"]
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        command += [json.dumps(graphs | {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]})]
        command += options.vllm_arguments.split()
        command += ["--kv-transfer-config", json.dumps(connector(self.name))]
        own = self._env | {
            "CUDA_VISIBLE_DEVICES": "0" if options.one_gpu else str(gpu),
            "PEGAFLOW_ENGINE_ENDPOINT": self._address(self._nodes()[-1] if gpu else 0),
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(5600 + gpu),
        }
        self.children[f"engine-{gpu}"] = stack.enter_context(process(command, log, own))
        return f"http://127.0.0.1:{8000 + gpu}/health", log

    def _router(self, arm: str, stack: contextlib.ExitStack) -> None:
        prefill, decode = ("http://127.0.0.1:8000", "http://127.0.0.1:8001")
        port = 8080 + self.arms.index(arm)
        command = [str(self.options.bin / "pegaflow-router"), "--listen", f"127.0.0.1:{port}"]
        if arm == "alone":
            command += [*ALONE, "--decode", prefill]
        else:
            command += [*FLOWS[arm], "--prefill", prefill, "--decode", decode]
        log = self.options.out / f"{self.name}-router-{arm}.log"
        child = stack.enter_context(process(command, log, dict(os.environ)))
        wait_until(child, f"http://127.0.0.1:{port}/health", log, 30)

    def shuffle(self) -> None:
        for engine in self.engines:
            shuffle_free_blocks(engine, VOCABULARY, 3)
            engine.empty_prefix_cache()

    def metrics(self) -> list[dict[str, float]]:
        """The metrics of both engines' connectors."""
        names = ("vllm:pegaflow", "vllm:nixl", "vllm:external_prefix")
        return [
            {name: value for name, value in engine.metrics().items() if name.startswith(names)}
            for engine in self.engines
        ]

    def ask(self, arm: str, tokens: list[int]) -> Answer:
        answer = self.routers[arm].complete(tokens, self.options.output_tokens)
        if answer.error:
            raise RuntimeError(f"{self.name}, {arm}, {len(tokens)} tokens: {answer.error}")
        return answer
