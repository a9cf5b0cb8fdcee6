"""The policy kv-aware in front of two real vLLMs that publish their KV events."""

from __future__ import annotations

import collections
import dataclasses
import http.client
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from demo.stage import SMALL, wait_until
from tests.support.vllm_server import (
    MODEL_NAME,
    RouterServer,
    VllmOptions,
    VllmServer,
    ensure_model,
    free_port,
)

BLOCK = 32
SYSTEM = 320
CONVERSATIONS = 4
TURNS = 6
BUILD = Path(os.environ["PEGA_BUILD_DIR"])


class PublishingVllm(VllmServer):
    """A vLLM with KV events, whose addresses stay the same when it starts again."""

    def __init__(self, options: VllmOptions, directory: Path) -> None:
        self.events, self.replay = free_port(), free_port()
        config = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.events}",
            "replay_endpoint": f"tcp://*:{self.replay}",
        }
        arguments = ("--kv-events-config", json.dumps(config), "--enable-prompt-tokens-details")
        super().__init__(dataclasses.replace(options, arguments=arguments), directory)

    def start_again(self) -> None:
        """Starts it at the address that it had."""
        port = self._port
        self._make_temporary()
        self._port = port
        super(VllmServer, self).start()


@dataclasses.dataclass
class Answer:
    tokens: list[int]
    cached: int


class Fleet:
    def __init__(self, directory: Path, count: int = 2) -> None:
        self.options = VllmOptions(
            ensure_model(SMALL), kv_cache_bytes=1 << 28, block_size=BLOCK, dtype="float32"
        )
        self.engines = [
            PublishingVllm(self.options, directory / f"engine-{number}") for number in range(count)
        ]
        self.directory = directory
        self.secret = directory / "secret"

    def router(self, *arguments: str) -> RouterServer:
        router = RouterServer(
            BUILD / "router" / "pegaflow-router",
            self.directory,
            [],
            [engine.http for engine in self.engines],
        )
        self.secret.write_text("a secret of routers, for tests\n")
        self.secret.chmod(0o600)
        router.arguments += ["--health-interval", "200ms", "--peer-secret-file", str(self.secret)]
        router.arguments += arguments
        return router

    def routes(self, router: RouterServer) -> Any:
        """The router's last decisions, by the command that operators use."""
        command = [sys.executable, "-m", "pegaflow", "routes", "--json"]
        command += ["--router", f"http://{router.http}", "--secret-file", str(self.secret)]
        env = os.environ | {"PYTHONPATH": str(BUILD / "python")}
        shown = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        return json.loads(shown.stdout)["routes"]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("fleet"))
    try:
        for engine in fleet.engines:
            engine.start()
        yield fleet
    finally:
        for engine in fleet.engines:
            engine.stop()


def get(address: str, path: str) -> Any:
    connection = http.client.HTTPConnection(address, timeout=30)
    try:
        connection.request("GET", path)
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def complete(address: str, prompt: list[int], tokens: int = 16) -> Answer:
    body = {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    connection = http.client.HTTPConnection(address, timeout=120)
    try:
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        text = response.read()
        assert response.status == 200, text
    finally:
        connection.close()
    answer = json.loads(text)
    details = answer["usage"]["prompt_tokens_details"]
    return Answer(answer["choices"][0]["token_ids"], details["cached_tokens"] if details else 0)


def states(router: RouterServer) -> list[str]:
    return [source["events"] for source in get(router.http, "/health")["kv_aware"]["sources"]]


def wait_for_trust(router: RouterServer, count: int) -> None:
    wait_until(
        f"{count} streams are trusted",
        lambda: sum(state in ("exact", "partial") for state in states(router)) == count,
        30,
    )


def reports(router: RouterServer) -> tuple[int, int]:
    """Reports of cached tokens: within a block of the prediction, and all."""
    metrics = router.metrics()
    name = "pegaflow_router_kv_reports_total"
    close = int(metrics.total(name, within_a_block="yes"))
    return close, close + int(metrics.total(name, within_a_block="no"))


class Conversations:
    """Conversations that take turns; each turn has the whole history."""

    def __init__(self, seed: int, count: int) -> None:
        self.random = random.Random(seed)
        self.system = self.tokens(SYSTEM)
        self.histories = [self.system + self.tokens(400) for _ in range(count)]

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(3, SMALL.vocabulary) for _ in range(count)]

    def turn(self, address: str, number: int) -> tuple[Answer, int]:
        """The answer to the next turn, and the tokens of the history that had been computed."""
        prompt = self.histories[number]
        answer = complete(address, prompt)
        self.histories[number] = prompt + answer.tokens + self.tokens(40)
        return answer, len(prompt) - 40


