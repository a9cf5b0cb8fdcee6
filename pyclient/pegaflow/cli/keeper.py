"""The pool that outlives its server: its keeper, and the clients of the former server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pegaflow.cli.finding import ADVICE, OK, Finding
from pegaflow.cli.server_view import Samples


def check_keeper(keeper: Mapping[str, Any] | None, samples: Samples) -> Iterator[Finding]:
    """``keeper`` is that part of /health; None: the server keeps nothing, or is an older one."""
    if keeper is None:
        return
    yield _state(keeper)
    if clients := samples.get("pegaflow_former_clients"):
        slots = samples.get("pegaflow_quarantine_slots", reason="reader_lost")
        yield Finding(
            "keeper",
            ADVICE,
            f"{clients:.0f} clients of the former server have neither ended nor reported the end "
            f"of their copies: {slots:,.0f} slots that they may access are not reused",
            "find the one that hangs: grep -l pegaflow-pool /proc/*/maps, then ps -o "
            "pid,stat,etime,cmd -p PID; a stopped one (T) continues with kill -CONT PID",
        )
    if samples.get("pegaflow_adopted_waits_for_nodes"):
        yield Finding(
            "keeper",
            ADVICE,
            "blocks of the former server wait until every peer has been connected, and are dropped "
            "30 s after the start",
            "start the peers that are not ready, or remove those that are gone from --peers",
        )


def _state(keeper: Mapping[str, Any]) -> Finding:
    socket = keeper.get("socket", "")
    if keeper.get("state") == "holding":
        adopted = keeper.get("adopted_blocks", 0)
        found = f", {adopted:,.0f} blocks were adopted at the start" if adopted else ""
        return Finding(
            "keeper", OK, f"holds the pool, which outlives this server{found}; socket {socket}"
        )
    return Finding(
        "keeper",
        ADVICE,
        f"missing, so the pool ends with this server: {keeper.get('why', 'no reason')}",
        "with --keep external start it: systemctl start pegaflow-keeper, or pegaflow-keeper with "
        "the server's --addr; with --keep yes the server starts another one within a second, and "
        "its log has the error",
    )
