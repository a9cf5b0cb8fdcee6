#!/usr/bin/env python3
"""Time to first token of prompts that PegaFlow does not have, and of the same once it does.

Starts pegaflow-server and `vllm serve` (vLLM's own prefix cache off, so that whatever is not
computed came from PegaFlow), sends random prompts at a rate, and then the same once more. Prints
mean, p50 and p99 of both rounds, and writes results.json and a plot: PNG with matplotlib, else SVG.

    python examples/bench_kv_cache.py --model Qwen/Qwen3-8B --num-prompts 50 --input-len 10000
    python examples/bench_kv_cache.py --model DIR -- --dtype float32 --enforce-eager   # for vllm
"""

import argparse
import concurrent.futures
import contextlib
import http.client
import json
import math
import pathlib
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time

from plot import draw

START_TIMEOUT_S = 1800  # Loading a large model from a slow disk.
#: Ids that every vocabulary has, beyond those with a special meaning.
TOKENS = range(10, 2000)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="name or folder (%(default)s)")
    parser.add_argument("--num-prompts", type=int, default=50, help="in each round (%(default)s)")
    parser.add_argument("--input-len", type=int, default=2048, help="tokens (%(default)s)")
    parser.add_argument("--output-len", type=int, default=1, help="tokens (%(default)s)")
    parser.add_argument(
        "--request-rate",
        type=float,
        default=4.0,
        help="a second, or inf: all at once (%(default)s)",
    )
    parser.add_argument("--pool-size", default="30gb", help="of pegaflow-server (%(default)s)")
    parser.add_argument("--seed", type=int, default=42, help="of the prompts (%(default)s)")
    parser.add_argument(
        "--connector",
        type=json.loads,
        default={},
        help='more of kv_connector_extra_config, as {"pegaflow.verify": "all"}',
    )
    parser.add_argument("--output-dir", type=pathlib.Path, default=pathlib.Path("bench_results"))
    parser.add_argument("vllm", nargs="*", help="behind --: more options of `vllm serve`")
    return parser.parse_args()


# ---- the two servers


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def started(command: list[str], log: pathlib.Path, is_ready):
    """Runs a server until the block ends; it is ready when ``is_ready()`` says so."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not is_ready():
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"{command[0]} did not start; its output is in {log}")
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def get(address: str, path: str) -> str | None:
    """The body of an answer with status 200; None for any other, and while no server listens."""
    connection = http.client.HTTPConnection(address, timeout=10)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.read().decode() if response.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None  # it is still starting
    finally:
        connection.close()


def counter(page: str, name: str) -> float:
    """The sum over all labels of one of pegaflow-server's counters."""
    return sum(map(float, re.findall(rf"^{name}(?:{{.*}})? (\S+)$", page, re.MULTILINE)))


def wait_until_saved(pega: str) -> float:
    """Blocks that the cache has, once a second has passed in which none came; at most a minute."""
    blocks, since = -1.0, time.monotonic()
    deadline = since + 60
    while time.monotonic() < min(since + 1, deadline):
        now = counter(get(pega, "/metrics") or "", "pegaflow_cache_block_insertions_total")
        if now != blocks:
            blocks, since = now, time.monotonic()
        time.sleep(0.1)
    return blocks


# ---- requests


def ttft_of(address: str, model: str, prompt: list[int], output_len: int) -> float:
    """Seconds from the request to its first token. Raises RuntimeError if there is none."""
    request = {"model": model, "prompt": prompt, "max_tokens": output_len, "temperature": 0}
    body = json.dumps(request | {"ignore_eos": True, "stream": True})
    connection = http.client.HTTPConnection(address, timeout=600)
    start = time.perf_counter()
    try:
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"vLLM answered {response.status}: {response.read()[:300]!r}")
        for line in response:
            if line.startswith(b"data: {"):
                first = time.perf_counter() - start
                response.read()  # the rest of the answer
                return first
        raise RuntimeError("the answer held no token")
    finally:
        connection.close()


def send_all(address: str, model: str, prompts: list[list[int]], chosen) -> list[float]:
    """The TTFT of each prompt. Arrivals are a Poisson process, the same in both rounds."""
    draw_gap = random.Random(chosen.seed)
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        under_way = []
        for prompt in prompts:
            under_way.append(pool.submit(ttft_of, address, model, prompt, chosen.output_len))
            if math.isfinite(chosen.request_rate):
                time.sleep(draw_gap.expovariate(chosen.request_rate))
        return [answer.result() for answer in under_way]


