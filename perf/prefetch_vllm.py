"""A remote hit of a real vLLM behind the router, with and without a prefetch, beside a local hit.

A far server has the blocks of prompts, which an earlier engine has saved there. The engine's own
server reads them over a link of limited rate. A router with prefetches and one without send prompts
to the engine, whose cache is emptied before each. In half of the cells another request occupies the
engine meanwhile, for longer than a pull takes. The near server's pool holds four prompts, so each
prompt is remote again after some others, and a local hit right after it was pulled. The arms take
turns in a random order. Without a queue there is one more arm: the client announces the request to
the router, and sends it when the near server has fetched the blocks, as after the end of a tool
call.

The targets: behind a queue that takes longer than the pull, the time to the first token of a remote
hit is at most 1.1 times that of a local one, and so is that of an announced request. Without both
it is at most that of a remote hit without a prefetch, which is the pull and a local hit.

Needs root, for the namespaces.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import http.client
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from demo.stage import PATIENT
from perf.support.figure import Figure, note, publish
from perf.support.limited_link import Link, wait_joined
from perf.support.servers import parser
from perf.support.veth import End, NoNamespaces, cable
from tests.support.vllm_server import (
    MODEL_NAME,
    ModelShape,
    PegaServer,
    RouterServer,
    VllmOptions,
    VllmServer,
    ensure_model,
    free_port,
)

BLOCK = 32
CLONE_NEWNET = 0x40000000
#: Threads that spin while they wait for each other take a busy machine's cores from the servers.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
#: Prompts of each router, and the least that are remote again when their turn comes.
PROMPTS, LEAST_PROMPTS = 5, 3
CELLS = ("idle", "queued")
ARMS = ("local", "pull", "prefetch")
ANNOUNCED = "announced"


def enter(end: End) -> None:
    """Moves this thread, and all processes that it starts, to the end's network namespace."""
    path = next(word for word in end.prefix if word.startswith("--net=")).removeprefix("--net=")
    with open(path) as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET) != 0:
            raise NoNamespaces(f"setns: {os.strerror(ctypes.get_errno())}")


class Vllm(VllmServer):
    """A vLLM with KV events. Two in a row have the same addresses: to a router they are one."""

    def __init__(self, options: VllmOptions, directory: Path, ports: tuple[int, int, int]) -> None:
        port, events, replay = ports
        config = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{events}",
            "replay_endpoint": f"tcp://*:{replay}",
        }
        arguments = ["--kv-events-config", json.dumps(config), "--enable-prompt-tokens-details"]
        arguments += ["--max-num-seqs", "1"]
        super().__init__(dataclasses.replace(options, arguments=arguments), directory, ONE_THREAD)
        self._fixed = port

    def start(self) -> Vllm:
        self._make_temporary()
        self._port = self._fixed
        super(VllmServer, self).start()
        return self


