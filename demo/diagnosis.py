"""The diagnosis to print when a claim did not hold."""

from __future__ import annotations

from tests.support.child_process import ChildProcess, last_words
from tests.support.vllm_server import PegaServer, VllmServer

#: Counters of pegaflow-server with the reasons why blocks were not stored or not found.
_SERVER_COUNTERS = (
    "pegaflow_cache_block",
    "pegaflow_directory_",
    "pegaflow_fetch_",
    "pegaflow_leases",
    "pegaflow_peer_",
    "pegaflow_load_",
    "pegaflow_save_",
    "pegaflow_pool_alloc",
    "pegaflow_quarantine",
    "pegaflow_registrations_refused",
    "pegaflow_reservations_timed",
    "pegaflow_ssd_",
)


def describe(vllm: VllmServer | None, pega: PegaServer) -> str:
    """The counters of both that are not 0, and the ends of their logs."""
    parts = []
    if vllm is not None and vllm.running():
        parts.append(_counters(vllm, ("vllm:pegaflow_",)))
    if pega.running():
        parts.append(_counters(pega, _SERVER_COUNTERS))
    parts += [_log(child) for child in (vllm, pega) if child and child.log_file.exists()]
    return "\n\n".join(parts)


def _counters(server: VllmServer | PegaServer, prefixes: tuple[str, ...]) -> str:
    lines = [f"{server.name} counts:"]
    try:
        metrics = server.metrics()
    except OSError as error:
        return f"{server.name} has no metrics: {error}"
    for prefix in prefixes:
        for name, labels, value in metrics.items(prefix):
            if value and name.endswith("_total"):
                shown = ", ".join(
                    f"{key}={text}"
                    for key, text in labels.items()
                    if key not in ("engine", "model_name")
                )
                lines.append(f"  {name}{{{shown}}} {value:g}")
    return "\n".join(lines)


def _log(child: ChildProcess) -> str:
    return f"{child.log_file.name}:\n{last_words(child.log_text())}"
