"""`pegaflow doctor` shows the disks of a server, and checks a path before a server uses it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pegaflow.cli import disk_path, disks
from pegaflow.cli.finding import ADVICE, OK, PROBLEM
from pegaflow.cli.server_view import Samples
from tests.support.disk_server import BLOCKS, SEGMENT, DiskEngine, disk_options
from tests.support.vllm_server import PegaServer

SERVER = Path(os.environ["PEGA_BUILD_DIR"], "server", "pegaflow-server")
WITHOUT_IO_URING = [sys.executable, Path(__file__).parents[1] / "support/without_io_uring.py"]
DOCTOR = [sys.executable, "-m", "pegaflow", "doctor", "--json"]
DISK = "/nvme0/pegaflow/pegaflow.ssd"


def run_doctor(server, *arguments):
    """The exit status, and the details and fixes by the name of their check."""
    words = ["--addr", server.address, "--http-addr", server.http, *arguments]
    return findings_of([*DOCTOR, *words])


def findings_of(command):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    found = {}
    for each in json.loads(done.stdout)["findings"]:
        found.setdefault(each["check"], []).append(each)
    return done.returncode, found


def server_with(directory, *arguments, folders=("disk",)):
    paths = [directory / name for name in folders]
    return PegaServer(
        SERVER,
        directory,
        pool_size="64mb",
        arguments=[*disk_options(paths), *arguments],
    )


class Restricted(PegaServer):
    """A server that may not use io_uring."""

    def command(self):
        return [*map(str, WITHOUT_IO_URING), *super().command()]


# ---- a running server


def test_each_disk_is_shown_with_its_state_and_use(short_path):
    directory = short_path / "states"
    with server_with(directory, folders=("one", "two")) as server, DiskEngine(server) as engine:
        engine.save()
        status, found = run_doctor(server)
    assert status == 0
    assert [each["status"] for each in found["ssd"]] == [OK, OK]
    details = " ".join(each["detail"] for each in found["ssd"])
    for name in ("one", "two"):
        assert f"{directory}/{name}/pegaflow.ssd: ready, " in details
    assert "of 28 MiB used" in details  # 32 MiB: 1 MiB for records, and seven segments
    wear = [each["detail"] for each in found["ssd wear"]]
    assert len(wear) == 2
    assert all("written in 0 min" in each for each in wear)


def test_blocks_that_are_not_what_was_saved_are_reported(short_path):
    directory = short_path / "damaged"
    with server_with(directory) as server:
        with DiskEngine(server) as engine:
            engine.save()
        assert server.stop() == 0
        damage(directory / "disk/pegaflow.ssd")
        server.start()
        with DiskEngine(server) as engine:
            assert engine.load() == 0
            assert not engine.memory.any()
        status, found = run_doctor(server)
    assert status == 0
    (wrong,) = [each for each in found["ssd"] if "prove" in each["detail"]]
    assert wrong["status"] == ADVICE
    assert "smartctl" in wrong["fix"]


def damage(file):
    """Overwrites the second half of every segment that has one: blocks, and no table."""
    with file.open("r+b") as disk:
        for start in range(1 << 20, file.stat().st_size, SEGMENT):
            # Blocks lie behind the header and two pages of the table.
            disk.seek(start + 3 * 4096)
            disk.write(b"\xa5" * (SEGMENT - 3 * 4096))


def test_blocks_of_an_earlier_process_are_found_and_counted(short_path):
    directory = short_path / "warm"
    with server_with(directory) as server:
        with DiskEngine(server) as engine:
            engine.save()
        assert server.stop() == 0
        server.start()
        with DiskEngine(server) as engine:
            assert engine.load() == BLOCKS
        _, found = run_doctor(server)
    assert f"{BLOCKS} blocks" in found["ssd"][0]["detail"]


def test_a_server_that_may_not_use_io_uring_has_the_reason_and_the_fix(short_path):
    directory = short_path / "container"
    with Restricted(
        SERVER, directory, pool_size="64mb", arguments=disk_options([directory / "disk"])
    ) as server:
        status, found = run_doctor(server)
    assert status == 0
    (io,) = found["ssd io"]
    assert io["status"] == ADVICE
    assert "seccomp" in io["detail"] or "io_uring_disabled" in io["detail"]
    assert "io_uring" in io["fix"]
    assert "threads" in found["ssd"][0]["detail"]


def test_threads_that_were_chosen_are_fine(short_path):
    with server_with(short_path / "threads", "--ssd-io", "threads") as server:
        filtered = disks.has_filter(server.pid)
        _, found = run_doctor(server)
    (io,) = found["ssd io"]
    assert io["status"] == (ADVICE if filtered or disks.io_uring_disabled() else OK)


def test_blocks_that_wait_for_a_peer_are_reported(short_path):
    peers = ["--peers", "127.0.0.1:1", "--peer-listen", "127.0.0.1:0"]
    with server_with(short_path / "peers", *peers) as server:
        _, found = run_doctor(server)
    (waits,) = [each for each in found["ssd"] if "every peer" in each["detail"]]
    assert waits["status"] == ADVICE
    assert "--peers" in waits["fix"]


# ---- states that a healthy disk does not have


def samples(**changed):
    values = {
        f'ssd_disk_state{{disk="{DISK}",state="{changed.pop("state", "ready")}"}}': 1,
        f'ssd_capacity_bytes{{disk="{DISK}"}}': 1 << 40,
        f'ssd_scan_segments{{disk="{DISK}"}}': 4096,
        f'ssd_segments{{disk="{DISK}"}}': 8192,
        f'ssd_free_segments{{disk="{DISK}"}}': 2048,
        f'ssd_blocks{{disk="{DISK}"}}': 5000,
        "cache_block_evictions_total": 1000,
    }
    values |= {
        f'{name}{{disk="{DISK}"}}' if name.startswith("disk_") else name: value
        for name, value in changed.items()
    }
    return Samples(
        "\n".join(
            f"pegaflow_{name.replace('disk_', 'ssd_', 1) if name.startswith('disk_') else name} {v}"
            for name, v in values.items()
        )
    )


def findings(page, io="io_uring", direct=True, pid=0, proc=Path("/nowhere")):
    shown = {"path": DISK, "io": io, "direct": direct, "state": "scanning"}
    return list(disks.check_disks([shown], page, pid, proc))


def test_the_state_is_that_of_the_metrics():
    (ready,) = findings(samples())
    assert ready.status == OK
    assert ready.detail == f"{DISK}: ready, io_uring, 75% of 1 TiB used, 5,000 blocks"


def test_a_scan_shows_its_progress():
    (scanning,) = findings(samples(state="scanning"))
    assert scanning.status == OK
    assert "4,096 of 8,192 segments and 5,000 blocks so far" in scanning.detail


@pytest.mark.parametrize(
    ("state", "fix"),
    [("left", f"remove {DISK}"), ("read-only", "df -h /nvme0/pegaflow")],
)
def test_a_disk_out_of_use_is_a_problem(state, fix):
    (found,) = findings(samples(state=state))
    assert found.status == PROBLEM
    assert fix in found.fix


@pytest.mark.parametrize(
    ("changed", "status", "text"),
    [
        ({"disk_breaker_open": 1}, PROBLEM, "until a read succeeds"),
        ({"disk_slow": 1}, PROBLEM, "far longer than usual"),
        ({"disk_proof_failures_total": 3}, ADVICE, "3 blocks did not prove themselves"),
        ({"disk_damaged_blocks_total": 5}, ADVICE, "5 blocks differed in the pool"),
        ({'ssd_rejected_blocks_total{reason="slow"}': 21}, ADVICE, "2% of the evicted blocks"),
        ({'ssd_rejected_blocks_total{reason="budget"}': 7}, ADVICE, "7 blocks were not written"),
        ({'ssd_rejected_blocks_total{reason="too_large"}': 1}, ADVICE, "a quarter of a segment"),
        ({"ssd_late_blocks_total": 2}, ADVICE, "--fetch-deadline"),
        ({f'ssd_errors_total{{disk="{DISK}",op="write"}}': 4}, ADVICE, "4 writes failed"),
    ],
)
def test_each_trouble_has_a_line_with_its_fix(changed, status, text):
    first, found = findings(samples(**changed))
    assert first.status == OK
    assert found.status == status
    assert text in found.detail
    assert found.fix


def test_few_unwritten_blocks_are_no_trouble():
    assert len(findings(samples(**{'ssd_rejected_blocks_total{reason="slow"}': 19}))) == 1


def test_a_file_system_without_direct_io_is_reported():
    found = findings(samples(), direct=False)
    assert found[1].status == ADVICE
    assert "O_DIRECT" in found[1].detail


@pytest.fixture
def two_hours_old(tmp_path):
    """A kernel's files of process 7, which has run for two hours."""
    (tmp_path / "7").mkdir()
    ticks = os.sysconf("SC_CLK_TCK")
    fields = ["S", *["0"] * 18, str(1000 * ticks), *["0"] * 30]
    (tmp_path / "7/stat").write_text(f"7 (a ) b) {' '.join(fields)}\n")
    (tmp_path / "uptime").write_text("8200.00 9000.00\n")
    return tmp_path


