"""The SSD tier of a running server: the state of each disk, what it lost, and its wear."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pegaflow.cli.finding import ADVICE, OK, PROBLEM, Finding
from pegaflow.cli.machine import format_bytes
from pegaflow.cli.server_view import Samples

_DAY_S = 86400
#: A shorter time says nothing about a day.
_RATE_AFTER_S = 3600
#: Drives are rated for one to three drive writes a day.
_MANY_WRITES_A_DAY = 1.0
#: Shares of evictions and of reads that are worth a line.
_UNWRITTEN_SHARE = 0.02
_LATE_SHARE = 0.01

_DRIVE_FIX = "check the drive: dmesg, smartctl -a"


def state_of(samples: Samples, path: str) -> str:
    """The present state of a disk; "unknown" if the server does not have it."""
    for state in samples.by_label("pegaflow_ssd_disk_state", "state"):
        if samples.get("pegaflow_ssd_disk_state", disk=path, state=state):
            return state
    return "unknown"


def used_share(samples: Samples, path: str) -> float | None:
    """The share of a disk's segments that have blocks; None before its scan has ended."""
    if state_of(samples, path) not in ("ready", "read-only"):
        return None
    segments = samples.get("pegaflow_ssd_segments", disk=path)
    free = samples.get("pegaflow_ssd_free_segments", disk=path)
    return 1 - free / segments if segments else None


def check_disks(
    disks: Sequence[Mapping[str, Any]],
    samples: Samples,
    server_pid: int,
    proc: Path = Path("/proc"),
) -> Iterator[Finding]:
    """``disks`` is that part of /health; ``server_pid`` 0: unknown."""
    uptime_s = uptime(server_pid, proc)
    for disk in disks:
        yield _state(disk, samples)
        yield from _troubles(disk["path"], samples)
        if uptime_s is not None:
            yield _wear(disk["path"], samples, uptime_s)
        if not disk.get("direct", True):
            yield Finding(
                "ssd",
                ADVICE,
                f"{disk['path']}: its file system refuses O_DIRECT, so blocks pass through the "
                "page cache, which costs memory and speed",
                "move the file to ext4 or XFS on a local disk",
            )
    if any(disk.get("io") == "threads" for disk in disks):
        yield _why_threads(server_pid, proc)
    if disks:
        yield from _tier(samples)


def uptime(pid: int, proc: Path = Path("/proc")) -> float | None:
    """Seconds since the start of a process; None if it is unknown or in another PID namespace."""
    try:
        # The name, in parentheses, may contain spaces.
        fields = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
        now = float((proc / "uptime").read_text().split()[0])
    except OSError:
        return None
    return max(0.0, now - int(fields[19]) / os.sysconf("SC_CLK_TCK"))


def _state(disk: Mapping[str, Any], samples: Samples) -> Finding:
    path, state = disk["path"], state_of(samples, disk["path"])
    blocks = samples.get("pegaflow_ssd_blocks", disk=path)
    head = f"{path}: {state}"
    if state == "left":
        return Finding(
            "ssd",
            PROBLEM,
            f"{head}: it could not record a reset, and nothing is read or written",
            f"stop the server and remove {path}; {_DRIVE_FIX}; then start the server",
        )
    if state == "read-only":
        return Finding(
            "ssd",
            PROBLEM,
            f"{head}: writes failed repeatedly; its {blocks:,.0f} blocks are still read",
            f"the server's log has the error; free space (df -h {Path(path).parent}) or "
            f"{_DRIVE_FIX}; then restart the server",
        )
    if state == "scanning":
        scanned = samples.get("pegaflow_ssd_scan_segments", disk=path)
        segments = samples.get("pegaflow_ssd_segments", disk=path)
        return Finding(
            "ssd",
            OK,
            f"{head}: {scanned:,.0f} of {segments:,.0f} segments and {blocks:,.0f} blocks so far; "
            "the blocks are served, "
            "and writes begin at the end of the scan",
        )
    used = used_share(samples, path)
    size = format_bytes(samples.get("pegaflow_ssd_capacity_bytes", disk=path))
    share = size if used is None else f"{used:.0%} of {size} used"
    return Finding("ssd", OK, f"{head}, {disk.get('io')}, {share}, {blocks:,.0f} blocks")


