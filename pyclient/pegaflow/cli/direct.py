"""Whether engines can read blocks out of each other's memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pegaflow.cli.finding import ADVICE, OK, Finding
from pegaflow.cli.server_view import Samples

CHECK = "direct reads"


def check_partners(
    instances: Sequence[Mapping[str, Any]], nodes: Mapping[str, Any] | None = None
) -> Iterator[Finding]:
    """Engines that have named a direct group, and that no other one of it can read.

    The partner of an engine with network cards may be at another node, if this server knows any.
    """
    found: dict[str, tuple[str, str, str]] = {}  # by instance: group, lane, namespace
    networked: set[str] = set()
    for engine in instances:
        ranks = [rank for rank in engine.get("ranks", ()) if rank.get("connected")]
        lanes = {(one["group"], one["lane"]) for rank in ranks if (one := rank.get("direct"))}
        if engine.get("connected") and len(lanes) == 1:
            found[engine["instance"]] = (*lanes.pop(), engine["namespace"])
            if all(rank.get("direct", {}).get("network") for rank in ranks):
                networked.add(engine["instance"])
    for name, own in found.items():
        others = [other for instance, other in found.items() if instance != name]
        if own in others or (name in networked and nodes is not None):
            continue
        group, lane, _ = own
        mates = [other for other in others if other[0] == group]
        if not mates:
            why = "no other engine of this server has named it"
            fix = f'set pegaflow.direct_group to "{group}" for its partner, or remove it here'
        elif all(other[1] != lane for other in mates):
            why = f"the other engines in it have the lane {mates[0][1]}"
            fix = "engines on CPUs and on GPUs cannot read each other"
        else:
            why = "the other engines in it have other namespaces"
            fix = "compare `factors` of the instances; /instances has them"
        yield Finding(
            CHECK, ADVICE, f'{name}, direct group "{group}", lane {lane}: no partner, {why}', fix
        )


def check_direct(
    samples: Samples,
    instances: Sequence[Mapping[str, Any]],
    nodes: Mapping[str, Any] | None = None,
    proc: Path = Path("/proc"),
) -> Iterator[Finding]:
    """No finding unless engines have named a direct group; `nodes` is that of /health."""
    yield from check_partners(instances, nodes)
    workers = int(samples.get("pegaflow_direct_workers"))
    if workers == 0:
        return
    on_gpus = int(samples.get("pegaflow_direct_gpu_workers"))
    blocks = int(samples.get("pegaflow_direct_read_blocks_total"))
    blocks += int(samples.get("pegaflow_direct_far_read_blocks_total"))
    detail = f"{workers} workers have named a direct group; {blocks} blocks were read directly"
    yield from check_network(samples, nodes)
    try:
        scope = int((proc / "sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        scope = 0  # a kernel without Yama
    if on_gpus:
        detail += f"; {on_gpus} of the workers have their memory on GPUs"
    if scope == 0 or on_gpus == workers:  # The kernel's rule is about ordinary memory.
        yield Finding(CHECK, OK, detail)
    elif scope == 1:
        yield Finding(
            CHECK,
            OK,
            f"{detail}. kernel.yama.ptrace_scope is 1: engines without CAP_SYS_PTRACE read a "
            "prefill engine one at a time",
        )
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
            else "give the decode engines CAP_SYS_PTRACE, or sysctl -w kernel.yama.ptrace_scope=1",
        )


def check_network(samples: Samples, nodes: Mapping[str, Any] | None) -> Iterator[Finding]:
    """Workers with `pegaflow.direct_nics`, which engines of other nodes may read."""
    workers = int(samples.get("pegaflow_direct_network_workers"))
    if workers == 0:
        return
    reads = int(samples.get("pegaflow_direct_far_reads_total"))
    detail = f"engines of other nodes may read {workers} workers"
    if nodes is None:
        yield Finding(
            CHECK,
            ADVICE,
            f"{detail}, but this server has no other nodes",
            "name them with --peers, or --peer-listen for them, or remove pegaflow.direct_nics",
        )
        return
    loaded, through = (
        int(samples.get("pegaflow_direct_pool_blocks_total", result=result))
        for result in ("loaded", "through_pool")
    )
    detail += f"; {reads} reads went to other nodes; {loaded} blocks came from other nodes' pools"
    if through > loaded:
        yield Finding(
            CHECK,
            ADVICE,
            f"{detail}. {through} blocks could not be read there and came through this node's pool",
            "engines' logs have the reason (`cannot be read at present`); until it is mended "
            "--direct-pool off saves the attempts",
        )
    else:
        yield Finding(CHECK, OK, detail)