@pytest.mark.parametrize(
    ("written", "status", "a_day"),
    [
        (1 << 35, OK, "384 GiB, 0.38 times the file"),
        (1 << 38, ADVICE, "3 TiB, 3 times the file"),
    ],
)
def test_the_wear_is_the_rate_since_the_start(two_hours_old, written, status, a_day):
    assert disks.uptime(7, two_hours_old) == 7200
    _, wear = findings(samples(disk_write_bytes_total=written), pid=7, proc=two_hours_old)
    assert wear.check == "ssd wear"
    assert wear.status == status
    assert wear.detail.endswith(f"written in 2.0 h; a day at this rate: {a_day}")
    assert bool(wear.fix) == (status == ADVICE)


@pytest.mark.parametrize("setting", [1, 2])
def test_a_kernel_that_disables_io_uring_is_named(tmp_path, setting):
    (tmp_path / "sys/kernel").mkdir(parents=True)
    (tmp_path / "sys/kernel/io_uring_disabled").write_text(f"{setting}\n")
    found = findings(samples(), io="threads", proc=tmp_path)
    assert found[1].status == ADVICE
    assert f"kernel.io_uring_disabled is {setting}" in found[1].detail
    assert "sysctl" in found[1].fix


def test_a_server_without_disks_has_no_line():
    assert list(disks.check_disks([], samples(), 0)) == []


