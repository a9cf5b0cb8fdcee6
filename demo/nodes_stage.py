"""The stage of the claims of --nodes: three nodes, each with a server, and two engines."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from demo.children import StartsChildren
from demo.client import Answer, complete
from demo.diagnosis import describe
from demo.expectations import full_blocks
from demo.progress import Progress
from demo.prompts import BLOCK_TOKENS, Prompt, PromptMaker
from demo.stage import MAX_ASKED_AGAIN, PATIENT, SMALL, Late, forget_local, wait_until
from tests.support.network import Network, Node
from tests.support.vllm_server import PegaServer, VllmOptions, VllmServer, ensure_model

NAMES = ("a", "b", "c")
#: Each node's pool, for all blocks of the demo: about 700 x 128 KiB.
POOL_SIZE = "256mb"
#: Both engines run a small model.
KV_CACHE_BYTES = 1 << 29
PEER_PORT = 50055

#: Three servers and two engines share a few cores here: a response within 15 ms, as between idle
#: servers, is impossible. Blocks have the 2 s of a real node.
PATIENT_PEERS = ("--peer-deadline", "500ms", "--fetch-deadline", "2s")


@dataclasses.dataclass(frozen=True)
class NodeCounters:
    """One node's counters so far; the difference of two belongs to one request."""

    external_hit_tokens: int = 0  #: By its engine.
    local_hit_tokens: int = 0
    missed_deadlines: int = 0
    loaded_blocks: int = 0  #: From its pool to its engine.
    fetched_blocks: int = 0  #: From other nodes, whole.
    fetched_bytes: int = 0
    given_up_blocks: int = 0
    retried_blocks: int = 0
    lent_bytes: int = 0  #: To other nodes.
    questions: int = 0  #: Requests of other nodes for blocks.

    def __sub__(self, earlier: NodeCounters) -> NodeCounters:
        return NodeCounters(
            *(
                getattr(self, field.name) - getattr(earlier, field.name)
                for field in dataclasses.fields(self)
            )
        )


class DemoNode:
    """One node: its network, its server, and its engine while it has one."""

    def __init__(self, network: Node, server: PegaServer) -> None:
        self.network = network
        self.name = network.name.upper()
        self.server = server
        self.vllm: VllmServer | None = None
        self.peer_address = f"{network.address}:{PEER_PORT}"

    def counters(self) -> NodeCounters:
        server = self.server.metrics()
        blocks = "pegaflow_fetch_blocks_total"
        counted = NodeCounters(
            loaded_blocks=int(server.total("pegaflow_load_blocks_total")),
            fetched_blocks=int(server.total(blocks, result="whole")),
            fetched_bytes=int(server.total("pegaflow_fetch_bytes_total")),
            given_up_blocks=int(server.total(blocks, result="given_up")),
            retried_blocks=int(server.total("pegaflow_fetch_troubles_total", reason="retried")),
            lent_bytes=int(server.total("pegaflow_lent_bytes_total")),
            questions=int(server.total("pegaflow_peer_locates_total")),
        )
        if self.vllm is None:
            return counted
        engine = self.vllm.metrics()
        return dataclasses.replace(
            counted,
            external_hit_tokens=int(engine.total("vllm:external_prefix_cache_hits_total")),
            local_hit_tokens=int(engine.total("vllm:prefix_cache_hits_total")),
            missed_deadlines=sum(
                int(engine.total("vllm:pegaflow_misses_total", reason=reason))
                for reason in ("late", "timeout", "busy")
            )
            + int(engine.total("vllm:pegaflow_load_failures_total", error="timeout")),
        )

    def insertions(self) -> int:
        return int(self.server.metrics().total("pegaflow_cache_block_insertions_total"))

    def sees(self, other: DemoNode) -> bool:
        """Whether its server can query the other's."""
        ready = self.server.metrics().total("pegaflow_peer_ready", peer=other.peer_address)
        return bool(ready)

    def is_fetching(self) -> bool:
        return self.server.metrics().total("pegaflow_fetch_batches") > 0

    def answered(self) -> int:
        return int(self.engine.metrics().total("vllm:request_success_total"))

    @property
    def engine(self) -> VllmServer:
        assert self.vllm is not None, f"node {self.name} has no engine"
        return self.vllm


