"""The stage of the claims of --nodes 3 --directory: three nodes that only Redis knows about."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import Iterator
from pathlib import Path

from demo.nodes_stage import NAMES, DemoNode, NodesStage
from demo.stage import wait_until
from tests.support.network import Network
from tests.support.redis_server import RedisServer

#: The fourth network namespace, with Redis.
REDIS = "redis"
#: Names of all network namespaces.
PLACES = (*NAMES, REDIS)
REDIS_PORT = 6379
#: Restarted, flushed and cut off, all anchors have to be there again within this time.
REBUILT_S = 60.0


@dataclasses.dataclass(frozen=True)
class DirectoryCounters:
    """One node's counters of the directory so far."""

    found: int = 0  #: Questions that the directory answered with a node.
    none: int = 0  #: With no node.
    without_it: int = 0  #: Not asked, or not answered, because the directory was away.
    rebuilds: int = 0  #: Times that all anchors were written again.
    anchors: int = 0  #: Announced now.

    @staticmethod
    def of(node: DemoNode) -> DirectoryCounters:
        page = node.server.metrics()
        lookups = "pegaflow_directory_lookups_total"
        return DirectoryCounters(
            found=int(page.total(lookups, result="found")),
            none=int(page.total(lookups, result="none")),
            without_it=sum(
                int(page.total(lookups, result=result)) for result in ("down", "late", "withheld")
            ),
            rebuilds=int(page.total("pegaflow_directory_rebuilds_total")),
            anchors=int(page.total("pegaflow_directory_anchors")),
        )

    def __sub__(self, earlier: DirectoryCounters) -> DirectoryCounters:
        return DirectoryCounters(
            *(
                getattr(self, field.name) - getattr(earlier, field.name)
                for field in dataclasses.fields(self)
            )
        )


class DirectoryStage(NodesStage):
    """The nodes of --nodes, without --peers, and a Redis on a node of its own."""

    pool_size = "384mb"

    def __init__(
        self, build_dir: Path, logs: Path, sockets: Path, seed: int, network: Network
    ) -> None:
        place = network[REDIS]
        directory = sockets / REDIS
        directory.mkdir()
        self.redis = RedisServer(
            directory,
            f"{place.address}:{REDIS_PORT}",
            secrets.token_hex(16),
            control_host=place.control_address,
        )
        self.redis.prefix = place.prefix
        self.redis.log_file = logs / "redis-server.log"
        self.redis_place = place
        self._secret_file = sockets / "redis-secret"
        self._secret_file.touch(mode=0o600)
        self._secret_file.write_text(self.redis.password + "\n")
        super().__init__(build_dir, logs, sockets, seed, network)

    def _links(self) -> tuple[str, ...]:
        subnet = self.redis_place.address.rpartition(".")[0]
        return (
            *("--directory", self.redis.url),
            *("--directory-secret-file", str(self._secret_file)),
            *("--peer-networks", f"{subnet}.0/24"),
        )

    @contextlib.contextmanager
    def servers(self) -> Iterator[None]:
        """Redis, and the three servers, which know each other by it."""
        with self.running(self.redis), super().servers():
            yield

    def wait_for_peers(self) -> None:
        for node in self.nodes.values():
            what = f"{node.name} reads the leases of {len(self.nodes)} nodes"
            wait_until(what, lambda n=node: self.leases(n) == len(self.nodes), 60)

    def leases(self, node: DemoNode) -> int:
        return int(node.server.metrics().total("pegaflow_directory_nodes"))

    def is_usable(self, node: DemoNode) -> bool:
        """Whether the node asks the directory."""
        return bool(node.server.metrics().total("pegaflow_directory_usable"))

    def all_use_it(self) -> bool:
        return all(map(self.is_usable, self.nodes.values()))

    def none_uses_it(self) -> bool:
        return not any(map(self.is_usable, self.nodes.values()))

    def announced(self) -> int:
        """Anchors that all nodes together announce."""
        return sum(DirectoryCounters.of(node).anchors for node in self.nodes.values())