# ---- a path


def of_path(path, **places):
    return {each.check: each for each in disk_path.check_path(str(path), **places)}


def test_a_directory_is_checked_and_nothing_is_left_in_it(tmp_path):
    found = of_path(tmp_path)
    assert found.keys() == {"ssd path", "ssd direct"}
    assert f"{tmp_path}/pegaflow.ssd: " in found["ssd path"].detail
    assert " free" in found["ssd path"].detail
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_takes_several_paths(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
    words = ["--addr", f"unix:{tmp_path}/x.sock", "--ssd-cache-path", f"{tmp_path}/a,{tmp_path}/b"]
    status, found = findings_of([*DOCTOR, *words])
    assert status == 1  # there is no server
    assert len(found["ssd path"]) == 2
    assert len(found["ssd io"]) == len(found["ssd memlock"]) == 1


def test_the_file_of_a_server_is_accepted(short_path):
    directory = short_path / "file"
    with server_with(directory):
        found = of_path(directory / "disk/pegaflow.ssd")
    assert "the file has 64 MiB" in found["ssd path"].detail
    assert found["ssd direct"].status == OK


def test_a_missing_folder_is_a_problem(tmp_path):
    (found,) = of_path(tmp_path / "missing/file").values()
    assert found.status == PROBLEM
    assert f"install -d -m 700 -o USER {tmp_path}/missing" in found.fix


def test_a_file_that_others_may_read_is_a_problem(tmp_path):
    file = tmp_path / "pegaflow.ssd"
    file.touch(mode=0o640)
    file.chmod(0o640)
    (found,) = of_path(tmp_path).values()
    assert found.status == PROBLEM
    assert "mode 0640" in found.detail
    assert found.fix == f"chmod 600 {file}"


def test_a_device_is_a_problem():
    (found,) = of_path("/dev/null").values()
    assert found.status == PROBLEM
    assert "neither a regular file nor a directory" in found.detail


@pytest.mark.parametrize(
    ("kind", "status", "text"),
    [
        ("ext4", OK, "ext4 at "),
        ("tmpfs", PROBLEM, "memory"),
        ("overlay", ADVICE, "container's own layer"),
        ("nfs4", ADVICE, "not a local disk"),
        ("fuse.sshfs", ADVICE, "not a local disk"),
    ],
)
def test_the_file_system_decides(tmp_path, kind, status, text):
    found = of_path(tmp_path, proc=mounts(tmp_path, kind))["ssd path"]
    assert found.status == status
    assert text in found.detail


def mounts(root, kind):
    """A kernel's list with a mount at ``root``, whose name has a space, above the root's."""
    proc = root / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "self/mountinfo").write_text(
        "1 0 254:0 / / rw - xfs /dev/vda rw\n"
        f"2 1 253:9 / {root} rw,relatime shared:1 - {kind} /dev/x rw\n"
        f"3 1 0:9 / {root}\\040other rw - tmpfs none rw\n"
    )
    return proc


