#!/usr/bin/env python3
"""Prefill and decode on two GPUs: what the decode engine adds to the time to the first token.

Each configuration has two vLLMs, one on each GPU, and routers in front of them. A round sends one
prompt of random tokens through each router, in a random order. What the decode engine and the
router add is the difference to the prompt that the prefill engine answers alone, in the same round.

  ours    PegaFlow's connector: serial (--flow store), early (--flow auto), first (--flow store
          --pd-first-token)
  early   of these, early alone
  direct  early, with pegaflow.direct_group: blocks go from GPU to GPU
  whole   early, but a load begins when the whole prompt is saved (pegaflow.early_load_percent 0)
  nixl    vLLM's NixlConnector: serial (--flow kv-params)
  multi   both in a MultiConnector: kv-params loads by NIXL, store by PegaFlow

Free blocks of both engines are shuffled first. After each prompt the prefill engine answers it once
more from its own cache; the answers have to agree in every token. Prompts are one token longer than
a number of whole blocks, so that both answers compute that one token.

    python3 perf/handover_gpu.py --bin DIR --out DIR

`--bin` contains pegaflow-server and pegaflow-router (a bundle's bin/). The running interpreter has
vLLM 0.26 or newer, `pegaflow`, and for NIXL `nixl`. It exits with 0 if every configuration ran and
all answers of the flows agreed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOOLS = ROOT / "tools" / "vllm-gpu"
sys.path[:0] = [str(ROOT), str(TOOLS)]

from bench_ttft import Answer, Server, prompt, run_burst, shuffle_free_blocks  # noqa: E402

from perf.gpu_report import process, wait_until  # noqa: E402

VOCABULARY = 30000
BLOCK = 16
#: Kernels are compiled on first use, and the first transfer between two engines connects them.
WARM_UP = 2
#: Prompts of a burst, and their tokens.
BURST, BURST_TOKENS = 8, 10001

OURS = {
    "kv_connector": "PegaKVConnector",
    "kv_role": "kv_both",
    "kv_connector_module_path": "pegaflow.connector",
}
EXTRA = {
    "pegaflow.weights_id": "pegaflow_seeded",
    "pegaflow.load_policy": "always",
    "pegaflow.untested": True,
}
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}

ALONE = ("--flow", "store")
FLOWS = {
    "serial": ("--flow", "store"),
    "early": ("--flow", "auto"),
    "first": ("--flow", "store", "--pd-first-token"),
    "kv-params": ("--flow", "kv-params"),
}
#: What each configuration measures beside the prefill engine alone.
CONFIGURATIONS = {
    "ours": ("serial", "early", "first"),
    "early": ("early",),
    "direct": ("early",),
    "whole": ("early",),
    "nixl": ("kv-params",),
    "multi": ("kv-params", "serial"),
}
#: Arms in which the decode engine computes the last token as the prefill engine does.
COMPARED = ("serial", "early", "kv-params")


def connector(name: str) -> dict:
    """The value of --kv-transfer-config."""
    extra = dict(EXTRA)
    if name == "direct":
        extra["pegaflow.direct_group"] = "pd"
    if name == "whole":
        extra["pegaflow.early_load_percent"] = 0
    ours = OURS | {"kv_connector_extra_config": extra}
    if name == "nixl":
        return NIXL
    if name == "multi":
        return {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": [NIXL, ours]},
        }
    return ours


@dataclasses.dataclass
class Row:
    """One arm of a configuration with prompts of one length."""

    configuration: str
    arm: str
    tokens: int
    burst: int = 1  #: Prompts at once; the times are then means of a burst.
    ttft_ms: list[float] = dataclasses.field(default_factory=list)
    second_ms: list[float] = dataclasses.field(default_factory=list)  #: From the first token.
    agree: int = 0
    answers: int = 0
    #: Growth of the connectors' metrics, of the prefill and of the decode engine.
    grown: list[dict[str, float]] = dataclasses.field(default_factory=lambda: [{}, {}])

    def take(self, answer: Answer, reference: Answer | None) -> None:
        self.ttft_ms.append(answer.ttft_s * 1e3)
        self.second_ms.append((answer.arrivals[1] - answer.arrivals[0]) * 1e3)
        if reference is not None:
            self.answers += 1
            self.agree += answer.tokens == reference.tokens

    def grow(self, before: Sequence[dict[str, float]], after: Sequence[dict[str, float]]) -> None:
        for grown, old, new in zip(self.grown, before, after, strict=True):
            for name, value in new.items():
                if value != old.get(name, 0):
                    grown[name] = round(grown.get(name, 0) + value - old.get(name, 0), 6)

    def megabytes(self) -> str:
        """What the decode engine has received for a prompt: by PegaFlow, of that out of the other
        GPU, and by NIXL."""
        if not self.grown[1]:
            return ""
        names = (
            "vllm:pegaflow_loaded_bytes",
            "vllm:pegaflow_direct_bytes",
            "vllm:nixl_bytes_transferred_sum",
        )
        found = [sum(v for k, v in self.grown[1].items() if k.startswith(name)) for name in names]
        return ", ".join(f"{each / len(self.ttft_ms) / 1e6:.0f}" for each in found)


class Rig:
    """Two engines, one on each GPU, and a router for each arm."""

    def __init__(self, options: argparse.Namespace, name: str) -> None:
        self.options = options
        self.name = name
        self.arms = ("alone", *CONFIGURATIONS[name])
        self.children: dict[str, subprocess.Popen] = {}  #: server, engine-0, engine-1
        self._runtime = options.out / f"run-{name}"
        self._env = os.environ | {
            "PYTHONPATH": f"{TOOLS / 'plugin'}:{os.environ.get('PYTHONPATH', '')}",
            "PEGAFLOW_ENGINE_ENDPOINT": f"unix:{self._runtime}/pega.sock",
            "VLLM_SERVER_DEV_MODE": "1",
            "PYTHONHASHSEED": "0",
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
        }
        self.engines = [Server("127.0.0.1", 8000 + gpu, "model", 120) for gpu in (0, 1)]
        self.routers = {
            arm: Server("127.0.0.1", 8080 + number, "model", 120)
            for number, arm in enumerate(self.arms)
        }

    @contextlib.contextmanager
    def running(self) -> Iterator[contextlib.ExitStack]:
        """Yields what ends the children."""
        with contextlib.ExitStack() as stack:
            if self.name != "nixl":
                self._runtime.mkdir(exist_ok=True)
                self.start_server(stack)
            begun = [self._begin(gpu, stack) for gpu in (0, 1)]
            for gpu, (url, log) in enumerate(begun):
                wait_until(self.children[f"engine-{gpu}"], url, log, 240)
            for arm in self.arms:
                self._router(arm, stack)
            yield stack

    def start_server(self, stack: contextlib.ExitStack) -> None:
        options = self.options
        command = [str(options.bin / "pegaflow-server")]
        command += ["--addr", f"unix:{self._runtime}/pega.sock"]
        command += ["--http-addr", "127.0.0.1:9092", "--pool-size", f"{options.pool_gib}gb"]
        log = options.out / f"{self.name}-server.log"
        child = self.children["server"] = stack.enter_context(process(command, log, self._env))
        wait_until(child, "http://127.0.0.1:9092/health", log, 90)

    def _begin(self, gpu: int, stack: contextlib.ExitStack) -> tuple[str, pathlib.Path]:
        options = self.options
        log = options.out / f"{self.name}-engine-{gpu}.log"
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(options.model)]
        command += ["--served-model-name", "model", "--host", "127.0.0.1"]
        command += ["--port", str(8000 + gpu), "--load-format", "pegaflow_seeded"]
        command += ["--max-model-len", str(max(options.lengths) + 1000), "--max-num-seqs", "64"]
        command += ["--block-size", str(BLOCK), "--gpu-memory-utilization", "0.6"]
        command += ["--num-gpu-blocks-override", str(options.gpu_blocks)]
        command += ["--disable-uvicorn-access-log", "--compilation-config"]
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        command += [json.dumps(graphs | {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]})]
        command += options.vllm_arguments.split()
        command += ["--kv-transfer-config", json.dumps(connector(self.name))]
        own = self._env | {
            "CUDA_VISIBLE_DEVICES": str(gpu),
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(5600 + gpu),
        }
        self.children[f"engine-{gpu}"] = stack.enter_context(process(command, log, own))
        return f"http://127.0.0.1:{8000 + gpu}/health", log

    def _router(self, arm: str, stack: contextlib.ExitStack) -> None:
        prefill, decode = ("http://127.0.0.1:8000", "http://127.0.0.1:8001")
        port = 8080 + self.arms.index(arm)
        command = [str(self.options.bin / "pegaflow-router"), "--listen", f"127.0.0.1:{port}"]
        if arm == "alone":
            command += [*ALONE, "--decode", prefill]
        else:
            command += [*FLOWS[arm], "--prefill", prefill, "--decode", decode]
        log = self.options.out / f"{self.name}-router-{arm}.log"
        child = stack.enter_context(process(command, log, dict(os.environ)))
        wait_until(child, f"http://127.0.0.1:{port}/health", log, 30)

    def shuffle(self) -> None:
        for engine in self.engines:
            shuffle_free_blocks(engine, VOCABULARY, 3)
            engine.empty_prefix_cache()

    def metrics(self) -> list[dict[str, float]]:
        """The metrics of both engines' connectors."""
        names = ("vllm:pegaflow", "vllm:nixl", "vllm:external_prefix")
        return [
            {name: value for name, value in engine.metrics().items() if name.startswith(names)}
            for engine in self.engines
        ]

    def ask(self, arm: str, tokens: list[int]) -> Answer:
        answer = self.routers[arm].complete(tokens, self.options.output_tokens)
        if answer.error:
            raise RuntimeError(f"{self.name}, {arm}, {len(tokens)} tokens: {answer.error}")
        return answer

    def round(self, rows: dict[str, Row], tokens: int, seed: int, chance: random.Random) -> None:
        for arm in chance.sample(self.arms, len(self.arms)):
            one = prompt(seed * 64 + self.arms.index(arm), tokens, VOCABULARY)
            before = self.metrics()
            answer, reference = self.ask(arm, one), None
            if arm != "alone":
                reference = self.engines[0].complete(one, self.options.output_tokens)
                rows[arm].grow(before, self.metrics())
            rows[arm].take(answer, reference)
            # Let pending saves and reports finish before the next prompt.
            time.sleep(self.options.pause)

    def bursts(self, count: int) -> list[Row]:
        """Bursts of 8 prompts, 4 a second, through each router in turns."""
        chance = random.Random(self.options.seed)
        rows = {arm: Row(self.name, arm, BURST_TOKENS, BURST) for arm in self.arms}
        for number in range(count):
            for arm in chance.sample(self.arms, len(self.arms)):
                first = 77_000_000 + (number * len(self.arms) + self.arms.index(arm)) * BURST
                prompts = [prompt(first + i, BURST_TOKENS, VOCABULARY) for i in range(BURST)]
                answers = run_burst(self.routers[arm], prompts, 4.0, self.options.output_tokens)
                for one, answer in zip(prompts, answers, strict=True):
                    if answer.error:
                        raise RuntimeError(f"{self.name}, {arm}, burst: {answer.error}")
                    if arm != "alone":
                        reference = self.engines[0].complete(one, self.options.output_tokens)
                        rows[arm].answers += 1
                        rows[arm].agree += answer.tokens == reference.tokens
                times = [answer.ttft_s * 1e3 for answer in answers]
                rows[arm].ttft_ms.append(statistics.mean(times))
                gaps = [answer.arrivals[1] - answer.arrivals[0] for answer in answers]
                rows[arm].second_ms.append(statistics.mean(gaps) * 1e3)
                time.sleep(self.options.pause)
        return list(rows.values())

    def measure(self, tokens: int, rounds: int) -> list[Row]:
        chance = random.Random(self.options.seed)
        rows = {arm: Row(self.name, arm, tokens) for arm in self.arms}
        unused = {arm: Row(self.name, arm, tokens) for arm in self.arms}
        for number in range(WARM_UP):
            self.round(unused, tokens, 1_000_000 + number, chance)
        for number in range(rounds):
            self.round(rows, tokens, self.options.seed * 10_000 + tokens + number, chance)
        return list(rows.values())


