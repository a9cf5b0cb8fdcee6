"""Two real vLLMs behind pegaflow-router and behind SMG's gateway, beside round robin.

Conversations of eight turns begin at random times, open loop; each turn has the whole history, and
all have one system prompt. The arms are pegaflow-router with round robin and with kv-aware, and
SMG's gateway with cache_aware. They take turns in a rotated order, each time with empty caches and
a new router; they get equal arrivals and lengths, with texts of their own. The cache of an engine
holds less than all conversations. The rate is chosen by what computing costs at the beginning, so
that round robin would keep the engines busy for ``--load`` of the time.

With ``--faults`` each arm loses something while its conversations go on: the events of the second
engine are dropped for a while, and then the first engine is killed and starts again at its address.
A client whose answer breaks off sends its request again; its time counts from the first attempt.

With ``--bound`` each round also sends its conversations to one engine, one request at a time: no
queue, and no history that is not cached. No router can be faster than that.

The targets: the median time to the first token with kv-aware is at most 0.6 of round robin's and
0.9 of SMG's, and its p99 at most 0.8 of round robin's. At least 99 % of the router's predictions of
cached tokens are within a block of what the engines report, and no request for a tokenizer reaches
an engine. Predictions whose blocks the engine evicted while the request waited are printed.

SMG's wheel is not a part of the environment:

    pip install --no-deps --target build/smg smg==1.13.0
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import http.client
import itertools
import json
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from demo.stage import SMALL
from perf.support.figure import Figure, note, publish
from perf.support.servers import parser
from perf.support.smg_gateway import SmgGateway
from tests.support.publishing_vllm import EventProxy, PublishingVllm
from tests.support.vllm_server import (
    MODEL_NAME,
    REPOSITORY,
    RouterServer,
    VllmOptions,
    ensure_model,
)

ARMS = ("round-robin", "kv-aware", "smg")
BLOCK = 32
#: Words of the system prompt, of a conversation's first question, and of each later one.
SYSTEM, FIRST, LATER = 100, (400, 900), (40, 120)
ANSWER = 8  #: Tokens.
TURNS = 8
#: With --faults, of the time until the last conversation begins: when the second engine's events
#: are dropped, until when, and when the first engine is killed.
DROPS, PASSES, KILLED = 0.15, 0.3, 0.4
#: With --faults a client tries for so long to get its answer.
PATIENCE_S = 300.0
#: Seconds between an answer and the next question.
THINK_S = 2.0
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
WORDS = (
    "the request goes to an engine that has most of its prompt in cache and answers when all other "
    "work before it is done so that no client waits longer than it must while blocks move between "
    "nodes of one cluster over links with limited rate"
).split()


@dataclasses.dataclass(frozen=True)
class Talk:
    """When a conversation begins, its questions' words, and the pauses before them."""

    at: float
    words: tuple[int, ...]
    pauses: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Served:
    seconds: float  #: To the first token.
    prompt: int  #: Tokens,
    cached: int  #: and those of them that were in the engine's cache.
    turn: int
    text: str
    attempts: int = 1


class Unanswered(Exception):
    """A request got no whole answer."""


@dataclasses.dataclass
class Outcome:
    served: list[Served] = dataclasses.field(default_factory=list)
    close: int = 0  #: Predictions within a block of the report.
    reports: int = 0
    evicted: int = 0  #: Predictions whose blocks the engine evicted while the request waited.
    dropped: int = 0  #: Batches of events.

    @property
    def hits(self) -> float:
        return sum(s.cached for s in self.served) / max(1, sum(s.prompt for s in self.served))


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))


def complete(address: str, prompt: str, turn: int, patience_s: float = 0.0) -> Served:
    """The answer, with the time from the first attempt to its first token.

    Args:
        patience_s: A request without a whole answer is sent again for so long.

    Raises:
        Unanswered: no answer was whole.
    """
    began = time.perf_counter()
    attempts = 0
    while True:
        attempts += 1
        try:
            served = ask(address, prompt, turn, began)
        except (OSError, http.client.HTTPException, Unanswered) as error:
            if time.perf_counter() - began > patience_s:
                raise Unanswered(f"{address}, after {attempts} attempts: {error!r}") from error
            time.sleep(0.1)
            continue
        return dataclasses.replace(served, attempts=attempts)


