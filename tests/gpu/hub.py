#!/usr/bin/env python3
"""The wheel, a hub id and default options: the commands of a user with a GPU, with a real vLLM.

    PYTHONPATH=REPOSITORY python3 -m tests.gpu.hub --python VENV/bin/python --model DIR --out DIR

VENV has vLLM and the installed wheel, whose pegaflow-server is used. Nothing is offline: the
weights come from a stand-in of the hub on loopback, real safetensors files of random numbers
under which answers depend on the KV cache. DIR is tools/vllm-gpu/make_model.py's.

The reference is an engine without the connector. A prefix hit on its GPU and a reload compute the
same few tokens over the same KV cache, so tokens and log-probabilities must be equal; a cold
prefill rounds differently. Exits with 0 if everything held.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.gpu.scenarios import PATIENCE_S
from tests.support.child_process import ChildProcess
from tests.support.hub import Hub
from tests.support.prometheus import read_metrics
from tests.support.vllm_server import free_port
from tests.support.waiting import wait_until

BASE, TUNED = "acme/llama", "acme/llama-tuned"
#: No multiples of the block size: a reload of a whole prompt computes one token, a hit a block.
LENGTHS = (2009, 4009, 8009, 8005, 3333)
TOKENS = 48
#: Standard deviation of attention scores; with 1 attention is uniform and hides a wrong block.
SCORE_STD = 3.0

Answer = tuple[list[str], list[float]]


def write_weights(source: Path, target: Path, mlp_seed: int) -> None:
    """A checkpoint in two files. Checkpoints with other ``mlp_seed`` differ in the MLP alone."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((source / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file():
            shutil.copy(file, target)

    def draw(generator: Any, rows: int, columns: int, scale: float) -> Any:
        drawn = torch.randn(rows, columns, generator=generator, device="cuda")
        return (drawn * scale).to(torch.bfloat16).cpu()

    shared, mlp = torch.Generator("cuda"), torch.Generator("cuda")
    shared.manual_seed(1)
    mlp.manual_seed(mlp_seed)
    ones = torch.ones(hidden, dtype=torch.bfloat16)
    score = SCORE_STD**0.5
    tensors = {
        "model.embed_tokens.weight": draw(shared, config["vocab_size"], hidden, 1.0),
        "lm_head.weight": draw(shared, config["vocab_size"], hidden, hidden**-0.5),
        "model.norm.weight": ones,
    }
    for layer in range(config["num_hidden_layers"]):
        shapes = {
            "self_attn.q_proj": (shared, queries, hidden, score * hidden**-0.5),
            "self_attn.k_proj": (shared, keys, hidden, score * hidden**-0.5),
            "self_attn.v_proj": (shared, keys, hidden, hidden**-0.5),
            "self_attn.o_proj": (shared, hidden, queries, queries**-0.5),
            "mlp.gate_proj": (mlp, inner, hidden, hidden**-0.5),
            "mlp.up_proj": (mlp, inner, hidden, hidden**-0.5),
            "mlp.down_proj": (mlp, hidden, inner, inner**-0.5),
        }
        for name, shape in shapes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = draw(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = ones
    names = sorted(tensors)
    places = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file_name = f"model-{number:05}-of-00002.safetensors"
        content = {name: tensors[name].clone() for name in part}
        save_file(content, target / file_name, metadata={"format": "pt"})
        places |= dict.fromkeys(part, file_name)
    index = {"metadata": {}, "weight_map": places}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))


