"""`pegaflow doctor` names problems and their fixes."""

import ctypes
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pegaflow import _native
from pegaflow.cli import endpoint, finding, machine, routers, server_view
from pegaflow.cli.finding import ADVICE, OK, PROBLEM, Finding
from tests.support.vllm_server import PegaServer

SERVER = Path(os.environ["PEGA_BUILD_DIR"], "server", "pegaflow-server")
NOBODY = 65534


def run_doctor(*arguments, env=None):
    """The exit status, and the JSON output."""
    done = subprocess.run(
        [sys.executable, "-m", "pegaflow", "doctor", "--json", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **(env or {})},
    )
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


def by_check(report):
    found = {}
    for each in report["findings"]:
        found.setdefault(each["check"], []).append(each)
    return found


@pytest.fixture
def server(tmp_path):
    with PegaServer(SERVER, tmp_path, pool_size="64mb") as started:
        yield started


def test_the_ucx_library_of_the_option_or_the_environment_is_examined(tmp_path):
    missing = "/nonexistent/libucp.so.0"
    addr = ("--addr", f"unix:{tmp_path}/none.sock")
    for _, report in (
        run_doctor(*addr, "--ucx-library", missing, env={"PEGA_UCX_LIBRARY": "/nonexistent/other"}),
        run_doctor(*addr, env={"PEGA_UCX_LIBRARY": missing}),
    ):
        (ucx,) = by_check(report)["ucx"]
        assert ucx["detail"] == f"unusable: {missing}: No such file or directory"
        assert "--ucx-library of the server" in ucx["fix"]


def test_an_empty_option_examines_the_installed_ucx_and_not_that_of_the_environment(tmp_path):
    addr = ("--addr", f"unix:{tmp_path}/none.sock")
    _, report = run_doctor(*addr, "--ucx-library", "", env={"PEGA_UCX_LIBRARY": "/nonexistent"})
    _, installed = run_doctor(*addr, env={"PEGA_UCX_LIBRARY": ""})
    assert by_check(report).get("ucx") == by_check(installed).get("ucx")


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["text", "json"])
def test_bytes_of_a_name_that_are_not_utf_8_are_shown_by_their_numbers(tmp_path, options):
    name = b"/nonexistent/\xff-\xc3\xa4"
    done = subprocess.run(
        [sys.executable, "-m", "pegaflow", "doctor", "--addr", f"unix:{tmp_path}/none.sock"]
        + ["--ucx-library", name, *options],
        capture_output=True,
        timeout=60,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )
    assert done.stderr == b""
    text = done.stdout.decode()
    if options:
        (ucx,) = by_check(json.loads(text))["ucx"]
        text = ucx["detail"]
    assert "unusable: /nonexistent/\\xff-ä: No such file or directory" in text


class Engine:
    """A worker with a little memory of its own, like one of `pegaflow.connector`."""

    def __init__(self, server, instance, **factors):
        self._memory = mmap.mmap(-1, 64 * 4096)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        base = {
            "architecture": "Llama",
            "layers": "0,1",
            "weights": "named:w",
            "hash_fingerprint": "a",
        }
        self.mover = _native.Mover(
            str(server.socket),
            instance,
            _native.HostDevice(1),
            [(address, 4096, 4096)],
            64,
            list({**base, **factors}.items()),
        )
        while self.mover.status()["state"] == "connecting":
            pass  # the test's own time limit ends it
        assert self.mover.status()["state"] == "ready", self.mover.status()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.mover.close()


# ---- whole runs


def test_without_a_server_it_shows_how_to_start_one(tmp_path):
    status, report = run_doctor("--addr", f"unix:{tmp_path}/x.sock")
    assert status == 1
    assert report["ok"] is False
    (socket_finding,) = by_check(report)["socket"]
    assert socket_finding["status"] == PROBLEM
    assert f"pegaflow-server --addr unix:{tmp_path}/x.sock" in socket_finding["fix"]
    # Findings that need no server are still there.
    assert {"huge pages", "memory", "locked memory"} <= by_check(report).keys()


