"""A model by its name on the hub, as most users serve it: the real vLLM, transformers and
huggingface_hub, online, with a stand-in of the hub (tests/support/hub.py).
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from demo.client import complete, post
from tests.python.vllm_cases import BLOCK, PATIENT, SMALL, train_mlp
from tests.support.hub import Hub
from tests.support.vllm_server import (
    PegaServer,
    VllmOptions,
    VllmServer,
    ensure_model,
)
from tests.support.waiting import wait_until

#: Run in a process of its own, since huggingface_hub reads its environment at its import.
CONFIGURE = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader
from pegaflow.vllm import namespace, weights
for text in sys.argv[1:]:
    arguments = json.loads(text)
    config = EngineArgs(dtype="float32", max_model_len=512, **arguments).create_engine_config()
    get_model_loader(config.load_config).download_model(config.model_config)
    made = weights.weights_id(config, "", "engine")
    found = {"weights": made, "config": namespace._config(config.model_config)}
    print("FOUND " + json.dumps(found | {"model": str(config.model_config.model)}))
"""


@pytest.fixture(scope="module")
def base() -> Path:
    return ensure_model(SMALL)


@pytest.fixture(scope="module")
def tuned(base: Path, short_path: Path) -> Path:
    """The base with a trained MLP, and another norm."""
    made = train_mlp(base, short_path / "tuned")
    config = json.loads((base / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    return made


@pytest.fixture(scope="module")
def hub(base: Path, tuned: Path) -> Iterator[Hub]:
    with Hub() as made:
        made.push("org/name", tuned)  # an older commit
        made.push("org/name", base)
        made.push("org/tuned", tuned)
        yield made
        assert not made.unknown, made.unknown


@pytest.fixture(scope="module")
def online(hub: Hub, short_path: Path) -> dict[str, str]:
    """The environment of an engine that may use the hub."""
    home = str(short_path / "home")
    return {"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0"} | {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": home,
        "HF_HUB_CACHE": f"{home}/hub",
    }


def configure(environ: dict[str, str], *arguments: dict[str, Any]) -> list[dict[str, str]]:
    process = subprocess.run(
        [sys.executable, "-c", CONFIGURE, *map(json.dumps, arguments)],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
    lines = process.stdout.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("FOUND ")]


def test_a_name_on_the_hub_is_identified_by_the_files_that_were_loaded(hub, online, base, tuned):
    older, _ = hub.commits["org/name"]
    by_name, by_revision, by_path, other, foreign_config = configure(
        online,
        {"model": "org/name"},
        {"model": "org/name", "revision": older},
        {"model": str(base)},
        {"model": "org/tuned"},
        {"model": "org/tuned", "hf_config_path": "org/name"},
    )

    assert by_name["model"] == "org/name", "vLLM was offline, unlike most users"
    assert by_name["weights"].startswith("sha256:")
    assert by_name["weights"] == by_path["weights"]
    assert by_name["config"] == by_path["config"]
    assert by_revision["weights"] == other["weights"] == foreign_config["weights"]
    assert other["weights"] != by_name["weights"]
    assert foreign_config["config"] == by_name["config"] != other["config"]

    # The same cache offline, where vLLM has a path and no name.
    (offline,) = configure(online | {"HF_HUB_OFFLINE": "1"}, {"model": "org/name"})
    assert offline["weights"] == by_name["weights"]
    assert offline["model"].endswith("/snapshots/" + list(hub.commits["org/name"])[-1])


def forget(vllm: VllmServer) -> None:
    """Empties vLLM's own cache, which waits for blocks that are being saved."""
    wait_until(
        lambda: post(vllm.http, "/reset_prefix_cache")[1]["success"], "the cache is still in use"
    )


def hits(vllm: VllmServer) -> float:
    return vllm.metrics().total("vllm:external_prefix_cache_hits_total")


def test_a_model_of_the_hub_is_served_and_its_fine_tune_gets_none_of_its_blocks(
    own_pega: PegaServer, short_path: Path, online: dict[str, str], tuned: Path, prompt: Any
) -> None:
    tokens = prompt(500)

    def serve(model: Path, connector: str | None, name: str) -> VllmServer:
        options = VllmOptions(
            model=model,
            connector=connector,
            extra_config=PATIENT,
            block_size=BLOCK,
            max_model_len=1024,
            kv_cache_bytes=64 << 20,
            python_path=[Path(os.environ["PEGA_BUILD_DIR"]) / "python"],
        )
        return VllmServer(options, short_path / name, online)

    with serve(Path("org/name"), own_pega.address, "base") as vllm:
        first = complete(vllm.http, tokens, 8).tokens
        forget(vllm)
        assert hits(vllm) == 0
        assert complete(vllm.http, tokens, 8).tokens == first
        assert hits(vllm) == 500 // BLOCK * BLOCK

    with serve(tuned, own_pega.address, "tuned") as vllm:
        answer = complete(vllm.http, tokens, 8).tokens
        assert hits(vllm) == 0
    with serve(tuned, None, "plain") as vllm:
        assert complete(vllm.http, tokens, 8).tokens == answer
    assert answer != first
