"""The stage of the claims of --routing: two nodes, each with an engine, behind pegaflow-router."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import secrets
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from demo.chart import Event, Legend, Sample, svg_chart, text_chart
from demo.children import StartsChildren
from demo.client import Answer, RequestFailed, complete, get
from demo.diagnosis import describe
from demo.expectations import full_blocks
from demo.progress import Progress
from demo.prompts import BLOCK_TOKENS, PromptMaker
from demo.stage import LONG_DEADLINES, SMALL, SMALL_POOL_SIZE, wait_until
from tests.support.child_process import ChildProcess
from tests.support.publishing_vllm import PublishingVllm
from tests.support.vllm_server import (
    PegaServer,
    RouterServer,
    VllmOptions,
    VllmServer,
    ensure_model,
    free_port,
)

#: Tokens of a conversation's first prompt, of each later question, and of each answer.
FIRST, QUESTION, ANSWER = 700, 40, 8
KV_CACHE_BYTES = 1 << 29
#: Engines on the same cores would spin while they wait for each other's threads.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
#: Two servers and two engines share a few cores: a response within 15 ms is impossible.
PATIENT_PEERS = ("--peer-deadline", "500ms", "--fetch-deadline", "8s", "--nics", "none")
LEGEND = Legend("tokens of prompts in a cache", "in the engine's own", "loaded from a node's pool")


@dataclasses.dataclass(frozen=True)
class Turn:
    """One request of a conversation: all that was said, and a question."""

    name: str
    prompt: tuple[int, ...]
    #: Tokens that the turn before has computed; 0 for the first turn.
    history: int
    #: The answer of one vLLM without PegaFlow.
    baseline: Answer

    @property
    def known(self) -> int:
        """Tokens of the full blocks of the history."""
        return full_blocks(self.history, BLOCK_TOKENS) * BLOCK_TOKENS


@dataclasses.dataclass(frozen=True)
class Counted:
    """What the two nodes have counted so far; the difference of two belongs to some requests."""

    answered: tuple[int, int] = (0, 0)  #: By engine.
    own_tokens: int = 0  #: Hits in the engines' own caches.
    loaded_tokens: int = 0  #: Hits in the pools.
    pulled_bytes: int = 0  #: From the pool of one node to that of the other.

    def __sub__(self, earlier: Counted) -> Counted:
        first, second = (a - b for a, b in zip(self.answered, earlier.answered, strict=True))
        return Counted(
            (first, second),
            self.own_tokens - earlier.own_tokens,
            self.loaded_tokens - earlier.loaded_tokens,
            self.pulled_bytes - earlier.pulled_bytes,
        )


@dataclasses.dataclass(frozen=True)
class Reply:
    """The answer to one turn that was sent alone, and what was counted meanwhile."""

    turn: Turn
    answer: Answer
    counted: Counted

    @property
    def engine(self) -> int:
        return self.counted.answered.index(max(self.counted.answered))

    @property
    def stayed(self) -> bool:
        """Whether the engine had the history in its own cache.

        All full blocks but the last one, which vLLM computes again if the prompt ends there.
        """
        return self.counted.own_tokens >= self.turn.known - BLOCK_TOKENS


class Node:
    """An engine and its server."""

    def __init__(self, name: str, server: PegaServer, vllm: PublishingVllm) -> None:
        self.name = name
        self.server = server
        self.vllm = vllm

    @property
    def url(self) -> str:
        return f"http://{self.vllm.http}"

    def counted(self) -> tuple[int, int, int, int]:
        server = self.server.metrics()
        pulled = int(server.total("pegaflow_fetch_bytes_total"))
        if not self.vllm.running():
            return 0, 0, 0, pulled
        engine = self.vllm.metrics()
        return (
            int(engine.total("vllm:request_success_total")),
            int(engine.total("vllm:prefix_cache_hits_total")),
            int(engine.total("vllm:external_prefix_cache_hits_total")),
            pulled,
        )


class RoutingStage(StartsChildren):
    """One run's servers and results. Belongs to the main thread."""

    def __init__(self, build_dir: Path, logs: Path, sockets: Path, seed: int) -> None:
        self.shape = SMALL
        model = ensure_model(self.shape)
        self.progress = Progress()
        self.maker = PromptMaker(seed, self.shape.vocabulary)
        self.random = random.Random(seed)
        self.samples: list[Sample] = []
        self.events: list[Event] = []
        self.figures: dict[str, Any] = {}
        self.table = ""
        self.diagnosis = ""
        self._router_binary = build_dir / "router" / "pegaflow-router"
        self._package = build_dir / "python"
        self._logs, self._sockets = logs, sockets
        self._routers: list[RouterServer] = []
        self._secret = sockets / "secret"
        self._secret.touch(mode=0o600)
        self._secret.write_text(secrets.token_hex(16) + "\n")
        plain = VllmOptions(model, kv_cache_bytes=KV_CACHE_BYTES, block_size=BLOCK_TOKENS)
        self.plain = VllmServer(plain, sockets / "plain", ONE_THREAD)
        self.plain.log_file = logs / "vllm-without-connector.log"
        peers = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        self.nodes = [
            self._node(name, own, peers, build_dir, plain)
            for name, own in zip("ab", peers, strict=True)
        ]
        self.a, self.b = self.nodes
        self.pega = self.a.server

    def _node(
        self, name: str, own: str, peers: Sequence[str], build_dir: Path, plain: VllmOptions
    ) -> Node:
        directory = self._sockets / name
        directory.mkdir()
        arguments = ("--peers", ",".join(peers), "--peer-listen", own, *PATIENT_PEERS)
        arguments += ("--peer-secret-file", str(self._secret))
        binary = build_dir / "server" / "pegaflow-server"
        server = PegaServer(binary, directory, SMALL_POOL_SIZE, arguments)
        server.log_file = self._logs / f"pegaflow-server-{name}.log"
        options = dataclasses.replace(
            plain,
            connector=server.address,
            extra_config=LONG_DEADLINES,
            python_path=[build_dir / "python"],
        )
        # A proxy takes the place of the second engine at its socket.
        events = directory / "events" if name == "b" else None
        vllm = PublishingVllm(options, directory, ONE_THREAD, events_socket=events)
        vllm.log_file = self._logs / f"vllm-{name}.log"
        return Node(name, server, vllm)

    # -- servers

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Both nodes."""
        servers: list[ChildProcess] = [node.server for node in self.nodes]
        with self.running(*servers, *(node.vllm for node in self.nodes)):
            for node in self.nodes:
                wait_until(
                    f"server {node.name} can ask the other one",
                    lambda n=node: n.server.metrics().total("pegaflow_peer_ready") == 1,
                    30,
                )
            yield

    @contextlib.contextmanager
    def routed(
        self,
        policy: str,
        name: str = "router",
        nodes: Sequence[Node] | None = None,
        options: Sequence[str] = (),
    ) -> Iterator[RouterServer]:
        """A router with this policy in front of engines that are up; it knows both servers.

        Args:
            nodes: Those of the engines; None: both.
            options: More options of the router.
        """
        nodes = self.nodes if nodes is None else nodes
        directory = self._sockets / f"{name}-{len(self._routers)}"
        directory.mkdir()
        engines = [node.vllm.http for node in nodes]
        router = RouterServer(self._router_binary, directory, [], engines)
        router.log_file = self._logs / f"pegaflow-{directory.name}.log"
        router.arguments += ["--decode-policy", policy, "--health-interval", "200ms"]
        router.arguments += ["--peer-secret-file", str(self._secret), "--servers"]
        router.arguments += [f"http://{node.server.http}" for node in self.nodes]
        router.arguments += ["--engine-servers"]
        router.arguments += [f"{node.url}=http://{node.server.http}" for node in nodes]
        router.arguments += options
        self._routers.append(router)
        with self.running(router):
            if policy == "kv-aware":
                self.wait_for_trust(router, len(nodes))
            yield router

    @contextlib.contextmanager
    def two_routers(self) -> Iterator[tuple[RouterServer, RouterServer]]:
        """Two routers that share what they place and learn; the first one may be killed."""
        addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        own = [("--replica-listen", address, "--replicas", *addresses) for address in addresses]
        with self.routed("kv-aware", "second", options=own[1]) as second:
            with self.routed("kv-aware", "first", options=own[0]) as first:
                for router in (first, second):
                    wait_until(
                        "the routers hear each other",
                        lambda r=router: sorted(self.replica_states(r)) == ["live", "self"],
                        30,
                    )
                yield first, second

    def wait_for_trust(self, router: RouterServer, engines: int = 2) -> None:
        """Returns when the router follows all its engines' events and both servers' pools."""

        def trusts() -> bool:
            known = self.kv_health(router)
            sources = [one["events"] in ("exact", "partial") for one in known["sources"]]
            pools = [one["trusted"] for one in known["pools"]]
            return sources == [True] * engines and pools == [True, True]

        wait_until("the router knows its engines' caches and both pools", trusts, 60)

    def diagnose(self) -> None:
        """Keeps the servers' counters and logs at the first failure."""
        if self.diagnosis:
            return
        parts = [describe(node.vllm, node.server) for node in self.nodes]
        if self._routers:
            parts.append(f"log of the router:\n{self._routers[-1].log_text()[-4000:]}")
        self.diagnosis = "\n\n".join(parts)

    # -- what routers know

    @staticmethod
    def kv_health(router: RouterServer) -> Any:
        return get(router.http, "/health")[1]["kv_aware"]

    def replica_states(self, router: RouterServer) -> list[str]:
        return [one["state"] for one in self.kv_health(router)["replicas"]]

    def placed_elsewhere(self, router: RouterServer) -> int:
        """Placements that the router has heard of from others."""
        return sum(one["placements"] for one in self.kv_health(router)["replicas"])

    def blocks_of(self, router: RouterServer, node: Node) -> int:
        """Blocks of the engine's own cache, as the router knows them."""
        return int(router.metrics().total("pegaflow_router_kv_blocks", engine=node.url))

    def pool_blocks(self, router: RouterServer, node: Node) -> int:
        """Blocks of the node's pool, as the router knows them."""
        pools = self.kv_health(router)["pools"]
        return sum(one["blocks"] for one in pools if one["server"] == f"http://{node.server.http}")

    @staticmethod
    def reports(router: RouterServer) -> tuple[int, int]:
        """Reports of cached tokens: within a block of the prediction, and all."""
        metrics, name = router.metrics(), "pegaflow_router_kv_reports_total"
        close = int(metrics.total(name, within_a_block="yes"))
        return close, int(metrics.total(name))

    def routes(self, router: RouterServer) -> Any:
        """The router's last decisions, the newest first, by the command that operators use."""
        command = [sys.executable, "-m", "pegaflow", "routes", "--json"]
        command += ["--router", f"http://{router.http}", "--secret-file", str(self._secret)]
        env = os.environ | {"PYTHONPATH": str(self._package)}
        shown = subprocess.run(
            command, env=env, capture_output=True, text=True, check=True, timeout=60
        )
        return json.loads(shown.stdout)["routes"]

    # -- requests

    def conversations(self, name: str, count: int, turns: int) -> list[list[Turn]]:
        """New conversations, with the answers of the vLLM without PegaFlow, which is running."""
        drawn = [
            [self.maker.tokens(FIRST), *(self.maker.tokens(QUESTION) for _ in range(turns - 1))]
            for _ in range(count)
        ]

        def talk(number: int) -> list[Turn]:
            prompt: tuple[int, ...] = ()
            history, made = 0, []
            for turn, said in enumerate(drawn[number], 1):
                prompt += said
                answer = complete(self.plain.http, prompt, ANSWER)
                what = f"{name}, conversation {number + 1}, turn {turn}"
                made.append(Turn(what, prompt, history, answer))
                # The answer's last token is sampled and not computed.
                history = len(prompt) + ANSWER - 1
                prompt += answer.tokens
            return made

        with ThreadPoolExecutor(count) as clients, self.progress.step(f"alone: {name}"):
            talks = list(clients.map(talk, range(count)))
        self.progress.say(f"vLLM without PegaFlow has answered {count * turns} turns: {name}")
        return talks

    def begin(self, router: RouterServer, conversations: Sequence[list[Turn]]) -> list[Reply]:
        """The first turns, all at once, so that both engines receive some."""
        before = self.counted()
        turns = [turns[0] for turns in conversations]
        with ThreadPoolExecutor(len(turns)) as clients:
            answers = list(clients.map(lambda turn: self._complete(router.http, turn), turns))
        self.wait_until_counted(before, len(turns))
        at = self.progress.elapsed_s()
        self.samples += [
            Sample(at, 0.0, answer.cached_tokens / len(turn.prompt))
            for turn, answer in zip(turns, answers, strict=True)
        ]
        nothing = Counted()
        return [Reply(t, answer, nothing) for t, answer in zip(turns, answers, strict=True)]

    def ask(self, turn: Turn, *routers: RouterServer) -> Reply:
        """One turn at the first of the routers that answers it, alone."""
        before = self.counted()
        answer = self.ask_one_of(turn, *routers)
        self.wait_until_counted(before, 1)
        counted = self.counted() - before
        size = len(turn.prompt)
        # vLLM counts a load of a whole prompt, of which it computes the last token again.
        own = min(1.0, counted.own_tokens / size)
        loaded = min(1.0 - own, counted.loaded_tokens / size)
        self.samples.append(Sample(self.progress.elapsed_s(), loaded, own))
        return Reply(turn, answer, counted)

    def ask_one_of(self, turn: Turn, *routers: RouterServer) -> Answer:
        """The answer of the first of the routers that gives one.

        Raises:
            RequestFailed: none did.
        """
        for router in routers[:-1]:
            with contextlib.suppress(RequestFailed):  # A client tries its next router.
                return self._complete(router.http, turn)
        return self._complete(routers[-1].http, turn)

    @staticmethod
    def _complete(address: str, turn: Turn) -> Answer:
        return complete(address, turn.prompt, ANSWER, with_usage=True)

    # -- what is counted

    def counted(self) -> Counted:
        first, second = (node.counted() for node in self.nodes)
        return Counted(
            (first[0], second[0]), first[1] + second[1], first[2] + second[2], first[3] + second[3]
        )

    def wait_until_counted(self, before: Counted, requests: int) -> None:
        # The last event may arrive before vLLM has added up that step's statistics.
        wait_until(
            "vLLM counts the requests",
            lambda: sum((self.counted() - before).answered) >= requests,
            10,
        )

    @property
    def page_bytes(self) -> int:
        """Bytes of one block in the pool: all layers, K and V."""
        return BLOCK_TOKENS * self.shape.kv_bytes_per_token()

    # -- the chart

    def mark(self, text: str) -> None:
        """An event of the chart, and a line of progress."""
        self.events.append(Event(self.progress.elapsed_s(), text))
        self.progress.say(text)

    def chart(self) -> str:
        """The caches' share of each prompt over time; also written as SVG beside the logs."""
        picture = self._logs / "routing.svg"
        picture.write_text(svg_chart(self.samples, self.events, LEGEND))
        return text_chart(self.samples, self.events, legend=LEGEND)
