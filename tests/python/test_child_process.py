"""The harness that starts servers: all of its processes are gone afterwards, in every case."""

import os
import sys
import threading
from pathlib import Path
from typing import Self

import pytest

from tests.support.child_process import ChildFailed, ChildProcess, group_members, last_words
from tests.support.prometheus import Metrics, read_metrics

# Uses more processor time than the kernel rounds to nothing, reports that it is up, then waits
# forever, with a child that waits too.
FAMILY = """
import pathlib, signal, subprocess, sys, time
while time.process_time() < 0.05: pass
if {deaf}: signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print("up", flush=True)
pathlib.Path(sys.argv[1]).touch()
signal.pause()
"""


class Child(ChildProcess):
    start_timeout_s = 60.0

    def __init__(self, tmp_path: Path, code: str) -> None:
        super().__init__("child", tmp_path / "child.log")
        self._up = tmp_path / "up"
        self._code = code

    def command(self) -> list[str]:
        return [sys.executable, "-c", self._code, str(self._up)]

    def start(self) -> Self:
        self._up.unlink(missing_ok=True)
        return super().start()

    def is_ready(self) -> bool:
        return self._up.exists()


def test_a_stopped_child_leaves_no_member_of_its_group(tmp_path: Path) -> None:
    with Child(tmp_path, FAMILY.format(deaf=False)) as child:
        group = child.pid
        assert len(group_members(group)) == 2
        assert os.getpgid(group) != os.getpgid(0)
        assert child.cpu_seconds() > 0
        assert child.running()

    assert group_members(group) == []
    assert not child.running()


def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    child = Child(tmp_path, FAMILY.format(deaf=True)).start()
    group = child.pid
    child.stop_timeout_s = 0.1

    assert child.stop() == -9

    assert group_members(group) == []


def test_a_kill_ends_the_whole_group_and_it_can_start_again(tmp_path: Path) -> None:
    child = Child(tmp_path, FAMILY.format(deaf=False)).start()
    group = child.pid

    assert child.kill() == -9

    assert group_members(group) == []
    assert child.stop() is None
    with child:
        assert child.pid != group


def test_the_log_has_every_run_and_the_text_the_last_one(tmp_path: Path) -> None:
    child = Child(tmp_path, FAMILY.format(deaf=False))
    with child:
        assert child.log_text() == "up\n"
    with child:
        pass
    assert child.log_file.read_text() == "up\nup\n"
    assert child.log_text() == "up\n"


def test_a_child_that_dies_at_its_start_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    child = Child(tmp_path, "import sys; sys.exit('no such model')")
    with pytest.raises(ChildFailed, match="status 1 before it was ready.*\n.*no such model"):
        child.start()
    assert not child.running()


def test_a_child_that_is_never_ready_is_ended(tmp_path: Path) -> None:
    child = Child(tmp_path, "import signal; signal.pause()")
    child.start_timeout_s = 0.3
    with pytest.raises(ChildFailed, match="was not ready after"):
        child.start()
    assert not child.running()


def test_shared_memory_and_semaphores_of_a_killed_child_are_removed(tmp_path: Path) -> None:
    before = set(Path("/dev/shm").iterdir())
    child = Child(
        tmp_path,
        "import multiprocessing, pathlib, signal, sys\n"
        "from multiprocessing.shared_memory import SharedMemory\n"
        "memory = SharedMemory(create=True, size=4096)\n"
        "lock = multiprocessing.get_context('spawn').Lock()\n"
        "print(memory.name, lock._semlock.name, flush=True)\n"
        "pathlib.Path(sys.argv[1]).touch()\n"
        "signal.pause()\n",
    ).start()
    memory, lock = child.log_text().split()
    files = {Path("/dev/shm", memory), Path("/dev/shm", f"sem.{lock.removeprefix('/')}")}
    assert files <= set(Path("/dev/shm").iterdir()) - before

    child.kill()

    assert not files & set(Path("/dev/shm").iterdir())


def test_a_second_start_is_rejected(tmp_path: Path) -> None:
    with Child(tmp_path, FAMILY.format(deaf=False)) as child:
        with pytest.raises(ChildFailed, match="already started"):
            child.start()


def test_only_the_main_thread_may_start(tmp_path: Path) -> None:
    errors: list[ChildFailed] = []

    def start() -> None:
        try:
            Child(tmp_path, FAMILY.format(deaf=False)).start()
        except ChildFailed as error:
            errors.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])


def test_a_pid_before_the_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ChildFailed, match="was not started"):
        _ = Child(tmp_path, "").pid


def test_metrics_are_summed_over_the_labels_that_are_not_named() -> None:
    metrics = Metrics(
        "# HELP a_total Things.\n# TYPE a_total counter\n"
        'a_total{x="1",y="p \\"q\\" {r}"} 3\na_total{x="2"} 4.5\nb 1e3\nc{} 2\n'
    )
    assert metrics.total("a_total") == 7.5
    assert metrics.total("a_total", x="2") == 4.5
    assert metrics.total("a_total", y='p \\"q\\" {r}') == 3
    assert metrics.total("b") == 1000
    assert metrics.total("c") == 2
    assert metrics.total("absent") == 0
    assert metrics.names() == {"a_total", "b", "c"}


def test_reading_metrics_without_a_server_raises_os_error() -> None:
    with pytest.raises(OSError):
        read_metrics("127.0.0.1:1", timeout_s=1)


def test_last_words_begin_with_the_first_cause_even_far_above() -> None:
    log = "ok\nE ValueError: the cause\n" + "later\n" * 30 + "RuntimeError: see above\n"

    words = last_words(log, lines=3)

    assert words.splitlines() == [
        "E ValueError: the cause",
        "...",
        "later",
        "later",
        "RuntimeError: see above",
    ]
    assert last_words("") == "(nothing)"
