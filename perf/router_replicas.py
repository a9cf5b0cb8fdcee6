"""Four routers that share their placements, beside one, with bursts of requests at one instant.

Eight engines without a model compute one prompt after the other, in real time for each token, and
publish KV events. Users talk to them: each turn has the whole history. Requests come in bursts,
open loop: all of a burst are sent at one instant, each through the next router, as a balancer in
front of several routers does. The arms are one router, four with --replicas and four without. They
take turns, with equal bursts and with texts of their own, and with new routers each.

The target: the mean time to the first token with four routers that share is within 5 % of that with
one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from perf.support.figure import Figure, note, publish
from perf.support.serial_engine import SerialEngine
from perf.support.servers import parser
from tests.support.vllm_server import RouterServer, free_port

ARMS = ("one", "four sharing", "four alone")
ROUTERS = 4
#: Bytes of a conversation's first prompt, and of each later turn; 4 are a token.
FIRST = (8_000, 24_000)
TURN = (1_000, 3_000)
#: Share of requests that begin a conversation.
NEW = 0.3
#: Requests of a burst.
BURST = (4, 12)


@dataclasses.dataclass(frozen=True)
class Sent:
    """One request of a burst: the conversation's text up to a length."""

    conversation: int
    size: int


@dataclasses.dataclass(frozen=True)
class Burst:
    at: float  #: Seconds from the beginning.
    requests: tuple[Sent, ...]


@dataclasses.dataclass
class Outcome:
    """Of all requests after the warm-up of one arm in one round."""

    seconds: list[float] = dataclasses.field(default_factory=list)  #: To the first token.
    cached: int = 0  #: Tokens.
    tokens: int = 0

    @property
    def mean(self) -> float:
        return statistics.fmean(self.seconds)


def draw(rng: random.Random, length_s: float, requests_per_second: float) -> list[Burst]:
    """Bursts whose distances are exponential; a conversation has one request in a burst."""
    sizes: list[int] = []
    bursts: list[Burst] = []
    now = 0.0
    while True:
        now += rng.expovariate(requests_per_second / statistics.fmean(BURST))
        if now > length_s:
            return bursts
        requests = []
        idle = list(range(len(sizes)))
        for _ in range(rng.randint(*BURST)):
            if not idle or rng.random() < NEW:
                requests.append(Sent(len(sizes), rng.randint(*FIRST)))
                sizes.append(requests[-1].size)
            else:
                # The last conversations go on, and old ones end.
                one = idle.pop(-1 - min(len(idle) - 1, int(rng.expovariate(1 / 8))))
                sizes[one] += rng.randint(*TURN)
                requests.append(Sent(one, sizes[one]))
        bursts.append(Burst(now, tuple(requests)))


class Fleet:
    """The engines, and routers in front of them that change with each arm."""

    def __init__(
        self, binary: Path, directory: Path, engines: Sequence[SerialEngine], queue_time: str
    ) -> None:
        self.binary = binary
        self.queue_time = queue_time
        self.directory = directory
        self.engines = engines
        self.secret = directory / "secret"
        self.secret.write_text("a secret of routers, for measurements\n")
        self.secret.chmod(0o600)
        self._started = 0

    @contextlib.asynccontextmanager
    async def routers(self, arm: str) -> AsyncIterator[list[RouterServer]]:
        count = 1 if arm == "one" else ROUTERS
        addresses = [f"127.0.0.1:{free_port()}" for _ in range(count)]
        routers = []
        for address in addresses:
            self._started += 1
            directory = self.directory / f"router-{self._started}"
            urls = [engine.url.removeprefix("http://") for engine in self.engines]
            router = RouterServer(self.binary, directory, [], urls)
            router.arguments += ["--health-interval", "200ms", "--access-log", "false"]
            router.arguments += ["--engine-queue-time", self.queue_time]
            if arm == "four sharing":
                router.arguments += ["--replica-listen", address, "--replicas", *addresses]
                router.arguments += ["--peer-secret-file", str(self.secret)]
            routers.append(router)
        try:
            for router in routers:
                router.start()  # From the main thread; it is ready without its engines.
            for router in routers:
                await self._wait_until_ready(router, count if arm == "four sharing" else 0)
            yield routers
        finally:
            for router in routers:
                router.stop()

    async def _wait_until_ready(self, router: RouterServer, replicas: int) -> None:
        end = time.monotonic() + 60
        while True:
            metrics = await asyncio.to_thread(router.metrics)
            name = "pegaflow_router_kv_source"
            trusted = sum(metrics.total(name, state=s) for s in ("exact", "partial"))
            live = metrics.total("pegaflow_router_replica", state="live") if replicas else 0
            if trusted == len(self.engines) and live == max(0, replicas - 1):
                return
            if time.monotonic() > end:
                raise TimeoutError(
                    f"after 60 s the router knows {trusted:.0f} of {len(self.engines)} engines and "
                    f"{live:.0f} other routers"
                )
            await asyncio.sleep(0.05)


