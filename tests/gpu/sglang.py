#!/usr/bin/env python3
"""A real SGLang on a GPU while its cache is emptied, killed, stopped and damaged, and its figures.

    PYTHONPATH=REPOSITORY:PACKAGE python3 -m tests.gpu.sglang --server FILE --model DIR --out DIR

Answers depend on the KV cache (tools/vllm-gpu/plugin): a loaded prefix agrees with a hit on the
GPU in every token, or is wrong. The model is tools/vllm-gpu/make_model.py's. `--measure` compares
the time to the first token of each route with SGLang's own. Exits with 0 if all checks passed.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.gpu.scenarios import PATIENCE_S, PoolView
from tests.gpu.vllm import play
from tests.support.child_process import ChildProcess, started_together
from tests.support.prometheus import read_metrics
from tests.support.vllm_server import REPOSITORY, PegaServer, RouterServer, free_port
from tests.support.waiting import wait_until

PROMPTS, LENGTH, PAGE = 6, 4040, 64
TOKENS = 16
#: Weights are the plugin's, so they have this name.
WEIGHTS = {"pegaflow.weights_id": "pegaflow_seeded"}


class GpuSglang(ChildProcess):
    """`sglang.launch_server` with random weights; the route is one of ``ROUTES``."""

    start_timeout_s = 420.0

    def __init__(
        self, name: str, route: str, server: PegaServer | None, options: argparse.Namespace
    ) -> None:
        plugin = REPOSITORY / "tools" / "vllm-gpu" / "plugin"
        self.store = options.out / f"store-{name}"
        super().__init__(
            f"sglang {name}",
            options.out / f"sglang-{name}.log",
            {
                "PYTHONPATH": f"{plugin}:{os.environ.get('PYTHONPATH', '')}",
                "HF_HUB_OFFLINE": "1",
                "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(self.store),
            },
        )
        self.route = route
        self._options = options
        self._server = server
        self.port, self.event_port, self.replay_port = (free_port() for _ in range(3))

    def _cache(self) -> list[str]:
        ours = WEIGHTS | self._options.extra
        if self._server is not None:
            ours["pegaflow.host"] = self._server.address
        hicache = [
            "--enable-hierarchical-cache",
            *("--hicache-size", str(self._options.host_gb)),
            *("--hicache-mem-layout", "page_first", "--hicache-write-policy", "write_through"),
        ]
        if self.route == "linker":
            config = {
                "linker": "PegaLinker",
                "linker_module_path": "pegaflow.sglang",
                "linker_extra_config": ours,
            }
            return [
                "--enable-unified-cache-external-linker",
                *("--unified-cache-external-linker-backend", "dynamic"),
                *("--unified-cache-external-linker-config", json.dumps(config)),
            ]
        if self.route == "hicache":
            config = {
                "backend_name": "pegaflow",
                "module_path": "pegaflow.sglang",
                "class_name": "PegaHiCache",
                "interface_v1": 1,
            }
            return [
                *hicache,
                *("--hicache-storage-backend", "dynamic"),
                *("--hicache-storage-backend-extra-config", json.dumps(config | ours)),
            ]
        if self.route in ("file", "mooncake"):
            return [*hicache, "--hicache-storage-backend", self.route]
        return []

    def _events(self) -> dict[str, str]:
        """Where it publishes what its cache on the GPU has."""
        return {"publisher": "zmq", "endpoint": f"tcp://*:{self.event_port}"} | {
            "replay_endpoint": f"tcp://*:{self.replay_port}"
        }

    def command(self) -> list[str]:
        return [
            *(sys.executable, "-m", "sglang.launch_server"),
            *("--model-path", str(self._options.model), "--load-format", "dummy"),
            *("--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", "model"),
            *("--attention-backend", "triton", "--sampling-backend", "pytorch"),
            *("--grammar-backend", "none", "--page-size", str(PAGE), "--enable-cache-report"),
            *("--mem-fraction-static", str(self._options.fraction)),
            *("--max-total-tokens", str(self._options.gpu_tokens)),
            *("--tp-size", str(self._options.tensor_parallel), "--random-seed", "1"),
            *self._cache(),
            *("--kv-events-config", json.dumps(self._events())),
            *self._options.sglang_arguments.split(),
        ]

    def is_ready(self) -> bool:
        with contextlib.suppress(OSError):
            return self.call("GET", "/health_generate")[0] == 200
        return False

    def call(self, method: str, path: str) -> tuple[int, bytes]:
        return call(f"127.0.0.1:{self.port}", method, path)

    def ask(self, prompt: Sequence[int], tokens: int = TOKENS) -> Answer:
        """Streams, so that the first token has a time."""
        body = {
            "input_ids": list(prompt),
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
            "stream": True,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        with contextlib.closing(connection):
            began = time.perf_counter()
            connection.request(
                "POST", "/generate", json.dumps(body), {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            first, last = 0.0, {}
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                first = first or time.perf_counter() - began
                last = json.loads(line[len(b"data: ") :])
        return Answer(response.status, first, last)

    def flush(self) -> None:
        """Empties SGLang's own caches, as soon as nothing is in flight."""
        wait_until(
            lambda: self.call("POST", "/flush_cache")[0] == 200, "the cache is not emptied", 30.0
        )


