"""pegaflow doctor: engines that read blocks out of each other's memory."""

from __future__ import annotations

import pytest

from pegaflow.cli.direct import check_direct
from pegaflow.cli.finding import ADVICE, OK
from pegaflow.cli.server_view import Samples


def page(workers: int, blocks: int) -> Samples:
    return Samples(
        f"pegaflow_direct_workers {workers}\npegaflow_direct_read_blocks_total {blocks}\n"
    )


def found(tmp_path, scope: str | None, workers: int = 2, blocks: int = 0):
    if scope is not None:
        yama = tmp_path / "sys/kernel/yama"
        yama.mkdir(parents=True)
        (yama / "ptrace_scope").write_text(f"{scope}\n")
    return list(check_direct(page(workers, blocks), tmp_path))


def test_without_a_direct_group_there_is_no_finding(tmp_path):
    assert found(tmp_path, "1", workers=0) == []
    assert list(check_direct(Samples(""), tmp_path)) == []


@pytest.mark.parametrize("scope", [None, "0", "unreadable"])
def test_a_kernel_that_permits_the_reads_is_fine(tmp_path, scope):
    (finding,) = found(tmp_path, scope, blocks=7)
    assert finding.status == OK
    assert "2 workers" in finding.detail and "7 blocks" in finding.detail


@pytest.mark.parametrize("scope", ["1", "2"])
def test_a_kernel_that_wants_a_capability_is_advice_until_blocks_were_read(tmp_path, scope):
    (finding,) = found(tmp_path, scope)
    assert finding.status == ADVICE
    assert "CAP_SYS_PTRACE" in finding.fix


def test_blocks_that_were_read_show_that_the_capability_is_there(tmp_path):
    (finding,) = found(tmp_path, "1", blocks=1)
    assert finding.status == OK


def test_a_kernel_that_forbids_all_such_reads_is_advice(tmp_path):
    (finding,) = found(tmp_path, "3", blocks=1)
    assert finding.status == ADVICE
    assert "pegaflow.direct_group" in finding.fix
