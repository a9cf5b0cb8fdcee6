"""Whether engines of one host can read blocks out of each other's memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pegaflow.cli.finding import ADVICE, OK, Finding
from pegaflow.cli.server_view import Samples

CHECK = "direct reads"


def check_direct(samples: Samples, proc: Path = Path("/proc")) -> Iterator[Finding]:
    """No finding unless engines have named a direct group."""
    workers = int(samples.get("pegaflow_direct_workers"))
    if workers == 0:
        return
    on_gpus = int(samples.get("pegaflow_direct_gpu_workers"))
    blocks = int(samples.get("pegaflow_direct_read_blocks_total"))
    detail = f"{workers} workers have named a direct group; {blocks} blocks were read directly"
    try:
        scope = int((proc / "sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        scope = 0  # a kernel without Yama
    if on_gpus:
        detail += f"; {on_gpus} of the workers have their memory on GPUs"
    if scope == 0 or on_gpus == workers:  # The kernel's rule is about ordinary memory.
        yield Finding(CHECK, OK, detail)
    elif scope >= 3:
        yield Finding(
            CHECK,
            ADVICE,
            f"{detail}. kernel.yama.ptrace_scope is {scope}: no process may read another one's "
            "memory, and blocks come from the pool",
            "remove pegaflow.direct_group, or boot with another kernel.yama.ptrace_scope",
        )
    else:
        yield Finding(
            CHECK,
            ADVICE if blocks == 0 else OK,
            f"{detail}. kernel.yama.ptrace_scope is {scope}: only processes with CAP_SYS_PTRACE "
            "read others' memory; for others blocks come from the pool",
            ""
            if blocks
            else "give the decode engines CAP_SYS_PTRACE, or sysctl -w kernel.yama.ptrace_scope=0",
        )
