"""The router names the factor in which engines of a real server differ, until they are equal."""

import json
import os
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

from pegaflow.api import Cache
from tests.support.vllm_server import PegaServer, RouterServer

ROUTER = Path(os.environ["PEGA_BUILD_DIR"]) / "router" / "pegaflow-router"


def cache(server: PegaServer, instance: str, **factors: str) -> Cache:
    one = Cache(
        [np.zeros((8, 16, 64), np.float16)],
        factors={"model": "m", "block_tokens": "16"} | factors,
        endpoint=server.address,
        instance=instance,
    )
    one.wait_ready(timeout_s=30)
    return one


def health(router: RouterServer) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(f"http://{router.http}/health", timeout=20) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:  # There is no decode engine here.
        return json.load(error)


def wait_for(router: RouterServer, instances: int, different: int) -> dict[str, Any]:
    end = time.monotonic() + 30
    while True:
        found = health(router)["namespaces"]
        if (found["instances"], found["different"]) == (instances, different):
            return found
        assert time.monotonic() < end, found


def test_engines_with_different_namespaces_are_named(own_pega: PegaServer, tmp_path: Path) -> None:
    router = RouterServer(ROUTER, tmp_path, [], ["127.0.0.1:1"])
    router.arguments += ["--servers", f"http://{own_pega.http}", "--health-interval", "20ms"]
    router.arguments += ["--instances", "pd-"]
    with cache(own_pega, "pd-p"), cache(own_pega, "another", model="n"), router:
        assert wait_for(router, 1, 1)["differs"] == []
        with cache(own_pega, "pd-d", block_tokens="32"):
            found = wait_for(router, 2, 2)
            assert found["differs"] == [
                {
                    "factor": "block_tokens",
                    "values": [
                        {"value": "32", "instances": ["pd-d"]},
                        {"value": "16", "instances": ["pd-p"]},
                    ],
                }
            ]
            metrics = router.metrics()
            assert metrics.total("pegaflow_router_namespaces") == 2
            assert metrics.total("pegaflow_router_namespace_values", factor="block_tokens") == 2
            assert metrics.total("pegaflow_router_server_up") == 1
            assert 'block_tokens is "32" for pd-d, "16" for pd-p' in router.log_text()
        wait_for(router, 1, 1)
        with cache(own_pega, "pd-d"):
            assert wait_for(router, 2, 1)["differs"] == []
        assert router.log_text().count("engines share one namespace") == 1
        assert router.log_text().count("do not share one namespace") == 1