def learned(router: RouterServer) -> int:
    return int(router.metrics().total("pegaflow_router_kv_text_learned_total"))


def test_each_turn_goes_where_its_history_is_cached(fleet: Fleet) -> None:
    router = fleet.router()
    seed = int(os.environ["PEGA_TEST_SEED"])
    talk = Conversations(seed, CONVERSATIONS)
    with router:
        wait_for_trust(router, 2)
        late: collections.Counter[str] = collections.Counter()
        for turn in range(TURNS):
            for number in range(CONVERSATIONS):
                before = learned(router)
                answer, computed = talk.turn(router.http, number)
                wait_until("the prompt was learned", lambda b=before: learned(router) > b, 10)
                if turn == 0:
                    continue
                # All full blocks of the history, the last turn's answer included.
                late["turns"] += 1
                late["cached"] += answer.cached >= computed // BLOCK * BLOCK - BLOCK
        assert late["cached"] == late["turns"], (seed, late)
        close, all_reports = reports(router)
        assert all_reports >= CONVERSATIONS * (TURNS - 1)
        routes = fleet.routes(router)
        apart = [
            (route["predicted_cached_tokens"], route["outcome"]["cached_tokens"])
            for route in routes
            if route["outcome"]["cached_tokens"] is not None
            and abs(route["predicted_cached_tokens"] - route["outcome"]["cached_tokens"]) > BLOCK
        ]
        # The first turn of each conversation may be a surprise, since its system prompt is cached.
        assert close >= all_reports - CONVERSATIONS, (seed, close, all_reports, apart)


def test_an_engine_that_starts_again_has_no_credit_for_what_it_had(fleet: Fleet) -> None:
    router = fleet.router()
    seed = int(os.environ["PEGA_TEST_SEED"]) + 1
    talk = Conversations(seed, 2)
    with router:
        wait_for_trust(router, 2)
        for _ in range(2):
            for number in range(2):
                talk.turn(router.http, number)
        blocks = [s["blocks"] for s in get(router.http, "/health")["kv_aware"]["sources"]]
        assert sum(blocks) > 0
        first = fleet.engines[0]
        first.kill()
        first.start_again()
        wait_until(
            "its blocks are forgotten",
            lambda: blocks_of(router, first.http) == 0,
            30,
        )
        wait_for_trust(router, 2)
        for number in range(2):
            talk.turn(router.http, number)
        close, all_reports = reports(router)
        assert all_reports - close <= 3, (seed, close, all_reports)


def blocks_of(router: RouterServer, engine: str) -> int:
    sources = get(router.http, "/health")["kv_aware"]["sources"]
    return next(s["blocks"] for s in sources if s["url"] == f"http://{engine}")


def test_an_emptied_cache_is_known_with_the_next_request(fleet: Fleet) -> None:
    router = fleet.router()
    seed = int(os.environ["PEGA_TEST_SEED"]) + 2
    talk = Conversations(seed, 1)
    with router:
        wait_for_trust(router, 2)
        talk.turn(router.http, 0)
        talk.turn(router.http, 0)
        for engine in fleet.engines:
            connection = http.client.HTTPConnection(engine.http, timeout=30)
            connection.request("POST", "/reset_prefix_cache")
            assert connection.getresponse().status == 200
            connection.close()
        # vLLM announces it with its next step, so one prediction is wrong.
        talk.turn(router.http, 0)
        before = reports(router)
        for _ in range(3):
            answer, computed = talk.turn(router.http, 0)
            assert answer.cached >= computed // BLOCK * BLOCK - BLOCK, seed
        after = reports(router)
        assert after[0] - before[0] == after[1] - before[1] == 3
