"""Four routers that share their placements, beside one, with bursts of requests at one instant.

Eight engines without a model compute one prompt after the other, in real time for each token, and
publish KV events. Users talk to them: each turn has the whole history. Requests come in bursts,
open loop: all of a burst are sent at one instant, each through the next router, as a balancer in
front of several routers does. The arms are one router, the same once more, four with --replicas,
and with --alone four without. They take turns, with equal bursts and with texts of their own, and
with new routers and engines each.

Near the limit of the engines the mean of one arm differs from round to round, and between two runs
of one router: the second arm of one router shows by how much. A ratio is worth as much as the ratio
of these two is close to 1.

The target: the mean time to the first token with four routers that share is within 5 % of that with
one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import math
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

ONE, AGAIN, SHARING, ALONE = "one", "one again", "four sharing", "four alone"
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
    busy: float = 0.0  #: Share of the time in which the engines computed.

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
        count = 1 if arm in (ONE, AGAIN) else ROUTERS
        addresses = [f"127.0.0.1:{free_port()}" for _ in range(count)]
        routers = []
        for address in addresses:
            self._started += 1
            directory = self.directory / f"router-{self._started}"
            urls = [engine.url.removeprefix("http://") for engine in self.engines]
            router = RouterServer(self.binary, directory, [], urls)
            router.arguments += ["--health-interval", "200ms", "--access-log", "false"]
            router.arguments += ["--engine-queue-time", self.queue_time]
            if arm == SHARING:
                router.arguments += ["--replica-listen", address, "--replicas", *addresses]
                router.arguments += ["--peer-secret-file", str(self.secret)]
            routers.append(router)
        try:
            for router in routers:
                router.start()  # From the main thread; it is ready without its engines.
            for router in routers:
                await self._wait_until_ready(router, count if arm == SHARING else 0)
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

    async def post(self, body: bytes) -> tuple[float, int]:
        """Seconds to the first token of the answer, and the answer's cached tokens."""
        number = self._next % len(self._addresses)
        self._next += 1
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
        if "content-length:" in answer_head:
            length = int(answer_head.split("content-length:", 1)[1].split("\r\n", 1)[0])
            answer = await reader.readexactly(length)
            took = time.perf_counter() - began
        else:
            answer = await chunk(reader)
            took = time.perf_counter() - began
            while more := await chunk(reader):
                answer += more
            answer = answer.removeprefix(b"data: ").split(b"\n", 1)[0]
        if status != "200":
            raise AssertionError(f"the router answered {status}: {answer[:200]!r}")
        idle.append(pair)
        return took, json.loads(answer)["usage"]["prompt_tokens_details"]["cached_tokens"]

    def close(self) -> None:
        for idle in self._idle:
            for _, writer in idle:
                writer.close()


async def chunk(reader: asyncio.StreamReader) -> bytes:
    """The next chunk of a body; empty at its end."""
    size = int(await reader.readline(), 16)
    return (await reader.readexactly(size + 2))[:-2]