class HubVllm(ChildProcess):
    """`vllm serve ORG/NAME` as in the README."""

    def __init__(self, name: str, options: argparse.Namespace, hub: Hub, model: str, cached: bool):
        super().__init__(f"vllm {name}", options.out / f"{name}.log", environment(options, hub))
        self._python, self._model, self._cached = options.python, model, cached
        self.port = free_port()

    def command(self) -> list[str]:
        transfer = {
            "kv_connector": "PegaKVConnector",
            "kv_connector_module_path": "pegaflow.connector",
            "kv_role": "kv_both",
        }
        return [
            *(str(self._python), "-m", "vllm.entrypoints.cli.main", "serve", self._model),
            *("--port", str(self.port), "--gpu-memory-utilization", "0.3"),
            *("--max-model-len", "16384"),
            *(("--kv-transfer-config", json.dumps(transfer)) if self._cached else ()),
        ]

    def is_ready(self) -> bool:
        with contextlib.suppress(OSError):
            url = f"http://127.0.0.1:{self.port}/health"
            return urllib.request.urlopen(url, timeout=5).status == 200
        return False

    def ask(self, prompt: str) -> Answer:
        """Tokens and their log-probabilities."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": TOKENS}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body | {"temperature": 0, "logprobs": 1, "ignore_eos": True}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            found = json.load(response)["choices"][0]["logprobs"]
        return found["tokens"], found["token_logprobs"]

    def ask_all(self, prompts: Sequence[str]) -> list[Answer]:
        return [self.ask(prompt) for prompt in prompts]

    def total(self, name: str) -> float:
        return read_metrics(f"127.0.0.1:{self.port}").total(name)

    def wait_for_saves(self, blocks: int) -> None:
        wait_until(
            lambda: self.total("vllm:pegaflow_saved_blocks_total") >= blocks,
            f"fewer than {blocks} blocks were saved",
            PATIENCE_S,
        )


def environment(options: argparse.Namespace, hub: Hub) -> Mapping[str, str]:
    return {
        "PATH": f"{options.python.parent}:{os.environ['PATH']}",
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(options.out / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "PYTHONHASHSEED": "0",  # needed before vLLM 0.29
    }


@contextlib.contextmanager
def running_server(options: argparse.Namespace, hub: Hub) -> Iterator[None]:
    command = [options.python.parent / "pegaflow-server", "--pool-size", "8gb"]
    with (options.out / "server.log").open("wb") as log:
        server = subprocess.Popen(
            command,
            env={**os.environ, **environment(options, hub)},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            yield
        finally:
            server.send_signal(signal.SIGTERM)
            code = server.wait(PATIENCE_S)
    assert code == 0, f"pegaflow-server ended with {code}"


def check(options: argparse.Namespace, hub: Hub) -> None:
    chance = random.Random(options.seed)
    prompts = [" ".join(f"t{chance.randrange(10, 30000)}" for _ in range(n)) for n in LENGTHS]
    with HubVllm("reference", options, hub, BASE, cached=False) as engine:
        engine.ask_all(prompts)
        hits = engine.ask_all(prompts)
    with running_server(options, hub):
        with HubVllm("first", options, hub, BASE, cached=True) as engine:
            engine.ask_all(prompts)
            engine.wait_for_saves(sum(n // 16 for n in LENGTHS))
            print(doctor(options, hub), flush=True)
        with HubVllm("restarted", options, hub, BASE, cached=True) as engine:
            reloaded = engine.ask_all(prompts)
            loaded = engine.total("vllm:external_prefix_cache_hits_total")
        assert loaded == sum(n // 16 * 16 for n in LENGTHS), f"{loaded} tokens were reloaded"
        assert reloaded == hits, "tokens or log-probabilities differ from a hit on the GPU"
        print(f"{loaded:.0f} tokens reloaded after a restart; all responses are equal", flush=True)
        with HubVllm("tuned", options, hub, TUNED, cached=True) as engine:
            tuned = engine.ask_all(prompts)
            loaded = engine.total("vllm:external_prefix_cache_hits_total")
        assert loaded == 0, f"a fine-tune received {loaded} tokens of its base"
        assert tuned != hits, "the fine-tune has its base's answers: the check cannot fail"
        print("a fine-tune of the MLP alone received no block of its base", flush=True)
    assert not hub.unknown, f"the stand-in of the hub lacks {hub.unknown}"


def doctor(options: argparse.Namespace, hub: Hub) -> str:
    command = [options.python.parent / "pegaflow", "doctor"]
    env = {**os.environ, **environment(options, hub)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", type=Path, required=True, help="the Python of the environment")
    parser.add_argument("--model", type=Path, required=True, help="configuration and tokenizer")
    parser.add_argument("--out", type=Path, required=True, help="folder of weights and logs")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    options = parser.parse_args(argv)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "VLLM_SERVER_DEV_MODE"):
        os.environ.pop(name, None)
    options.out.mkdir(parents=True, exist_ok=True)
    print(f"seed {options.seed}", flush=True)
    with Hub() as hub:
        for number, name in enumerate((BASE, TUNED)):
            directory = options.out / "weights" / name
            write_weights(options.model, directory, mlp_seed=2 + number)
            hub.push(name, directory)
        check(options, hub)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
