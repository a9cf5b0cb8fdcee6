"""Hints of routers in requests, and the keys that a router asked for.

vLLM's real scheduler, the real connector and real servers; the router is the test.
"""

import dataclasses
import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from pegaflow.vllm.hints import NO_HINTS, Hints, keys_report
from pegaflow.vllm.metrics import Counts
from tests.python.harness import BLOCK, Engine
from tests.python.test_connector_nodes import two_nodes

NODE = bytes(range(16))
OTHER = bytes(range(16, 32))


@dataclasses.dataclass
class Asked:
    kv_transfer_params: Any = None
    kv_hints: Any = None


@dataclasses.dataclass
class Action:
    action_type: Any
    action_version: Any = "1.0"
    payload: Any = None


@dataclasses.dataclass
class Envelope:
    actions: Any


def read(params: Any = None, *actions: Any) -> tuple[Hints, dict[str, int]]:
    counts = Counts()
    hints = Hints.read(Asked(params, Envelope(list(actions)) if actions else None), counts)
    taken = {
        action: int(counts.data.get("kv_hints", {}).get(action, 0))
        for action in ("fetch", "prefetch", "release", "ignored")
    }
    return hints, {action: count for action, count in taken.items() if count}


def source(node: bytes) -> dict[str, Any]:
    return {"node": node.hex(), "blocks": 7}


@pytest.mark.parametrize(
    "told",
    [
        None,
        7,
        "somewhere",
        {},
        [1, None, "x", {}],
        [{"node": 5}],
        [{"node": "xyz"}],
        [{"node": "00"}],
        [{"blocks": 3}],
    ],
)
def test_invalid_hints_are_no_hints(told):
    assert read({"pegaflow": {"hints": told}})[0] == NO_HINTS


@pytest.mark.parametrize("params", [None, 5, [], {}, {"pegaflow": 3}, {"other": {}}])
def test_other_parameters_are_no_hints(params):
    assert read(params)[0] == NO_HINTS


def test_hints_name_three_nodes_at_most_or_say_that_computing_is_faster():
    told = [source(NODE), {"node": "bad"}, source(OTHER), source(NODE)]
    assert read({"pegaflow": {"hints": told}})[0].nodes == (NODE, OTHER)
    compute = read({"pegaflow": {"hints": "compute"}})[0]
    assert compute.no_nodes and not compute.nodes
    assert compute.arguments() == {"nodes": (), "no_nodes": True}
    assert NO_HINTS.arguments() == {}


def test_vllms_hints_are_read_and_unknown_ones_are_counted():
    fetch = Action("kv.fetch", payload={"sources": [source(OTHER)]})
    hints, counts = read(
        None,
        fetch,
        Action("kv.prefetch", payload={"sources": [source(NODE)]}),
        Action("kv.release"),
        Action("kv.pin", payload={"ttl": 5}),
        Action("kv.fetch", "2.0", {"sources": [source(NODE)]}),
        Action(None, None),
        5,
    )
    assert hints.nodes == (NODE,)
    assert hints.releases
    assert counts == {"fetch": 1, "prefetch": 1, "release": 1, "ignored": 4}
    # PegaFlow's own router wins.
    assert read({"pegaflow": {"hints": [source(NODE)]}}, fetch)[0].nodes == (NODE,)
    assert read({"pegaflow": {"hints": "compute"}}, fetch)[0].no_nodes
    many = [Action("kv.pin")] * 100
    assert read(None, *many)[1] == {"ignored": 16}


def test_a_request_that_asks_for_its_keys_gets_those_of_its_full_blocks(pega, prompt):
    tokens = prompt(10 * BLOCK + 5)
    with Engine(pega.address) as engine:
        engine.wait_ready()
        asked = {"pegaflow": {"report_keys": True}}
        told = engine.ask("x", tokens, 1, params=asked).params["pegaflow"]
        assert told["block_tokens"] == BLOCK
        assert len(told["keys"]) == 10 * 2 * told["key_bytes"]
        # The keys are those under which the blocks were saved.
        engine.run()
        assert engine.ask("y", tokens, 1).params is None
        both = {"pegaflow": {"report_keys": True, "save_tail": True}}
        with_job = engine.ask("z", tokens, 1, params=both).params["pegaflow"]
        assert with_job["keys"] == told["keys"]
        assert with_job["tokens"] == len(tokens)
        engine.check_at_rest()


def test_a_short_prompt_has_no_keys_to_report(pega, prompt):
    with Engine(pega.address) as engine:
        engine.wait_ready()
        answer = engine.ask("x", prompt(BLOCK - 1), 1, params={"pegaflow": {"report_keys": True}})
        assert answer.params is None


def test_the_report_of_keys_is_bounded():
    class Chain:
        key_bytes = 2

        def usable_blocks(self) -> int:
            return 100_000

        def keys(self, first: int, stop: int) -> list[bytes]:
            return [b"ab"] * (stop - first)

    assert len(keys_report(Chain(), 10**9, 16)["keys"]) == 8192 * 4


def test_hints_reach_the_server_with_the_lookup_and_the_claim(short_path: Path, prompt):
    tokens = prompt(12 * BLOCK)
    with two_nodes(short_path) as nodes:
        with urllib.request.urlopen(f"http://{nodes.p.http}/health") as page:
            node = bytes.fromhex(json.load(page)["nodes"]["node"])

        def hints(result: str) -> int:
            return int(nodes.d.metrics().total("pegaflow_fetch_hints_total", result=result))

        with Engine(nodes.p.address) as p, Engine(nodes.d.address) as d:
            p.wait_ready()
            d.wait_ready()
            p.ask("x", tokens, 1)
            p.run()
            compute = {"pegaflow": {"hints": "compute"}}
            d.ask("a", tokens, 1, params=compute)
            assert nodes.fetched() == 0
            d.run()
            other = prompt(12 * BLOCK)
            p.ask("y", other, 1)
            p.run()
            d.ask("b", other, 1, params={"pegaflow": {"hints": [source(node)]}})
            assert nodes.fetched() > 0
            assert hints("found") >= 1
            assert hints("wrong") == 0
            d.run()
            for engine in (p, d):
                engine.run()
                engine.check_at_rest()


def test_a_released_request_is_not_saved(pega, prompt, monkeypatch):
    def with_release(self: Engine, *args: Any, **options: Any) -> Any:
        request = made(self, *args, **options)
        request.kv_hints = Envelope([Action("kv.release")])
        return request

    made = Engine._request
    with Engine(pega.address) as engine:
        engine.wait_ready()
        monkeypatch.setattr(Engine, "_request", with_release)
        engine.ask("x", prompt(10 * BLOCK), 1)
        engine.run()
        assert engine.stats["saved_blocks"] == 0
        assert engine.stats["kv_hints{release}"] == 1
        monkeypatch.undo()
        engine.ask("y", prompt(10 * BLOCK), 1)
        engine.run()
        assert engine.stats["saved_blocks"] == 10
        engine.check_at_rest()