class Answer:
    """One streamed response of /generate."""

    def __init__(self, status: int, ttft_s: float, last: dict[str, Any]) -> None:
        self.status, self.ttft_s = status, ttft_s
        meta = last.get("meta_info", {})
        self.tokens: list[int] = last.get("output_ids") or []
        self.cached = meta.get("cached_tokens", 0)
        reason = meta.get("finish_reason") or {}
        self.error = "" if reason.get("type") == "length" else f"{status} {str(last)[:300]}"


class Session:
    """One engine with a route, and its server; each scenario returns its observations."""

    def __init__(
        self,
        engine: GpuSglang,
        server: PegaServer,
        options: argparse.Namespace,
        plain: list[list[int]],
    ) -> None:
        self.engine, self.server = engine, server
        self._options = options
        self.chance = random.Random(options.seed)
        self.prompts = prompts_of(options.seed)
        self.plain = plain
        self.hits: list[list[int]] = []

    def loaded_bytes(self) -> float:
        return self.server.metrics().total("pegaflow_load_bytes_total")

    def learn(self) -> str:
        """Computes, saves, and compares hits on the GPU with those of an engine without us."""
        self.engine.flush()
        cold = [self.engine.ask(prompt) for prompt in self.prompts]
        self.hits = [self.engine.ask(prompt).tokens for prompt in self.prompts]
        self._until_saved()
        if self.plain:
            assert self.hits == self.plain, f"an engine without PegaFlow answers {self.plain}"
        same = sum(one.tokens == hit for one, hit in zip(cold, self.hits, strict=True))
        return f"{same} of {len(cold)} computed answers are those of hits, hits as without PegaFlow"

    def _until_saved(self) -> None:
        counts: list[float] = []

        def steady() -> bool:
            counts.append(self.server.metrics().total("pegaflow_save_bytes_total"))
            self.engine.ask([5, 6, 7], 1)  # a pass takes the results
            time.sleep(0.1)
            return len(counts) > 5 and len(set(counts[-5:])) == 1

        wait_until(steady, "saves do not end")

    def reload(self, name: str = "reload", least: float = 0.9) -> str:
        """One after the other, like the hits: rounding differs from batch to batch."""
        self.engine.flush()
        before, answers = self.loaded_bytes(), [self.engine.ask(one) for one in self.prompts]
        tokens = [one.tokens for one in answers]
        assert tokens == self.hits, f"{name}: {tokens} are not {self.hits}"
        loaded = self.loaded_bytes() - before
        cached = sum(one.cached for one in answers)
        assert cached >= least * PROMPTS * (LENGTH // PAGE * PAGE), f"{name}: {cached} cached"
        assert loaded > 0 or not least, "nothing was loaded"
        return f"{cached} tokens, {loaded / 1e9:.2f} GB loaded, all {PROMPTS * TOKENS} tokens agree"

    def restarted_engine(self) -> str:
        self.engine.stop()
        self.engine.start()
        return self.reload("a new engine process")

    def crowd(self) -> str:
        """All at once with fresh prompts: evictions, loads beside prefill and decode."""
        total = failed = compared = 0
        for _ in range(4):
            self.engine.flush()
            fresh = [prompt_of(self.chance) for _ in range(PROMPTS)]
            order = list(range(2 * PROMPTS))
            self.chance.shuffle(order)
            asked = [[*self.prompts, *fresh][number] for number in order]
            answers = self._together(asked, 64)
            failed += sum(1 for one in answers if one.error)
            total += len(answers)
            loaded = {number for number, one in zip(order, answers, strict=True) if one.cached}
            # What was loaded beside other work must be right. A lookup that missed its deadline
            # is no hit: a prompt that was computed in another batch has other roundings.
            for number, (prompt, hit) in enumerate(zip(self.prompts, self.hits, strict=True)):
                found = self.engine.ask(prompt)
                if number in loaded and found.cached:
                    compared += 1
                    assert found.tokens == hit, f"{found.tokens} are not {hit}"
        assert not failed, f"{failed} of {total} requests failed"
        assert compared, "no prompt was loaded beside others"
        return f"{total} requests together, {compared} later hits on loaded prompts agree"

    def _together(self, prompts: Sequence[Sequence[int]], tokens: int = TOKENS) -> list[Answer]:
        found: list[Answer | None] = [None] * len(prompts)

        def one(number: int) -> None:
            found[number] = self.engine.ask(prompts[number], tokens)

        threads = [threading.Thread(target=one, args=(n,)) for n in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [one for one in found if one is not None]

    def killed_server(self) -> str:
        """SIGKILL in the middle of reloads, and a new server."""
        failed = asked = 0
        for _ in range(3):
            self.engine.flush()
            answers = self._disturbed(self.server.kill)
            failed += sum(1 for one in answers if one.error)
            asked += len(answers)
            self.engine.flush()
            without = [self.engine.ask(prompt) for prompt in self.prompts]
            assert not any(one.error for one in without), "a request failed without a server"
            self.server.start()
            self._until_used_again()
        return f"{failed} of {asked} requests aborted, none without a server; reloads agree again"

    def stopped_server(self) -> str:
        self.engine.flush()
        try:
            answers = self._disturbed(lambda: os.kill(self.server.pid, signal.SIGSTOP))
            self.engine.flush()
            began = time.monotonic()
            without = [self.engine.ask(prompt) for prompt in self.prompts]
            took = time.monotonic() - began
        finally:
            os.kill(self.server.pid, signal.SIGCONT)
        assert not any(one.error for one in without), "a request failed with a stopped server"
        failed = sum(1 for one in answers if one.error)
        self._until_used_again()
        return f"{failed} of {len(answers)} aborted; the next {PROMPTS} took {took:.1f} s"

    def _disturbed(self, disturb: Any) -> list[Answer]:
        before, answers = self.loaded_bytes(), []
        asking = threading.Thread(target=lambda: answers.extend(self._together(self.prompts)))
        asking.start()
        while self.loaded_bytes() == before and asking.is_alive():
            pass
        disturb()
        asking.join()
        for one in answers:
            assert one.tokens or one.error, "a request was not answered"
        return answers

    def _until_used_again(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self.engine.flush()
            for prompt in self.prompts:
                self.engine.ask(prompt)
            self._until_saved()
            with contextlib.suppress(AssertionError):
                self.reload()
                return
            assert time.monotonic() < deadline, "the cache is not used again"

    def planted_error(self) -> str:
        """Pages of the pool get other bytes: a check of tokens that cannot fail proves nothing."""
        view, size = PoolView(self.server), 1 << 20
        used = [at for at in range(0, len(view.bytes), size) if any(view.bytes[at : at + 64])]
        for at in used:
            view.bytes[at : at + size // 2] = view.bytes[at + size // 2 : at + size]
        view.close()
        self.engine.flush()
        found = [self.engine.ask(prompt).tokens for prompt in self.prompts]
        wrong = sum(one != hit for one, hit in zip(found, self.hits, strict=True))
        assert wrong, "no token shows wrong pages"
        return f"{wrong} of {PROMPTS} answers show wrong pages"


def prompt_of(chance: random.Random, length: int = LENGTH) -> list[int]:
    return [chance.randrange(10, 32000) for _ in range(length)]


def prompts_of(seed: int) -> list[list[int]]:
    chance = random.Random(f"prompts {seed}")
    return [prompt_of(chance) for _ in range(PROMPTS)]


def scenarios(session: Session) -> Iterator[tuple[str, Any]]:
    yield "learn", session.learn
    yield "reload", session.reload
    yield "crowd", session.crowd
    yield "restarted_engine", session.restarted_engine
    yield "stopped_server", session.stopped_server
    yield "killed_server", session.killed_server
    yield "planted_error", session.planted_error


def measure(engine: GpuSglang, options: argparse.Namespace) -> dict[str, Any]:
    """Medians of the time to the first token: computed, hit on the GPU, after a flush."""
    chance = random.Random(options.seed + 1)
    found: dict[str, Any] = {}
    for length in [int(one) for one in options.lengths.split(",")]:
        engine.ask(prompt_of(chance, length), 2)
        times: dict[str, list[float]] = {"computed": [], "hit": [], "reload": []}
        tokens, cached = 0, 0
        for _ in range(options.repeats):
            engine.flush()
            prompt = prompt_of(chance, length)
            times["computed"].append(engine.ask(prompt).ttft_s)
            hit = engine.ask(prompt)
            times["hit"].append(hit.ttft_s)
            time.sleep(options.pause_s)  # saves of HiCache pass through its host pool
            engine.flush()
            again = engine.ask(prompt)
            times["reload"].append(again.ttft_s)
            tokens += again.tokens == hit.tokens
            cached += again.cached
        found[str(length)] = {
            name: {
                "median_ms": round(1e3 * statistics.median(each), 1),
                "min_ms": round(1e3 * min(each), 1),
                "max_ms": round(1e3 * max(each), 1),
            }
            for name, each in times.items()
        } | {"reloads as hits": f"{tokens}/{options.repeats}", "cached": cached // options.repeats}
        print(f"{engine.route} {length}: {json.dumps(found[str(length)])}", flush=True)
    return found


class Routed:
    """Two engines with the linker behind pegaflow-router; a scenario returns its observations."""

    def __init__(
        self, options: argparse.Namespace, engines: Sequence[GpuSglang], server: PegaServer
    ) -> None:
        self._options, self.engines, self.server = options, engines, server
        self.prompts = prompts_of(options.seed)

    @contextlib.contextmanager
    def _router(self, *, split: bool) -> Iterator[str]:
        addresses = [f"127.0.0.1:{engine.port}" for engine in self.engines]
        prefill, decode = (addresses[:1], addresses[1:]) if split else ([], addresses)
        folder = self._options.out / f"router-{split}"
        with RouterServer(self._options.router, folder, prefill, decode) as router:
            router_address = router.http
            wait_until(
                lambda: b'"model"' in call(router_address, "GET", "/v1/models")[1],
                "the router lists no model",
            )
            yield router_address

    def balanced(self) -> str:
        with self._router(split=False) as router:
            assert call(router, "GET", "/health")[0] == 200
            direct = f"127.0.0.1:{self.engines[0].port}"
            for prompt in self.prompts:
                complete(direct, prompt)
                hit = complete(direct, prompt)
                for stream in (False, True):
                    found = complete(router, prompt, stream)
                    again = complete(router, prompt, stream)
                    assert again[0] == hit[0], f"{found} {again} are not {hit}"
        return f"{2 * len(self.prompts)} answers, streamed or not, agree with the engine's own"

    def known(self) -> str:
        """Conversations whose turns go to the engine that announced their blocks."""
        turns, late, cached_late = 5, 0, 0
        with self._router(split=False) as router:
            wait_until(
                lambda: _states(router) and set(_states(router)) <= {"exact", "partial"},
                "the events are not trusted",
                60.0,
            )
            histories = [prompt_of(random.Random(f"known {n}"), 1000) for n in range(PROMPTS)]
            for turn in range(turns):
                for history in histories:
                    blocks = _metric(router, "kv_blocks")
                    _, cached = complete(router, history, stream=True)
                    wait_until(
                        lambda b=blocks: _metric(router, "kv_blocks") > b, "no block is announced"
                    )
                    if turn:
                        late += 1
                        cached_late += cached >= (len(history) - 300) // PAGE * PAGE
                    history += prompt_of(random.Random(f"{turn} of {history[:3]}"), 300)
            close = _metric(router, "kv_reports_total", within_a_block="yes")
            reports = _metric(router, "kv_reports_total")
            placed = [
                count
                for _, _, count in read_metrics(router).items(
                    "pegaflow_router_engine_requests_total"
                )
                if count
            ]
        assert cached_late == late, f"{late - cached_late} of {late} turns missed their history"
        assert len(placed) == 2, f"one engine got all requests: {placed}"
        assert close >= reports - PROMPTS, f"{reports - close} of {reports} predictions are apart"
        return f"{late} turns met their history; {close:.0f} of {reports:.0f} predictions are close"

    def split(self) -> str:
        """The prefill engine saves, and the decode engine loads what is saved when it asks."""
        direct = f"127.0.0.1:{self.engines[1].port}"
        prompts = [prompt_of(random.Random(f"split {number}")) for number in range(PROMPTS)]
        before = self.server.metrics().total("pegaflow_load_bytes_total")
        with self._router(split=True) as router:
            answers = [complete(router, prompt, stream=True) for prompt in prompts]
        loaded = self.server.metrics().total("pegaflow_load_bytes_total") - before
        hits = [complete(direct, prompt)[0] for prompt in prompts]
        # A prompt that the decode engine computes rounds otherwise than its hit.
        found = [(text, hit) for (text, cached), hit in zip(answers, hits, strict=True) if cached]
        assert loaded > 0 and found, f"{loaded} bytes were loaded for {answers}"
        assert all(text == hit for text, hit in found), f"{found}"
        return f"{len(found)} of {PROMPTS} prompts were loaded by the decode engine, all agree"


def _states(router: str) -> list[str]:
    """Of the streams of KV events."""
    status = json.loads(call(router, "GET", "/health")[1])
    return [source["events"] for source in status["kv_aware"]["sources"]]


def _metric(router: str, name: str, **labels: str) -> float:
    return read_metrics(router).total(f"pegaflow_router_{name}", **labels)


def call(address: str, method: str, path: str, body: str = "") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(address, timeout=PATIENCE_S)
    with contextlib.closing(connection):
        connection.request(method, path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()


def complete(address: str, prompt: Sequence[int], stream: bool = False) -> tuple[str, int]:
    """The text of OpenAI's completion, and how many tokens of the prompt were cached."""
    body: dict[str, Any] = {"model": "model", "prompt": list(prompt), "max_tokens": TOKENS}
    body |= {"temperature": 0, "ignore_eos": True, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    status, answer = call(address, "POST", "/v1/completions", json.dumps(body))
    assert status == 200, (status, answer[:300])
    if stream:
        lines = [line[6:] for line in answer.splitlines() if line.startswith(b"data: {")]
        events = [json.loads(line) for line in lines]
    else:
        events = [json.loads(answer)]
    text = "".join(one["text"] for event in events for one in event["choices"])
    usage = next((event["usage"] for event in reversed(events) if event.get("usage")), {})
    return text, (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


def route_requests(options: argparse.Namespace) -> bool:
    with contextlib.ExitStack() as stack:
        server = PegaServer(options.server, options.out / "pega-routed", options.pool)
        stack.enter_context(server)
        engines = [GpuSglang(name, "linker", server, options) for name in ("first", "second")]
        stack.enter_context(started_together(engines))
        routed = Routed(options, engines, server)
        return play(
            [("balanced", routed.balanced), ("known", routed.known), ("split", routed.split)]
        )


def run(route: str, options: argparse.Namespace, plain: list[list[int]]) -> tuple[bool, Any]:
    ours = route in ("linker", "hicache")
    with contextlib.ExitStack() as stack:
        server = None
        if ours:
            server = PegaServer(options.server, options.out / f"pega-{route}", options.pool)
            stack.enter_context(server)
        engine = GpuSglang(route, route, server, options)
        began = time.monotonic()
        stack.enter_context(engine)
        print(f"{route}: the engine started in {time.monotonic() - began:.0f} s", flush=True)
        held = True
        if server is not None and options.only != "none":
            session = Session(engine, server, options, plain)
            wanted = options.only.split(",") if options.only else None
            held = play(one for one in scenarios(session) if wanted is None or one[0] in wanted)
        elif route == "plain":
            for prompt in prompts_of(options.seed):
                engine.ask(prompt)
                plain.append(engine.ask(prompt).tokens)
        return held, measure(engine, options) if options.lengths else {}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--server", type=Path, required=True, help="the program pegaflow-server")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the logs")
    parser.add_argument("--routes", default="plain,linker,hicache", help="also file, mooncake")
    parser.add_argument("--router", type=Path, help="pegaflow-router: two engines behind it, too")
    parser.add_argument("--pool", default="16gb")
    parser.add_argument("--host-gb", type=int, default=8, help="HiCache's own host pool")
    parser.add_argument("--gpu-tokens", type=int, default=40_000, help="of the cache on the GPU")
    parser.add_argument("--fraction", type=float, default=0.6, help="of the GPU's memory")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--only", default="", help="names of scenarios, or none")
    parser.add_argument("--lengths", default="", help="measures prompts of these lengths, too")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--pause-s", type=float, default=1.5)
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--extra", type=json.loads, default={}, help="options of PegaFlow, in JSON")
    parser.add_argument("--sglang-arguments", default="", help="more arguments of SGLang")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    print(f"seed {options.seed}", flush=True)
    good, figures, plain = True, {}, []
    for route in options.routes.split(",") if options.routes else ():
        held, figures[route] = run(route, options, plain)
        good = good and held
    if options.router:
        good = route_requests(options) and good
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
