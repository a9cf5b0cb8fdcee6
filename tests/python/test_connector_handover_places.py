"""Handovers independent of the place of both engines: at one server, or each at its own."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.python.conftest import server_binary
from tests.python.harness import Engine
from tests.python.test_connector_handover import (
    LONG,
    engines,
    is_waiting,
    next_job,
    prefill,
    wait_steps,
    waits,
)
from tests.python.test_connector_nodes import two_nodes
from tests.python.test_connector_two_engines import run_together
from tests.support.vllm_server import PegaServer


class Place(NamedTuple):
    p: str  #: Address of the prefill engine's server.
    d: str  # Address of the decode engine's server.


@pytest.fixture(scope="module", params=["one server", "two nodes"])
def place(request: pytest.FixtureRequest, short_path: Path) -> Iterator[Place]:
    """The same prompts are used at each place, so each has servers of its own."""
    with contextlib.ExitStack() as stack:
        if request.param == "one server":
            pega = stack.enter_context(PegaServer(server_binary(), short_path / "place", "64mb"))
            yield Place(pega.address, pega.address)
        else:
            nodes = stack.enter_context(two_nodes(short_path / "places"))
            yield Place(nodes.p.address, nodes.d.address)


def at(place: Place, prefill: Any = None, decode: Any = None) -> Any:
    return engines(place.p, prefill, decode, place.d)


def test_a_wait_for_a_chunked_prompt_ends_with_its_last_chunk(place, prompt):
    # 256 tokens for each step, and enough blocks that all of them may wait for their save at once.
    tokens = prompt(805)
    with at(place, {"blocks": 1024}, {"blocks": 1024}) as (p, d):
        params = prefill(p, "x", tokens)
        assert d.ask("x", tokens, 3, params=params).loaded == 804


def test_without_the_partial_block_the_full_blocks_are_loaded(place, prompt):
    tokens = prompt(300)
    with at(place) as (p, d):
        p.ask("x", tokens, 1)  # The partial block was not requested.
        p.run()
        params = prefill(p, "other", prompt(40))
        params["pegaflow"]["tokens"] = 300

        assert d.ask("x", tokens, 3, params=params).loaded == 288


def test_a_request_waits_without_blocks_and_others_continue(place, prompt):
    tokens = prompt(300)
    with at(place) as (p, d):
        params = next_job(prefill(p, "warm-up", prompt(40)))
        params["pegaflow"]["tokens"] = 300
        d.add("x", tokens, 5, params=params)
        wait_steps(d, "x")
        d.add("other", prompt(50), 5)
        d.run(lambda: d.answers["other"].finish_reason != "")
        assert is_waiting(d, "x")

        prefill(p, "x", tokens)
        run_together([p, d])

        d.answers["x"].check()
        assert d.answers["x"].loaded == 299
        assert waits(d, "over") == 1


def test_a_wait_ends_after_its_patience(place, prompt):
    tokens = prompt(300)
    with at(place, None, {"extra": {"pegaflow.handover_wait_ms": 300}}) as (p, d):
        params = next_job(prefill(p, "x", tokens))

        answer = d.ask("x", tokens, 5, params=params)

        # The wait's saves were complete; the next ones were missing.
        assert answer.loaded == 299
        assert waits(d, "timeout") == 1


def test_a_killed_prefill_engine_is_not_waited_for(place, prompt):
    tokens = prompt(300)
    with Engine(place.p, process=True) as p, Engine(place.d, extra=LONG) as d:
        p.wait_ready()
        d.wait_ready()
        params = next_job(prefill(p, "x", tokens))
        p.run()
        d.add("x", tokens, 5, params=params)
        wait_steps(d, "x")

        p.ranks[0].kill()

        d.run()
        d.answers["x"].check()
        assert waits(d, "gone") == 1
        # Its saved blocks are still loaded. Later waits end at once.
        assert d.answers["x"].loaded == 299
        d.ask("y", prompt(300), 1, params=params)
        assert waits(d, "gone") == 2
        d.run()
        d.check_at_rest()