def test_with_a_server_there_is_no_problem(server):
    status, report = run_doctor("--addr", server.address, "--http-addr", server.http)
    found = by_check(report)
    problems = [f for f in report["findings"] if f["status"] == PROBLEM]
    assert (status, problems) == (0, [])
    assert f"pid {server.pid} (pegaflow-server)" in found["socket"][0]["detail"]
    assert _native.__version__ in found["versions"][0]["detail"]
    assert "they agree" in found["versions"][0]["detail"]
    assert found["pool"][0]["detail"].startswith("0 B of 64 MiB")
    assert found["quarantine"][0]["status"] == OK
    assert found["instances"][0]["detail"] == "no engine is served yet"


def test_it_finds_the_server_as_an_engine_does(server):
    for env in (
        {"PEGAFLOW_ENGINE_ENDPOINT": server.address},
        {"PEGAFLOW_HOST": server.address},
    ):
        _, report = run_doctor("--http-addr", server.http, env=env)
        assert by_check(report)["socket"][0]["status"] == OK
    missing = {"PEGAFLOW_RUNTIME_DIR": str(server.socket.parent), "PEGAFLOW_PORT": "7"}
    _, report = run_doctor(env=missing)
    assert f"{server.socket.parent}/7.sock" in by_check(report)["socket"][0]["detail"]


def test_the_text_has_a_fix_under_its_problem(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "pegaflow", "doctor", "--addr", f"unix:{tmp_path}/x.sock"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    problem = next(i for i, line in enumerate(lines) if line.startswith("PROBLEM"))
    assert any("fix: start one:" in line for line in lines[problem : problem + 4])
    assert lines[-1].endswith("1 to fix")


def test_the_factors_that_separate_two_engines_of_one_model_are_named(server):
    with (
        Engine(server, "one") as _,
        Engine(server, "two", block_tokens="32", hash_fingerprint="b"),
        Engine(server, "same as one"),
        Engine(server, "other model", architecture="Qwen", hash_fingerprint="c"),
    ):
        status, report = run_doctor("--addr", server.address, "--http-addr", server.http)
    assert status == 0  # they may be separate on purpose
    found = by_check(report)
    assert len(found["instance"]) == 4
    details = [each["detail"] for each in found["namespace"]]
    assert len(details) == 2
    assert all("one and two" in detail or "two and one" in detail for detail in details)
    named = {
        each["detail"].split(": ")[1].split(" is ")[0]: each["fix"] for each in found["namespace"]
    }
    assert named.keys() == {"block_tokens", "hash_fingerprint"}
    assert "--block-size" in named["block_tokens"]
    assert "PYTHONHASHSEED" in named["hash_fingerprint"]


def test_another_http_address_is_used(server):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        status, report = run_doctor("--addr", server.address, "--http-addr", address)
    assert status == 1
    (health,) = by_check(report)["health"]
    assert health["status"] == PROBLEM
    assert "--http-addr" in health["fix"]
    assert by_check(report)["versions"][0]["status"] == OK


def test_a_stopped_server_is_a_problem_and_not_a_hang(server):
    os.kill(server.pid, signal.SIGSTOP)
    try:
        status, report = run_doctor("--addr", server.address, "--http-addr", server.http)
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert status == 1
    (versions,) = by_check(report)["versions"]
    assert versions["status"] == PROBLEM
    assert "no hello" in versions["detail"]


def test_the_command_line_has_a_help_text():
    def pegaflow(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "pegaflow", *arguments],
            capture_output=True,
            text=True,
            timeout=60,
        )

    assert pegaflow("--version").stdout == f"pegaflow {_native.__version__}\n"
    assert "doctor" in pegaflow("--help").stdout
    assert "PEGAFLOW_ENGINE_ENDPOINT" in pegaflow("doctor", "--help").stdout
    assert pegaflow("surgeon").returncode == 2
    assert pegaflow().returncode == 2


# ---- the socket


def test_a_file_that_is_not_a_socket_is_a_problem(tmp_path):
    path = tmp_path / "x.sock"
    path.touch()
    found, listener = endpoint.check_socket(path, "unix:x")
    assert listener is None
    assert "is not a socket" in found.detail


