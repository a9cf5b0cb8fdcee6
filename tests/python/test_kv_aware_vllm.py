"""The policy kv-aware in front of real vLLMs: two with KV events, and one without."""

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
from tests.support.publishing_vllm import PublishingVllm
from tests.support.vllm_server import (
    MODEL_NAME,
    PegaServer,
    RouterServer,
    VllmOptions,
    VllmServer,
    ensure_model,
)

BLOCK = 32
SYSTEM = 320
CONVERSATIONS = 4
TURNS = 10
BUILD = Path(os.environ["PEGA_BUILD_DIR"])


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

    def index(self) -> RouterServer:
        """A pegaflow-index of the engines."""
        index = RouterServer(
            BUILD / "router" / "pegaflow-index",
            self.directory,
            [],
            [engine.http for engine in self.engines],
        )
        index.arguments = ["--engines" if w == "--decode" else w for w in index.arguments]
        index.arguments += ["--health-interval", "200ms"]
        return index

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
    answer = json.loads(raw_answer(address, prompt, tokens))
    details = answer["usage"]["prompt_tokens_details"]
    return Answer(answer["choices"][0]["token_ids"], details["cached_tokens"] if details else 0)


def raw_answer(address: str, prompt: list[int], tokens: int) -> bytes:
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
    return text


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
    return close, int(metrics.total(name))


def paths_asked(engines: list[PublishingVllm]) -> collections.Counter[str]:
    """Requests that the engines have received, by their path."""
    asked: collections.Counter[str] = collections.Counter()
    for engine in engines:
        for name, labels, value in engine.metrics().items("http_requests_total"):
            if name == "http_requests_total":
                asked[labels["handler"]] += int(value)
    return asked


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


def known_blocks(router: RouterServer) -> int:
    return int(router.metrics().total("pegaflow_router_kv_blocks"))


def token_prompts(router: RouterServer, keys: str) -> int:
    name = "pegaflow_router_kv_token_prompts_total"
    return int(router.metrics().total(name, keys=keys))


def learned(router: RouterServer) -> int:
    return int(router.metrics().total("pegaflow_router_kv_text_learned_total"))


def trusted_pools(router: RouterServer) -> int:
    return sum(pool["trusted"] for pool in get(router.http, "/health")["kv_aware"]["pools"])


