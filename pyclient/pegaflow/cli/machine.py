"""Huge pages, memory limits and NUMA nodes of the machine. Only reads files of the kernel."""

from __future__ import annotations

import re
from pathlib import Path

from pegaflow.cli.finding import ADVICE, OK, PROBLEM, Finding

GIB = 1 << 30

#: Memory left to the rest of the machine beside a pool; the server requires the same.
RESERVE_BYTES = 1 * GIB
SMALLEST_POOL = 64 << 20


def format_bytes(count: float) -> str:
    """Three digits and a 1024-based unit."""
    power = 0
    while abs(count) >= 1024 and power < 4:
        count /= 1024
        power += 1
    digits = f"{count:.3g}" if abs(count) < 1000 else f"{count:.0f}"
    return f"{digits} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def meminfo(proc: Path = Path("/proc")) -> dict[str, int]:
    """The fields of /proc/meminfo: bytes, or a plain count for the HugePages_ ones."""
    fields = {}
    for line in (proc / "meminfo").read_text().splitlines():
        if match := re.match(r"(\S+):\s+(\d+)( kB)?$", line):
            fields[match[1]] = int(match[2]) * (1024 if match[3] else 1)
    return fields


def check_huge_pages(
    pool_bytes: int,
    pool_page_bytes: int,
    proc: Path = Path("/proc"),
    sys: Path = Path("/sys"),
    *,
    pool_huge_bytes: int = 0,
) -> Finding:
    """``pool_bytes`` and the others are a running server's; 0 when there is none.

    ``pool_huge_bytes``: the bytes of its pool on huge pages, which on tmpfs are those that the
    kernel found.
    """
    fields = meminfo(proc)
    size = fields.get("Hugepagesize", 0)
    if size == 0:
        return Finding("huge pages", OK, "not supported by this kernel; the pool has 4 KiB pages")
    total = fields.get("HugePages_Total", 0)
    free = max(0, fields.get("HugePages_Free", 0) - fields.get("HugePages_Rsvd", 0))
    state = f"{total} of {format_bytes(size)} reserved, {free} free"
    if pool_page_bytes >= size:
        return Finding("huge pages", OK, f"{state}; the pool uses them")
    if pool_huge_bytes and pool_huge_bytes > pool_bytes - size:
        return Finding("huge pages", OK, f"{state}; the pool uses unreserved ones")
    shmem = _shmem_enabled(sys)
    if pool_bytes == 0 and free > 0:
        return Finding("huge pages", OK, f"{state}: a pool up to {format_bytes(free * size)} fits")
    needed = (pool_bytes + size - 1) // size if pool_bytes else 0
    detail = f"{state}; tmpfs uses them: {shmem}"
    if pool_bytes:
        share = 100 * pool_huge_bytes // pool_bytes
        detail += (
            f"; {share} % of the pool lie on huge pages, and small ones cost time of disks, of a "
            "GPU's driver and of the TLB"
        )
    if pool_bytes and free >= needed:
        return Finding(
            "huge pages", ADVICE, detail, "enough are free now: restart the server to use them"
        )
    if pool_bytes:
        fix = f"before the server starts: sysctl -w vm.nr_hugepages={total - free + needed}"
    else:
        size_gib = 8
        fix = (
            f"before the server starts, for a pool of {size_gib} GiB: "
            f"sysctl -w vm.nr_hugepages={total - free + size_gib * GIB // size}"
        )
    if shmem == "never":
        fix += "; or: echo always > /sys/kernel/mm/transparent_hugepage/shmem_enabled"
    elif shmem in ("always", "force"):
        return Finding("huge pages", OK, detail)
    return Finding("huge pages", ADVICE, detail, fix)


def _shmem_enabled(sys: Path) -> str:
    try:
        text = (sys / "kernel/mm/transparent_hugepage/shmem_enabled").read_text()
    except OSError:
        return "unknown"
    match = re.search(r"\[(\w+)\]", text)
    return match[1] if match else "unknown"


def cgroup_limits(
    pid: int | str, proc: Path = Path("/proc"), root: Path = Path("/sys/fs/cgroup")
) -> list[tuple[Path, int, int]]:
    """(group, limit, in use) for each memory cgroup of a process that has a limit.

    Raises:
        OSError: the process is gone or hidden.
    """
    limits = []
    for line in (proc / str(pid) / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit_name, usage_name = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit_name, usage_name = (
                root / "memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
            )
        else:
            continue
        group = base / path.lstrip("/")
        for place in (group, *group.parents):
            if not place.is_relative_to(base):
                break
            limit, usage = _number(place / limit_name), _number(place / usage_name)
            # Version 1 writes "no limit" as a number near 2^63.
            if limit is not None and usage is not None and limit < 1 << 60:
                limits.append((place, limit, usage))
    return limits


def check_memory(
    pool_bytes: int,
    server_pid: int,
    proc: Path = Path("/proc"),
    root: Path = Path("/sys/fs/cgroup"),
) -> Finding:
    """Whether a pool fits, or has room beside it. ``server_pid`` 0: unknown."""
    available = meminfo(proc).get("MemAvailable", 0)
    detail = f"{format_bytes(available)} available"
    try:
        limits = cgroup_limits(server_pid or "self", proc, root)
    except OSError as error:
        limits = []
        detail += f"; its cgroup cannot be read ({error.strerror})"
    whose = "the server's" if server_pid else "this process's"
    for group, limit, usage in limits:
        detail += (
            f"; {whose} cgroup {group} may have {format_bytes(limit)}, has {format_bytes(usage)}"
        )
    if pool_bytes == 0:
        room = min([available, *(max(0, limit - usage) for _, limit, usage in limits)])
        size = min(room // 2, max(0, room - RESERVE_BYTES), 30 * GIB)  # the server's default
        if size < SMALLEST_POOL:
            return Finding(
                "memory",
                PROBLEM,
                detail,
                "free some memory or raise the limit: a pool needs its size and 1 GiB beside it",
            )
        return Finding("memory", OK, f"{detail}: the default pool is {format_bytes(size)}")
    for group, limit, _ in limits:
        if limit < pool_bytes + RESERVE_BYTES:
            return Finding(
                "memory",
                ADVICE,
                f"{detail}; that is less than the pool of {format_bytes(pool_bytes)} and 1 GiB",
                f"raise {group}/memory.max or choose a smaller --pool-size: the kernel kills "
                "processes of a full group",
            )
    if available < RESERVE_BYTES:
        return Finding(
            "memory",
            ADVICE,
            f"{detail} beside a pool of {format_bytes(pool_bytes)}",
            "choose a smaller --pool-size: the kernel kills processes when memory runs out",
        )
    return Finding("memory", OK, f"{detail} beside a pool of {format_bytes(pool_bytes)}")


def memory_nodes(sys: Path = Path("/sys")) -> int:
    """How many NUMA nodes have memory and cores; at least 1."""
    root = sys / "devices/system/node"
    try:
        with_memory = _number_list((root / "has_memory").read_text())
    except OSError:
        return 1  # a kernel without NUMA

    def has_cores(node: int) -> bool:
        try:
            return bool((root / f"node{node}" / "cpulist").read_text().strip())
        except OSError:
            return False

    return max(1, sum(has_cores(node) for node in with_memory))


def _number_list(text: str) -> list[int]:
    """The numbers of a kernel list such as ``0-2,8``; empty if it is invalid."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        if not first.isdigit() or not (last or first).isdigit():
            return []
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None  # the controller is missing or hidden, so no limit is known
    return int(text) if text.isdigit() else None