def test_a_socket_of_a_dead_server_is_recognized(tmp_path):
    path = tmp_path / "x.sock"
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(path))
    found, listener = endpoint.check_socket(path, "unix:x")
    assert listener is None
    assert "left behind" in found.detail
    assert "replaces the file" in found.fix


def test_a_socket_whose_server_accepts_no_connection_is_a_problem(tmp_path):
    path = tmp_path / "x.sock"
    with socket.socket(socket.AF_UNIX) as full, socket.socket(socket.AF_UNIX) as first:
        full.bind(str(path))
        full.listen(0)
        first.connect(str(path))  # the only place in the queue
        found, listener = endpoint.check_socket(path, "unix:x")
    assert listener is None
    assert "accepts no connection" in found.detail


def test_another_program_that_listens_is_named(tmp_path):
    path = tmp_path / "x.sock"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen(1)
        found, listener = endpoint.check_socket(path, "unix:x")
    assert found.status == OK
    assert listener == endpoint.Listener(os.getpid(), os.getuid())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("closed", ["socket", "directory"])
def test_a_user_without_access_to_the_socket_gets_the_name_of_its_group(tmp_path, closed):
    for parent in (tmp_path, *tmp_path.parents):
        if not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o011)
    directory = tmp_path / "run"
    directory.mkdir(mode=0o755)
    path = directory / "x.sock"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen(1)
        path.chmod(0o660)
        if closed == "directory":
            directory.chmod(0o750)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
                found, _ = endpoint.check_socket(path, "unix:x")
                os.write(writer, json.dumps([found.status, found.detail, found.fix]).encode())
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as answer:
            text = answer.read()
        os.waitpid(child, 0)
    status, detail, fix = json.loads(text)
    assert status == PROBLEM
    assert "may not" in detail
    assert "usermod -aG" in fix


def test_addresses():
    assert endpoint.socket_path("unix:/a/b.sock") == Path("/a/b.sock")
    assert endpoint.socket_path("127.0.0.1:50055").name == "50055.sock"
    assert endpoint.socket_path("http://127.0.0.1:50056/").name == "50056.sock"
    for bad in ("unix:relative", "nothing", "host:", "host:99999", "host:x"):
        with pytest.raises(endpoint.BadAddress):
            endpoint.socket_path(bad)


# ---- the machine


def fake_machine(root, huge_total=0, huge_free=0, shmem="never", available_gib=16):
    proc, sys_ = root / "proc", root / "sys"
    proc.mkdir()
    (proc / "meminfo").write_text(
        f"MemTotal:       33554432 kB\nMemAvailable:   {available_gib << 20} kB\n"
        f"HugePages_Total:    {huge_total}\nHugePages_Free:     {huge_free}\n"
        "HugePages_Rsvd:        0\nHugepagesize:       2048 kB\n"
    )
    (proc / "self").mkdir()
    (proc / "self" / "cgroup").write_text("0::/a/b\n")
    enabled = sys_ / "kernel/mm/transparent_hugepage"
    enabled.mkdir(parents=True)
    words = ["always", "never", "advise"]
    (enabled / "shmem_enabled").write_text(
        " ".join(f"[{word}]" if word == shmem else word for word in words)
    )
    return proc, sys_


def test_missing_huge_pages_are_reported_with_the_command(tmp_path):
    proc, sys_ = fake_machine(tmp_path)
    found = machine.check_huge_pages(8 << 30, 4096, proc, sys_)
    assert found.status == ADVICE
    assert "vm.nr_hugepages=4096" in found.fix
    assert "shmem_enabled" in found.fix


def test_huge_pages_that_the_pool_has_are_fine(tmp_path):
    proc, sys_ = fake_machine(tmp_path, huge_total=4096)
    assert machine.check_huge_pages(8 << 30, 2 << 20, proc, sys_).status == OK


def test_huge_pages_that_the_kernel_found_are_fine(tmp_path):
    proc, sys_ = fake_machine(tmp_path)
    found = machine.check_huge_pages(8 << 30, 4096, proc, sys_, pool_huge_bytes=8 << 30)
    assert found.status == OK
    assert "unreserved" in found.detail