class Client:
    """Sends requests over connections that it keeps, some for each router."""

    def __init__(self, routers: Sequence[RouterServer]) -> None:
        self._addresses = [router.http.rsplit(":", 1) for router in routers]
        self._idle: list[list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]
        self._idle = [[] for _ in routers]
        self._next = 0

    async def post(self, prompt: str) -> tuple[float, int]:
        """Seconds to the answer, and its cached tokens."""
        number = self._next % len(self._addresses)
        self._next += 1
        body = json.dumps({"model": "m", "max_tokens": 1, "prompt": prompt}).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode()
        began = time.perf_counter()
        host, port = self._addresses[number]
        idle = self._idle[number]
        pair = idle.pop() if idle else await asyncio.open_connection(host, int(port))
        reader, writer = pair
        writer.write(head + body)
        answer_head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        status = answer_head.split(" ", 2)[1]
        length = int(answer_head.split("content-length:", 1)[1].split("\r\n", 1)[0])
        answer = await reader.readexactly(length)
        took = time.perf_counter() - began
        if status != "200":
            raise AssertionError(f"the router answered {status}: {answer[:200]!r}")
        idle.append(pair)
        return took, json.loads(answer)["usage"]["prompt_tokens_details"]["cached_tokens"]

    def close(self) -> None:
        for idle in self._idle:
            for _, writer in idle:
                writer.close()


