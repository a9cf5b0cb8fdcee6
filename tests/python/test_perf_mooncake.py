"""The comparison with Mooncake: its requirements, its errors without them, and a run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from perf.net_mooncake import PACKAGE, REPOSITORY, Failed, Options, Process, Setting, compare
from perf.support.veth import NoNamespaces, cable

SCRIPT = REPOSITORY / "perf" / "net_mooncake.py"
ENVIRONMENT = REPOSITORY / "build" / "mooncake"

#: Prints its port, and echoes the first connection's bytes.
ECHO = """
import socket, sys
with socket.create_server((sys.argv[1], 0)) as server:
    print(server.getsockname()[1], flush=True)
    connection, _ = server.accept()
    connection.sendall(connection.recv(100))
"""

SAY = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=30) as connection:
    connection.sendall(b"hello")
    print(connection.recv(100).decode())
"""


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments],
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment},
    )


def test_the_cable_joins_two_namespaces() -> None:
    here = os.readlink("/proc/self/ns/net")
    try:
        with cable() as (near, far):
            echo = [*far.prefix, sys.executable, "-c", ECHO, far.address]
            with Process(echo) as server:
                say = [*near.prefix, sys.executable, "-c", SAY, far.address, server.line().strip()]
                assert subprocess.run(say, capture_output=True, check=True).stdout == b"hello\n"
            there = [
                subprocess.run(
                    [*end.prefix, "readlink", "/proc/self/ns/net"], capture_output=True, check=True
                ).stdout
                for end in (near, far)
            ]
    except NoNamespaces as why:
        pytest.skip(str(why))
    assert len({here.encode(), *(name.strip() for name in there)}) == 3
    assert os.readlink("/proc/self/ns/net") == here


def test_a_program_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(NoNamespaces, match="setpriv"), cable():
        pass


def test_a_process_that_ends_is_reported_with_its_reason() -> None:
    with (
        Process(["sh", "-c", "read line; echo first >&2; echo why >&2; exit 3"]) as child,
        pytest.raises(Failed, match="^why$"),
    ):
        child.ask({"what": 1})
    with Process(["sh", "-c", "exit 3"]) as child, pytest.raises(Failed, match="ended with 3"):
        child.line()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--pages", "3"], "not a size"),
        (["--pages", "32kb"], "multiples of 64 KiB"),
        (["--pages", "32mb"], "up to 16 MiB"),
        (["--bytes", "much"], "not a size"),
        (["--rounds", "1"], "at least 2"),
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str], words: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stdout == ""


def test_without_the_package_the_error_names_it(tmp_path: Path) -> None:
    done = run("--environment", str(tmp_path / "none"), PIP_NO_INDEX="1")
    assert done.returncode == 1
    assert f"setup: installing {PACKAGE}" in done.stderr
    assert f"net_mooncake: {PACKAGE} could not be installed" in done.stderr
    assert "Traceback" not in done.stderr


def test_rounds_are_whole_batches_and_the_memory_holds_operations_in_flight() -> None:
    options = Options(pages=[64 << 10, 2 << 20], least_bytes=256 << 20, rounds=2, seed=1)
    assert options.memory_bytes == 2 * 64 * (2 << 20)
    assert options.round_bytes(64 << 10) == 256 << 20
    assert options.round_bytes(2 << 20) == 4 * 64 * (2 << 20)


def test_the_median_is_compared_with_mooncakes() -> None:
    options = Options(pages=[2 << 20], least_bytes=1 << 20, rounds=3, seed=1)
    setting = Setting(4, 64, "async")
    figure = compare(2 << 20, [2.0, 3.0, 10.0], [2.0, 6.0, 4.0], setting, options)
    assert (figure.figure, figure.bound, figure.n) == (3.0, 4.0, 3)
    assert not figure.held
    assert figure.spread == "ratio of the rounds 0.50 to 2.50"
    assert "4 connections, slices of 64 KiB, async" in figure.bound_name
    assert compare(2 << 20, [4.1], [4.0], setting, options).held


def test_a_short_run() -> None:
    if not (ENVIRONMENT / "installed").exists():
        pytest.skip("no build/mooncake; `./dev bench net_mooncake` makes it")
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    done = run("--rounds", "2", "--pages", "64kb", "--bytes", "4mb", "--json", "--seed", "7")
    assert done.returncode in (0, 1), (
        done.stderr
    )  # The test does not depend on which of them was faster.
    (figure,) = (json.loads(line) for line in done.stdout.splitlines())
    assert figure["held"] == (figure["ratio"] >= figure["target"])
    assert figure["params"]["mooncake"] == PACKAGE
    assert figure["params"]["seed"] == 7
    assert figure["n"] == 2
    assert figure["figure"] > 0 < figure["bound"]
