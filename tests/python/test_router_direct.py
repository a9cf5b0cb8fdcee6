"""The router tells which engines of a real server cannot read each other's memory."""

import json
import os
import urllib.request
from pathlib import Path
from typing import Any

from tests.python.harness import Engine
from tests.python.test_router_namespaces import health
from tests.support.vllm_server import PegaServer, RouterServer
from tests.support.waiting import wait_until

ROUTER = Path(os.environ["PEGA_BUILD_DIR"]) / "router" / "pegaflow-router"
GROUP = {"pegaflow.direct_group": "host"}


def engine(server: PegaServer, group: dict[str, Any]) -> Engine:
    return Engine(server.address, extra=group)


def instances(server: PegaServer) -> dict[str, dict[str, Any]]:
    """By name."""
    with urllib.request.urlopen(f"http://{server.http}/instances", timeout=20) as answer:
        return {one["instance"]: one for one in json.load(answer)["instances"]}


def wait_for(router: RouterServer, paired: int, alone: int) -> list[dict[str, str]]:
    def sizes() -> tuple[int, int]:
        found = health(router)["direct"]
        return found["paired"], len(found["alone"])

    wait_until(lambda: sizes() == (paired, alone), "the engines are not compared so")
    return health(router)["direct"]["alone"]


def test_engines_that_cannot_read_another_one_are_named(
    own_pega: PegaServer, tmp_path: Path
) -> None:
    url = f"http://{own_pega.http}"
    router = RouterServer(ROUTER, tmp_path, [], ["127.0.0.1:1"])
    router.arguments += ["--servers", url, "--health-interval", "20ms", "--flow", "direct"]
    with router, engine(own_pega, GROUP) as p:
        p.wait_ready()
        (alone,) = wait_for(router, 0, 1)
        assert alone["server"] == url
        assert alone["why"] == 'no other engine of its server is in the direct group "host"'
        (rank,) = instances(own_pega)[alone["instance"]]["ranks"]
        assert rank["direct"] == {"group": "host", "lane": "process_vm_readv"}
        with engine(own_pega, GROUP) as d:
            d.wait_ready()
            assert wait_for(router, 2, 0) == []
            wait_until(
                lambda: "every engine has one whose memory it can read" in router.log_text(),
                "the router says nothing",
            )
            with engine(own_pega, {}) as other:
                other.wait_ready()
                (alone,) = wait_for(router, 2, 1)
                assert "pegaflow.direct_group is not set" in alone["why"]
                assert "direct" not in instances(own_pega)[alone["instance"]]["ranks"][0]
                metrics = router.metrics()
                assert metrics.total("pegaflow_router_direct_engines") == 2
                assert metrics.total("pegaflow_router_direct_engines_alone") == 1
                wait_until(
                    lambda: f"{alone['instance']} at {url}: its workers" in router.log_text(),
                    "the router does not name the engine",
                )
        wait_for(router, 0, 1)
        assert router.log_text().count("--flow direct: engines without") == 3
