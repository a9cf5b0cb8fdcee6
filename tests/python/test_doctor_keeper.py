"""`pegaflow doctor` shows the keeper of a pool and what a former server left."""

import json
import subprocess
import sys

import pytest

from pegaflow.cli import keeper
from pegaflow.cli.finding import ADVICE, OK
from pegaflow.cli.server_view import Samples
from tests.python.conftest import server_binary
from tests.support.disk_server import BLOCKS, DiskEngine
from tests.support.vllm_server import PegaServer


def run_doctor(server):
    """The exit status, and the findings about the keeper."""
    words = [sys.executable, "-m", "pegaflow", "doctor", "--json"]
    words += ["--addr", server.address, "--http-addr", server.http]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    findings = json.loads(done.stdout)["findings"]
    return done.returncode, [each for each in findings if each["check"] == "keeper"]


def server_with(directory, mode):
    words = ["--keep", mode]
    return PegaServer(server_binary(), directory, pool_size="64mb", arguments=words)


def release(server):
    command = [server_binary(), "--release", "--addr", server.address]
    subprocess.run(command, check=True, capture_output=True, timeout=60)


# ---- a running server


def test_a_keeper_that_holds_the_pool_has_one_line(short_path):
    with server_with(short_path / "holding", "yes") as server:
        try:
            _, before = run_doctor(server)
            with DiskEngine(server) as engine:
                engine.save_to_pool()
            server.kill()
            server.start()
            status, after = run_doctor(server)
        finally:
            server.kill()
            release(server)
    (before,), (after,) = before, after
    assert status == 0
    assert before["status"] == after["status"] == OK
    assert "adopted" not in before["detail"]
    assert f", {BLOCKS} blocks were adopted at the start" in after["detail"]
    assert f"socket {short_path}/holding/pega.keeper" in after["detail"]


def test_a_missing_external_keeper_is_named_with_its_socket(short_path):
    with server_with(short_path / "missing", "external") as server:
        status, found = run_doctor(server)
    (missing,) = found
    assert status == 0
    assert missing["status"] == ADVICE
    assert f"no keeper listens at {short_path}/missing/pega.keeper" in missing["detail"]
    assert "pegaflow-keeper" in missing["fix"]


def test_a_server_whose_pool_ends_with_it_has_no_line(pega):
    _, found = run_doctor(pega)
    assert found == []


# ---- what a server has for a moment only


@pytest.mark.parametrize(
    ("page", "text", "fix"),
    [
        (
            'pegaflow_former_clients 2\npegaflow_quarantine_slots{reason="reader_lost"} 1500\n',
            "2 clients of the former server have neither ended nor reported the end of their "
            "copies: 1,500 slots",
            "kill -CONT",
        ),
        ("pegaflow_adopted_waits_for_nodes 1\n", "every peer has been connected", "--peers"),
    ],
)
def test_each_wait_has_a_line_with_its_fix(page, text, fix):
    holding = {"state": "holding", "socket": "/run/pegaflow/50055.keeper", "adopted_blocks": 0}
    first, found = keeper.check_keeper(holding, Samples(page))
    assert first.status == OK
    assert found.status == ADVICE
    assert text in found.detail
    assert fix in found.fix
