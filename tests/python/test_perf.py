"""`pegaflow-perf` measures a real server, and leaves no process behind."""

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest

from pegaflow.cli import rdma
from tests.python.perf_program import PERF, lines_of, perf


def servers_of(pid):
    """Processes that a run of pegaflow-perf has started, by their command."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {int(child): Path(f"/proc/{child}/comm").read_text().strip() for child in children}


def test_lookup():
    figures = lines_of("lookup", "--blocks", "20000", "--rounds", "2")
    runs = {figure["run"] for figure in figures}
    assert "lookup of 8,192 keys, p50" in runs
    assert "lookup of one key, C++ client, p50" in runs
    echo = next(
        f for f in figures if f["bound_name"] == "echo of the same bytes" and f["held"] is not None
    )
    assert echo["target"] == 2
    assert echo["params"] == {"blocks": 20000, "keys": 8192}
    assert all(figure["figure"] > 0 for figure in figures)


def test_lookup_of_several_kinds():
    figures = lines_of("lookup", "--kinds", "--blocks", "20000", "--rounds", "2")
    median = next(f for f in figures if f["run"] == "lookup of 8,192 units, 4 kinds, p50")
    assert median["bound_name"] == "echo of the same bytes"
    assert median["target"] == 2
    assert median["params"] == {"blocks": 20000, "keys": 8192, "kinds": 4}
    assert sum("4 kinds" in f["run"] for f in figures) == 6


def test_copy_checks_every_byte():
    figures = lines_of("copy", "--check", "--pages", "64kb,4mb", "--rounds", "2", "--threads", "2")
    assert [f["params"]["page_bytes"] for f in figures] == [65536] * 3 + [4194304] * 3
    assert {f["unit"] for f in figures} == {"GB/s"}
    assert {f["target"] for f in figures} == {0.9, None}


def test_cells_are_copied_beside_whole_layers_and_every_byte_is_checked():
    figures = lines_of("cells", "--pieces", "8kb,512", "--rounds", "2")
    assert [
        (f["params"]["piece_bytes"], f["params"]["layout"], f["params"]["tp"], f["target"])
        for f in figures
    ] == [
        (size, layout, ranks, target)
        for size, layout, target in ((8192, "HND", 0.97), (512, "NHD", 0.85))
        for ranks in (1, 1, 2, 2)
    ]
    assert {(f["unit"], f["bound_name"]) for f in figures} == {("GB/s", "without cells")}
    assert all(f["figure"] > 0 and f["bound"] > 0 for f in figures)


def test_two_engines_copy_at_once_and_check_every_byte():
    arguments = ("--engines", "2", "--check", "--pages", "128kb,4mb", "--rounds", "5")
    figures = lines_of("copy", *arguments)
    assert [f["params"]["page_bytes"] for f in figures] == [131072, 4194304]
    assert {(f["params"]["engines"], f["unit"], f["target"]) for f in figures} == {
        (2, "GB/s", 0.85)
    }


def test_start():
    rate, seconds = lines_of("start", "--size", "128mb", "--rounds", "1")
    assert rate["target"] == 0.8
    assert seconds["unit"] == "s"
    assert seconds["held"] is None


def test_server():
    figures = lines_of("server", "--blocks", "20000", "--repetitions", "10", "--idle", "1s")
    runs = [figure["run"] for figure in figures]
    for part in ("idle", "memory beside the pool", "reserve + publish", "longest turn, cleanup"):
        assert any(part in run for run in runs), (part, runs)


def test_the_default_output_is_a_table():
    done = perf("start", "--size", "64mb", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    assert "load average" in done.stdout
    assert "bound: the same threads touch fresh memory" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fly"], "no subcommand"),
        (["copy", "--pages", "3kb"], "not a power of two"),
        (["copy", "--pages", "many"], "is not a size"),
        (["copy", "--engines", "2", "--verify"], "takes one engine"),
        (["lookup", "--blocks", "0"], "--blocks"),
        (["pull", "--page", "96kb"], "not a multiple of 64 KiB"),
        (["miss", "--peers", "0"], "--peers"),
        (["net", "--pages", "128mb"], "not from 4kb to 64mb"),
        (["net", "127.0.0.1"], "is not HOST:PORT"),
        (["net", "--backend", "mail"], "not tcp or ucx"),
        (["net", "--rails", "mlx5_0:1"], "--rails needs --backend ucx"),
        (["net", "--backend", "ucx", "--ucx-over-tcp"], "needs --rails"),
        (["net", "--their-rails", "mlx5_0:1"], "need --backend ucx and both ends"),
        (["net", "--their-memory", "cuda"], "need --backend ucx and both ends"),
        (["net", "--memory", "gpu"], "'gpu' is not host, cuda or cuda:N"),
        (["net", "--memory", "cuda:1"], "--memory cuda:1 needs --backend ucx"),
        (["net", "127.0.0.1:7000", "--listen", "127.0.0.1:0"], "the other end"),
        (["gpu", "--kinds", "full:4by64kb"], "NAME:[GROUPSx]LAYERSxBYTES[@BLOCKS]"),
        (["gpu", "--kinds", "full:64x32mb"], "at most 1 GiB a page"),
        (["lookup", "--bogus"], "--help"),
    ],
)
def test_wrong_usage_exits_with_2_and_gives_the_reason(arguments, words):
    done = perf(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stdout == ""


def test_a_missing_server_is_an_error():
    done = perf("start", "--server", "/nonexistent/pegaflow-server", "--size", "64mb")
    assert done.returncode == 1
    assert "/nonexistent/pegaflow-server" in done.stderr


@pytest.mark.parametrize(
    "subcommand",
    [
        "",
        "lookup",
        "copy",
        "gpu",
        "start",
        "server",
        "replay",
        "net",
        "pull",
        "miss",
        "directory",
        "ssd_scan",
        "ssd_reads",
    ],
)
def test_help(subcommand):
    done = perf(*filter(None, [subcommand, "--help"]))
    assert done.returncode == 0
    assert "--json" in done.stdout


def test_a_killed_run_takes_its_server_with_it():
    with tempfile.TemporaryDirectory(prefix="pega-") as directory:  # a killed run leaves its own
        kill_a_run(directory)


def kill_a_run(directory):
    run = subprocess.Popen(
        [PERF, "server", "--idle", "60s"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": directory},
    )
    try:
        assert "idle engines" in run.stderr.readline()
        while "pegaflow-server" not in servers_of(run.pid).values():
            assert run.poll() is None
        (server,) = (p for p, name in servers_of(run.pid).items() if name == "pegaflow-server")
        pidfd = os.pidfd_open(server)
    finally:
        run.send_signal(signal.SIGKILL)
        run.communicate()
    # Readable once it is gone; the kernel has sent the signal already.
    try:
        assert select.select([pidfd], [], [], 30)[0]
    finally:
        os.close(pidfd)


def test_pull_loads_blocks_of_another_node():
    figures = lines_of("pull", "--blocks", "6", "--page", "64kb", "--rounds", "2")
    assert [(figure["unit"], figure["target"]) for figure in figures] == [
        ("ms", 0.2),
        ("ms", None),
        ("GB/s", None),
    ]
    first, confirmation, _ = figures
    assert first["n"] == confirmation["n"] == 2
    assert 0 < first["figure"] <= first["bound"]
    assert confirmation["run"] == "the owner's confirmation of a lease, one round trip"
    assert 0 < confirmation["figure"] <= confirmation["bound"]


def test_miss_measures_nodes_with_and_without_peers():
    figures = lines_of("miss", "--peers", "2", "--keys", "40", "--rounds", "2")
    *with_peers, vain, longest = figures
    assert [figure["params"] for figure in with_peers] == [
        {"keys": 40, "peers": peers} for peers in (1, 2) for _ in range(8)
    ]
    for question in ("lookup", "claim"):
        of_it = [figure for figure in with_peers if figure["run"].startswith(question)]
        assert [figure["n"] for figure in of_it] == 2 * [32, 32, 2, 2]
        assert all(figure["figure"] > 0 for figure in of_it)
    # Requests to the stopped peer time out until it counts as lost, and no longer.
    assert vain["unit"] == "claims"
    assert 1 <= vain["figure"] <= vain["bound"] == 3
    assert longest["figure"] >= 15, "the default of --peer-deadline"


def test_directory_measures_claims_with_and_without_redis():
    figures = lines_of(
        "directory", "--nodes", "2", "--redis", "1", "--rounds", "5", "--flushes", "1"
    )
    *claims, flush = figures
    assert flush["params"]["anchors"] > 500
    assert 0 < flush["figure"] < flush["bound"] == 60
    states = ("answers", "killed", "started again", "stopped")
    assert len(claims) == 7 * len(states) + 1
    for state in states:
        of_it = [figure for figure in claims if f"directory {state}" in figure["run"]]
        # The first claim of each node waits for the stopped one, and has a line of its own.
        times = 6 if state == "stopped" else 5
        assert [figure["unit"] for figure in of_it] == [*times * ["ms"], "lookups", "requests"]
        failed = of_it[-1]
        assert failed["figure"] == 0
        assert failed["n"] == 4 * 10  # three claims and a lookup for each round and node
        assert all(figure["figure"] > 0 for figure in of_it[:4])


def test_miss_runs_with_one_peer_one_key_and_one_round():
    figures = lines_of("miss", "--peers", "1", "--keys", "1", "--rounds", "1")
    assert len(figures) == 2 * 4 + 2


NET = ["net", "--pages", "4kb,192kb", "--batch", "5", "--rounds", "2", "--check"]


def check_net(figures):
    assert [figure["run"] for figure in figures] == [
        "get, pages of 4 KiB in batches of 5",
        "get of one page of 4 KiB, p50",
        "get, pages of 192 KiB in batches of 5",
        "get of one page of 192 KiB, p50",
    ]
    assert all(figure["figure"] > 0 and figure["bound"] > 0 for figure in figures)
    assert [figure["target"] for figure in figures] == [None, None, 0.8, None]


def test_net_measures_between_two_ends_of_its_own():
    figures = lines_of(*NET)
    check_net(figures)
    assert figures[0]["params"]["link"] in ("between two namespaces", "over loopback")


def test_net_measures_against_another_end_that_serves_several():
    listening = [PERF, "net", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(listening, stdout=subprocess.PIPE, text=True) as holder:
        try:
            words = holder.stdout.readline().split()
            assert words[:2] == ["listening", "at"]
            for _ in range(2):
                check_net(lines_of("net", words[2], *NET[1:]))
        finally:
            holder.kill()


def test_net_measures_only_the_lane_of_the_other_end():
    listening = [PERF, "net", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(listening, stdout=subprocess.PIPE, text=True) as holder:
        try:
            address = holder.stdout.readline().split()[2]
            done = perf("net", address, "--backend", "ucx", "--ucx-over-tcp", "--rails", "lo")
        finally:
            holder.kill()
    assert done.returncode == 1
    assert "this end runs with --backend tcp" in done.stderr


UCX_OVER_TCP = ["net", "--backend", "ucx", "--ucx-over-tcp", "--rails", "lo", "--check"]


@pytest.mark.skipif(rdma.find_ucx() is None, reason="UCX is not on this machine")
def test_net_reads_through_ucx_and_compares_every_byte():
    figures = lines_of(*UCX_OVER_TCP, "--pages", "64kb", "--batch", "5", "--rounds", "2")
    assert [figure["run"] for figure in figures] == [
        "get, pages of 64 KiB in batches of 5",
        "get of one page of 64 KiB, p50",
    ]
    assert figures[0]["params"]["memory"] == figures[0]["params"]["their_memory"] == "host"


@pytest.mark.skipif(rdma.find_ucx() is None, reason="UCX is not on this machine")
def test_net_with_memory_of_a_gpu_that_is_not_there_fails_with_the_reason():
    done = perf(*UCX_OVER_TCP, "--memory", "cuda:200", "--their-memory", "host")
    assert done.returncode == 1
    # Without a driver, or with fewer GPUs.
    assert "no CUDA driver" in done.stderr or "there is no GPU 200" in done.stderr
    done = perf(*UCX_OVER_TCP, "--memory", "host", "--their-memory", "cuda:200")
    assert done.returncode == 1
    assert "the other end reports" in done.stderr


def test_net_names_the_ucx_library_that_cannot_be_used():
    missing = "/nonexistent/libucp.so.0"
    for done in (
        perf(*UCX_OVER_TCP, "--ucx-library", missing),
        perf(*UCX_OVER_TCP, env={**os.environ, "PEGA_UCX_LIBRARY": missing}),
    ):
        assert done.returncode == 1
        assert missing in done.stderr or "without UCX" in done.stderr


def test_net_names_the_program_that_is_not_an_other_end():
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        address = "{}:{}".format(*stranger.getsockname())
        run = subprocess.Popen([PERF, "net", address], stderr=subprocess.PIPE, text=True)
        connection, _ = stranger.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            assert "not `pegaflow-perf net`" in run.communicate(timeout=60)[1]
        assert run.returncode == 1


def test_net_allocates_no_more_memory_than_the_machine_has():
    with open("/proc/meminfo", encoding="ascii") as meminfo:
        total = int(meminfo.readline().split()[1]) * 1024
    if total > 64 << 30:
        pytest.skip("this machine may have as much memory as can be requested")
    listening = [PERF, "net", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(listening, stdout=subprocess.PIPE, text=True) as holder:
        try:
            host, port = holder.stdout.readline().split()[2].split(":")
            with socket.create_connection((host, int(port)), timeout=60) as connection:
                request = {"protocol": 3, "backend": "tcp", "memory_bytes": total, "seed": 1}
                connection.sendall(json.dumps(request).encode() + b"\n")
                with connection.makefile() as answers:
                    assert "the reader requests" in json.loads(answers.readline())["error"]
        finally:
            holder.kill()


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_ssd_scan_finds_every_block_of_the_tables():
    figures = lines_of("ssd_scan", "--blocks", "20000", "--block-bytes", "64kb", "--rounds", "2")
    scan = next(f for f in figures if f["run"] == "scan")
    assert scan["bound_name"] == "fio reads the same tables"
    assert scan["figure"] > 0
    index = next(f for f in figures if f["run"] == "index of a block")
    assert 24 < index["figure"] < 64  # A row has 24 bytes, and a cell at least 8.


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_ssd_reads_loads_from_the_disk():
    figures = lines_of("ssd_reads", "--blocks", "32", "--page-bytes", "256kb", "--rounds", "2")
    assert [f["unit"] for f in figures] == ["ms/GiB", "us/block"]
    assert figures[1]["figure"] > 0
