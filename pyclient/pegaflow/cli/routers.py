"""What a router that places requests by cache can learn from this node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pegaflow.cli import server_view
from pegaflow.cli.finding import OK, Finding


def check_routers(
    server: server_view.ServerHttp, instances: Sequence[Mapping[str, Any]]
) -> Iterator[Finding]:
    """Whether routers may read the pool, and the engines whose GPU caches they do not see."""
    try:
        status, _ = server.get("/links")
    except server_view.Unreachable:
        return  # another finding is about that
    if status == 403:
        yield Finding(
            "routers",
            OK,
            "off: a router learns from this node neither which blocks it has nor its links, and "
            "prefetches nothing",
            "if a router places requests by cache, start it and the servers with the same "
            "--peer-secret-file",
        )
    elif status == 401:
        yield Finding("routers", OK, "on: routers prove the secret of --peer-secret-file")
    yield from check_events(instances)


def check_events(instances: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Served engines that have not published KV events since their start."""
    silent = [
        one
        for one in instances
        if one.get("connected") and one.get("schedulers") and one.get("kv_events") is False
    ]
    reports = [str(one["instance"]) for one in silent if one.get("chains")]
    others = [str(one["instance"]) for one in silent if not one.get("chains")]
    fix = "for exact placement start them with --kv-events-config; docs/kv_events.md has an example"
    if reports:
        yield Finding(
            "kv events",
            OK,
            f"none from {', '.join(reports)}, which report the blocks of their prompts: a "
            "router knows their texts and the node's pool, and of their GPU caches only what it "
            "sent there within 10 s. Where several engines share the pool, it may choose one that "
            "has to load what another has in its GPU",
            fix,
        )
    if others:
        yield Finding(
            "kv events",
            OK,
            f"none from {', '.join(others)}, which had no --kv-events-config or no request yet, "
            "and have not reported the blocks of a prompt: a router that places requests by "
            "cache sees the node's pool, not their GPU caches, and learns no texts from them",
            f"{fix}. Without events a router with --servers learns from vLLM 0.32 and later",
        )
