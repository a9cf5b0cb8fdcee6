"""Shared parts of tests with a real vLLM: serving it, sending requests, and forcing cache hits."""

import contextlib
import http.client
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
from safetensors import safe_open
from safetensors.numpy import save_file

from demo.client import post
from tests.support.vllm_server import (
    MODEL_NAME,
    ModelShape,
    PegaServer,
    VllmOptions,
    VllmServer,
)
from tests.support.waiting import wait_until

BLOCK = 32
SMALL = ModelShape(layers=4, hidden=256, heads=8, kv_heads=4, head_dim=32)
#: Generous deadlines, and a policy that loads every cached block: that the engine computes blocks
#: which a busy machine delays is not the subject.
PATIENT = {
    "pegaflow.load_policy": "always",
    "pegaflow.claim_limit_ms": 5000,
    "pegaflow.lookup_deadline_ms": 5000,
    "pegaflow.open_deadline_ms": 5000,
    "pegaflow.reserve_deadline_ms": 5000,
    "pegaflow.load_patience_ms": 5000,
}


def serve(
    model: Path,
    directory: Path,
    pega: PegaServer | None,
    *arguments: str,
    env: dict[str, str] | None = None,
    transfer: dict[str, Any] | None = None,
    extra: dict[str, Any] | None = None,
) -> VllmServer:
    """A vLLM with the connector, or a plain one without a server.

    ``extra``: further options of the connector. ``transfer``: the whole --kv-transfer-config, for
    another connector.
    """
    options = VllmOptions(
        model=model,
        connector=pega.address if pega is not None else None,
        extra_config=PATIENT | (extra or {}),
        kv_transfer_config=transfer,
        block_size=BLOCK,
        max_model_len=1024,
        kv_cache_bytes=128 << 20,
        python_path=[Path(os.environ["PEGA_BUILD_DIR"]) / "python"],
        arguments=arguments,
    )
    return VllmServer(options, directory, env)


def train_mlp(base: Path, made: Path) -> Path:
    """A copy of the model ``base`` in the new directory ``made``, with another MLP."""
    shutil.copytree(base, made)
    with safe_open(base / "model.safetensors", "np") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    chance = numpy.random.default_rng(1)
    for name, tensor in tensors.items():
        if ".mlp." in name:
            noise = chance.standard_normal(tensor.shape, dtype=tensor.dtype)
            tensors[name] = tensor + noise * tensor.std()
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    return made


def call(vllm: VllmServer, path: str, body: dict[str, Any] | None = None) -> Any:
    """POST; returns the JSON response, or its text."""
    connection = http.client.HTTPConnection(vllm.http, timeout=300)
    with contextlib.closing(connection):
        headers = {"Content-Type": "application/json"}
        connection.request("POST", path, json.dumps(body or {}), headers)
        response = connection.getresponse()
        text = response.read().decode()
    assert response.status == 200, (path, response.status, text)
    with contextlib.suppress(ValueError):
        return json.loads(text)
    return text


def hits(vllm: VllmServer) -> float:
    """The number of tokens that vLLM has counted as loaded by the connector."""
    return vllm.metrics().total("vllm:external_prefix_cache_hits_total")


def forget(vllm: VllmServer) -> None:
    """Empties vLLM's own cache, which waits for blocks that are being saved."""
    wait_until(
        lambda: post(vllm.http, "/reset_prefix_cache")[1]["success"], "the cache is still in use"
    )


def ask(
    vllm: VllmServer, tokens: Sequence[int], length: int = 8, model: str = MODEL_NAME
) -> tuple[list[int], float]:
    """A greedy answer, and the number of tokens from the cache when vLLM's own is empty."""
    forget(vllm)
    before = hits(vllm)
    body = {
        "model": model,
        "prompt": list(tokens),
        "max_tokens": length,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = call(vllm, "/v1/completions", body)["choices"][0]["token_ids"]
    return answer, hits(vllm) - before
