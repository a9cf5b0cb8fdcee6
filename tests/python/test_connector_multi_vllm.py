"""A real vLLM whose MultiConnector has PegaFlow's connector beside one of vLLM's own."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from demo.client import complete, post
from tests.python.vllm_cases import BLOCK, PATIENT, SMALL
from tests.support.vllm_server import PegaServer, VllmOptions, VllmServer, ensure_model
from tests.support.waiting import wait_until


def group(pega: PegaServer, path: Path) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "connectors": [
                {
                    "kv_connector": "PegaKVConnector",
                    "kv_connector_module_path": "pegaflow.connector",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": PATIENT | {"pegaflow.host": pega.address},
                },
                {
                    "kv_connector": "ExampleConnector",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": {"shared_storage_path": str(path)},
                },
            ]
        },
    }


@pytest.fixture(scope="module")
def vllm(pega: PegaServer, short_path: Path) -> Iterator[VllmServer]:
    options = VllmOptions(
        model=ensure_model(SMALL),
        kv_transfer_config=group(pega, short_path / "example"),
        block_size=BLOCK,
        kv_cache_bytes=256 << 20,
        python_path=[Path(os.environ["PEGA_BUILD_DIR"]) / "python"],
    )
    with VllmServer(options, short_path / "v") as server:
        yield server


def test_the_engine_answers_loads_and_shows_its_metrics(vllm, prompt):
    tokens = prompt(300)
    computed = complete(vllm.http, tokens, 8)
    wait_until(
        lambda: post(vllm.http, "/reset_prefix_cache")[1]["success"], "the cache is still in use"
    )

    loaded = complete(vllm.http, tokens, 8)

    assert loaded.tokens == computed.tokens
    # The API server makes the metrics of each connector from what the engine sends it.
    wait_until(
        lambda: vllm.metrics().total("vllm:pegaflow_loaded_blocks_total") >= 300 // BLOCK,
        "the loaded blocks are not in the metrics",
    )
    assert complete(vllm.http, prompt(20), 2).tokens
