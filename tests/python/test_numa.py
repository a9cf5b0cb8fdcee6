"""NUMA nodes: the node that an engine's worker reports, and the doctor's findings."""

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from pegaflow.cli import machine, server_view
from pegaflow.cli.finding import ADVICE, OK
from tests.support.vllm_server import PegaServer

ON_MACHINE = Path(os.environ["PEGA_BUILD_DIR"], "tests", "support", "on_machine")
SKIPPED = 77


def recorded(root: Path, nodes: dict[int, str], has_memory: str) -> Path:
    """The kernel's files of a machine with these NUMA nodes and the cores of each."""
    cores = ",".join(text for text in nodes.values() if text)
    files = {
        "sys/devices/system/cpu/online": cores,
        "sys/devices/system/node/online": ",".join(map(str, nodes)),
        "sys/devices/system/node/has_memory": has_memory,
        "status": "Mems_allowed_list:\t0-1023",
    }
    for node, cpulist in nodes.items():
        files[f"sys/devices/system/node/node{node}/cpulist"] = cpulist
        files[f"sys/devices/system/node/node{node}/distance"] = " ".join("10" for _ in nodes)
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


# ---- a worker's own NUMA node

#: Registers as a worker whose process is bound to the cores in argv, and waits for a line.
WORKER = """
import ctypes, mmap, os, sys
os.sched_setaffinity(0, map(int, sys.argv[2].split(",")))
from pegaflow import _native
memory = mmap.mmap(-1, 64 * 4096)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
options = {"numa_node": int(sys.argv[3])} if len(sys.argv) > 3 else {}
mover = _native.Mover(
    sys.argv[1], "engine", _native.HostDevice(1), [(address, 4096, 4096)], 64,
    [("model", "m")], **options)
while mover.status()["state"] == "connecting":
    pass
print(mover.status()["state"], flush=True)
sys.stdin.readline()
mover.close()
"""


@pytest.mark.parametrize(
    ("cores", "said", "node"),
    [([0], None, 4), ([1], None, 6), ([0, 1], None, -1), ([0], 6, 6)],
    ids=["first", "second", "both", "told"],
)
def test_a_worker_that_is_bound_to_a_nodes_cores_names_it(own_pega, tmp_path, cores, said, node):
    mine = sorted(os.sched_getaffinity(0))
    if len(mine) < 2:
        pytest.skip("one core cannot be two NUMA nodes")
    root = recorded(tmp_path, {4: str(mine[0]), 6: str(mine[1])}, "4,6")
    kept_to = ",".join(str(mine[i]) for i in cores)
    arguments = [own_pega.socket, kept_to] + ([] if said is None else [str(said)])
    with subprocess.Popen(
        [ON_MACHINE, root, "as-it-is", sys.executable, "-c", WORKER, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as worker:
        assert worker.stdin is not None and worker.stdout is not None
        line = worker.stdout.readline()
        if not line and worker.wait() == SKIPPED:
            pytest.skip("this process may not mount")
        assert line == "ready\n"
        ((rank,),) = [one["ranks"] for one in instances(own_pega)]
        worker.stdin.write("\n")
        worker.stdin.flush()
        assert worker.wait() == 0
    assert rank["numa_node"] == node


def instances(server: PegaServer) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"http://{server.http}/instances", timeout=10) as answer:
        return json.loads(answer.read())["instances"]


# ---- the doctor


def test_nodes_with_memory_and_cores_are_counted(tmp_path):
    assert machine.memory_nodes(recorded(tmp_path / "a", {0: "0-7"}, "0") / "sys") == 1
    two = recorded(tmp_path / "b", {0: "0-3", 1: "4-7", 2: ""}, "0-2")
    assert machine.memory_nodes(two / "sys") == 2
    memoryless = recorded(tmp_path / "c", {0: "0", 1: "1", 2: "2", 3: "3"}, "0,2")
    assert machine.memory_nodes(memoryless / "sys") == 2
    assert machine.memory_nodes(recorded(tmp_path / "d", {0: "0"}, "all") / "sys") == 1
    assert machine.memory_nodes(tmp_path / "nothing") == 1


def findings(numa: dict[str, Any] | None, nodes: int = 2, *ranks: int) -> list[Any]:
    health = {"status": "ok"} | ({} if numa is None else {"numa": numa})
    connected = [{"ranks": [{"connected": True, "numa_node": node} for node in ranks]}]
    return list(server_view.check_numa(health, connected, nodes))


PARTS = {"policy": "auto", "nodes": [{"node": 0, "bytes": 8 << 30}, {"node": 1, "bytes": 4 << 30}]}


def test_the_doctor_shows_the_placement_of_the_pool():
    (found,) = findings(PARTS | {"in_place": 1.0}, 2, 0, 1)
    assert (found.check, found.status) == ("numa", OK)
    assert found.detail == "auto: 8 GiB on node 0, 4 GiB on node 1"
    (found,) = findings({"policy": "interleave", "nodes": [{"node": 0}, {"node": 8}]}, 2, -1)
    assert (found.status, found.detail) == (OK, "interleave: node 0, node 8")
    (found,) = findings({"policy": "off", "nodes": []}, 1)
    assert (found.status, found.detail) == (OK, "one NUMA node")
    (found,) = findings({"policy": "off", "nodes": []}, 4)
    assert found.status == OK and "4 NUMA nodes" in found.detail
    assert findings(None) == [], "an older server reports nothing"


def test_the_doctor_names_the_fix_for_a_rejected_mbind():
    (found,) = findings({"policy": "off", "nodes": [], "refused": "mbind: Operation not permitted"})
    assert found.status == ADVICE
    assert "Operation not permitted" in found.detail and "SYS_NICE" in found.fix


def test_the_doctor_reports_full_nodes_and_workers_without_a_node():
    full, homeless = findings(PARTS | {"in_place": 0.75}, 2, 0, -1, -1)
    assert full.status == homeless.status == ADVICE
    assert "25% of the pages" in full.detail
    assert "2 of 3 workers" in homeless.detail and "numactl" in homeless.fix


def test_the_doctor_checks_this_machines_server(own_pega):
    from tests.python.test_doctor import by_check, run_doctor

    _, report = run_doctor("--addr", own_pega.address, "--http-addr", own_pega.http)
    (found,) = by_check(report)["numa"]
    assert found["status"] == OK
    if machine.memory_nodes() == 1:
        assert found["detail"] == "one NUMA node"