def ask(address: str, prompt: str, turn: int, began: float) -> Served:
    """Raises: Unanswered: the answer is not whole; OSError, HTTPException: of the connection."""
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": ANSWER, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    connection = http.client.HTTPConnection(address, timeout=300)
    with contextlib.closing(connection):
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        first, text, usage = 0.0, "", {}
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            first = first or time.perf_counter() - began
            event = json.loads(line[6:])
            if "choices" not in event:
                raise Unanswered(f"after {len(text)} characters: {event}")
            text += "".join(choice["text"] for choice in event["choices"])
            usage = event.get("usage") or usage
        if response.status != 200 or not usage:
            raise Unanswered(f"status {response.status}, {len(text)} characters")
    cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
    return Served(first, usage["prompt_tokens"], cached, turn, text)


class Rig:
    """Both engines, and the routers in front of them that change with each arm."""

    def __init__(self, options: argparse.Namespace, directory: Path) -> None:
        self.options = options
        self.directory = directory
        vllm = VllmOptions(
            ensure_model(SMALL),
            kv_cache_bytes=options.cache_mib << 20,
            block_size=BLOCK,
            max_model_len=8192,
        )
        # A proxy takes the place of the second engine at its socket.
        self.events = directory / "events" if options.faults else None
        sockets = (None, self.events)
        self.engines = [
            PublishingVllm(vllm, directory / name, ONE_THREAD, events_socket=socket)
            for name, socket in zip("ab", sockets, strict=True)
        ]
        self.proxy: EventProxy | None = None
        for engine in self.engines:
            engine.prefix = ["nice", "-n", str(options.niceness)]
        self._number = 0

    @contextlib.contextmanager
    def routed(self, arm: str) -> Iterator[RouterServer | SmgGateway]:
        self._number += 1
        directory = self.directory / f"{arm}-{self._number}"
        directory.mkdir()
        urls = [engine.http for engine in self.engines]
        if arm == "smg":
            with SmgGateway(self.options.smg, directory, urls) as gateway:
                yield gateway
            return
        binary = self.options.build_dir / "router" / "pegaflow-router"
        router = RouterServer(binary, directory, [], urls)
        router.arguments += ["--decode-policy", arm, "--health-interval", "500ms"]
        with router:
            if arm == "kv-aware":
                wait_for_trust(router, len(urls))
            yield router

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Both engines, and with --faults the proxy of the second one's events."""
        with contextlib.ExitStack() as stack:
            for engine in self.engines:
                stack.enter_context(engine)
            if self.events is not None:
                self.proxy = stack.enter_context(EventProxy(self.events))
            yield

    def fail(self, began: float, span_s: float) -> None:
        """Drops events, and kills and starts an engine, at their times since ``began``.

        Only the main thread starts engines.
        """
        assert self.proxy is not None
        time.sleep(max(0.0, began + DROPS * span_s - time.monotonic()))
        with self.proxy.dropping():
            time.sleep(max(0.0, began + PASSES * span_s - time.monotonic()))
        time.sleep(max(0.0, began + KILLED * span_s - time.monotonic()))
        self.engines[0].kill()
        killed = time.monotonic()
        self.engines[0].start_again()
        note(f"the first engine was down for {time.monotonic() - killed:.0f} s")

    def empty(self) -> None:
        """Empties both engines' caches, and lets them announce it."""
        for engine in self.engines:
            post(engine.http, "/reset_prefix_cache")
            complete(engine.http, "once", 0)

    def tokenizer_requests(self) -> int:
        """Requests for a tokenizer or a chat template that have reached the engines."""
        return sum(
            int(value)
            for engine in self.engines
            for name, labels, value in engine.metrics().items("http_requests_total")
            if "render" in labels.get("handler", "") or "tokenize" in labels.get("handler", "")
        )


def post(address: str, path: str) -> None:
    connection = http.client.HTTPConnection(address, timeout=60)
    with contextlib.closing(connection):
        connection.request("POST", path)
        response = connection.getresponse()
        if response.status != 200:
            raise AssertionError(f"POST {path} to {address}: {response.status}")


def wait_for_trust(router: RouterServer, engines: int) -> None:
    end = time.monotonic() + 60
    while True:
        metrics = router.metrics()
        states = ("exact", "partial")
        if sum(metrics.total("pegaflow_router_kv_source", state=s) for s in states) == engines:
            return
        if time.monotonic() > end:
            raise TimeoutError("after 60 s the router does not follow the engines' events")
        time.sleep(0.05)


