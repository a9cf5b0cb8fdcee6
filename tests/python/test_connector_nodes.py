"""Prefill on one node, decode on another: the real connector, vLLM's scheduler, and real servers.

The handover and the waiting are the same as on one node (test_connector_handover); here the servers
notify each other, and the blocks are read over the lane between them.
"""

import contextlib
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pegaflow.vllm import resets
from tests.python.conftest import server_binary
from tests.python.harness import BLOCK, Engine
from tests.python.test_connector_engine import KINDS
from tests.python.test_connector_faults import stopped
from tests.python.test_connector_handover import (
    LONG,
    engines,
    next_job,
    prefill,
    wait_steps,
    waits,
)
from tests.support.vllm_server import PegaServer
from tests.support.waiting import wait_until

#: Long deadlines: a busy machine must not turn a hit into a miss.
PATIENT_PEERS = ["--peer-deadline", "5s", "--fetch-deadline", "8s"]


class Nodes(NamedTuple):
    p: PegaServer  # The owner.
    d: PegaServer  # The reader, which sends requests to p.

    def fetched(self) -> int:
        """Bytes that D's node has read from P's."""
        return int(self.d.metrics().total("pegaflow_fetch_bytes_total"))

    def remote_waits(self, result: str) -> int:
        return int(self.d.metrics().total("pegaflow_peer_job_waits_total", result=result))

    def are_joined(self) -> bool:
        return self.d.metrics().total("pegaflow_peer_ready") == 1


@contextlib.contextmanager
def two_nodes(directory: Path, *options: str) -> Iterator[Nodes]:
    """Two servers of which one has the other as a peer; ``options`` are the reader's."""
    lends = ["--peer-listen", "127.0.0.1:0"]
    with PegaServer(server_binary(), directory / "p", "64mb", lends) as p:
        asks = ["--peers", p.peer_listen, *PATIENT_PEERS, *options]
        with PegaServer(server_binary(), directory / "d", "64mb", asks) as d:
            nodes = Nodes(p, d)
            wait_until(nodes.are_joined, "the nodes are not joined")
            yield nodes


@pytest.fixture(scope="module")
def nodes(short_path: Path) -> Iterator[Nodes]:
    """Shared by all tests that leave both nodes alive."""
    with two_nodes(short_path) as both:
        yield both


@pytest.fixture
def own_nodes(short_path: Path, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    """For a test that stops or kills a node."""
    with two_nodes(short_path / f"own-{abs(hash(request.node.name)) % 10**6}") as both:
        yield both


def at_both(nodes: Nodes, prefill: Any = None, decode: Any = None) -> Any:
    return engines(nodes.p.address, prefill, decode, nodes.d.address)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [288, 290, 303])
