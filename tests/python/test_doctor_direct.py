"""pegaflow doctor: engines that read blocks out of each other's memory."""

from __future__ import annotations

import pytest

from pegaflow.cli.direct import check_direct, check_partners
from pegaflow.cli.finding import ADVICE, OK
from pegaflow.cli.server_view import Samples
from tests.support.memory_reads import why_forbidden


def page(workers: int, blocks: int) -> Samples:
    return Samples(
        f"pegaflow_direct_workers {workers}\npegaflow_direct_read_blocks_total {blocks}\n"
    )


def write_scope(proc, scope: str) -> None:
    yama = proc / "sys/kernel/yama"
    yama.mkdir(parents=True)
    (yama / "ptrace_scope").write_text(f"{scope}\n")


def found(tmp_path, scope: str | None, workers: int = 2, blocks: int = 0):
    if scope is not None:
        write_scope(tmp_path, scope)
    return list(check_direct(page(workers, blocks), [], None, tmp_path))


def test_without_a_direct_group_there_is_no_finding(tmp_path):
    assert found(tmp_path, "1", workers=0) == []
    assert list(check_direct(Samples(""), [], None, tmp_path)) == []


@pytest.mark.parametrize("scope", [None, "0", "unreadable"])
def test_a_kernel_that_permits_the_reads_is_fine(tmp_path, scope):
    (finding,) = found(tmp_path, scope, blocks=7)
    assert finding.status == OK
    assert "2 workers" in finding.detail and "7 blocks" in finding.detail


def test_a_kernel_that_wants_consent_is_fine(tmp_path):
    (finding,) = found(tmp_path, "1")
    assert finding.status == OK
    assert "one at a time" in finding.detail


def test_a_kernel_that_wants_a_capability_is_advice_until_blocks_were_read(tmp_path):
    (finding,) = found(tmp_path, "2")
    assert finding.status == ADVICE
    assert "CAP_SYS_PTRACE" in finding.fix


def test_blocks_that_were_read_show_that_the_capability_is_there(tmp_path):
    (finding,) = found(tmp_path, "2", blocks=1)
    assert finding.status == OK


def test_a_kernel_that_forbids_all_such_reads_is_advice(tmp_path):
    (finding,) = found(tmp_path, "3", blocks=1)
    assert finding.status == ADVICE
    assert "pegaflow.direct_group" in finding.fix


def engine(
    name: str, group: str = "pd", lane: str = "cuda", namespace: str = "n"
) -> dict[str, object]:
    direct = {"direct": {"group": group, "lane": lane}} if group else {}
    ranks = [{"connected": True} | direct, {"connected": False}]
    return {"instance": name, "connected": True, "namespace": namespace, "ranks": ranks}


@pytest.mark.parametrize(
    "engines",
    [
        [],
        [engine("a", group="")],
        [engine("a"), engine("b")],
        [engine("a"), engine("b"), engine("c", group="x"), engine("d", group="x")],
        [engine("a"), engine("b"), {"instance": "old", "ranks": [{"connected": True}]}],
    ],
)
def test_engines_with_a_partner_or_without_a_group_are_no_finding(engines):
    assert list(check_partners(engines)) == []


@pytest.mark.parametrize(
    ("other", "why", "fix"),
    [
        (engine("b", group="x"), "no other engine", '"pd"'),
        (engine("b", group=""), "no other engine", '"pd"'),
        (engine("b", lane="process_vm_readv"), "lane process_vm_readv", "CPUs and on GPUs"),
        (engine("b", namespace="m"), "other namespaces", "factors"),
        (engine("b") | {"connected": False}, "no other engine", '"pd"'),
    ],
)
def test_an_engine_without_a_partner_is_advice_with_the_reason(other, why, fix):
    finding = next(iter(check_partners([engine("a"), other])))
    assert finding.status == ADVICE
    assert finding.detail.startswith('a, direct group "pd", lane cuda: no partner')
    assert why in finding.detail and fix in finding.fix


def networked(name: str, network: str = "ucx") -> dict[str, object]:
    one = engine(name)
    for rank in one["ranks"]:
        if "direct" in rank:
            rank["direct"]["network"] = network
    return one


def test_the_partner_of_an_engine_with_network_cards_may_be_at_another_node():
    nodes = {"peers": []}
    assert list(check_partners([networked("a")], nodes)) == []
    (without_nodes,) = check_partners([networked("a")])
    (without_cards,) = check_partners([networked("a", network="")], nodes)
    for finding in (without_nodes, without_cards):
        assert finding.status == ADVICE and "no partner" in finding.detail


def with_network(tmp_path, nodes):
    samples = Samples(
        "pegaflow_direct_workers 2\npegaflow_direct_network_workers 2\n"
        "pegaflow_direct_far_reads_total 31\npegaflow_direct_far_read_blocks_total 99\n"
    )
    return list(check_direct(samples, [], nodes, tmp_path))


def test_reads_of_other_nodes_are_counted(tmp_path):
    network, local = with_network(tmp_path, {"peers": []})
    assert network.status == local.status == OK
    assert "2 workers" in network.detail and "31 reads" in network.detail


@pytest.mark.parametrize(("loaded", "through", "status"), [(5, 5, OK), (5, 6, ADVICE)])
def test_pools_of_other_nodes_that_are_mostly_not_readable_are_advice(
    tmp_path, loaded, through, status
):
    name = "pegaflow_direct_pool_blocks_total"
    samples = Samples(
        "pegaflow_direct_workers 2\npegaflow_direct_network_workers 2\n"
        f'{name}{{result="loaded"}} {loaded}\n{name}{{result="through_pool"}} {through}\n'
    )
    network, _ = check_direct(samples, [], {"peers": []}, tmp_path)
    assert network.status == status
    assert f"{loaded} blocks came from other nodes' pools" in network.detail
    assert (f"{through} blocks could not be read" in network.detail) == (status == ADVICE)
    assert ("--direct-pool off" in network.fix) == (status == ADVICE)


def test_reads_of_other_nodes_need_no_capability(tmp_path):
    write_scope(tmp_path, "1")
    _, local = with_network(tmp_path, {"peers": []})
    assert local.status == OK and local.fix == ""
    assert "99 blocks" in local.detail


def test_network_cards_at_a_server_without_other_nodes_are_advice(tmp_path):
    network, local = with_network(tmp_path, None)
    assert network.status == ADVICE and local.status == OK
    assert "--peers" in network.fix


@pytest.mark.parametrize(
    ("scope", "capabilities", "fix"),
    [
        ("0", "0000000000000000", ""),
        ("1", "000001ffffffffff", ""),
        ("2", "0000000000080000", ""),
        ("1", "0000000000000000", ""),
        ("2", "000001fffff7ffff", "run as root"),
        ("3", "000001ffffffffff", "boot with another"),
    ],
)
def test_the_demo_and_tests_say_why_engines_cannot_read_each_other(
    tmp_path, scope, capabilities, fix
):
    write_scope(tmp_path, scope)
    (tmp_path / "self").mkdir()
    (tmp_path / "self/status").write_text(f"Name:\tx\nCapEff:\t{capabilities}\n")
    why = why_forbidden(tmp_path)
    assert fix in why if fix else why == ""


def test_a_kernel_without_yama_forbids_nothing(tmp_path):
    assert why_forbidden(tmp_path) == ""
