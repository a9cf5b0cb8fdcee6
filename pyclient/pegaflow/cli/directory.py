"""The directory of a large cluster, as the server sees it (docs/directory.md)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pegaflow.cli.finding import ADVICE, OK, Finding
from pegaflow.cli.server_view import Samples

#: The oldest release of Redis with ACL users, which docs/directory.md requires.
OLDEST_REDIS = 6

#: A directory in the same site answers within a tenth of it.
SLOW_MS = 2.0


def check_directory(nodes: Mapping[str, Any] | None, samples: Samples) -> Iterator[Finding]:
    """Each server of the directory, and whether something else writes there or deletes from it."""
    directory = (nodes or {}).get("directory")
    if directory is None:
        return
    for server in directory["servers"]:
        name = server["server"]
        if server["state"] != "ready":
            yield Finding(
                "directory",
                ADVICE,
                f"{name}: {server['state']}, {server.get('reason', 'no reason')}; blocks are "
                "requested from the nodes that this one has links to",
                "start the server, or correct --directory on all nodes",
            )
        elif server.get("round_trip_ms", 0) > SLOW_MS:
            yield Finding(
                "directory",
                ADVICE,
                f"{name}: the last answer took {server['round_trip_ms']} ms; a lookup waits for "
                "two of them, and 5 ms at most",
                "a server in the same site, on a core of its own",
            )
        else:
            version = f", {server['version']}" if "version" in server else ""
            yield Finding("directory", OK, f"{name}: {directory['nodes']} nodes{version}")
        yield from _settings(name, server)
    yield from _contents(samples)


def _settings(name: str, server: Mapping[str, Any]) -> Iterator[Finding]:
    """What is wrong with the version and the settings that a server has told."""
    product, _, version = server.get("version", "").partition(" ")
    major = version.partition(".")[0]
    if product == "Redis" and major.isdigit() and int(major) < OLDEST_REDIS:
        yield Finding(
            "directory",
            ADVICE,
            f"{name}: Redis {version} is too old",
            f"Redis {OLDEST_REDIS} or newer, or Valkey",
        )
    policy = server.get("maxmemory_policy", "noeviction")
    if policy == "noeviction" or server.get("maxmemory_bytes", 0) == 0:
        return
    victims = "the leases of nodes" if policy.startswith("volatile-") else "hints and leases"
    yield Finding(
        "directory",
        ADVICE,
        f"{name}: with maxmemory-policy {policy} it removes {victims} when it is full",
        "maxmemory-policy noeviction, and maxmemory above the size in docs/directory.md",
    )


def _ignored(samples: Samples, reason: str) -> float:
    return samples.get("pegaflow_directory_ignored_total", reason=reason)


def _contents(samples: Samples) -> Iterator[Finding]:
    if _ignored(samples, "error") > 0:
        yield Finding(
            "directory",
            ADVICE,
            "a server of the directory rejected commands: it is full, its keys are of another "
            "program, or the user's ACL lacks a command",
            "a database of its own, maxmemory above the size in docs/directory.md with "
            "maxmemory-policy noeviction, and the ACL given there",
        )
    forged = sum(_ignored(samples, reason) for reason in ("member", "lease", "epochs"))
    if forged > 0:
        yield Finding(
            "directory",
            ADVICE,
            f"{forged:.0f} entries that no node with this --peer-secret-file wrote were ignored",
            "the same secret on all nodes, and a database that only they may write to",
        )
    if _ignored(samples, "network") > 0:
        yield Finding(
            "directory",
            ADVICE,
            "the directory named nodes outside --peer-networks, which were not dialed",
            "add their network, if they are nodes of this cluster",
        )