def test_all_but_the_last_token_are_loaded_from_the_other_node(nodes, prompt, kind, length):
    tokens = prompt(length)
    with at_both(nodes, KINDS[kind], KINDS[kind]) as (p, d):
        before = nodes.fetched()
        params = prefill(p, "x", tokens)
        assert params["pegaflow"]["tokens"] == length

        answer = d.ask("x", tokens, 20, params=params)

        # The partial block, too, under PegaFlow's own key.
        assert answer.loaded == (length - 1 if length % BLOCK else 288)
        assert waits(d, "over") == 1
        page = nodes.p.metrics().total("pegaflow_lent_bytes_total") / (
            nodes.d.metrics().total("pegaflow_fetch_blocks_total", result="whole")
        )
        assert nodes.fetched() - before == -(-length // BLOCK) * page
        # From now on D has its own copy.
        d.reset_local()
        again = d.ask("again", tokens, 2, params=params)
        assert again.loaded == answer.loaded
        assert nodes.fetched() - before == -(-length // BLOCK) * page


def test_each_node_has_a_part_of_the_prompt(nodes, prompt):
    head, tail = prompt(160), prompt(140)
    with at_both(nodes) as (p, d):
        d.ask("head", head, 2)
        d.run()
        d.reset_local()
        before = nodes.fetched()
        params = prefill(p, "x", head + tail)

        answer = d.ask("x", head + tail, 3, params=params)

        assert (answer.local, answer.loaded) == (0, 299)
        assert 0 < nodes.fetched() - before  # The beginning was local.
        assert nodes.p.metrics().total("pegaflow_peer_awaits_total") >= 1


def test_a_killed_node_is_not_waited_for(own_nodes, prompt):
    tokens = prompt(300)
    with Engine(own_nodes.p.address) as p, Engine(own_nodes.d.address, extra=LONG) as d:
        p.wait_ready()
        d.wait_ready()
        params = next_job(prefill(p, "x", tokens))
        p.run()
        d.add("x", tokens, 5, params=params)
        wait_steps(d, "x")

        own_nodes.p.kill()

        d.run()
        d.answers["x"].check()
        assert d.answers["x"].loaded == 0
        assert waits(d, "gone") == 1
        assert own_nodes.remote_waits("gone") == 1
        # No request is sent to a node that is gone.
        d.ask("y", prompt(300), 1, params=params)
        assert own_nodes.remote_waits("unknown") == 1
        d.run()
        d.check_at_rest()


def test_a_node_that_hangs_is_waited_for_until_the_deadline(short_path, prompt):
    tokens = prompt(300)
    short = {"pegaflow.handover_wait_ms": 300}
    with two_nodes(short_path / "hang", "--peer-deadline", "50ms") as nodes:
        with at_both(nodes, None, {"extra": short}) as (p, d):
            params = next_job(prefill(p, "x", tokens))
            p.run()
            with stopped(nodes.p):
                answer = d.ask("x", tokens, 5, params=params)
                assert answer.loaded == 0
                assert waits(d, "timeout") == 1
                # The node owes a response: it receives no further request, and is lost after a
                # while.
                d.ask("y", prompt(300), 1, params=params)
                assert waits(d, "busy") + waits(d, "gone") == 1
                wait_until(lambda: not nodes.are_joined(), "the nodes stay joined")
                d.ask("z", prompt(300), 1, params=params)
                assert waits(d, "busy") + waits(d, "gone") == 2
                assert waits(d, "gone") >= 1
            wait_until(nodes.are_joined, "the nodes are not joined")


def test_the_next_incarnation_of_a_node_is_another_one(own_nodes, prompt):
    tokens = prompt(300)
    with Engine(own_nodes.p.address) as p, Engine(own_nodes.d.address, extra=LONG) as d:
        p.wait_ready()
        d.wait_ready()
        params = prefill(p, "x", tokens)
        p.run()
        health = json.load(urllib.request.urlopen(f"http://{own_nodes.d.http}/health"))
        assert health["nodes"]["peers"][0]["node"] == params["pegaflow"]["node"]
        own_nodes.p.arguments[1] = own_nodes.p.peer_listen
        own_nodes.p.kill()
        own_nodes.p.start()
        wait_until(own_nodes.are_joined, "the nodes are not joined")

        assert d.ask("x", tokens, 5, params=params).loaded == 0
        assert waits(d, "gone") == 1
        d.run()
        d.check_at_rest()


def test_nodes_that_do_not_confirm_a_reset_are_named_and_counted(short_path, prompt, monkeypatch):
    warnings = []
    monkeypatch.setattr(resets.log, "warning", lambda text, *words: warnings.append(text % words))
    with (
        two_nodes(short_path / "deaf", "--peer-deadline", "200ms") as nodes,
        Engine(nodes.d.address) as d,
    ):
        address = nodes.p.peer_listen
        d.wait_ready()
        d.ask("x", prompt(300))
        d.run()
        assert d.scheduler.reset_prefix_cache(reset_connector=True)
        wait_until(d.connector._scheduler._resets.is_done, "the reset does not end")
        assert not [text for text in warnings if "not confirmed by" in text]

        with stopped(nodes.p):
            d.reset_local()
            assert d.scheduler.reset_prefix_cache(reset_connector=True)
            wait_until(d.connector._scheduler._resets.is_done, "the reset does not end")

        (line,) = [text for text in warnings if "not confirmed by" in text]
        assert "1 node(s)" in line and address in line
        d.ask("y", prompt(40))
        d.run()
        assert d.stats["reset_unconfirmed_nodes"] == 1
        assert d.stats["resets{explicit}"] == 2
        d.check_at_rest()
