"""`pegaflow top` shows the activity of a real server, and restores the terminal."""

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import termios
import time

import pytest

from pegaflow.cli import server_view, top
from tests.python.conftest import server_binary
from tests.python.harness import Engine
from tests.python.test_connector_kinds import engine_of
from tests.python.test_kinds_expectations import prompt_of
from tests.support.disk_server import BLOCK, BLOCKS, DiskEngine, disk_options
from tests.support.vllm_server import PegaServer

TOP = [sys.executable, "-m", "pegaflow", "top"]
DEADLINE_S = 60


def run_top(*arguments):
    return subprocess.run([*TOP, *arguments], capture_output=True, text=True, timeout=60)


@contextlib.contextmanager
def running(*arguments):
    """`pegaflow top` with a pipe; interrupted like by Ctrl-C at the end, and exits cleanly."""
    with subprocess.Popen(
        [*TOP, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as started:
        try:
            yield started
            started.send_signal(signal.SIGINT)
            _, errors = started.communicate(timeout=DEADLINE_S)
        finally:
            started.kill()
    assert errors == ""
    assert started.returncode == 0


def until(process, wanted):
    """The first view of ``process`` for which ``wanted`` is true."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        view = json.loads(process.stdout.readline())
        if wanted(view):
            return view
    raise AssertionError("no such view in time")


def load(pega, tokens):
    """Saves a prompt, and loads it again."""
    with Engine(pega.address) as engine:
        engine.wait_ready()
        engine.ask("cold", tokens)
        engine.reset_local()
        engine.ask("again", tokens)
        engine.run()
        return engine.worker._worker.mover.page_bytes


def test_one_view_shows_the_activity_so_far(own_pega, prompt):
    page_bytes = load(own_pega, prompt(300))

    done = run_top("--once", "--json", "--http-addr", own_pega.http)

    assert done.stderr == ""
    assert done.returncode == 0
    view = json.loads(done.stdout)
    assert view["seconds"] == 0
    assert view["problem"] is None
    assert view["blocks"] == {
        "asked": 36,
        "found": 18,
        "hit_rate": 0.5,
        "saved": 18,
        "evicted": 0,
        "not_saved_no_room": 0,
    }
    assert view["bytes"] == {"loaded": 18 * page_bytes, "saved": 18 * page_bytes}
    assert view["misses"]["new"] == 18
    assert sum(view["misses"].values()) == 18
    assert view["windows"].keys() == {"5m", "1h", "1d"}
    for window in view["windows"].values():
        assert window["asked"] == 36
        assert window["hit_rate"] == 0.5
        assert 0.5 <= window["ceiling"] < 0.6
        assert window["working_set_bytes"] == pytest.approx(18 * page_bytes, rel=0.3)
    assert view["pool"]["resident_blocks"] == 18
    assert view["latency_at_most_seconds"]["lookup"]["calls"] == 2
    assert view["latency_at_most_seconds"]["lookup"]["p50"] > 0
    assert view["turns"]["longest_seconds"] > 0


def test_one_view_as_text(own_pega, prompt):
    load(own_pega, prompt(300))

    done = run_top("--once", "--http-addr", own_pega.http)

    assert done.returncode == 0
    assert "\x1b" not in done.stdout  # no terminal
    assert "hit rate   50.0% of 36 in all blocks asked for" in done.stdout
    assert "missing    new 18 in all" in done.stdout
    assert "ceiling" in done.stdout
    assert "64 MiB" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 120


def test_the_disks_are_shown_with_their_traffic(short_path):
    directory = short_path / "disks"
    words = disk_options([directory / "one"])
    with PegaServer(server_binary(), directory, pool_size="64mb", arguments=words) as server:
        with DiskEngine(server) as engine:
            engine.save()
        assert server.stop() == 0
        server.start()
        with DiskEngine(server) as engine:
            assert engine.load() == BLOCKS
        view = json.loads(run_top("--once", "--json", "--http-addr", server.http).stdout)
        text = run_top("--once", "--http-addr", server.http).stdout
    path = f"{directory}/one/pegaflow.ssd"
    ssd = view["ssd"]
    (disk,) = ssd["disks"].values()
    assert ssd["disks"].keys() == {path}
    assert disk["state"] == "ready"
    assert not disk["breaker_open"]
    assert disk["bytes"] == 60 << 20
    # 4 MiB of blocks and tables in segments of 4 MiB.
    assert disk["used_share"] == pytest.approx(2 / 15)
    assert disk["blocks"] == disk["hit_blocks"] == BLOCKS
    assert disk["read_bytes"] == BLOCKS * BLOCK
    assert disk["errors"] == disk["proof_failures"] == 0
    assert ssd["not_written"] == {"budget": 0, "too_large": 0, "slow": 0, "error": 0}
    assert ssd["waits_for_peers"] is False
    line = f"ssd        ready, 13% of 60 MiB, {BLOCKS} blocks, hits {BLOCKS} in all, read 4 MiB"
    assert line in text
    assert text.count(path) == 1


def test_a_pool_that_outlives_its_server_has_a_line(short_path):
    directory = short_path / "kept"
    words = ["--keep", "yes"]
    with PegaServer(server_binary(), directory, pool_size="64mb", arguments=words) as server:
        try:
            with DiskEngine(server) as engine:
                engine.save_to_pool()
            server.kill()
            server.start()
            view = json.loads(run_top("--once", "--json", "--http-addr", server.http).stdout)
            text = run_top("--once", "--http-addr", server.http).stdout
        finally:
            server.kill()
            release = [server_binary(), "--release", "--addr", server.address]
            subprocess.run(release, check=True, capture_output=True, timeout=60)
    kept = view["kept"]
    assert kept["keeper"] is True
    assert kept["adopted_blocks"] == BLOCKS
    assert kept["adopted_bytes"] == BLOCKS * BLOCK
    assert kept["former_clients"] == 0
    assert f"\nkept       held by its keeper, {BLOCKS} blocks adopted in " in text


def test_a_pool_that_ends_with_its_server_has_none(pega):
    assert top.View(read(pega)).numbers()["kept"] is None
    assert not any(line.startswith("kept") for line in top.View(read(pega)).text("x"))


def test_a_keeper_that_is_missing_and_former_clients_are_shown():
    page = """
pegaflow_keeper 0
pegaflow_adopted_blocks 1200
pegaflow_adopt_seconds 0.25
pegaflow_former_clients 2
pegaflow_adopted_waits_for_nodes 1
"""
    lines = top.View(server_view.Samples(page)).text("x")
    (line,) = [line for line in lines if line.startswith("kept")]
    assert line == (
        "kept       NO KEEPER, it ends with this server, 1,200 blocks adopted in 250 ms, "
        "2 former clients, earlier blocks wait for nodes"
    )


def test_a_server_without_disks_shows_none(pega):
    assert top.View(read(pega)).numbers()["ssd"]["disks"] == {}
    assert not any(line.startswith("ssd") for line in top.View(read(pega)).text("x"))


def read(server):
    return server_view.Samples(server_view.ServerHttp(server.http).get("/metrics")[1])


def test_lost_blocks_and_failed_reads_are_shown():
    page = """
pegaflow_ssd_capacity_bytes{disk="/d"} 1048576
pegaflow_ssd_disk_state{disk="/d",state="read-only"} 1
pegaflow_ssd_breaker_open{disk="/d"} 1
pegaflow_ssd_segments{disk="/d"} 4
pegaflow_ssd_proof_failures_total{disk="/d"} 2
pegaflow_ssd_rejected_blocks_total{reason="slow"} 7
pegaflow_ssd_rejected_blocks_total{reason="budget"} 0
pegaflow_ssd_late_blocks_total 3
pegaflow_ssd_waits_for_peers 1
"""
    lines = top.View(server_view.Samples(page)).text("x")
    first = next(i for i, line in enumerate(lines) if line.startswith("ssd"))
    assert lines[first] == (
        "ssd        read-only, reads fail, 100% of 1 MiB, 0 blocks, hits 0 in all, "
        "read 0 B in all, written 0 B in all, 2 in all failed: /d"
    )
    assert lines[first + 1] == (
        "           not written: slow 7 in all; late 3 in all; earlier blocks wait for peers"
    )


def test_blocks_and_bytes_are_shown_by_kind(own_pega):
    engine = engine_of("gemma3", own_pega.address, extra={"pegaflow.untested": True})
    try:
        engine.ask("cold", prompt_of(300))
        engine.reset_local()
        assert engine.ask("again", prompt_of(300)) == (0, 288)
        engine.run()
        # The branch leaves the prompt between two windows.
        engine.reset_local()
        assert engine.ask("branch", [*prompt_of(300)[:200], *prompt_of(100, 7)]) == (0, 128)
        engine.run()
        saved = engine.saved()
    finally:
        engine.close()

    done = run_top("--once", "--json", "--http-addr", own_pega.http)
    kinds = json.loads(done.stdout)["kinds"]
    # Of 19 blocks of the prompt 18 are loaded, and of those of the branch 8 of the 12 that both
    # share; each time the last 4 of a window of 64 tokens.
    assert saved == {kind: kinds[kind]["saved_blocks"] for kind in saved}
    assert kinds["full"]["loaded_blocks"] == 18 + 8
    assert kinds["window"]["loaded_blocks"] == 4 + 4
    assert kinds["window"]["shortened_lookups"] == 1
    assert kinds["window"]["shortened_tokens"] == 192 - 128
    assert kinds["full"]["shortened_lookups"] == 0
    for row in kinds.values():
        assert (row["saved_bytes"] > 0) == (row["saved_blocks"] > 0)
    window = kinds["window"]
    page = window["saved_bytes"] / window["saved_blocks"]
    assert window["loaded_bytes"] == 8 * page

    text = run_top("--once", "--http-addr", own_pega.http).stdout
    assert "  full     loaded 26 in all blocks" in text
    assert "  window   loaded 8 in all blocks" in text
    assert "; shortened 1 in all hits" in text
    assert "state" not in text
    assert max(map(len, text.splitlines())) <= 120


def test_one_kind_of_full_attention_has_no_lines_by_kind(own_pega, prompt):
    load(own_pega, prompt(300))
    assert "  full" not in run_top("--once", "--http-addr", own_pega.http).stdout


def test_a_server_without_requests(own_pega):
    done = run_top("--once", "--http-addr", own_pega.http)
    assert done.returncode == 0
    assert "hit rate       - of 0 in all" in done.stdout
    assert "missing    nothing" in done.stdout


def test_later_views_show_the_activity_since_the_previous_one(own_pega, prompt):
    with running("--json", "--interval", "0.1", "--http-addr", own_pega.http) as process:
        assert until(process, lambda view: True)["blocks"]["asked"] == 0
        load(own_pega, prompt(300))
        asked, seconds = 0, []

        def add(view):
            nonlocal asked
            asked += view["blocks"]["asked"]
            seconds.append(view["seconds"])
            return asked == 36

        until(process, add)
        assert all(each > 0 for each in seconds)
        assert until(process, lambda view: True)["blocks"]["asked"] == 0


def test_a_server_that_ends_is_reported(own_pega, prompt):
    with running("--json", "--interval", "0.1", "--http-addr", own_pega.http) as process:
        until(process, lambda view: view["problem"] is None)
        own_pega.stop()
        gone = until(process, lambda view: view["problem"])
        assert own_pega.http in gone["problem"]


def test_without_a_server_it_names_the_address_to_check():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        done = run_top("--http-addr", address)
    assert done.returncode == 1
    assert done.stdout == ""
    assert address in done.stderr
    assert "--http-addr" in done.stderr
    assert "Traceback" not in done.stderr


class Stranger(server_view.ServerHttp):
    def __init__(self, status, page):
        super().__init__("somewhere:1")
        self._answer = status, page

    def get(self, path):
        return self._answer


@pytest.mark.parametrize(
    ("status", "page", "says"),
    [
        (200, "node_load1 3\n", "does not belong to a PegaFlow"),
        (503, "preparing", "status 503: preparing"),
    ],
)
def test_a_page_without_pegaflow_metrics_is_an_error(status, page, says):
    with pytest.raises(server_view.Unreachable, match=says):
        top._read(Stranger(status, page))


def test_a_reader_that_closes_the_pipe_ends_it(own_pega):
    with subprocess.Popen(
        [*TOP, "--interval", "0.1", "--http-addr", own_pega.http],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(DEADLINE_S) == 0
        assert process.stderr.read() == ""


@pytest.mark.parametrize("key", ["q", "\x03"])
def test_on_a_terminal_it_refreshes_until_a_key(own_pega, key):
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [*TOP, "--interval", "0.1", "--http-addr", own_pega.http],
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that ^C reaches it
    ) as process:
        try:
            os.close(theirs)
            shown = b""
            deadline = time.monotonic() + DEADLINE_S
            while shown.count(b"hit rate") < 3 and time.monotonic() < deadline:
                if select.select([ours], [], [], 1.0)[0]:
                    shown += os.read(ours, 4096)
            os.write(ours, key.encode())
            with contextlib.suppress(OSError):  # the other end closed
                while select.select([ours], [], [], DEADLINE_S)[0]:
                    shown += os.read(ours, 4096)
            assert process.wait(DEADLINE_S) == 0
            assert process.stderr.read() == b""
        finally:
            process.kill()
            os.close(ours)
    assert shown.count(b"hit rate") >= 3
    assert shown.startswith(b"\x1b[?1049h")
    assert shown.rstrip().endswith(b"\x1b[?1049l")


@pytest.mark.parametrize("interval", ["0", "1e9", "soon"])
def test_an_interval_out_of_bounds_is_wrong_usage(interval):
    assert run_top("--interval", interval).returncode == 2


def test_the_command_line_lists_all_commands():
    done = subprocess.run(
        [sys.executable, "-m", "pegaflow", "--help"], capture_output=True, text=True, timeout=60
    )
    assert "doctor" in done.stdout
    assert "top" in done.stdout
    assert "--once" in run_top("--help").stdout


# ---- numbers


def page(lookups, *buckets):
    counts = zip(("1e-05", "0.001", "+Inf"), buckets, strict=True)
    return server_view.Samples(
        f"pegaflow_cache_lookups_total {lookups}\n"
        + "".join(
            f'pegaflow_rpc_duration_seconds_bucket{{method="lookup",le="{bound}"}} {count}\n'
            for bound, count in counts
        )
    )


def lookup_of(view):
    return view.numbers()["latency_at_most_seconds"]["lookup"]


def test_percentiles_are_of_the_time_between_two_readings():
    view = top.View(page(200, 190, 198, 200), page(100, 100, 100, 100), 2.0)
    assert lookup_of(view)["p50"] == 1e-05
    assert lookup_of(view)["p99"] == float("inf")
    assert top._finite(view.numbers())["latency_at_most_seconds"]["lookup"]["p99"] is None
    assert any("> 1 s" in line for line in view.text("x"))
    still = top.View(page(200, 190, 198, 200), page(200, 190, 198, 200), 2.0)
    assert lookup_of(still)["p50"] is None


def test_after_a_restart_of_the_server_counts_begin_at_zero():
    view = top.View(page(3, 3, 3, 3), page(100, 100, 100, 100), 2.0)
    assert view.seconds == 0
    assert lookup_of(view)["p50"] == 1e-05


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0, "0 s"),
        (2e-05, "20 us"),
        (0.0025, "2.5 ms"),
        (90, "90 s"),
        (600, "10 min"),
        (9000, "2.5 h"),
        (864000, "10 d"),
    ],
)
def test_times_are_printed_with_units(seconds, text):
    assert top._time(seconds) == text