def post(address: str, path: str, body: dict[str, object] | None = None) -> bytes:
    connection = http.client.HTTPConnection(address, timeout=120)
    with contextlib.closing(connection):
        data = b"" if body is None else json.dumps(body)
        connection.request("POST", path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
        if response.status not in (200, 202):
            raise AssertionError(f"POST {path} to {address}: {response.status} {answer[:300]!r}")
        return answer


@dataclasses.dataclass(frozen=True)
class Served:
    seconds: float  #: To the first token.
    cached: int  #: Tokens.


def complete(address: str, prompt: list[int], tokens: int = 1) -> Served:
    body = {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection(address, timeout=120)
    with contextlib.closing(connection):
        data = json.dumps(body)
        began = time.perf_counter()
        connection.request("POST", "/v1/completions", data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        first, usage = 0.0, {}
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            first = first or time.perf_counter() - began
            usage = json.loads(line[6:]).get("usage") or usage
        if response.status != 200 or not usage:
            raise AssertionError(f"{address} answered {response.status}")
    return Served(first, (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


def wait_until(what: str, is_so: Callable[[], bool], timeout_s: float = 120.0) -> None:
    end = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > end:
            raise TimeoutError(what)
        time.sleep(0.02)


def known_prompts(router: RouterServer) -> float:
    """Prompts whose blocks the router has learned, or has computed from their token ids."""
    metrics = router.metrics()
    learned = metrics.total("pegaflow_router_kv_text_learned_total")
    return learned + metrics.total("pegaflow_router_kv_token_prompts_total", keys="computed")


def hold(address: str, prompt: list[int], tokens: int, ends: threading.Event) -> None:
    """A request with a long answer, whose client leaves when ``ends`` is set."""
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True}
    connection = http.client.HTTPConnection(address, timeout=120)
    with contextlib.closing(connection):
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        if not ends.wait(120):
            raise TimeoutError("the request that occupies the engine was not ended")


class Rig:
    """Two servers on a link, the addresses of the engine, and the two routers in front of it."""

    def __init__(
        self, link: Link, build: Path, directory: Path, prompt_bytes: int, niceness: int
    ) -> None:
        self.niceness = niceness
        self.link = link
        self.build = build
        self.directory = directory
        self.secret = directory / "secret"
        self.secret.write_text("a secret for measurements\n")
        self.secret.chmod(0o600)
        self.ports = (free_port(), free_port(), free_port())
        binary = build / "server" / "pegaflow-server"
        secret = ["--peer-secret-file", str(self.secret)]
        lends = ["--peer-listen", f"{link.far.address}:0", *secret]
        self.far = PegaServer(binary, directory / "far", "2gb", lends)
        self.far.prefix, self.far.host = link.far.prefix, link.far.address
        # A claim fetches into a quarter of the pool at most.
        pool = f"{(prompt_bytes * 9 // 2 >> 20) + 1}mb"
        self.near = PegaServer(binary, directory / "near", pool, secret)
        self.near.arguments += ["--prefetch-bytes", f"{(prompt_bytes >> 20) + 1}mb"]
        self.routers: dict[str, RouterServer] = {}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.far)
            self.near.arguments += ["--peers", self.far.peer_listen]
            self.near.arguments += ["--peer-deadline", "1s", "--fetch-deadline", "8s"]
            stack.enter_context(self.near)
            wait_joined(self.near)
            for arm, key_bytes in (("prefetch", "64mb"), ("pull", "0")):
                router = RouterServer(
                    self.build / "router" / "pegaflow-router",
                    self.directory / arm,
                    [],
                    [f"127.0.0.1:{self.ports[0]}"],
                )
                servers = [f"http://{each.http}" for each in (self.near, self.far)]
                router.arguments += ["--servers", *servers, "--health-interval", "200ms"]
                engine = f"http://127.0.0.1:{self.ports[0]}"
                router.arguments += ["--engine-servers", f"{engine}={servers[0]}"]
                router.arguments += ["--peer-secret-file", str(self.secret)]
                router.arguments += ["--prefetch-key-bytes", key_bytes]
                self.routers[arm] = stack.enter_context(router)
            self.routers[ANNOUNCED] = self.routers["prefetch"]
            yield

    def engine(self, server: PegaServer) -> Vllm:
        options = VllmOptions(
            ensure_model(ModelShape()),
            connector=server.address,
            extra_config=PATIENT,
            kv_cache_bytes=1 << 29,
            block_size=BLOCK,
            python_path=[self.build / "python"],
        )
        engine = Vllm(options, self.directory / "vllm", self.ports)
        engine.prefix = ["nice", "-n", str(self.niceness)]
        return engine

    def decision(self, router: RouterServer) -> str:
        """What the router's last decision was about, by the command that operators use."""
        command = [sys.executable, "-m", "pegaflow", "routes", "--json"]
        command += ["--router", f"http://{router.http}", "--secret-file", str(self.secret)]
        env = os.environ | {"PYTHONPATH": str(self.build / "python")}
        shown = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        route = json.loads(shown.stdout)["routes"][0]
        terms = route["terms"][0]
        names = ("local_blocks", "reach_blocks", "pull_bytes", "fetch_s", "prefill_s")
        return ", ".join(f"{name} {terms[name]}" for name in names)

    def wait_for_trust(self, pools: int) -> None:
        for router in self.routers.values():

            def is_trusted(router: RouterServer = router) -> bool:
                metrics = router.metrics()
                trusted = metrics.total("pegaflow_router_kv_pool_trusted")
                states = [
                    metrics.total("pegaflow_router_kv_source", state=state)
                    for state in ("exact", "partial")
                ]
                is_up = metrics.total("pegaflow_router_engine_up") == 1
                return is_up and trusted >= pools and sum(states) == 1

            wait_until("the routers know engine and pools", is_trusted)


class Bench:
    def __init__(self, rig: Rig, tokens: int, rng: random.Random) -> None:
        self.rig = rig
        self.tokens = tokens
        self.rng = rng
        self.vocabulary = ModelShape().vocabulary
        self.blocker = [self.rng.randrange(3, self.vocabulary) for _ in range(BLOCK)]
        self.most_tokens = VllmOptions.max_model_len - 2 * BLOCK
        self.queue_s = 0.0
        self.missed: collections.Counter[str] = collections.Counter()

    def prompt(self) -> list[int]:
        return [self.rng.randrange(3, self.vocabulary) for _ in range(self.tokens)]

    def seed(self, prompts: dict[str, list[list[int]]]) -> None:
        """An engine at the far server computes and saves the prompts; the routers learn them."""
        with self.rig.engine(self.rig.far):
            self.rig.wait_for_trust(1)
            for arm, all_of_arm in prompts.items():
                router = self.rig.routers[arm]
                for prompt in all_of_arm:
                    before = known_prompts(router)
                    complete(router.http, prompt)
                    wait_until(
                        "the prompt's blocks are known",
                        lambda r=router, b=before: known_prompts(r) > b,
                    )
            wanted = sum(map(len, prompts.values())) * (self.tokens // BLOCK)
            router = self.rig.routers["prefetch"]
            wait_until(
                "all blocks were saved",
                lambda: router.metrics().total("pegaflow_router_kv_keys") >= wanted,
            )

    def accepted(self) -> float:
        metrics = self.rig.routers["prefetch"].metrics()
        return metrics.total("pegaflow_router_prefetches_total", result="accepted")

    def fetched(self) -> float:
        """Blocks that the near server has read from the far one."""
        return self.rig.near.metrics().total("pegaflow_fetch_blocks_total", result="whole")

    @contextlib.contextmanager
    def occupied(self, engine: Vllm, seconds: float) -> Iterator[None]:
        """Another request occupies the engine at the beginning, and for ``seconds`` from then on.

        Its client leaves at that time, so the queue is as long for each arm, however fast the
        engine decodes. Its prompt and so its answer are always the same: what is saved of them does
        not fill the near pool.
        """
        ends = threading.Event()
        blocker = threading.Thread(
            target=hold, args=(engine.http, self.blocker, self.most_tokens, ends)
        )
        blocker.start()
        wait_until(
            "the engine is occupied",
            lambda: engine.metrics().total("vllm:num_requests_running") == 1,
        )
        timer = threading.Timer(seconds, ends.set)
        timer.start()
        try:
            yield
        finally:
            timer.join()
            blocker.join()

    def run(self, engine: Vllm, arm: str, prompt: list[int], queue_s: float) -> float | None:
        """Seconds to the first token; None: the engine computed, as it does when a call of its
        connector misses a deadline on a busy machine."""
        post(engine.http, "/reset_prefix_cache")
        router = self.rig.routers["pull" if arm == "pull" else "prefetch"]
        if arm == ANNOUNCED:
            self.announce(router, prompt)
        before, missed = self.accepted(), self.misses(engine)
        with self.occupied(engine, queue_s) if queue_s else contextlib.nullcontext():
            served = complete(router.http, prompt)
        if served.cached < self.tokens - BLOCK:
            self.missed[arm] += 1
            reasons = dict(self.misses(engine) - missed)
            why = self.rig.decision(router)
            note(f"{arm}: {served.cached} tokens were cached; not counted: {reasons}, {why}")
            return None
        if (self.accepted() > before) != (arm == "prefetch"):
            raise AssertionError(f"{arm}: {self.accepted() - before} prefetches")
        return served.seconds

    def announce(self, router: RouterServer, prompt: list[int]) -> None:
        """Returns when the near server has what the far one has of the prompt.

        A router that has just seen the engine start fetches nothing for it yet, so the announcement
        is repeated.
        """
        before = self.fetched()
        body = {"model": MODEL_NAME, "prompt": prompt}
        blocks = self.tokens // BLOCK - 1
        for attempts_left in reversed(range(20)):
            post(router.http, "/kv/prefetch/v1/completions", body)
            try:
                wait_until("the blocks were fetched", lambda: self.fetched() - before >= blocks, 6)
            except TimeoutError:
                if not attempts_left:
                    raise
            else:
                return

    @staticmethod
    def misses(engine: Vllm) -> collections.Counter[str]:
        """The connector's misses by reason."""
        counted: collections.Counter[str] = collections.Counter()
        for name, labels, value in engine.metrics().items("vllm:pegaflow_misses_total"):
            if name == "vllm:pegaflow_misses_total":
                counted[labels["reason"]] += int(value)
        return counted

    def rounds(
        self, engine: Vllm, prompts: dict[str, list[list[int]]], count: int, queue_s: float
    ) -> dict[str, list[float]]:
        remote = ["pull", "prefetch"] + ([] if queue_s else [ANNOUNCED])
        times: dict[str, list[float]] = {arm: [] for arm in ["local", *remote]}
        for _ in range(2 * count):
            for arm in self.rng.sample(remote, len(remote)):
                prompt = prompts[arm].pop(0)
                before = self.fetched()
                took = self.run(engine, arm, prompt, queue_s)
                if took is None:
                    # The engine has saved what it computed, so the prompt is local from now on.
                    if len(prompts[arm]) < LEAST_PROMPTS:
                        raise AssertionError(f"too many loads were missed: {self.missed}")
                    continue
                prompts[arm].append(prompt)
                if self.fetched() - before < self.tokens // BLOCK - 1:
                    raise AssertionError(f"{arm}: {self.fetched() - before} blocks were pulled")
                times[arm].append(took)
                if arm == "prefetch":
                    took = self.run(engine, "local", prompt, queue_s)
                    times["local"] += [took] if took is not None else []
            if min(map(len, times.values())) >= count:
                return times
        raise AssertionError(f"too many loads were missed: {self.missed}")

    def warm_up(self, engine: Vllm, prompts: dict[str, list[list[int]]], queue: float) -> None:
        """Learns the rates, and the length of a queue of ``queue`` remote hits."""
        warm = self.rounds(engine, prompts, 2, 0.0)
        pull = statistics.median(warm["pull"])
        self.queue_s = queue * pull
        note(f"a remote hit: {pull * 1e3:.0f} ms; a queue: {self.queue_s * 1e3:.0f} ms")


def figure(
    cell: str, times: dict[str, list[float]], queue_s: float, params: dict[str, object]
) -> list[Figure]:
    """The time to the first token; behind a queue also from its end on."""
    median = {arm: statistics.median(values) * 1e3 for arm, values in times.items()}
    note(
        f"{cell}: "
        + ", ".join(
            f"{arm} {median[arm]:.1f} ms ({min(v) * 1e3:.1f} to {max(v) * 1e3:.1f})"
            for arm, v in times.items()
        )
    )
    plain = "local" if cell == "queued" else "pull"
    rows = [("prefetch", plain, "", 0.0)]
    rows += [("prefetch", plain, ", from the queue's end", queue_s)] if queue_s else []
    rows += [(ANNOUNCED, "local", f", {ANNOUNCED}", 0.0)] if ANNOUNCED in times else []
    made = []
    for arm, bound, since, waited in rows:
        values = [1e3 * (took - waited) for took in times[arm]]
        bounds = [1e3 * (took - waited) for took in times[bound]]
        made.append(
            Figure(
                run="prefetch_vllm",
                params={"cell": cell + since, **params},
                figure=statistics.median(values),
                unit="ms",
                bound=statistics.median(bounds),
                bound_name={"local": "local hit", "pull": "remote hit without a prefetch"}[bound]
                + (since if waited else ""),
                target={"local": 1.1, "pull": 1.0}[bound],
                n=len(values),
                spread=f"{min(values):.1f} to {max(values):.1f} ms "
                f"(bound: {min(bounds):.1f} to {max(bounds):.1f})",
            )
        )
    return made


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=9)
    arguments.add_argument("--tokens", type=int, default=1536, help="of a prompt")
    arguments.add_argument("--gbps", type=float, default=0.08, help="GB/s of the link")
    arguments.add_argument("--cells", nargs="*", choices=CELLS, default=CELLS)
    arguments.add_argument("--queue", type=float, default=1.5, help="in remote hits")
    arguments.add_argument("--niceness", type=int, default=0, help="of vLLM, for a busy machine")
    options = arguments.parse_args()
    rng = random.Random(options.seed)
    directory = Path(tempfile.mkdtemp(prefix="pega-perf-"))
    figures = []
    try:
        with cable() as ends:
            enter(ends[0])
            prompt_bytes = options.tokens * ModelShape().kv_bytes_per_token()
            rig = Rig(Link(*ends), options.build_dir, directory, prompt_bytes, options.niceness)
            bench = Bench(rig, options.tokens, rng)
            prompts = {
                arm: [bench.prompt() for _ in range(PROMPTS)]
                for arm in ("prefetch", "pull", ANNOUNCED)
            }
            params = {"tokens": options.tokens, "gigabytes_per_second": options.gbps}
            with rig.running():
                bench.seed(prompts)
                rig.link.limit(options.gbps)
                with rig.engine(rig.near) as engine:
                    rig.wait_for_trust(2)
                    bench.warm_up(engine, prompts, options.queue)
                    for cell in options.cells:
                        queue_s = bench.queue_s if cell == "queued" else 0.0
                        times = bench.rounds(engine, prompts, options.rounds, queue_s)
                        figures += figure(cell, times, queue_s, params)
    except NoNamespaces as error:
        note(f"skipped: {error}")
        return 77
    except Exception:
        note(f"the logs are in {directory}")
        raise
    shutil.rmtree(directory, ignore_errors=True)
    return 0 if publish(figures, options.json) else 1


if __name__ == "__main__":
    sys.exit(main())