def text(name: str, size: int) -> str:
    """A text whose beginnings are those of the same name's shorter ones."""
    rng = random.Random(name)
    words = [f"{rng.randrange(1 << 28):07x} " for _ in range(size // 8 + 1)]
    return "".join(words)[:size]


async def play(
    routers: Sequence[RouterServer], bursts: Sequence[Burst], name: str, warm_up_s: float
) -> Outcome:
    client, outcome = Client(routers), Outcome()
    sizes: dict[int, int] = {}
    for burst in bursts:
        for one in burst.requests:
            sizes[one.conversation] = max(one.size, sizes.get(one.conversation, 0))
    texts = {number: text(f"{name} {number}", size) for number, size in sizes.items()}

    async def send(one: Sent, counts: bool) -> None:
        took, cached = await client.post(texts[one.conversation][: one.size])
        if counts:
            outcome.seconds.append(took)
            outcome.cached += cached
            outcome.tokens += one.size // 4

    began = time.perf_counter()
    tasks = []
    for burst in bursts:
        await asyncio.sleep(max(0.0, began + burst.at - time.perf_counter()))
        counts = burst.at >= warm_up_s
        tasks += [asyncio.create_task(send(one, counts)) for one in burst.requests]
    await asyncio.gather(*tasks)
    client.close()
    return outcome


def figure(arm: str, rounds: dict[str, list[Outcome]], params: dict[str, object]) -> Figure:
    means = {name: [one.mean for one in made] for name, made in rounds.items()}
    ratios = [a / b for a, b in zip(means[arm], means["one"], strict=True)]
    return Figure(
        run="router_replicas",
        params={"arm": arm, **params},
        figure=statistics.fmean(means[arm]) * 1e3,
        unit="ms",
        bound=statistics.fmean(means["one"]) * 1e3,
        bound_name="one router",
        target=1.05,
        n=len(ratios),
        spread=f"ratios of the rounds {min(ratios):.3f} to {max(ratios):.3f}",
    )


def report(rounds: dict[str, list[Outcome]]) -> None:
    for arm, made in rounds.items():
        seconds = sorted(took for one in made for took in one.seconds)
        hits = sum(one.cached for one in made) / sum(one.tokens for one in made)
        note(
            f"{arm}: {len(seconds)} requests, mean {statistics.fmean(seconds) * 1e3:.1f} ms, p50 "
            f"{statistics.median(seconds) * 1e3:.1f}, p99 "
            f"{seconds[int(0.99 * len(seconds))] * 1e3:.1f} ms, {100 * hits:.1f} % cached"
        )


@contextlib.asynccontextmanager
async def started(count: int, tokens_per_second: float) -> AsyncIterator[list[SerialEngine]]:
    """Engines with empty caches."""
    async with contextlib.AsyncExitStack() as stack:
        engines = []
        for _ in range(count):
            engines.append(await SerialEngine(tokens_per_second).start())
            stack.push_async_callback(engines[-1].stop)
        yield engines


async def measure(options: argparse.Namespace, directory: Path) -> dict[str, list[Outcome]]:
    rng = random.Random(options.seed)
    binary = options.build_dir / "router" / "pegaflow-router"
    queue_time = options.engine_queue_time
    rounds: dict[str, list[Outcome]] = {arm: [] for arm in ARMS}
    for number in range(1, options.rounds + 1):
        bursts = draw(rng, options.seconds, options.rate)
        for arm in rng.sample(ARMS, len(ARMS)):
            name = f"{number}-{arm.replace(' ', '-')}"
            own = directory / name
            own.mkdir()
            async with started(options.engines, options.tokens_per_second) as engines:
                async with Fleet(binary, own, engines, queue_time).routers(arm) as routers:
                    outcome = await play(routers, bursts, f"{options.seed} {name}", options.warm_up)
                busy = sum(engine.busy_s for engine in engines) / len(engines)
            rounds[arm].append(outcome)
            note(
                f"round {number}, {arm}: mean {outcome.mean * 1e3:.1f} ms of "
                f"{len(outcome.seconds)}; engines computed {busy / options.seconds:.0%} of the time"
            )
    return rounds


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--seconds", type=float, default=40.0, help="of each arm in each round")
    arguments.add_argument("--warm-up", type=float, default=8.0, help="seconds that do not count")
    arguments.add_argument("--engines", type=int, default=8)
    arguments.add_argument("--tokens-per-second", type=float, default=5000.0, help="of an engine")
    arguments.add_argument("--rate", type=float, default=14.0, help="requests a second")
    arguments.add_argument(
        "--engine-queue-time",
        default="500ms",
        help="of the routers: requests wait in a router while all engines have longer queues",
    )
    options = arguments.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="pega-perf-"))
    try:
        rounds = asyncio.run(measure(options, directory))
    except Exception:
        note(f"the logs are in {directory}")
        raise
    shutil.rmtree(directory, ignore_errors=True)
    report(rounds)
    params = {
        "seed": options.seed,
        "engines": options.engines,
        "requests_per_second": options.rate,
        "tokens_per_second": options.tokens_per_second,
        "engine_queue_time": options.engine_queue_time,
    }
    made = [figure(arm, rounds, params) for arm in ARMS[1:]]
    # Without sharing there is no target: it shows what sharing is worth.
    note(made[1].line())
    return 0 if publish(made[:1], options.json) else 1


if __name__ == "__main__":
    sys.exit(main())
