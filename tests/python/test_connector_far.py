"""Requests that read the blocks of a prompt out of the memory of a prefill engine of another node.

The real connector, vLLM's scheduler and two real servers; UCX runs over TCP on the loopback device.
The prefill engine's worker has a process of its own, which answers the reads.
"""

import contextlib
import ctypes.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.python.harness import BLOCK, Engine
from tests.python.test_connector_chunked import CHUNK, LENGTH
from tests.python.test_connector_direct import check_followed, has_arrived, send
from tests.python.test_connector_early import CHUNKED, forgets_all
from tests.python.test_connector_handover import LONG, engines
from tests.python.test_connector_nodes import Nodes, two_nodes
from tests.python.test_connector_two_engines import run_together
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(
    ctypes.util.find_library("ucp") is None, reason="UCX is not installed (package libucx0)"
)

NETWORK = {"pegaflow.direct_group": "far", "pegaflow.direct_nics": "auto"}
PREFILL = CHUNKED | {"process": True, "extra": NETWORK}
DECODE = {"extra": LONG | NETWORK}


@pytest.fixture(autouse=True)
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEGAFLOW_TEST_UCX_OVER_TCP", "lo")
    monkeypatch.setenv("UCX_TCP_CM_REUSEADDR", "y")


@pytest.fixture
def nodes(short_path: Path, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    with two_nodes(short_path / f"far-{abs(hash(request.node.name)) % 10**6}") as both:
        yield both


def at_both(nodes: Nodes, prefill: Any = None, decode: Any = None) -> Any:
    return engines(
        nodes.p.address, PREFILL | (prefill or {}), DECODE | (decode or {}), nodes.d.address
    )


def is_waiting(nodes: Nodes) -> bool:
    """Whether the decode engine's worker waits at the prefill engine's node for a block."""
    return int(nodes.p.metrics().total("pegaflow_direct_waits")) > 0


def far_reads(nodes: Nodes) -> int:
    return int(nodes.d.metrics().total("pegaflow_direct_far_reads_total"))


def reads_left(nodes: Nodes) -> int:
    return int(nodes.p.metrics().total("pegaflow_direct_reads"))


@contextlib.contextmanager
def following(
    nodes: Nodes, tokens: list[int], prefill: Any = None, decode: Any = None
) -> Iterator[tuple[Engine, Engine]]:
    """Both engines when the decode engine has the first of four chunks and waits for the next."""
    with at_both(nodes, prefill, decode) as (p, d):
        send(p, d, tokens)
        p.step()
        d.run(lambda: has_arrived(d, tokens, CHUNK))
        d.run(lambda: is_waiting(nodes))
        assert d.answers["x"].finish_reason == ""
        yield p, d
    wait_until(lambda: reads_left(nodes) == 0, "a read of another node's worker was not ended")


@pytest.mark.parametrize("length", [LENGTH, 992, 993])
def test_one_load_follows_a_prefill_of_another_node(nodes, prompt, length):
    tokens = prompt(length)
    with following(nodes, tokens) as (p, d):
        run_together([p, d])
        check_followed(d, length)
        assert d.stats["loads"] <= 2  # That of the first chunk, if it was saved by then.
        assert far_reads(nodes) > 0


def test_each_chunk_behind_the_first_is_read_out_of_the_other_nodes_worker(nodes, prompt):
    tokens = prompt(LENGTH)
    with following(nodes, tokens) as (p, d):
        for chunk in range(2, 5):
            before = far_reads(nodes)
            p.step()
            if chunk < 4:
                d.run(lambda count=chunk * CHUNK: has_arrived(d, tokens, count))
                d.run(lambda: is_waiting(nodes))
            assert far_reads(nodes) > before or chunk == 4
        run_together([p, d])
        d.answers["x"].check()
        block = d.connector._scheduler.rules.block_bytes
        assert d.stats["direct_bytes"] >= 2 * CHUNK // BLOCK * block
        # Nothing of what was read directly went through the pools.
        assert nodes.fetched() <= d.stats["loaded_bytes"] - d.stats["direct_bytes"]


def test_blocks_that_the_other_nodes_pool_has_are_fetched(nodes, prompt):
    tokens = prompt(LENGTH)
    with at_both(nodes) as (p, d):
        send(p, d, tokens)
        p.run()  # All of the prompt is saved before the decode engine looks.
        run_together([p, d])
        d.answers["x"].check()
        assert d.answers["x"].loaded == LENGTH - 1
        assert nodes.fetched() > 0


def test_two_ranks_read_the_memory_of_their_peers_on_the_other_node(nodes, prompt):
    tokens = prompt(LENGTH)
    two = {"tensor_parallel_size": 2}
    with at_both(nodes, two, two) as (p, d):
        send(p, d, tokens)
        p.step()
        d.run(lambda: is_waiting(nodes))
        run_together([p, d])
        d.answers["x"].check()
        assert d.answers["x"].loaded == LENGTH - 1
        assert d.stats["direct_bytes"] > 0


def test_a_killed_prefill_worker_leaves_what_was_read(nodes, prompt):
    tokens = prompt(LENGTH)
    with Engine(nodes.d.address, **DECODE) as d:
        d.wait_ready()
        with Engine(nodes.p.address, **PREFILL) as p:
            p.wait_ready()
            send(p, d, tokens)
            p.step()
            d.run(lambda: has_arrived(d, tokens, CHUNK))
            d.run(lambda: is_waiting(nodes))
            (worker,) = p.ranks
            worker.kill()
            d.run()
        d.answers["x"].check()
        assert CHUNK // BLOCK <= d.stats["loaded_blocks"] < LENGTH // BLOCK
        assert forgets_all(d)
        d.check_at_rest()


def test_a_request_that_is_aborted_leaves_no_read(nodes, prompt):
    tokens = prompt(LENGTH)
    with following(nodes, tokens) as (p, d):
        d.abort("x")
        d.run()
        assert forgets_all(d)
        p.run()


def test_an_engine_without_a_network_loads_through_the_pools(nodes, prompt):
    # The decode engine's worker has no network, so its server does not ask for the other memory.
    tokens = prompt(LENGTH)
    with at_both(nodes, None, {"extra": LONG | {"pegaflow.direct_group": "far"}}) as (p, d):
        send(p, d, tokens)
        run_together([p, d])
        d.answers["x"].check()
        assert d.answers["x"].loaded == LENGTH - 1
        assert d.stats["direct_bytes"] == 0
        assert far_reads(nodes) == 0


def test_the_server_shows_which_workers_other_nodes_can_read(nodes, prompt):
    with at_both(nodes) as (p, d):
        d.ask("x", prompt(40), 2)
        p.run()
        for server in nodes:
            assert server.metrics().total("pegaflow_direct_network_workers") == 1
            (rank,) = server.get_by_socket("/instances")["instances"][0]["ranks"]
            assert rank["direct"] == {
                "group": "far",
                "lane": "process_vm_readv",
                "network": "ucx",
            }
