"""Whether processes of one user may read each other's memory on this machine."""

from __future__ import annotations

from pathlib import Path

_CAP_SYS_PTRACE = 1 << 19


def why_forbidden(proc: Path = Path("/proc")) -> str:
    """
    The reason why a process that is started here cannot read one that consents to it by
    process_vm_readv(), and how to permit it; empty: it can.

    Raises:
        OSError: there is no /proc.
    """
    try:
        scope = int((proc / "sys/kernel/yama/ptrace_scope").read_text())
    except FileNotFoundError:
        return ""  # a kernel without Yama
    lines = (proc / "self/status").read_text().splitlines()
    capabilities = next(int(line.split()[1], 16) for line in lines if line.startswith("CapEff:"))
    if scope < 2 or (scope == 2 and capabilities & _CAP_SYS_PTRACE):
        return ""
    fix = (
        "run as root, or sysctl -w kernel.yama.ptrace_scope=1"
        if scope == 2
        else "boot with another kernel.yama.ptrace_scope"
    )
    return (
        f"kernel.yama.ptrace_scope is {scope}, so that engines cannot read each other's memory: "
        f"{fix}"
    )
