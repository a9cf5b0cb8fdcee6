#!/usr/bin/env python3
"""Runs all tests and measurements for a machine with an NVIDIA GPU, and writes one report.

The report has the tests of GPU copies, the faults around them (tests/gpu), `pegaflow-perf gpu`, and
a real vLLM that serves a model without weights, of Llama-3.1-8B's shape or another (--shape):
plain, with PegaFlow's connector, with vLLM's OffloadingConnector, and, where it is installed, with
the Rust system of the same name. A run takes about 15 minutes; --without omits parts.

    python3 perf/gpu_report.py --bin DIR --out DIR

`--bin` contains pegaflow-perf and pegaflow-server (a bundle's bin/). The running interpreter, or
--python, has vLLM 0.26 or newer and `pegaflow`. The script itself needs only the standard library.
It exits with 0 if every step ran and every comparison of bytes and tokens held; a missed target is
in the report and does not change the exit code.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import platform
import random
import signal
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOOLS = ROOT / "tools" / "vllm-gpu"
PORT = 8000

#: Names of configurations; `upstream` is the Rust system of --upstream, with its default copies and
#: with its kernels.
CONFIGURATIONS = ("base", "ours", "offload", "upstream", "upstream-kernel")


def connector(name: str, pool_bytes: int) -> dict | None:
    """The value of --kv-transfer-config."""
    if name == "base":
        return None
    if name == "offload":
        return {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": pool_bytes},
        }
    extra = {
        "ours": {
            "pegaflow.weights_id": "pegaflow_seeded",
            "pegaflow.load_policy": "always",
            "pegaflow.untested": True,
        },
        "upstream": {},
        "upstream-kernel": {"pegaflow.transfer_backend": "kernel"},
    }[name]
    return {
        "kv_connector": "PegaKVConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "pegaflow.connector",
        "kv_connector_extra_config": extra,
    }


@contextlib.contextmanager
def process(command: Sequence[str], log: pathlib.Path, env: dict[str, str]) -> Iterator[object]:
    """A child in its own process group, which is killed at the end."""
    with log.open("w") as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=env,
        )
    try:
        yield child
    finally:
        for number in (signal.SIGINT, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(15)
                break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


def wait_until(child: subprocess.Popen, url: str, log: pathlib.Path, seconds: float) -> float:
    """Seconds until ``url`` responds."""
    begin = time.monotonic()
    while time.monotonic() - begin < seconds:
        if child.poll() is not None:
            break
        try:
            with urllib.request.urlopen(url, timeout=1):
                return time.monotonic() - begin
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    tail = log.read_text(errors="replace").splitlines()[-25:]
    raise RuntimeError("\n".join([f"no response from {url}; the end of {log.name}:", *tail]))


class Run:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.out: pathlib.Path = options.out
        self.out.mkdir(parents=True, exist_ok=True)
        self.begin = time.monotonic()
        self.lines: list[str] = ["# PegaFlow on a GPU", ""]
        self.results: dict[str, object] = {}
        self.failed: list[str] = []

    def say(self, text: str) -> None:
        print(text, flush=True)
        self.lines.append(text)

    def title(self, text: str) -> None:
        self.say(f"\n## {text} (at {time.monotonic() - self.begin:.0f} s)\n")

    def step(self, name: str, work) -> None:
        """Runs one part of the report; a failure is noted and the other parts still run."""
        if name in self.options.without:
            return
        if time.monotonic() - self.begin > self.options.stop_after:
            self.say(f"\n**{name} was left out:** no time left")
            return
        try:
            work()
        except (RuntimeError, OSError, subprocess.SubprocessError, KeyError, ValueError) as error:
            self.failed.append(name)
            self.say(f"**{name} failed:** {error}")
        self.save()

    def save(self) -> None:
        (self.out / "report.md").write_text("\n".join(self.lines) + "\n")
        (self.out / "report.json").write_text(json.dumps(self.results, indent=1))

    def output_of(
        self, command: Sequence[str], seconds: float, **more
    ) -> subprocess.CompletedProcess:
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds, **more)

    # ---- parts

    def machine(self) -> None:
        self.title("Machine")
        gpu = self.output_of(
            ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"],
            30,
        ).stdout.strip()
        meminfo = pathlib.Path("/proc/meminfo").read_text().splitlines()
        memory = [" ".join(x.split()) for x in meminfo if "HugePages_Free" in x or "MemTotal" in x]
        self.say(f"- GPU: {gpu}")
        self.say(f"- {platform.platform()}, {os.cpu_count()} cores, {', '.join(memory)}")
        self.results["machine"] = {"gpu": gpu, "platform": platform.platform(), "memory": memory}

    def unit(self) -> None:
        self.title("Tests of the copies over this GPU")
        done = self.output_of([str(self.options.unit)], 200)
        self.say("\n".join(done.stdout.splitlines()[-4:]))
        if done.returncode != 0:
            raise RuntimeError(f"exit status {done.returncode}\n{done.stdout[-3000:]}")

    def faults(self) -> None:
        """The faults around copies, without a model."""
        self.title("Kills, stops, errors and comparisons of every byte (tests/gpu/run.py)")
        self._run_tests("tests.gpu.run", 300)

    def vllm_faults(self) -> None:
        self.title("The same around a real vLLM (tests/gpu/vllm.py)")
        more = ["--model", str(self.options.model), "--out", str(self.out / "vllm_faults")]
        more += ["--gpu-blocks", str(self.options.fault_blocks)]
        more += ["--planted-kib", str(self.options.planted_kib)]
        self._run_tests("tests.gpu.vllm", 500, *more)

    def _run_tests(self, module: str, seconds: float, *more: str) -> None:
        server = str(self.options.bin / "pegaflow-server")
        command = [self.options.python, "-m", module, "--server", server, *more]
        env = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        log = self.out / f"{module}.log"
        with log.open("w") as errors:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, env=env, timeout=seconds
            )
        self.say("```\n" + done.stdout.strip() + "\n```")
        self.results[module] = done.stdout.splitlines()
        if done.returncode not in (0, 77):  # 77: skipped, with the reason
            raise RuntimeError(f"{module} ended with {done.returncode}, see {log.name}")

    def perf(self) -> None:
        self.title("pegaflow-perf gpu")
        command = [str(self.options.bin / "pegaflow-perf"), "gpu", "--check", "--json"]
        command += ["--server", str(self.options.bin / "pegaflow-server")]
        if self.options.cublas:
            command += ["--cublas", self.options.cublas]
        done = self.output_of([*command, *self.options.perf_args.split()], 400)
        if done.returncode != 0:
            raise RuntimeError(done.stderr[-2000:])
        figures = [json.loads(line) for line in done.stdout.splitlines()]
        self.results["perf"] = figures
        self.say("| figure | measured | bound | ratio | target | n | spread |")
        self.say("|---|---|---|---|---|---|---|")
        for figure in figures:
            target = figure.get("target")
            held = {True: "held", False: "**missed**", None: ""}[figure.get("held")]
            sign = ">=" if figure.get("target_is") == "at least" else "<="
            self.say(
                f"| {figure['run']} | {figure['figure']:.4g} {figure['unit']} "
                f"| {figure['bound']:.4g} ({figure['bound_name']}) | {figure['ratio']:.3f} "
                f"| {f'{sign} {target}, {held}' if target is not None else ''} "
                f"| {figure['n']} | {figure['spread']} |"
            )

    def vllm(self, name: str) -> None:
        self.title(f"vLLM, {name}")
        options = self.options
        env = dict(os.environ)
        path = [str(TOOLS / "plugin"), env.get("PYTHONPATH", "")]
        if name.startswith("upstream"):
            path.insert(0, str(options.upstream))
        env |= {
            "PYTHONPATH": ":".join(part for part in path if part),
            "VLLM_SERVER_DEV_MODE": "1",
            "PYTHONHASHSEED": "0",
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
        }
        with contextlib.ExitStack() as stack:
            self._cache_server(name, env, stack)
            log = self.out / f"{name}.log"
            command = [options.python, "-m", "vllm.entrypoints.cli.main", "serve"]
            command += [str(options.model), "--served-model-name", "model", "--port", str(PORT)]
            command += ["--host", "127.0.0.1", "--load-format", "pegaflow_seeded"]
            lengths = [int(length) for length in options.lengths.split(",")]
            context = max(40000, max(lengths) + 1000)
            command += ["--max-model-len", str(context), "--max-num-seqs", "64"]
            command += ["--block-size", "16", "--gpu-memory-utilization", "0.6"]
            command += ["--num-gpu-blocks-override", str(options.gpu_blocks)]
            command += options.vllm_arguments.split()
            command += ["--disable-uvicorn-access-log", "--compilation-config"]
            graphs = {"mode": 0, "cudagraph_mode": options.cudagraphs}
            command += [json.dumps(graphs | {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]})]
            if (config := connector(name, options.pool_gib << 30)) is not None:
                command += ["--kv-transfer-config", json.dumps(config)]
            child = stack.enter_context(process(command, log, env))
            start = wait_until(child, f"http://127.0.0.1:{PORT}/health", log, 240)
            self.say(f"- start: {start:.1f} s")
            rows = self.out / f"{name}.json"
            bench = [options.python, str(TOOLS / "bench_ttft.py"), "--label", name]
            # Not a multiple of 16: else a hit on the GPU computes 16 tokens and a reload one, which
            # rounds differently, and their answers cannot be compared.
            bench += ["--lengths", options.lengths, "--burst-length", "10008"]
            bench += ["--fragment", "3", "--burst", str(options.burst)]
            bench += ["--neighbours", "4" if options.burst else "0"]
            bench += ["--repeats", str(options.repeats), "--json", str(rows)]
            done = self.output_of(bench, 300, env=env)
            self.say("```\n" + done.stdout.strip() + "\n```")
            if done.returncode != 0:
                raise RuntimeError(done.stderr[-2000:])
        found = json.loads(rows.read_text())["rows"]
        self.results[f"vllm_{name}"] = {"start_s": start, "rows": found}
        self._check_tokens(name, found)

    def _cache_server(self, name: str, env: dict[str, str], stack: contextlib.ExitStack) -> None:
        options = self.options
        pool = ["--pool-size", f"{options.pool_gib}gb"]
        log = self.out / f"{name}-server.log"
        if name == "ours":
            runtime = self.out / "run"
            runtime.mkdir(exist_ok=True)
            env["PEGAFLOW_ENGINE_ENDPOINT"] = f"unix:{runtime}/pega.sock"
            command = [str(options.bin / "pegaflow-server"), "--addr", f"unix:{runtime}/pega.sock"]
            command += ["--http-addr", "127.0.0.1:9092", *pool]
            child = stack.enter_context(process(command, log, env))
            wait_until(child, "http://127.0.0.1:9092/health", log, 60)
        elif name.startswith("upstream"):
            program = options.upstream / "pegaflow" / "pegaflow-server-py"
            command = [str(program), "--devices", "0", "--http-addr", "127.0.0.1:9091", *pool]
            child = stack.enter_context(process(command, log, env))
            wait_until(child, "http://127.0.0.1:9091/health", log, 90)

    def _check_tokens(self, name: str, rows: Sequence[dict]) -> None:
        """A reload computes the same last token over the same bytes as a hit on the GPU."""
        for row in rows:
            if row.get("errors"):
                raise RuntimeError(f"{row['errors']} requests of {row['phase']} failed")
            if name == "base" or row["phase"] != "reload":
                continue
            same, _, all_of = row["same"]["gpu"].partition("/")
            if same != all_of:
                raise RuntimeError(f"a reload agrees with its GPU hit in {same} of {all_of} tokens")

    def summary(self) -> None:
        self.title("vLLM side by side: one prompt at a time, shuffled free blocks, TTFT in ms")
        self.say("| configuration | tokens | start s | cold | GPU hit | reload | reload / floor |")
        self.say("|---|---|---|---|---|---|---|")
        peak = self._peak()
        known = [n for n in self.options.configurations if f"vllm_{n}" in self.results]
        ours = self._phases("ours", "reload") if "ours" in known else []
        loaded = {row["prompt_tokens"]: row["loaded_bytes"] for row in ours}
        for name in known:
            for cold, gpu, reload in zip(
                *(self._phases(name, phase) for phase in ("cold", "gpu", "reload")), strict=True
            ):
                tokens, ratio = cold["prompt_tokens"], ""
                if name != "base" and loaded.get(tokens):
                    copy_ms = loaded[tokens] / peak / 1e6
                    ratio = floor_ratio(gpu["ttft_ms"], reload["ttft_ms"], copy_ms)
                start = self.results[f"vllm_{name}"]["start_s"]
                self.say(
                    f"| {name} | {tokens} | {start:.1f} | {cold['ttft_ms_median']} "
                    f"| {gpu['ttft_ms_median']} | {reload['ttft_ms_median']} | {ratio} |"
                )
        sizes = ", ".join(f"{size / 1e9:.3f} GB for {n} tokens" for n, size in loaded.items())
        self.say(
            f"\nfloor: the median GPU hit + the bytes that our connector loads ({sizes}) at "
            f"{peak:.1f} GB/s; ratio of medians, in brackets its 95 % interval (bootstrap, 2,000 "
            "draws, seed 1)"
        )
        if self.options.burst:
            self._burst_summary(known)

    def _burst_summary(self, names: Sequence[str]) -> None:
        self.say(f"\nBursts of {self.options.burst} prompts of 10,008 tokens, mean TTFT in ms:\n")
        self.say(
            "| configuration | reload | beside 4 neighbors | their gaps p99 (alone) | TPOT |\n"
            "|---|---|---|---|---|"
        )
        for name in names:
            rows = {row["phase"]: row for row in self.results[f"vllm_{name}"]["rows"]}
            self.say(
                f"| {name} | {rows['burst reload']['ttft_ms_mean']} "
                f"| {rows['beside neighbours reload']['ttft_ms_mean']} "
                f"| {rows['neighbours, reload']['gap_ms_p99']} "
                f"({rows['neighbours alone']['gap_ms_p99']}) "
                f"| {rows['cold']['tpot_ms_median']} |"
            )

    def _phases(self, name: str, phase: str) -> list[dict]:
        """The rows of a phase of single prompts, one for each length."""
        return [row for row in self.results[f"vllm_{name}"]["rows"] if row["phase"] == phase]

    def _peak(self) -> float:
        """GB/s of contiguous copies to the idle GPU in this run."""
        bounds = [
            figure["bound"]
            for figure in self.results.get("perf", ())
            if figure["params"].get("direction") == "load"
            and figure["params"].get("what") == "idle"
        ]
        return statistics.median(bounds) if bounds else 55.4


def floor_ratio(gpu: Sequence[float], reload: Sequence[float], copy_ms: float) -> str:
    """Ratio of a reload to a hit on the GPU plus the bare copy, with its interval."""
    chance = random.Random(1)
    draws = sorted(
        statistics.median(chance.choices(reload, k=len(reload)))
        / (statistics.median(chance.choices(gpu, k=len(gpu))) + copy_ms)
        for _ in range(2000)
    )
    ratio = statistics.median(reload) / (statistics.median(gpu) + copy_ms)
    return f"{ratio:.3f} [{draws[49]:.3f}, {draws[1949]:.3f}]"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bin", type=pathlib.Path, required=True, help="a bundle's bin/")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder of the report")
    parser.add_argument("--unit", type=pathlib.Path, help="the program cuda_gpu_test")
    parser.add_argument("--python", default=sys.executable, help="has vLLM and pegaflow")
    parser.add_argument("--model", type=pathlib.Path, default=pathlib.Path("/tmp/vllm-model"))
    parser.add_argument("--upstream", type=pathlib.Path, help="folder with the Rust system")
    parser.add_argument("--cublas", default="", help="path of cuBLAS")
    parser.add_argument("--perf-args", default="", help="more arguments for pegaflow-perf gpu")
    parser.add_argument("--pool-gib", type=int, default=40)
    parser.add_argument(
        "--shape", default="llama-8b", help="of --model, if it does not exist; tools/vllm-gpu"
    )
    parser.add_argument("--lengths", default="10008", help="of prompts, separated by commas")
    parser.add_argument("--repeats", type=int, default=20, help="prompts, one after the other")
    parser.add_argument("--burst", type=int, default=8, help="prompts of a burst; 0: no bursts")
    parser.add_argument("--gpu-blocks", type=int, default=8000)
    parser.add_argument("--vllm-arguments", default="", help="more arguments of vLLM")
    parser.add_argument("--planted-kib", type=int, default=1024, help="see tests/gpu/vllm.py")
    parser.add_argument("--fault-blocks", type=int, default=1540, help="see tests/gpu/vllm.py")
    parser.add_argument(
        "--cudagraphs",
        default="FULL",
        help="vLLM's cudagraph_mode. FULL also captures the step with a prompt's last tokens, as "
        "vLLM's default does, and takes long to compile; FULL_DECODE_ONLY does not",
    )
    parser.add_argument("--configurations", default=",".join(CONFIGURATIONS))
    parser.add_argument(
        "--stop-after", type=float, default=1e9, help="seconds after which no step begins"
    )
    parser.add_argument(
        "--without",
        default="",
        help="parts to omit: unit, faults, vllm_faults, perf, and configurations",
    )
    options = parser.parse_args(argv)
    options.configurations = options.configurations.split(",")
    options.without = options.without.split(",")
    if options.unit is None:
        options.without.append("unit")
    if options.upstream is None:
        options.configurations = [
            name for name in options.configurations if not name.startswith("upstream")
        ]
    return options


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    run = Run(options)
    run.step("machine", run.machine)
    run.step("unit", run.unit)
    run.step("faults", run.faults)
    run.step("perf", run.perf)
    if not options.model.exists():
        make = [options.python, TOOLS / "make_model.py", options.model, "--shape", options.shape]
        subprocess.run(make, check=True)
    run.step("vllm_faults", run.vllm_faults)
    for name in options.configurations:
        run.step(name, lambda name=name: run.vllm(name))
    options.stop_after = float("inf")
    run.step("summary", run.summary)
    run.title("End")
    run.say("failed: " + (", ".join(run.failed) or "nothing"))
    run.save()
    return 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