def interval(values: Sequence[float], alone: Sequence[float]) -> str:
    """The difference of the medians, with its 95 % interval (bootstrap)."""
    chance = random.Random(1)
    draws = sorted(
        statistics.median(chance.choices(values, k=len(values)))
        - statistics.median(chance.choices(alone, k=len(alone)))
        for _ in range(2000)
    )
    difference = statistics.median(values) - statistics.median(alone)
    return f"{difference:.1f} [{draws[49]:.1f}, {draws[1949]:.1f}]"


def table(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| configuration | arm | tokens | n | TTFT ms (min to max) | added to the prefill alone "
        "[95 %] | second token | answers that agree | MB by PegaFlow, direct, NIXL |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    alone = {
        (row.configuration, row.tokens, row.burst): row.ttft_ms
        for row in rows
        if row.arm == "alone"
    }
    for row in rows:
        n = len(row.ttft_ms)
        added = same = moved = ""
        tokens = f"{row.burst} x {row.tokens}" if row.burst > 1 else str(row.tokens)
        if row.arm != "alone":
            added = interval(row.ttft_ms, alone[row.configuration, row.tokens, row.burst])
            same = f"{row.agree} of {row.answers}"
            moved = row.megabytes()
        lines.append(
            f"| {row.configuration} | {row.arm} | {tokens} | {n} "
            f"| {statistics.median(row.ttft_ms):.1f} ({min(row.ttft_ms):.1f} to "
            f"{max(row.ttft_ms):.1f}) | {added} | {statistics.median(row.second_ms):.1f} "
            f"| {same} | {moved} |"
        )
    return lines


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bin", type=pathlib.Path, required=True, help="a bundle's bin/")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder of the report")
    parser.add_argument("--model", type=pathlib.Path, default=pathlib.Path("/tmp/vllm-model"))
    parser.add_argument(
        "--shape", default="llama-8b", help="of --model, if it does not exist; tools/vllm-gpu"
    )
    parser.add_argument(
        "--lengths",
        default="2001:20,10001:20,32001:8",
        help="TOKENS:ROUNDS of prompts, separated by commas",
    )
    parser.add_argument(
        "--bursts", type=int, default=0, help="bursts of 8 prompts of 10,001 tokens, 4 a second"
    )
    parser.add_argument("--configurations", default="ours,whole,nixl,multi")
    parser.add_argument("--gpu-blocks", type=int, default=8000)
    parser.add_argument("--pool-gib", type=int, default=40)
    parser.add_argument("--output-tokens", type=int, default=8)
    parser.add_argument("--pause", type=float, default=0.15, help="seconds between two prompts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--vllm-arguments", default="", help="more arguments of vLLM")
    parser.add_argument(
        "--stop-after", type=float, default=1e9, help="seconds after which no length begins"
    )
    options = parser.parse_args(argv)
    options.rounds = [[int(n) for n in part.split(":")] for part in options.lengths.split(",")]
    options.lengths = [tokens for tokens, _ in options.rounds]
    if wrong := [tokens for tokens in options.lengths if tokens % BLOCK != 1]:
        parser.error(f"--lengths: {wrong} are not one more than a multiple of {BLOCK}")
    if options.output_tokens < 2:
        parser.error(f"--output-tokens {options.output_tokens} is less than 2")
    options.configurations = options.configurations.split(",")
    if unknown := set(options.configurations) - set(CONFIGURATIONS):
        parser.error(f"--configurations: {sorted(unknown)}; known are {list(CONFIGURATIONS)}")
    return options


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    if not options.model.exists():
        make = [sys.executable, TOOLS / "make_model.py", options.model, "--shape", options.shape]
        subprocess.run(make, check=True)
    rows: list[Row] = []
    failed = []
    for name in options.configurations:
        rig = Rig(options, name)
        try:
            with rig.running():
                rig.shuffle()
                print(f"{name}: ready at {time.monotonic() - begin:.0f} s", flush=True)
                for tokens, rounds in options.rounds:
                    if time.monotonic() - begin > options.stop_after:
                        print(f"{name}: {tokens} tokens left out: no time left", flush=True)
                        continue
                    rows += rig.measure(tokens, rounds)
                    print("\n".join(table(rows)[-len(rig.arms) :]), flush=True)
                if options.bursts and time.monotonic() - begin < options.stop_after:
                    rows += rig.bursts(options.bursts)
                    print("\n".join(table(rows)[-len(rig.arms) :]), flush=True)
        except (RuntimeError, OSError, TimeoutError) as error:
            failed.append(name)
            print(f"{name} failed: {error}", flush=True)
        report = [dataclasses.asdict(row) for row in rows]
        (options.out / "handover.json").write_text(json.dumps(report, indent=1))
    report = "\n".join(table(rows))
    (options.out / "handover.md").write_text(report + "\n")
    print(report, flush=True)
    wrong = [row for row in rows if row.arm in COMPARED and row.agree != row.answers]
    for row in wrong:
        print(f"{row.configuration}, {row.arm}, {row.tokens}: answers differ", flush=True)
    print("failed: " + (", ".join(failed) or "nothing"), flush=True)
    return 1 if failed or wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