def _troubles(path: str, samples: Samples) -> Iterator[Finding]:
    if samples.get("pegaflow_ssd_breaker_open", disk=path):
        yield Finding(
            "ssd",
            PROBLEM,
            f"{path}: reads fail, so the disk is read once in 10 s until a read succeeds",
            f"the server's log has the errors; {_DRIVE_FIX}",
        )
    if samples.get("pegaflow_ssd_slow", disk=path):
        yield Finding(
            "ssd",
            PROBLEM,
            f"{path}: reads take far longer than usual, so the disk is not used until they do not",
            f"see what else uses the disk (iostat -x); {_DRIVE_FIX}",
        )
    for op in ("read", "write"):
        if errors := samples.get("pegaflow_ssd_errors_total", disk=path, op=op):
            yield Finding(
                "ssd",
                ADVICE,
                f"{path}: {errors:,.0f} {op}s failed since the start",
                f"the server's log has the errors; {_DRIVE_FIX}",
            )
    if wrong := samples.get("pegaflow_ssd_proof_failures_total", disk=path):
        yield Finding(
            "ssd",
            ADVICE,
            f"{path}: {wrong:,.0f} blocks did not prove themselves; they were misses",
            f"after a power cut some are expected; otherwise {_DRIVE_FIX}",
        )
    if damaged := samples.get("pegaflow_ssd_damaged_blocks_total", disk=path):
        yield Finding(
            "ssd",
            ADVICE,
            f"{damaged:,.0f} blocks differed in the pool from what was saved when they were to be "
            f"written to {path}; they were dropped",
            "find the process that overwrites the pool (grep -l pegaflow-pool /proc/*/maps), or "
            "test the memory",
        )


def _wear(path: str, samples: Samples, uptime_s: float) -> Finding:
    written = samples.get("pegaflow_ssd_write_bytes_total", disk=path)
    size = samples.get("pegaflow_ssd_capacity_bytes", disk=path)
    a_day = written / max(uptime_s, 1.0) * _DAY_S
    times = a_day / size if size else 0.0
    detail = (
        f"{path}: {format_bytes(written)} written in {_hours(uptime_s)}; a day at this rate: "
        f"{format_bytes(a_day)}, {times:.2g} times the file"
    )
    if times > _MANY_WRITES_A_DAY and uptime_s >= _RATE_AFTER_S:
        return Finding(
            "ssd wear",
            ADVICE,
            detail,
            "compare it with the drive's rating (DWPD); --ssd-write-budget limits it",
        )
    return Finding("ssd wear", OK, detail)


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.0f} min"


def _why_threads(server_pid: int, proc: Path) -> Finding:
    detail = "the server uses threads instead of io_uring"
    disabled = io_uring_disabled(proc)
    if disabled:
        return Finding(
            "ssd io",
            ADVICE,
            f"{detail}: kernel.io_uring_disabled is {disabled}",
            "sysctl -w kernel.io_uring_disabled=0, then restart the server",
        )
    if has_filter(server_pid, proc):
        return Finding(
            "ssd io",
            ADVICE,
            f"{detail}: a seccomp profile filters its system calls, as containers have it",
            "allow io_uring_setup, io_uring_enter and io_uring_register in the profile: "
            "docker run --security-opt seccomp=FILE",
        )
    return Finding("ssd io", OK, f"{detail}: --ssd-io, or the reason in the server's log")


def io_uring_disabled(proc: Path = Path("/proc")) -> int:
    """The setting of the machine; 0 if the kernel does not have it."""
    try:
        return int((proc / "sys/kernel/io_uring_disabled").read_text())
    except (OSError, ValueError):
        return 0


def has_filter(pid: int, proc: Path = Path("/proc")) -> bool:
    """Whether a seccomp filter applies to a process; False if it is unknown."""
    try:
        return "\nSeccomp:\t2\n" in (proc / str(pid) / "status").read_text()
    except OSError:
        return False


def _tier(samples: Samples) -> Iterator[Finding]:
    if samples.get("pegaflow_ssd_waits_for_peers"):
        yield Finding(
            "ssd",
            ADVICE,
            "blocks of an earlier process wait until every peer has been connected",
            "start the peers that are not ready, or remove those that are gone from --peers",
        )
    rejected = samples.by_label("pegaflow_ssd_rejected_blocks_total", "reason")
    evicted = samples.get("pegaflow_cache_block_evictions_total")
    if evicted and (share := rejected.get("slow", 0) / evicted) > _UNWRITTEN_SHARE:
        yield Finding(
            "ssd",
            ADVICE,
            f"{share:.0%} of the evicted blocks were lost because their write had not ended",
            "more or faster disks, one path for each in --ssd-cache-path",
        )
    if count := rejected.get("budget"):
        yield Finding(
            "ssd",
            ADVICE,
            f"{count:,.0f} blocks were not written: the budget was spent",
            "a larger --ssd-write-budget, if the drive is rated for it",
        )
    if count := rejected.get("too_large"):
        yield Finding(
            "ssd",
            ADVICE,
            f"{count:,.0f} blocks were not written: they are larger than a quarter of a segment",
            "remove the file and start with a larger --ssd-segment-size",
        )
    late = samples.get("pegaflow_ssd_late_blocks_total")
    if late > _LATE_SHARE * (late + samples.get("pegaflow_ssd_hits_blocks_total")):
        yield Finding(
            "ssd",
            ADVICE,
            f"{late:,.0f} blocks did not arrive by --fetch-deadline",
            f"a disk is slow or hangs: iostat -x 1; {_DRIVE_FIX}",
        )
