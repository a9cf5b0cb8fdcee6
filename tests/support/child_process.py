"""Runs one child in a process group of its own and leaves no process of it behind.

Servers under test start helpers of their own (a vLLM has an API server, an engine core and a
worker), so the unit here is the process group: it is stopped as one, killed as one, and its CPU
time is counted as one.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


#: The last line of a traceback. In a log of several processes the first one has the cause.
_EXCEPTION = re.compile(r"\b\w*(?:Error|Exception): ")


class ChildFailed(RuntimeError):
    """A child died or did not become ready in time.

    ``what`` is one line; the whole message adds the log's last words.
    """

    def __init__(self, what: str, last_words: str = "") -> None:
        super().__init__(f"{what}; its log ends with:\n{last_words}" if last_words else what)
        self.what = what


def last_words(text: str, lines: int = 15) -> str:
    """The first exception in a log and its last lines: the cause, and the place of its end."""
    found = text.splitlines()
    shown = found[-lines:]
    causes = [line for line in found if _EXCEPTION.search(line) and "WARNING" not in line]
    if causes and causes[0] not in shown:
        shown = [causes[0], "...", *shown]
    return "\n".join(shown) or "(nothing)"


def _stat_fields(pid: str) -> list[str] | None:
    """Fields of /proc/PID/stat from the state on; None if the process is gone."""
    try:
        stat = Path("/proc", pid, "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name is in parentheses and may hold any character, so split behind the last one.
    return stat.rpartition(")")[2].split()


def group_members(pgid: int) -> list[int]:
    """Processes of a group that still run. Zombies are not counted: they only wait to be reaped."""
    members = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        fields = _stat_fields(pid)
        if fields and int(fields[2]) == pgid and fields[0] not in "ZX":
            members.append(int(pid))
    return members


def group_cpu_seconds(pgid: int) -> float:
    """User and system time of a group so far, with that of members it has already reaped."""
    ticks = 0
    for pid in group_members(pgid):
        fields = _stat_fields(str(pid))
        if fields:
            ticks += sum(int(field) for field in fields[11:15])  # utime stime cutime cstime
    return ticks / _TICKS_PER_SECOND


def _shared_memory_files(pids: Sequence[int]) -> set[Path]:
    """Files in /dev/shm that these processes have mapped."""
    inodes = set()
    for pid in pids:
        try:
            maps = Path("/proc", str(pid), "maps").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        inodes |= {int(line.split()[4]) for line in maps.splitlines() if " /dev/shm/" in line}
    # By inode: glibc makes a semaphore under another name, which maps shows.
    with os.scandir("/dev/shm") as files:
        return {Path(file.path) for file in files if file.inode() in inodes}


class ChildProcess:
    """One command in its own session and process group, its output in a log file.

    As a context manager it starts on entry and stops on exit. Should this process be killed, the
    kernel sends the child SIGTERM; that signal is tied to the thread that started it, hence
    start() belongs to the main thread.

    A subclass defines the command (command()) and when it is ready (is_ready()).
    """

    #: Seconds from SIGTERM to SIGKILL in stop().
    stop_timeout_s = 30.0
    #: Seconds from the start until is_ready(); generous, for a busy machine.
    start_timeout_s = 300.0

    def __init__(self, name: str, log_file: Path, env: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.log_file = log_file
        self.env = dict(env or {})
        #: The prefix of command(), as `nsenter`; it must replace itself by the command.
        self.prefix: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    def command(self) -> list[str]:
        """The command line; called again by each start()."""
        raise NotImplementedError

    def is_ready(self) -> bool:
        """True if the child serves; called about five times a second while it starts."""
        raise NotImplementedError

    @property
    def pid(self) -> int:
        """Process id of the leader, which is also the id of the group and of the session."""
        if self._process is None:
            raise ChildFailed(f"{self.name} was not started")
        return self._process.pid

    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        """Start and wait until ready.

        Raises:
            ChildFailed: it died first or took longer than start_timeout_s; nothing is left of it.
        """
        self.launch()
        return self.wait_until_started()

    def launch(self) -> None:
        """Starts it and does not wait; wait_until_started() does."""
        if self._process is not None:
            raise ChildFailed(f"{self.name} is already started")
        if threading.current_thread() is not threading.main_thread():
            raise ChildFailed(f"{self.name} must be started by the main thread")
        setpriv = shutil.which("setpriv")
        if setpriv is None:
            raise ChildFailed("setpriv is missing (Debian package util-linux)")
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        with self.log_file.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [setpriv, "--pdeathsig", "TERM", "--", *self.prefix, *self.command()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.env},
                start_new_session=True,
            )

    def wait_until_started(self) -> Self:
        """After launch(); raises as start() does."""
        try:
            self._wait_until_ready()
        except BaseException:
            self.kill()
            raise
        return self

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self.start_timeout_s
        while not self.is_ready():
            # Its death ends the wait at once; otherwise this is the pause between two checks.
            if self._exited_within(0.2):
                raise ChildFailed(
                    f"{self.name} ended with status {self._process.returncode} before it was ready",
                    last_words(self.log_text()),
                )
            if time.monotonic() > deadline:
                raise ChildFailed(
                    f"{self.name} was not ready after {self.start_timeout_s:g} s",
                    last_words(self.log_text()),
                )

    def _exited_within(self, seconds: float) -> bool:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def log_text(self) -> str:
        """The log of this run of the child so far."""
        with self.log_file.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    def cpu_seconds(self) -> float:
        """User and system CPU seconds of the whole group so far."""
        return group_cpu_seconds(self.pid)

    def stop(self) -> int | None:
        """Ends it with SIGTERM, and the remaining processes with SIGKILL; returns its exit status.

        A status of -9 means that it did not end by itself. Stopping twice is no error: then, and
        for a child that was never started, the status is None.
        """
        return self._end(lambda process: process.terminate(), self.stop_timeout_s)

    def kill(self) -> int | None:
        """Ends the whole group with SIGKILL, like a crash: no member can say goodbye."""
        return self._end(lambda process: None, 0.0)

    def _end(self, ask: Callable[[subprocess.Popen[bytes]], None], timeout_s: float) -> int | None:
        process, self._process = self._process, None
        if process is None:
            return None
        # A killed Python leaves its shared memory files behind: list them while they are mapped.
        shared_memory = _shared_memory_files(group_members(process.pid))
        try:
            ask(process)
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pass  # the group is killed below
        finally:
            self._kill_group(process)
            for path in shared_memory:
                path.unlink(missing_ok=True)
        return process.returncode

    def _kill_group(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + 30.0
        # Repeatedly, since a member may be forking another.
        while members := group_members(process.pid):
            for pid in members:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue  # it ended by itself meanwhile
            if time.monotonic() > deadline:
                raise ChildFailed(f"{self.name}: processes {members} outlive SIGKILL")
            try:
                process.wait(0.02)
            except subprocess.TimeoutExpired:
                continue
        process.wait()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


@contextlib.contextmanager
def started_together(children: Sequence[ChildProcess]) -> Iterator[None]:
    """All of them, started at the same time and stopped at the end.

    Raises:
        ChildFailed: one of them, as of start(); nothing is left of the others either.
    """
    with contextlib.ExitStack() as stack:
        for child in children:
            child.launch()
            stack.callback(child.stop)
        for child in children:
            child.wait_until_started()
        yield
