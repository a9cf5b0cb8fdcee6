#!/usr/bin/env python3
"""Run one test program so that none of its processes outlives it.

usage: supervise.py --timeout SECONDS --log FILE --report FILE -- COMMAND...

The supervisor makes itself the subreaper of all processes of the test. A daemon that the test
forked, even into a session of its own, thus becomes a child of the supervisor when its parents
end, and can be named, killed and reported as a failure. The report is one JSON object:
{"exit": N or null, "signal": N or null, "timed_out": bool, "seconds": N, "leaked": ["PID CMD"]}.
"""

import argparse
import ctypes
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

# The time for a process that was signaled just before its test ended: a vLLM, or a server with a
# whole pool to free, on a busy machine.
GRACE_S = 10.0
# The time for a test that ran out of time to write its state.
TERM_S = 5.0


def become_subreaper() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value in ((PR_SET_CHILD_SUBREAPER, 1), (PR_SET_PDEATHSIG, signal.SIGTERM)):
        if libc.prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({option})")


def children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            text = pathlib.Path(f"/proc/{pid}/task/{task}/children").read_text()
            found += [int(word) for word in text.split()]
    except (FileNotFoundError, ProcessLookupError):
        pass  # It ended meanwhile: then it has no children.
    return found


def descendants(pid: int) -> list[int]:
    """All processes below ``pid``, parents before their children."""
    found: list[int] = []
    todo = children(pid)
    while todo:
        found += todo
        todo = [grandchild for child in todo for grandchild in children(child)]
    return found


def command_of(pid: int) -> str:
    try:
        raw = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return "?"
    return raw.replace(b"\0", b" ").decode(errors="replace").strip()[:200] or "?"


def reap_ended() -> None:
    """Reaps every child that has ended, adopted ones included."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


def wait_until_alone(limit_s: float) -> list[int]:
    """Waits until no descendant is left; returns those that remain after ``limit_s``."""
    end = time.monotonic() + limit_s
    while True:
        reap_ended()
        left = descendants(os.getpid())
        if not left or time.monotonic() >= end:
            return left
        # Wakes at the next SIGCHLD; a grandchild's end sends none, hence the short limit.
        signal.sigtimedwait({signal.SIGCHLD}, min(0.05, max(0.0, end - time.monotonic())))


def kill_all(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def run(command: list[str], log: pathlib.Path, timeout_s: float) -> dict:
    # Blocked, so that sigtimedwait() receives it; the child starts with an empty mask again.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    started = time.monotonic()
    with log.open("wb") as out:
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, set()),
            )
        except OSError as error:
            out.write(f"cannot start {command[0]}: {error}\n".encode())
            return {"exit": 127, "signal": None, "timed_out": False, "seconds": 0.0, "leaked": []}
    timed_out = False
    try:
        code = child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        timed_out = True
        os.killpg(child.pid, signal.SIGTERM)
        try:
            code = child.wait(TERM_S)
        except subprocess.TimeoutExpired:
            child.kill()
            code = child.wait()
    seconds = time.monotonic() - started
    left = wait_until_alone(0.0 if timed_out else GRACE_S)
    leaked = [f"{pid} {command_of(pid)}" for pid in left]
    while left:  # A process may fork while it is killed: repeat until none is left.
        kill_all(left)
        left = wait_until_alone(GRACE_S)
    return {
        "exit": code if code >= 0 else None,
        "signal": -code if code < 0 else None,
        "timed_out": timed_out,
        "seconds": seconds,
        "leaked": leaked,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--timeout", type=float, required=True)
    parser.add_argument("--log", type=pathlib.Path, required=True)
    parser.add_argument("--report", type=pathlib.Path, required=True)
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()

    become_subreaper()

    def stop(number: int, _frame: object) -> None:
        kill_all(descendants(os.getpid()))
        os._exit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    report = run(args.command, args.log, args.timeout)
    args.report.write_text(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