def test_an_encrypted_disk_is_recognized_below_another_device(tmp_path):
    block = tmp_path / "sys/dev/block"
    (block / "253:9/slaves/dm-0").mkdir(parents=True)
    (block / "253:9/slaves/dm-0/dev").write_text("253:0\n")
    (block / "253:0/dm").mkdir(parents=True)
    (block / "253:0/dm/uuid").write_text("CRYPT-LUKS2-0123\n")
    places = {"proc": mounts(tmp_path, "ext4"), "sys": tmp_path / "sys"}
    assert "encrypted by dm-crypt" in of_path(tmp_path, **places)["ssd path"].detail
    (block / "253:0/dm/uuid").write_text("LVM-0123\n")
    assert "dm-crypt" not in of_path(tmp_path, **places)["ssd path"].detail


def test_a_process_that_may_not_use_io_uring_has_the_reason(tmp_path):
    words = ["--addr", f"unix:{tmp_path}/x.sock", "--ssd-cache-path", tmp_path]
    _, found = findings_of([*WITHOUT_IO_URING, *DOCTOR, *words])
    (io,) = found["ssd io"]
    assert io["status"] == ADVICE
    assert "Operation not permitted" in io["detail"]
    assert "io_uring" in io["fix"]


@pytest.mark.parametrize(
    ("huge", "limit", "capabilities", "status"),
    [
        (0, "8388608", "0", OK),
        (64, "unlimited", "0", OK),
        (64, "8388608", "4000", OK),  # CAP_IPC_LOCK
        (64, "8388608", "0", ADVICE),
    ],
)
def test_memlock_matters_for_a_pool_on_huge_pages(tmp_path, huge, limit, capabilities, status):
    (tmp_path / "self").mkdir()
    (tmp_path / "meminfo").write_text(f"HugePages_Total:    {huge}\n")
    (tmp_path / "self/limits").write_text(f"Max locked memory   {limit}   {limit}   bytes\n")
    (tmp_path / "self/status").write_text(f"Name:\tx\nCapEff:\t{capabilities:>016}\n")
    found = disk_path.check_registration(tmp_path)
    assert found.status == status
    assert bool(found.fix) == (status == ADVICE)
