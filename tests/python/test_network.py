"""Nodes in network namespaces: working, slow, cut and pulled links; no leftovers."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.support.network import Network, Node, NoNetwork

PORT = 7000

#: Answers each connection with a mebibyte.
SERVER = f"""
import socket
with socket.create_server(("0.0.0.0", {PORT})) as server:
    print("ready", flush=True)
    while True:
        connection, _ = server.accept()
        try:
            connection.sendall(bytes(1 << 20))
        except OSError:
            pass  # its reader has left
        connection.close()
"""

#: Reads everything from an address; ends with 0 after a mebibyte, and with 1 at a time-out.
READER = f"""
import socket, sys
try:
    with socket.create_connection((sys.argv[1], {PORT}), timeout=float(sys.argv[2])) as connection:
        count = 0
        while part := connection.recv(1 << 16):
            count += len(part)
        sys.exit(count != 1 << 20)
except OSError:
    sys.exit(1)
"""


@pytest.fixture
def network() -> Iterator[Network]:
    try:
        with Network(["a", "b"]) as made:
            yield made
    except NoNetwork as why:
        pytest.skip(str(why))


@pytest.fixture
def server(network: Network) -> Iterator[Node]:
    """Node a, on which the server runs."""
    command = [*network["a"].prefix, sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"ready\n"
            yield network["a"]
        finally:
            process.kill()


def comes(network: Network, timeout_s: float = 30.0) -> bool:
    """True if node b can read all bytes from a."""
    reader = [sys.executable, "-c", READER, network["a"].address, str(timeout_s)]
    return subprocess.run([*network["b"].prefix, *reader], check=False).returncode == 0


def test_nodes_reach_each_other_and_the_caller_reaches_them(network: Network, server: Node) -> None:
    before = server.sent_bytes()
    assert comes(network)
    assert server.sent_bytes() - before > 1 << 20
    with socket.create_connection((server.control_address, PORT), timeout=30):
        pass


def test_a_limit_holds_in_each_direction(network: Network, server: Node) -> None:
    for set_rate in (server.limit, network["b"].limit_received):
        set_rate("8mbit")
        begin = time.monotonic()
        assert comes(network)
        # A mebibyte takes more than a second at that rate, except for the first 32 KiB.
        assert time.monotonic() - begin > 0.9
        set_rate(None)


def test_cut_and_pulled_links_can_be_restored(network: Network, server: Node) -> None:
    server.cut()
    assert not comes(network, timeout_s=0.3)
    server.mend()
    assert comes(network)
    server.set_link(up=False)
    assert not comes(network, timeout_s=0.3)
    server.set_link(up=True)
    assert comes(network)


def test_the_caller_returns_to_its_namespace() -> None:
    here = os.readlink("/proc/thread-self/ns/net")
    try:
        with Network(["a"]):
            assert os.readlink("/proc/thread-self/ns/net") != here
    except NoNetwork as why:
        pytest.skip(str(why))
    assert os.readlink("/proc/thread-self/ns/net") == here


def test_a_failed_command_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    here = os.readlink("/proc/thread-self/ns/net")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(NoNetwork, match="`ip` is missing"), Network(["a"]):
        pass
    assert os.readlink("/proc/thread-self/ns/net") == here