# ---- what came out


def summary(seconds: list[float]) -> dict[str, float]:
    """Mean, p50 and p99 in milliseconds; the p99 of few prompts is the slowest one."""
    ordered = sorted(1000 * value for value in seconds)
    last = min(len(ordered) - 1, math.ceil(0.99 * len(ordered)) - 1)
    return {
        "mean_ttft_ms": statistics.fmean(ordered),
        "p50_ttft_ms": statistics.median(ordered),
        "p99_ttft_ms": ordered[last],
    }


def report(chosen: argparse.Namespace, rounds: dict[str, list[float]], loaded: float) -> None:
    results = {name: summary(seconds) for name, seconds in rounds.items()}
    print(f"{'TTFT (ms)':<10}{'mean':>10}{'p50':>10}{'p99':>10}{'n':>6}")
    for name, row in results.items():
        print(f"{name:<10}" + "".join(f"{value:>10.1f}" for value in row.values()), end="")
        print(f"{len(rounds[name]):>6}")
    ratio = results["cold"]["mean_ttft_ms"] / results["warm"]["mean_ttft_ms"]
    print(f"warm is {ratio:.2f} times as fast; {loaded:.0f} blocks were loaded for it")
    picture = draw(chosen.output_dir, {name: sorted(seconds) for name, seconds in rounds.items()})
    asked = {key: value for key, value in vars(chosen).items() if key != "output_dir"}
    for name in results:
        results[name]["ttft_s"] = rounds[name]
    text = json.dumps({"options": asked, "loaded_blocks": loaded, **results}, indent=1)
    (chosen.output_dir / "results.json").write_text(text + "\n")
    print(f"wrote {chosen.output_dir}/results.json and {picture}")


def main() -> int:
    chosen = options()
    # The servers below are ended whatever ends us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    chosen.output_dir.mkdir(parents=True, exist_ok=True)
    draw_token = random.Random(chosen.seed)
    prompts = [draw_token.choices(TOKENS, k=chosen.input_len) for _ in range(chosen.num_prompts)]
    rounds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="pega-bench-") as scratch, contextlib.ExitStack() as up:
        ready, server_socket = pathlib.Path(scratch, "ready.json"), f"unix:{scratch}/pega.sock"
        server = ["pegaflow-server", "--addr", server_socket, "--http-addr", "127.0.0.1:0"]
        server += ["--pool-size", chosen.pool_size, "--ready-file", str(ready)]
        up.enter_context(started(server, chosen.output_dir / "pegaflow-server.log", ready.exists))
        pega = json.loads(ready.read_text())["http"]

        port = free_port()
        address = f"127.0.0.1:{port}"
        connector = {
            "kv_connector": "PegaKVConnector",
            "kv_connector_module_path": "pegaflow.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"pegaflow.host": server_socket} | chosen.connector,
        }
        vllm = ["vllm", "serve", chosen.model, "--host", "127.0.0.1", "--port", str(port)]
        vllm += ["--no-enable-prefix-caching", "--kv-transfer-config", json.dumps(connector)]
        print(f"starting vLLM, its output goes to {chosen.output_dir}/vllm.log", flush=True)
        log = chosen.output_dir / "vllm.log"
        up.enter_context(
            started(vllm + chosen.vllm, log, lambda: get(address, "/health") is not None)
        )

        # Not counted: a first request pays for what vLLM does once.
        ttft_of(address, chosen.model, draw_token.choices(TOKENS, k=chosen.input_len), 1)
        for name in ("cold", "warm"):
            print(f"{name}: {chosen.num_prompts} prompts of {chosen.input_len} tokens", flush=True)
            rounds[name] = send_all(address, chosen.model, prompts, chosen)
            print(f"the cache holds {wait_until_saved(pega):.0f} blocks", flush=True)
        loaded = counter(get(pega, "/metrics") or "", "pegaflow_load_blocks_total")
    report(chosen, rounds, loaded)
    if not loaded:
        print("nothing came back: `pegaflow doctor` says why, or the pool is too small")
    return 0 if loaded else 1


if __name__ == "__main__":
    sys.exit(main())