def seconds_per_token(rig: Rig, rng: random.Random) -> float:
    """Of a prompt that is not cached, while both engines compute."""

    def one(engine: PublishingVllm, text: str) -> float:
        served = complete(engine.http, text, 0)
        return served.seconds / served.prompt

    costs = []
    with ThreadPoolExecutor(len(rig.engines)) as clients:
        for _ in range(3):
            texts = [words(rng, sum(FIRST) // 2) for _ in rig.engines]
            costs += clients.map(one, rig.engines, texts)
    return statistics.median(costs)


def draw(rng: random.Random, count: int, gap_s: float) -> list[Talk]:
    talks, at = [], 0.0
    for _ in range(count):
        at += rng.expovariate(1 / gap_s)
        sizes = (rng.randint(*FIRST), *(rng.randint(*LATER) for _ in range(TURNS - 1)))
        pauses = tuple(rng.expovariate(1 / THINK_S) for _ in range(TURNS - 1))
        talks.append(Talk(at, sizes, pauses))
    return talks


def converse(
    address: str,
    seed: str,
    number: int,
    its: Talk,
    *,
    patience_s: float = 0.0,
    pause: Callable[[float], object] = lambda _: None,
) -> list[Served]:
    """The turns of one conversation. ``pause`` waits between an answer and the next question."""
    rng = random.Random(f"{seed} {number}")
    prompt, made = words(random.Random(f"system {seed}"), SYSTEM), []
    for turn, size in enumerate(its.words):
        if turn:
            pause(its.pauses[turn - 1])
        prompt += f" {words(rng, size)}"
        made.append(complete(address, prompt, turn, patience_s))
        prompt += made[-1].text
    return made


def play(address: str, talks: Sequence[Talk], seed: str, rig: Rig) -> list[Served]:
    began = time.monotonic()
    stop = threading.Event()
    patience_s = PATIENCE_S if rig.proxy is not None else 0.0

    def talk(number: int) -> list[Served]:
        its = talks[number]
        stop.wait(max(0.0, began + its.at - time.monotonic()))
        return converse(address, seed, number, its, patience_s=patience_s, pause=stop.wait)

    with ThreadPoolExecutor(len(talks)) as clients:
        served = clients.map(talk, range(len(talks)))
        if rig.proxy is not None:
            rig.fail(began, talks[-1].at)
        return [one for its in served for one in its]


def run(rig: Rig, arm: str, talks: Sequence[Talk], seed: str) -> Outcome:
    outcome = Outcome()
    rig.empty()
    before = rig.proxy.dropped if rig.proxy else 0
    with rig.routed(arm) as router:
        outcome.served = play(router.http, talks, seed, rig)
        outcome.dropped = rig.proxy.dropped - before if rig.proxy else 0
        if isinstance(router, RouterServer) and arm == "kv-aware":
            metrics, name = router.metrics(), "pegaflow_router_kv_reports_total"
            outcome.close = int(metrics.total(name, within_a_block="yes"))
            outcome.evicted = int(metrics.total(name, within_a_block="evicted"))
            outcome.reports = int(metrics.total(name))
    return outcome


def play_alone(rig: Rig, talks: Sequence[Talk], seed: str) -> list[Served]:
    """The conversations one after the other, without pauses, at an engine without a router."""
    rig.empty()
    address = rig.engines[1].http
    return [one for n, its in enumerate(talks) for one in converse(address, seed, n, its)]


def stayed(served: Sequence[Served]) -> int:
    """Turns after the first whose engine had all full blocks of the turn before."""
    return sum(
        now.cached >= (before.prompt // BLOCK - 1) * BLOCK
        for before, now in itertools.pairwise(served)
        if now.turn
    )


def describe(name: str, served: Sequence[Served]) -> str:
    first = [s.seconds for s in served if not s.turn]
    later = [s.seconds for s in served if s.turn]
    return (
        f"{name}: p50 of first turns {statistics.median(first) * 1e3:.0f} ms, of later turns "
        f"{statistics.median(later) * 1e3:.0f} ms, of all "
        f"{statistics.median(first + later) * 1e3:.0f} ms; {stayed(served)} of {len(later)} later "
        "turns met their history"
    )


def measure(rig: Rig, rng: random.Random) -> dict[str, list[Outcome]]:
    options = rig.options
    cost = seconds_per_token(rig, rng)
    # Round robin finds about half of a history; a word is about 1.3 tokens.
    tokens = 1.3 * TURNS * (SYSTEM + sum(FIRST) / 2 + sum(LATER) / 2 * TURNS / 2) / 2
    gap_s = cost * tokens / len(rig.engines) / options.load
    note(f"computing takes {cost * 1e3:.2f} ms a token; a conversation begins every {gap_s:.1f} s")
    rounds: dict[str, list[Outcome]] = {arm: [] for arm in ARMS}
    alone: list[Served] = []
    for number in range(options.rounds):
        talks = draw(rng, options.talks, gap_s)
        for place in range(len(ARMS)):
            arm = ARMS[(number + place) % len(ARMS)]
            outcome = run(rig, arm, talks, f"{options.seed} {number} {arm}")
            rounds[arm].append(outcome)
            times = [s.seconds for s in outcome.served]
            note(
                f"round {number + 1}, {arm}: {len(times)} turns, p50 "
                f"{statistics.median(times) * 1e3:.0f} ms, p99 {percentile(times, 0.99) * 1e3:.0f} "
                f"ms, {outcome.hits:.1%} cached, {sum(s.attempts for s in outcome.served)} "
                f"attempts, {outcome.dropped} batches of events dropped"
            )
            if arm == "kv-aware":
                note(
                    f"{outcome.close} of {outcome.reports} predictions within a block, "
                    f"{outcome.evicted} evicted before the engine began"
                )
        if options.bound:
            alone += play_alone(rig, talks, f"{options.seed} {number} alone")
    for arm, made in rounds.items():
        note(describe(arm, [s for one in made for s in one.served]))
    if alone:
        note(describe("one request at a time", alone))
    return rounds


def figures(rounds: dict[str, list[Outcome]], params: dict[str, object]) -> list[Figure]:
    times = {arm: [s.seconds for one in made for s in one.served] for arm, made in rounds.items()}

    def beside(other: str, share: float, target: float) -> Figure:
        mine, bound = (percentile(times[arm], share) for arm in ("kv-aware", other))
        each = [
            percentile([s.seconds for s in a.served], share)
            / percentile([s.seconds for s in b.served], share)
            for a, b in zip(rounds["kv-aware"], rounds[other], strict=True)
        ]
        return Figure(
            run="routing_vllm",
            params={"figure": f"TTFT p{share * 100:.0f}", **params},
            figure=mine * 1e3,
            unit="ms",
            bound=bound * 1e3,
            bound_name=other,
            target=target,
            n=len(times["kv-aware"]),
            spread=f"ratios of {len(each)} rounds {min(each):.2f} to {max(each):.2f}",
        )

    reports = sum(one.reports for one in rounds["kv-aware"])
    close = sum(one.close for one in rounds["kv-aware"])
    predicted = Figure(
        run="routing_vllm",
        params={"figure": "predictions within a block", **params},
        figure=float(close),
        unit="reports",
        bound=float(reports),
        bound_name="all reports",
        target=0.99,
        n=reports,
        spread="all turns",
        at_least=True,
    )
    made = [beside("round-robin", 0.5, 0.6), beside("smg", 0.5, 0.9)]
    return [*made, beside("round-robin", 0.99, 0.8), predicted]


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--talks", type=int, default=14, help="conversations in each round")
    arguments.add_argument("--load", type=float, default=0.6, help="of the engines, at round robin")
    arguments.add_argument("--cache-mib", type=int, default=64, help="of an engine's KV cache")
    arguments.add_argument("--smg", type=Path, default=REPOSITORY / "build" / "smg")
    arguments.add_argument("--faults", action="store_true", help="drop events, restart an engine")
    arguments.add_argument("--bound", action="store_true", help="add one request at a time")
    arguments.add_argument("--niceness", type=int, default=0, help="of vLLM, for a busy machine")
    options = arguments.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="pega-perf-"))
    rng = random.Random(options.seed)
    note(f"seed {options.seed}")
    try:
        rig = Rig(options, directory)
        with rig.serving():
            rounds = measure(rig, rng)
            asked = rig.tokenizer_requests()
    except Exception:
        note(f"the logs are in {directory}")
        raise
    shutil.rmtree(directory, ignore_errors=True)
    note(f"{asked} requests for a tokenizer have reached the engines")
    params = {"seed": options.seed, "load": options.load, "cache_mib": options.cache_mib}
    params["faults"] = options.faults
    held = publish(figures(rounds, params), options.json)
    return 0 if held and asked == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