def test_a_pool_of_which_a_part_has_huge_pages_is_advice(tmp_path):
    proc, sys_ = fake_machine(tmp_path)
    found = machine.check_huge_pages(8 << 30, 4096, proc, sys_, pool_huge_bytes=6 << 30)
    assert found.status == ADVICE
    assert "75 % of the pool" in found.detail


def test_huge_pages_reserved_too_late_need_a_restart(tmp_path):
    proc, sys_ = fake_machine(tmp_path, huge_total=4096, huge_free=4096)
    assert "restart" in machine.check_huge_pages(8 << 30, 4096, proc, sys_).fix


def test_a_cgroup_that_is_too_small_is_named(tmp_path):
    proc, _ = fake_machine(tmp_path)
    root = tmp_path / "cgroup"
    (root / "a/b").mkdir(parents=True)
    (root / "a/memory.max").write_text(f"{4 << 30}\n")
    (root / "a/memory.current").write_text(f"{1 << 30}\n")
    (root / "a/b/memory.max").write_text("max\n")
    (root / "a/b/memory.current").write_text("5\n")
    assert machine.cgroup_limits("self", proc, root) == [(root / "a", 4 << 30, 1 << 30)]

    found = machine.check_memory(8 << 30, 0, proc, root)
    assert found.status == ADVICE
    assert f"raise {root / 'a'}/memory.max" in found.fix

    # Without a server: the default pool would have (4 - 1) / 2 GiB.
    assert "the default pool is 1.5 GiB" in machine.check_memory(0, 0, proc, root).detail


def test_a_machine_without_memory_is_a_problem(tmp_path):
    proc, _ = fake_machine(tmp_path, available_gib=1)
    assert machine.check_memory(0, 0, proc, tmp_path / "none").status == PROBLEM
    assert machine.check_memory(8 << 30, 0, proc, tmp_path / "none").status == OK


def test_cgroups_of_version_1_are_read_too(tmp_path):
    proc, _ = fake_machine(tmp_path)
    (proc / "self" / "cgroup").write_text("5:cpu,memory:/x\n3:pids:/y\n")
    group = tmp_path / "cgroup/memory/x"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text(f"{2 << 30}\n")
    (group / "memory.usage_in_bytes").write_text("7\n")
    limits = machine.cgroup_limits("self", proc, tmp_path / "cgroup")
    assert limits == [(group, 2 << 30, 7)]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (64 << 20, "64 MiB"), (5 << 50, "5120 TiB")],
)
def test_bytes_are_printed_with_units(count, text):
    assert machine.format_bytes(count) == text


# ---- findings from the server's pages


def test_quarantine_old_pins_and_failures_are_advice():
    page = """
pegaflow_pool_capacity_bytes 1073741824
pegaflow_pool_used_bytes 536870912
pegaflow_cache_block_hits_total 75
pegaflow_cache_block_misses_total 25
pegaflow_quarantine_slots{reason="timeout"} 0
pegaflow_quarantine_slots{reason="writer_lost"} 12
pegaflow_pins 3
pegaflow_oldest_pin_seconds 3601.5
pegaflow_pool_alloc_failures_total 9
pegaflow_connections_refused_total{reason="user"} 2
"""
    found = {f.check: f for f in server_view.check_metrics(server_view.Samples(page))}
    assert found["pool"].detail.startswith("512 MiB of 1 GiB used, 75%")
    assert found["quarantine"].status == ADVICE
    assert "12 writer_lost" in found["quarantine"].detail
    assert "timeout" not in found["quarantine"].detail
    assert "3602 s" in found["pins"].detail or "3601 s" in found["pins"].detail
    assert "--pool-size" in found["counters"].fix
    assert "--allow-uid" in found["connections"].fix


def test_a_server_that_prepares_its_pool_is_not_ready():
    class Preparing(server_view.ServerHttp):
        def get(self, path):
            body = {"status": "touching memory", "done_bytes": 1 << 30, "pool_bytes": 4 << 30}
            return 503, json.dumps(body)

    found, health = server_view.check_health(Preparing("nowhere"))
    assert health is None
    assert found.status == PROBLEM
    assert "touching memory (1 GiB of 4 GiB)" in found.detail