def test_an_engine_without_events_is_known_by_its_server(tmp_path: Path, short_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret of routers, for tests\n")
    secret.chmod(0o600)
    with PegaServer(
        BUILD / "server" / "pegaflow-server",
        short_path / "pega",
        "256mb",
        ["--peer-secret-file", str(secret)],
    ) as pega:
        options = VllmOptions(
            ensure_model(SMALL),
            connector=pega.address,
            extra_config={"pegaflow.load_policy": "always"},
            kv_cache_bytes=1 << 28,
            block_size=BLOCK,
            dtype="float32",
            arguments=("--enable-prompt-tokens-details",),
            python_path=(BUILD / "python",),
        )
        with VllmServer(options, tmp_path / "engine") as engine:
            router = RouterServer(BUILD / "router" / "pegaflow-router", tmp_path, [], [engine.http])
            router.arguments += ["--health-interval", "200ms", "--peer-secret-file", str(secret)]
            router.arguments += ["--servers", f"http://{pega.http}"]
            with router:
                check_turns_by_the_pool(router, engine)


def check_turns_by_the_pool(router: RouterServer, engine: VllmServer) -> None:
    seed = int(os.environ["PEGA_TEST_SEED"]) + 3
    talk = Conversations(seed, 1)
    wait_until("the pool is listed", lambda: trusted_pools(router) == 1, 60)
    prompt = talk.histories[0]
    # Nothing of what the router asked for is in the answer.
    text = raw_answer(router.http, prompt, 16)
    assert not json.loads(text).get("kv_transfer_params"), text
    assert b"pf1:" not in text and b"pegaflow" not in text, text
    wait_until("the prompt was learned", lambda: learned(router) == 1, 10)
    (source,) = get(router.http, "/health")["kv_aware"]["sources"]
    assert (source["events"], source["known_by"]) == ("no_events", "chains")
    for turn in range(3):
        # What is in the GPU is not known here, and what is in the pool is loaded from there.
        connection = http.client.HTTPConnection(engine.http, timeout=30)
        connection.request("POST", "/reset_prefix_cache")
        assert connection.getresponse().status == 200
        connection.close()
        before = learned(router)
        answer, computed = talk.turn(router.http, 0)
        wait_until("the prompt was learned", lambda b=before: learned(router) > b, 10)
        known = len(prompt) if turn == 0 else computed
        assert answer.cached >= known // BLOCK * BLOCK - BLOCK, (seed, turn, answer.cached, known)
    close, all_reports = reports(router)
    assert all_reports >= 3, seed
    assert close >= all_reports - 1, (seed, close, all_reports)
    text = str(router.metrics().total("pegaflow_router_kv_pool_chains_total"))
    assert float(text) >= 4


def test_each_turn_goes_where_its_history_is_cached(fleet: Fleet) -> None:
    router = fleet.router()
    seed = int(os.environ["PEGA_TEST_SEED"])
    talk = Conversations(seed, CONVERSATIONS)
    with router:
        wait_for_trust(router, 2)
        late: collections.Counter[str] = collections.Counter()
        first = (0, 0)
        for turn in range(TURNS):
            if turn == 1:
                first = reports(router)
            for number in range(CONVERSATIONS):
                before = known_blocks(router)
                answer, computed = talk.turn(router.http, number)
                wait_until("its blocks are known", lambda b=before: known_blocks(router) > b, 10)
                if turn == 0:
                    continue
                # All full blocks of the history, the last turn's answer included.
                late["turns"] += 1
                late["cached"] += answer.cached >= computed // BLOCK * BLOCK - BLOCK
        assert late["cached"] == late["turns"], (seed, late)
        # The first prompt's blocks tell how the engine hashes: all others are computed.
        hashes = {s["hashes"] for s in get(router.http, "/health")["kv_aware"]["sources"]}
        assert any(each.startswith("sha256") for each in hashes), hashes
        assert token_prompts(router, "computed") >= CONVERSATIONS * TURNS - 1
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
        later = all_reports - first[1]
        assert later >= CONVERSATIONS * (TURNS - 1)
        assert close - first[0] >= 0.99 * later, (seed, close, all_reports, first, apart)
        asked = paths_asked(fleet.engines)
        assert asked["/v1/completions"] >= CONVERSATIONS * TURNS, asked
        assert not [path for path in asked if "render" in path or "tokenize" in path], asked


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


def test_the_score_of_token_ids_is_what_the_engine_reports(fleet: Fleet) -> None:
    """pegaflow-index has seen neither the prompts nor a tokenizer."""
    seed = int(os.environ["PEGA_TEST_SEED"]) + 3
    talk = Conversations(seed, 2)
    index = fleet.index()
    with index:
        wait_for_trust(index, 2)
        for engine, history in zip(fleet.engines, talk.histories, strict=True):
            complete(engine.http, history)
            wait_until(
                "the prompt is known",
                lambda h=history: scores(index, h)[0]["gpu"] >= (len(h) - 1) // BLOCK,
                10,
            )
            prompt = history + talk.tokens(3 * BLOCK)
            best = scores(index, prompt)[0]
            assert best["engine"] == f"http://{engine.http}", (seed, best)
            reported = complete(engine.http, prompt).cached
            assert best["gpu"] * BLOCK == reported, (seed, best, reported)


def scores(index: RouterServer, prompt: list[int]) -> Any:
    connection = http.client.HTTPConnection(index.http, timeout=30)
    try:
        body = json.dumps({"model": MODEL_NAME, "token_ids": prompt})
        connection.request("POST", "/score", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
        assert response.status == 200, answer
        return json.loads(answer)["engines"]
    finally:
        connection.close()


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