class NodesStage(StartsChildren):
    """One run's nodes and results. Belongs to the main thread, which is in ``network``."""

    pool_size = POOL_SIZE

    def __init__(
        self, build_dir: Path, logs: Path, sockets: Path, seed: int, network: Network
    ) -> None:
        self.shape = SMALL
        self._model = ensure_model(self.shape)
        self.progress = Progress()
        self.maker = PromptMaker(seed, self.shape.vocabulary)
        self.baseline: dict[str, Answer] = {}
        self.local_hits: dict[str, Answer] = {}
        self.figures: dict[str, Any] = {}
        self.asked_again = 0
        self.diagnosis = ""
        self._build_dir, self._logs, self._sockets = build_dir, logs, sockets
        secret = sockets / "secret"
        secret.touch(mode=0o600)
        secret.write_text(secrets.token_hex(16) + "\n")
        self.network = network
        self.nodes: dict[str, DemoNode] = {}
        for name in NAMES:
            node = network[name]
            directory = sockets / name
            directory.mkdir()
            arguments = (*self._links(), "--peer-listen", f"{node.address}:{PEER_PORT}")
            # An RDMA card of this machine would bypass the links that are broken here.
            arguments += ("--nics", "none", "--peer-secret-file", str(secret), *PATIENT_PEERS)
            server = PegaServer(
                build_dir / "server" / "pegaflow-server", directory, self.pool_size, arguments
            )
            server.log_file = logs / f"pegaflow-server-{name}.log"
            server.host, server.prefix = node.control_address, node.prefix
            self.nodes[name] = DemoNode(node, server)
        self.a, self.b, self.c = (self.nodes[name] for name in NAMES)
        self.pega = self.a.server

    def _links(self) -> tuple[str, ...]:
        """The options of a server by which it has links to the others."""
        return ("--peers", ",".join(f"{self.network[name].address}:{PEER_PORT}" for name in NAMES))

    # -- servers

    @contextlib.contextmanager
    def plain_vllm(self) -> Iterator[VllmServer]:
        """A vLLM without the connector, on no node."""
        plain = VllmServer(VllmOptions(self._model, kv_cache_bytes=KV_CACHE_BYTES), self._sockets)
        plain.log_file = self._logs / "vllm-without-connector.log"
        with self.running(plain):
            yield plain

    @contextlib.contextmanager
    def servers(self) -> Iterator[None]:
        """The three servers, connected to each other."""
        with self.running(*(node.server for node in self.nodes.values())):
            self.wait_for_peers()
            yield

    @contextlib.contextmanager
    def engine_at(self, node: DemoNode) -> Iterator[None]:
        """A vLLM with the connector on that node."""
        options = VllmOptions(
            self._model,
            kv_cache_bytes=KV_CACHE_BYTES,
            connector=node.server.address,
            extra_config=PATIENT,
            python_path=[self._build_dir / "python"],
        )
        # The namespace has no route to the outside, so vLLM would find no address of its own.
        vllm = VllmServer(options, self._sockets / node.name, {"VLLM_HOST_IP": "127.0.0.1"})
        vllm.log_file = self._logs / f"vllm-{node.name.lower()}.log"
        vllm.host, vllm.prefix = node.network.control_address, node.network.prefix
        with self.running(vllm):
            node.vllm = vllm
            try:
                yield
            finally:
                node.vllm = None

    def wait_for_peers(self) -> None:
        for node in self.nodes.values():
            for other in self.nodes.values():
                if other is not node:
                    what = f"{node.name} can query {other.name}"
                    wait_until(what, lambda n=node, o=other: n.sees(o), 30)

    def diagnose(self) -> None:
        """Keeps the nodes' counters and logs at the first failure."""
        self.diagnosis = self.diagnosis or "\n\n".join(
            describe(node.vllm, node.server) for node in self.nodes.values()
        )

    # -- requests

    def ask_counted(
        self, node: DemoNode, prompt: Prompt, max_tokens: int
    ) -> tuple[Answer, dict[str, NodeCounters]]:
        """Answers a prompt at a node, with the counts of all nodes; it must be the only one."""
        before, answered = self.all_counters(), node.answered()
        answer = complete(node.engine.http, prompt.tokens, max_tokens)
        return answer, self.counted_since(before, node, answered)

    def counted_since(
        self, before: dict[str, NodeCounters], node: DemoNode, answered: int
    ) -> dict[str, NodeCounters]:
        """The counts since then, once the engine of ``node`` has added up its statistics."""
        wait_until("vLLM counts the request", lambda: node.answered() > answered, 10)
        now = self.all_counters()
        # A server that was killed meanwhile has no counters to compare.
        return {name: now[name] - before[name] for name in now if name in before}

    def all_counters(self) -> dict[str, NodeCounters]:
        return {name: node.counters() for name, node in self.nodes.items() if node.server.running()}

    def store(self, node: DemoNode, prompt: Prompt) -> Answer:
        """Asks for one token at a node until all of the prompt's blocks are in its pool.

        The prompt is new on all nodes. Returns the first answer, the cold one.
        """
        wanted = node.insertions() + full_blocks(len(prompt), BLOCK_TOKENS)
        what = f"all blocks of prompt {prompt.name} are stored at {node.name}"
        first: Answer | None = None
        for _ in range(MAX_ASKED_AGAIN + 1):
            answer = complete(node.engine.http, prompt.tokens, max_tokens=1)
            first = first or answer
            try:
                wait_until(what, lambda: node.insertions() >= wanted, 10)
                return first
            except Late:
                self.asked_again += 1
                self.forget_local(node)
        raise Late(f"asked {MAX_ASKED_AGAIN + 1} times and still not: {what}")

    def forget_local(self, node: DemoNode) -> None:
        """Empties the engine's own prefix cache, and only that."""
        forget_local(node.engine, self.maker)

    @property
    def page_bytes(self) -> int:
        """Bytes of one block in the pool: all layers, K and V."""
        return BLOCK_TOKENS * self.shape.kv_bytes_per_token()