def text(name: str, size: int) -> str:
    """A text whose beginnings are those of the same name's shorter ones."""
    rng = random.Random(name)
    words = [f"{rng.randrange(1 << 28):07x} " for _ in range(size // 8 + 1)]
    return "".join(words)[:size]


def bodies_of(bursts: Sequence[Burst], name: str, streams: bool) -> dict[Sent, bytes]:
    """The bodies of all requests, made before the first of them: they leave at one instant."""
    sizes: dict[int, int] = {}
    for burst in bursts:
        for one in burst.requests:
            sizes[one.conversation] = max(one.size, sizes.get(one.conversation, 0))
    texts = {number: text(f"{name} {number}", size) for number, size in sizes.items()}
    same = {"model": "m", "max_tokens": 1, "stream": streams}
    return {
        one: json.dumps({**same, "prompt": texts[one.conversation][: one.size]}).encode()
        for burst in bursts
        for one in burst.requests
    }


async def play(
    routers: Sequence[RouterServer],
    bursts: Sequence[Burst],
    bodies: dict[Sent, bytes],
    warm_up_s: float,
) -> Outcome:
    client, outcome = Client(routers), Outcome()

    async def send(one: Sent, counts: bool) -> None:
        took, cached = await client.post(bodies[one])
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


def ratios(arm: str, rounds: dict[str, list[Outcome]]) -> list[float]:
    """The mean of an arm in each round, as a share of those of one router."""
    if arm == AGAIN:
        return [b.mean / a.mean for a, b in zip(rounds[ONE], rounds[AGAIN], strict=True)]
    ones = [statistics.fmean((a.mean, b.mean)) for a, b in zip(*both(rounds), strict=True)]
    return [made.mean / one for made, one in zip(rounds[arm], ones, strict=True)]


def both(rounds: dict[str, list[Outcome]]) -> tuple[list[Outcome], list[Outcome]]:
    return rounds[ONE], rounds[AGAIN]


def spread(values: Sequence[float]) -> str:
    """The values, their geometric mean, and its standard error where there are several."""
    logs = [math.log(value) for value in values]
    words = f"rounds {' '.join(f'{value:.3f}' for value in values)}"
    words += f", geometric mean {math.exp(statistics.fmean(logs)):.3f}"
    if len(logs) > 1:
        words += f" +- {statistics.stdev(logs) / math.sqrt(len(logs)):.3f}"
    return words


def figure(arm: str, rounds: dict[str, list[Outcome]], params: dict[str, object]) -> Figure:
    ones = [one.mean for made in both(rounds) for one in made]
    return Figure(
        run="router_replicas",
        params={"arm": arm, **params},
        figure=statistics.fmean(one.mean for one in rounds[arm]) * 1e3,
        unit="ms",
        bound=statistics.fmean(ones) * 1e3,
        bound_name="one router",
        target=1.05,
        n=len(rounds[arm]),
        spread=f"{spread(ratios(arm, rounds))}; one router twice: {spread(ratios(AGAIN, rounds))}",
    )


def report(rounds: dict[str, list[Outcome]]) -> None:
    for arm, made in rounds.items():
        seconds = sorted(took for one in made for took in one.seconds)
        hits = sum(one.cached for one in made) / sum(one.tokens for one in made)
        note(
            f"{arm}: {len(seconds)} requests, mean {statistics.fmean(seconds) * 1e3:.1f} ms, p50 "
            f"{statistics.median(seconds) * 1e3:.1f}, p99 "
            f"{seconds[int(0.99 * len(seconds))] * 1e3:.1f} ms, {100 * hits:.1f} % cached, engines "
            f"computed {statistics.fmean(one.busy for one in made):.0%} of the time"
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
    binary = options.build_dir / "router" / "pegaflow-router"
    arms = [ONE, AGAIN, SHARING, *([ALONE] if options.alone else [])]
    rounds: dict[str, list[Outcome]] = {arm: [] for arm in arms}
    for number in range(options.rounds):
        seed = options.seed + number
        rng = random.Random(seed)
        bursts = draw(rng, options.seconds, options.rate)
        for arm in rng.sample(arms, len(arms)):
            name = f"{seed}-{arm.replace(' ', '-')}"
            own = directory / name
            own.mkdir()
            bodies = bodies_of(bursts, name, not options.whole)
            async with started(options.engines, options.tokens_per_second) as engines:
                fleet = Fleet(binary, own, engines, options.engine_queue_time)
                async with fleet.routers(arm) as routers:
                    outcome = await play(routers, bursts, bodies, options.warm_up)
                computed = sum(engine.busy_s for engine in engines)
            outcome.busy = computed / len(engines) / options.seconds
            rounds[arm].append(outcome)
            note(
                f"seed {seed}, {arm}: mean {outcome.mean * 1e3:.1f} ms of "
                f"{len(outcome.seconds)}; engines computed {outcome.busy:.0%} of the time"
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
    arguments.add_argument("--whole", action="store_true", help="answers are not streamed")
    arguments.add_argument(
        "--alone", action="store_true", help="also four routers that do not share their placements"
    )
    options = arguments.parse_args()
    note(f"seed {options.seed}: --seed SEED --rounds 1 repeats a round")
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
        "streams": not options.whole,
    }
    # Without sharing there is no target: it shows what sharing is worth.
    if options.alone:
        note(figure(ALONE, rounds, params).line())
    return 0 if publish([figure(SHARING, rounds, params)], options.json) else 1


if __name__ == "__main__":
    sys.exit(main())
