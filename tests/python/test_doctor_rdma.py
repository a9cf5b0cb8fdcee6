"""Findings of `pegaflow doctor` about RDMA, over recorded trees of /sys."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from pegaflow.cli import rdma
from pegaflow.cli.finding import ADVICE, OK, PROBLEM


class Machine:
    """Cards as shown by mlx5_core, in files below a directory."""

    def __init__(self, root):
        self.sys, self.dev, self.proc = root / "sys", root / "dev", root / "proc"
        for each in (self.sys, self.dev, self.proc):
            each.mkdir()

    def card(self, device, state="4: ACTIVE", layer="InfiniBand", node="0", interface=""):
        folder = self.sys / "class/infiniband" / device
        port = folder / "ports/1"
        (port / "gid_attrs/ndevs").mkdir(parents=True)
        (folder / "device").mkdir()
        (folder / "device/numa_node").write_text(f"{node}\n")
        (port / "state").write_text(f"{state}\n")
        (port / "link_layer").write_text(f"{layer}\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
        if interface:
            (port / "gid_attrs/ndevs/0").write_text(f"{interface}\n")
        index = len(list(self.sys.glob("class/infiniband_verbs/*")))
        verbs = self.sys / f"class/infiniband_verbs/uverbs{index}"
        verbs.mkdir(parents=True)
        (verbs / "ibdev").write_text(f"{device}\n")
        (self.dev / "infiniband").mkdir(exist_ok=True)
        device_file = self.dev / f"infiniband/uverbs{index}"
        device_file.touch()
        return device_file

    def limit(self, soft):
        folder = self.proc / "7"
        folder.mkdir()
        (folder / "limits").write_text(
            "Limit                     Soft Limit           Hard Limit           Units\n"
            "Max cpu time              unlimited            unlimited            seconds\n"
            f"Max locked memory         {soft:<20} {soft:<20} bytes\n"
        )

    def ports(self):
        return rdma.ports(self.sys)

    def findings(self, nodes=None):
        return list(rdma.check_ports(self.ports(), nodes))


@pytest.fixture
def box(tmp_path):
    return Machine(tmp_path)


def test_a_machine_without_cards_is_not_a_problem(box):
    (found,) = box.findings()
    assert (found.check, found.status) == ("rdma", OK)
    assert "over sockets" in found.detail
    assert rdma.check_ucx(None, box.ports()) is None


def test_each_port_is_shown_with_its_link_and_place(box):
    box.card("mlx5_0", node="1")
    box.card("rxe0", layer="Ethernet", node="-1", interface="eth1")
    first, second = box.findings()
    assert first.detail == "mlx5_0:1, InfiniBand, 400 Gb/sec (4X NDR), NUMA node 1: up"
    assert second.detail == "rxe0:1, Ethernet (eth1), 400 Gb/sec (4X NDR): up"
    assert first.status == second.status == OK


@pytest.mark.parametrize(
    ("state", "layer", "fix"),
    [
        ("1: DOWN", "Ethernet", "ip link set eth1 up"),
        ("1: DOWN", "InfiniBand", "cable"),
        ("2: INIT", "InfiniBand", "opensm"),
    ],
)
def test_a_link_that_is_down_is_reported_with_the_fix(box, state, layer, fix):
    box.card("mlx5_0", state=state, layer=layer, interface="eth1")
    (found,) = box.findings()
    assert found.status == ADVICE
    assert state.split()[1] in found.detail
    assert fix in found.fix


def test_the_cards_that_a_server_uses_and_the_reasons_against_others_are_shown(box):
    for name in ("mlx5_0", "mlx5_1", "mlx5_2"):
        box.card(name)
    nodes = {"cards": ["mlx5_0:1"], "refused_cards": ["mlx5_1:1: it is denied"]}
    used, denied, later = box.findings(nodes)
    assert "the server uses it" in used.detail
    assert (denied.status, later.status) == (ADVICE, OK)
    assert "it is denied" in denied.detail
    assert "--deny-nics" in denied.fix


def test_a_server_on_sockets_beside_working_cards_is_reported(box):
    box.card("mlx5_0")
    *_, found = box.findings({"no_rdma": "UCX is not on this machine"})
    assert (found.check, found.status) == ("rdma", ADVICE)
    assert "UCX is not on this machine" in found.detail
    assert "restart" in found.fix


def test_device_files_that_a_container_lacks_are_reported(box):
    box.card("mlx5_0").unlink()
    box.card("mlx5_1")
    (found,) = rdma.check_devices(box.ports(), box.sys, box.dev)
    assert found.status == PROBLEM
    assert "uverbs0" in found.detail
    assert "--device=/dev/infiniband" in found.fix


@pytest.mark.skipif(os.geteuid() == 0, reason="root may open everything")
def test_device_files_of_another_group_are_reported(box):
    box.card("mlx5_0").chmod(0)
    (found,) = rdma.check_devices(box.ports(), box.sys, box.dev)
    assert found.status == ADVICE
    assert "usermod -aG" in found.fix


def test_the_limit_of_locked_memory_is_the_servers(box):
    box.card("mlx5_0")
    box.card("mlx5_1")
    box.limit(8 << 20)
    found = rdma.check_locked_memory(box.ports(), 30 << 30, 7, box.proc)
    assert found.status == ADVICE
    assert "the server's limit: 8 MiB" in found.detail
    assert "60 GiB" in found.detail
    assert "LimitMEMLOCK=infinity" in found.fix


def test_a_sufficient_limit_or_none_is_not_a_problem(box):
    box.card("mlx5_0")
    box.limit(32 << 30)
    assert rdma.check_locked_memory(box.ports(), 30 << 30, 7, box.proc).status == OK
    (box.proc / "7/limits").write_text("Max locked memory  unlimited  unlimited  bytes\n")
    assert "none" in rdma.check_locked_memory(box.ports(), 1 << 40, 7, box.proc).detail
    # Without a card nothing is registered.
    assert rdma.check_locked_memory([], 0, 0).status == OK


def ucx(tmp_path, version=(1, 22, 0), verbs=True, **more):
    tmp_path.mkdir(exist_ok=True)
    library = tmp_path / "libucp.so.0"
    if verbs:
        (tmp_path / "ucx").mkdir()
        (tmp_path / "ucx/libuct_ib.so.0").touch()
    return rdma.Ucx(version, library, rdma.has_verbs(library), **more)


def test_the_library_is_checked_for_the_needs_of_the_cards(box, tmp_path):
    box.card("mlx5_0")
    ports = box.ports()
    assert rdma.check_ucx(None, ports).fix.startswith("apt-get install libucx0; --ucx-library")
    assert rdma.check_ucx(ucx(tmp_path), ports).status == OK
    fragile = rdma.check_ucx(ucx(tmp_path / "a", (1, 13, 1)), ports)
    assert fragile.status == ADVICE
    assert "1.14 or newer" in fragile.fix
    assert "too old" in rdma.check_ucx(ucx(tmp_path / "b", (1, 12, 0)), ports).detail
    wheel = rdma.check_ucx(ucx(tmp_path / "c", verbs=False), ports)
    assert "without RDMA" in wheel.detail
    # Without cards the same library is not a problem.
    assert rdma.check_ucx(ucx(tmp_path / "d", (1, 13, 1)), []).status == OK


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"memory_types": 3}, "with RDMA, with CUDA memory"),
        ({"memory_types": 1}, "with RDMA, without CUDA memory"),
        ({"memory_types": 1, "has_cuda": True}, "finds no GPU"),
        ({"not_started": "No such device"}, "CUDA memory unknown: UCX does not start (No such"),
    ],
)
def test_the_memory_that_the_library_reads_and_writes_is_shown(tmp_path, more, words):
    found = rdma.check_ucx(ucx(tmp_path, **more), [])
    assert found.status == OK
    assert words in found.detail


def test_a_named_library_that_cannot_be_used_is_reported_with_the_fix(box):
    box.card("mlx5_0")
    found = rdma.check_ucx("/opt/ucx: No such file or directory", box.ports())
    assert (found.check, found.status) == ("ucx", PROBLEM)
    assert "unusable: /opt/ucx: No such file" in found.detail
    assert "PEGA_UCX_LIBRARY" in found.fix
    assert rdma.check_ucx("/opt/ucx: No such file or directory", []).status == ADVICE


def test_the_option_names_the_library_then_the_server_then_the_environment(tmp_path, monkeypatch):
    served = tmp_path / "libucp.so.0"
    nodes = {"ucx": {"version": "1.22.0", "library": str(served)}}
    monkeypatch.delenv("PEGA_UCX_LIBRARY", raising=False)
    assert rdma.ucx_name(None, None) == ""
    monkeypatch.setenv("PEGA_UCX_LIBRARY", "/opt/other")
    assert rdma.ucx_name(None, {"lane": "tcp"}) == "/opt/other"
    assert rdma.ucx_name(None, nodes) == "/opt/other"  # That of a container is not visible here.
    served.touch()
    assert rdma.ucx_name(None, nodes) == str(served)
    assert rdma.ucx_name("/opt/mine", nodes) == "/opt/mine"
    assert rdma.ucx_name("", nodes) == ""  # The one that the system finds.


@pytest.fixture(scope="module")
def installed():
    """The UCX of this machine."""
    found = rdma.find_ucx()
    if found is None:
        pytest.skip("UCX is not on this machine")
    return found


def test_the_library_of_this_machine_is_found(installed):
    assert installed.version >= (1, 0, 0)
    assert installed.path.is_file()
    assert installed.memory_types & 1  # Host memory.


def test_a_library_is_found_by_its_file(installed, tmp_path):
    link = tmp_path / "any-name.so"
    link.symlink_to(installed.path)
    assert rdma.find_ucx(str(link)) == installed


def test_files_that_are_no_library_of_ucx_are_reported_with_their_names(tmp_path):
    text = tmp_path / "libucp.so.0"
    text.write_text("not a library")
    assert str(text) in rdma.find_ucx(str(text))
    missing = tmp_path / "missing"
    assert rdma.find_ucx(str(missing)) == f"{missing}: No such file or directory"
    maps = Path("/proc/self/maps").read_text()
    other = re.search(r"/\S+/libc\.so\S*$", maps, re.MULTILINE)[0]
    assert "undefined symbol: ucp_get_version" in rdma.find_ucx(other)


VERSION = """
void ucp_get_version(unsigned* major, unsigned* minor, unsigned* release) {
  *major = 1, *minor = %d, *release = 0;
}
"""
OLD = VERSION % 12
ON_LOAD = "__attribute__((constructor)) static void on_load(void) { %s }"


def library(path, code):
    """Compiles a library that has the functions of ``code``, and returns its name."""
    source = path.with_name("library.c")
    includes = ("signal.h", "stdlib.h", "unistd.h")
    source.write_text("".join(f"#include <{name}>\n" for name in includes) + code)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", path, source], check=True)
    return str(path)


@pytest.mark.parametrize("output", ["1", "2"], ids=["stdout", "stderr"])
@pytest.mark.parametrize(
    "text",
    ["hello", '{\\"error\\": \\"made up\\"}\\n', "\\xff"],
    ids=["words", "json", "not UTF-8"],
)
def test_the_output_of_a_library_is_not_taken_for_the_answer(tmp_path, text, output):
    prints = f'static const char text[] = "{text}"; write({output}, text, sizeof text - 1);'
    name = library(tmp_path / "libucp.so.0", OLD + ON_LOAD % prints)
    found = rdma.find_ucx(name)
    assert isinstance(found, rdma.Ucx), found
    assert (found.version, found.path) == ((1, 12, 0), Path(name))


@pytest.mark.parametrize(
    ("action", "end"),
    [
        ("exit(0);", "exit status 0"),
        ("write(1, &(char){'1'}, 1); _exit(0);", "exit status 0"),
        ("exit(3);", "exit status 3"),
        ("raise(SIGKILL);", "Killed (signal 9)"),
    ],
)
def test_a_library_that_ends_its_process_is_reported_with_the_end(box, tmp_path, action, end):
    box.card("mlx5_0")
    name = library(tmp_path / "libucp.so.0", OLD + ON_LOAD % action)
    found = rdma.check_ucx(rdma.find_ucx(name), box.ports())
    assert found.status == PROBLEM
    assert found.detail == f"unusable: {name} ends the process that loads it: {end}"
    assert "PEGA_UCX_LIBRARY" in found.fix


def test_a_library_without_the_functions_is_reported_with_the_first_that_is_missing(tmp_path):
    found = rdma.find_ucx(library(tmp_path / "libucp.so.0", VERSION % 22))
    assert "undefined symbol: ucs_status_string" in found


def test_links_that_form_a_loop_are_reported(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    one.symlink_to(other)
    other.symlink_to(one)
    assert rdma.find_ucx(str(one)) == f"{one}: Too many levels of symbolic links"


def test_a_file_below_a_file_is_reported_with_its_name(tmp_path):
    (tmp_path / "file").touch()
    below = tmp_path / "file/libucp.so.0"
    assert rdma.find_ucx(str(below)) == f"{below}: Not a directory"


def test_what_is_not_a_regular_file_is_reported_and_not_opened(tmp_path):
    fifo = tmp_path / "libucp.so.0"
    os.mkfifo(fifo)
    for name in (fifo, tmp_path, Path("/dev/null")):
        assert rdma.find_ucx(str(name)) == f"{name} is not a regular file"


def test_a_fifo_beside_the_named_library_is_not_opened(tmp_path):
    name = library(tmp_path / "libucp.so.0", OLD)
    os.mkfifo(tmp_path / "libucs.so.0")
    assert rdma.find_ucx(name).version == (1, 12, 0)


def test_a_name_that_is_not_utf_8_is_reported_with_its_bytes(tmp_path):
    folder = tmp_path / os.fsdecode(b"ucx-\xff")
    folder.mkdir()
    missing, text = folder / "missing", folder / "text"
    text.write_text("not a library")
    assert rdma.find_ucx(str(missing)) == f"{missing}: No such file or directory"
    assert rdma.find_ucx(str(text)) == f"{text}: file too short"
    other = library(folder / "other", "")
    assert rdma.find_ucx(other) == f"{other}: undefined symbol: ucp_get_version"
    old = library(folder / "old", OLD)
    assert rdma.find_ucx(old).path == Path(old)


def test_peers_are_shown_with_their_lane():
    nodes = {
        "peers": [
            {"peer": "a:1", "state": "self"},
            {"peer": "b:1", "state": "ready", "lane": "rdma"},
            {"peer": "c:1", "state": "ready", "lane": "tcp", "lane_reason": "no answer"},
            {"peer": "d:1", "state": "connecting", "reason": "connection refused"},
            {"peer": "e:1", "state": "refused", "reason": "another --peer-secret-file"},
        ]
    }
    ready, slower, away, refused = rdma.check_peers(nodes)
    assert (ready.status, ready.detail) == (OK, "b:1: lane rdma")
    assert (slower.status, away.status, refused.status) == (ADVICE, ADVICE, PROBLEM)
    assert "no answer" in slower.detail
    assert "--peer-secret-file" in refused.detail
    assert list(rdma.check_peers(None)) == []
