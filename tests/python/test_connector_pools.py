"""Requests whose blocks an engine reads out of the pool of another node, past that of its own.

The real connector, vLLM's scheduler and two real servers; UCX runs over TCP on the loopback device.
"""

import contextlib
import ctypes.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.python.harness import BLOCK, Engine
from tests.python.test_connector_nodes import Nodes, two_nodes
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(
    ctypes.util.find_library("ucp") is None, reason="UCX is not installed (package libucx0)"
)

NETWORK = {"pegaflow.direct_group": "pools", "pegaflow.direct_nics": "auto"}


@pytest.fixture(autouse=True)
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEGAFLOW_TEST_UCX_OVER_TCP", "lo")
    monkeypatch.setenv("UCX_TCP_CM_REUSEADDR", "y")


@contextlib.contextmanager
def joined(directory: Path, direct_pool: str) -> Iterator[Nodes]:
    with two_nodes(directory, "--direct-pool", direct_pool) as nodes:
        wait_until(
            lambda: nodes.d.metrics().total("pegaflow_peer_lane", lane="rdma") == 1,
            "the nodes do not read over UCX",
        )
        yield nodes


@pytest.fixture
def nodes(short_path: Path, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    with joined(short_path / f"pool-{abs(hash(request.node.name)) % 10**6}", "force") as both:
        yield both


@contextlib.contextmanager
def both_engines(nodes: Nodes, **options: Any) -> Iterator[tuple[Engine, Engine]]:
    """One that saves at the owner's node, and one whose worker has a network at the other."""
    with (
        Engine(nodes.p.address, **options) as p,
        Engine(nodes.d.address, extra=NETWORK, **options) as d,
    ):
        p.wait_ready()
        d.wait_ready()
        yield p, d


def pool_blocks(nodes: Nodes, result: str) -> int:
    metrics = nodes.d.metrics()
    return int(metrics.total("pegaflow_direct_pool_blocks_total", result=result))


def check_nothing_left(nodes: Nodes) -> None:
    for name in ("pegaflow_direct_pool_claims", "pegaflow_direct_pool_reads", "pegaflow_claims"):
        wait_until(lambda name=name: nodes.d.metrics().total(name) == 0, f"{name} is not 0")
    wait_until(lambda: nodes.p.metrics().total("pegaflow_leases") == 0, "a lease is left")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_prompt_of_another_node_is_read_past_the_pool(nodes, prompt, ranks):
    tokens = prompt(288)
    with both_engines(nodes, tensor_parallel_size=ranks) as (p, d):
        p.ask("first", tokens, 2)
        p.run()

        answer = d.ask("x", tokens, 5)

        answer.check()
        assert answer.loaded == 288
        assert d.stats["direct_bytes"] == d.stats["loaded_bytes"] > 0
        assert nodes.fetched() == 0
        assert pool_blocks(nodes, "loaded") == ranks * 288 // BLOCK
        check_nothing_left(nodes)


def test_answers_continue_from_blocks_of_both_pools(nodes, prompt):
    head, tail = prompt(160), prompt(140)
    with both_engines(nodes) as (p, d):
        d.ask("head", head, 2)
        d.run()
        d.reset_local()
        p.ask("all", head + tail, 2)
        p.run()

        answer = d.ask("x", head + tail, 3)

        answer.check()
        assert 0 < d.stats["direct_bytes"] < d.stats["loaded_bytes"]
        assert nodes.fetched() == 0
        check_nothing_left(nodes)


def test_by_default_a_model_with_small_pieces_is_read_through_the_pool(short_path, prompt):
    with joined(short_path / "pool-auto", "auto") as nodes, both_engines(nodes) as (p, d):
        for number in range(2):  # The first fetch measures the rate of the other node.
            tokens = prompt(288)
            p.ask(f"first-{number}", tokens, 2)
            p.run()
            d.ask(f"x-{number}", tokens, 5).check()
        assert d.stats["direct_bytes"] == 0 < d.stats["loaded_bytes"] == nodes.fetched()
        check_nothing_left(nodes)


def test_a_node_that_is_killed_meanwhile_costs_computing(nodes, prompt):
    tokens = prompt(288)
    with both_engines(nodes) as (p, d):
        p.ask("first", tokens, 2)
        p.run()
        d.add("x", tokens, 5)
        d.step()
        nodes.p.kill()
        d.run()
        d.answers["x"].check()
        d.ask("y", prompt(64), 2).check()