def test_a_response_without_json_is_not_from_a_pegaflow_server():
    class Stranger(server_view.ServerHttp):
        def get(self, path):
            return 200, "<html>"

    found, _ = server_view.check_health(Stranger("nowhere"))
    assert found.status == PROBLEM
    assert "not JSON" in found.detail


def test_it_says_whether_routers_may_read_the_pool(server, tmp_path):
    _, report = run_doctor("--addr", server.address, "--http-addr", server.http)
    (off,) = by_check(report)["routers"]
    assert off["status"] == OK
    assert "--peer-secret-file" in off["fix"]
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef-for-a-test\n")
    secret.chmod(0o600)
    options = ["--peer-secret-file", str(secret)]
    with PegaServer(SERVER, tmp_path / "with", "16mb", options) as other:
        _, report = run_doctor("--addr", other.address, "--http-addr", other.http)
    (on,) = by_check(report)["routers"]
    assert on["detail"].startswith("on:")


def test_engines_without_kv_events_are_named_with_what_a_router_then_uses():
    one = {"instance": "e1", "connected": True, "schedulers": 1, "kv_events": False}
    instances = [one, one | {"instance": "e2", "kv_events": True}, one | {"connected": False}]
    (found,) = routers.check_events(instances)
    assert found.status == OK
    assert "e1" in found.detail and "e2" not in found.detail
    assert "pool" in found.detail
    assert "--kv-events-config" in found.fix
    tells = one | {"instance": "e3", "chains": True}
    reports, others = routers.check_events([*instances, tells])
    assert "e3" in reports.detail and "GPU" in reports.detail and "e3" not in others.detail
    assert "e1" in others.detail
    assert not list(routers.check_events([{"instance": "old", "connected": True}]))


def test_a_random_hash_seed_is_reported():
    engine = {
        "instance": "e",
        "state": "connected",
        "namespace": "n",
        "factors": [{"name": "hash_fingerprint", "value": "private:e"}],
    }
    found = list(server_view.check_instances([engine]))
    assert [f.status for f in found] == [OK, ADVICE]
    assert "PYTHONHASHSEED" in found[1].fix


@pytest.mark.parametrize(
    "state", ["disconnected", "waiting for ranks", "refused: pages of 1 and 2 bytes"]
)
def test_an_instance_without_the_cache_is_advice(state):
    engine = {
        "instance": "e",
        "state": state,
        "namespace": "n",
        "factors": [{"name": "a", "value": "b"}],
    }
    (found,) = server_view.check_instances([engine])
    assert found.status == ADVICE
    assert found.fix


def test_an_instance_shows_its_kinds_of_blocks():
    engine = {
        "instance": "e",
        "state": "connected",
        "namespace": "n",
        "build": "pegaflow 1",
        "factors": [{"name": "a", "value": "b"}],
    }
    kinds = [
        {"kind": "full", "block_tokens": 16},
        {"kind": "window", "block_tokens": 16, "tokens": 127},
        {"kind": "chunk", "block_tokens": 16, "tokens": 64},
        {"kind": "state", "block_tokens": 256},
    ]
    (found,) = server_view.check_instances([engine | {"kinds": kinds}])
    assert found == Finding(
        "instance",
        OK,
        "e: connected, namespace n, pegaflow 1, kinds: full in blocks of 16, window of 128 in "
        "blocks of 16, chunk of 64 in blocks of 16, state in blocks of 256",
    )
    (plain,) = server_view.check_instances([engine])
    assert plain.detail == "e: connected, namespace n, pegaflow 1"


# ---- findings


def test_a_problem_needs_a_fix():
    with pytest.raises(ValueError):
        Finding("x", PROBLEM, "broken")


def test_only_problems_change_the_exit_status():
    assert finding.exit_status([Finding("a", OK, ""), Finding("b", ADVICE, "", "do")]) == 0
    assert finding.exit_status([Finding("c", PROBLEM, "", "do")]) == 1


def test_a_long_command_is_not_wrapped():
    command = "sysctl -w vm.nr_hugepages=" + "9" * 90
    assert command.split()[-1] in finding.as_text("1", [Finding("a", ADVICE, "b", command)], 40)
