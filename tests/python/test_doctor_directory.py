"""`pegaflow doctor` shows the directory of a large cluster and what is wrong there."""

from pegaflow.cli.directory import check_directory
from pegaflow.cli.finding import ADVICE, OK
from pegaflow.cli.server_view import Samples


def nodes_with(**server):
    row = {"server": "redis://a:6379/0", "state": "ready", "round_trip_ms": 0.2} | server
    return {"directory": {"usable": True, "nodes": 40, "links": 3, "servers": [row]}}


def findings(nodes, page=""):
    return [(one.status, one.detail, one.fix) for one in check_directory(nodes, Samples(page))]


def test_a_node_without_a_directory_has_no_line():
    assert findings(None) == []
    assert findings({"peers": []}) == []


def test_a_server_that_answers_has_one_line():
    assert findings(nodes_with()) == [(OK, "redis://a:6379/0: 40 nodes", "")]


def test_the_version_is_named_and_one_that_is_too_old_is_advice():
    assert findings(nodes_with(version="Valkey 8.0.1")) == [
        (OK, "redis://a:6379/0: 40 nodes, Valkey 8.0.1", "")
    ]
    assert len(findings(nodes_with(version="Redis 10.1"))) == 1
    _, (status, detail, fix) = findings(nodes_with(version="Redis 5.0.14"))
    assert (status, detail) == (ADVICE, "redis://a:6379/0: Redis 5.0.14 is too old")
    assert "Redis 6 or newer" in fix


def test_a_policy_that_evicts_is_advice_where_there_is_a_limit():
    limited = {"maxmemory_bytes": 1 << 30}
    for policy, victims in (("allkeys-lru", "hints"), ("volatile-ttl", "the leases of nodes")):
        _, (status, detail, fix) = findings(nodes_with(maxmemory_policy=policy, **limited))
        assert status == ADVICE
        assert f"maxmemory-policy {policy} it removes {victims}" in detail
        assert "noeviction" in fix
        assert len(findings(nodes_with(maxmemory_policy=policy, maxmemory_bytes=0))) == 1
    assert len(findings(nodes_with(maxmemory_policy="noeviction", **limited))) == 1


def test_a_server_that_is_down_or_slow_is_named_with_its_reason():
    ((status, detail, fix),) = findings(nodes_with(state="down", reason="Connection refused"))
    assert status == ADVICE
    assert "redis://a:6379/0: down, Connection refused" in detail
    assert "--directory" in fix

    ((status, detail, _),) = findings(nodes_with(round_trip_ms=3.5))
    assert status == ADVICE
    assert "3.5 ms" in detail


def test_ignored_contents_are_named_with_their_cause():
    name = "pegaflow_directory_ignored_total"
    page = f'{name}{{reason="error"}} 2\n{name}{{reason="lease"}} 3\n{name}{{reason="network"}} 1\n'
    _, full, forged, outside = findings(nodes_with(), page)
    assert "noeviction" in full[2]
    assert forged[1].startswith("3 entries")
    assert "--peer-networks" in outside[1]
