#!/usr/bin/env python3
"""Prefill and decode on two GPUs: what the decode engine adds to the time to the first token.

Each configuration has two vLLMs, one on each GPU, and routers in front of them. A round sends one
prompt of random tokens through each router, in a random order. What the decode engine and the
router add is the difference to the prompt that the prefill engine answers alone, in the same round.

  ours    PegaFlow's connector: serial (--flow store), early (--flow auto), first (--flow store
          --pd-first-token)
  early   of these, early alone
  direct  early, with pegaflow.direct_group: blocks go from GPU to GPU
  far     the same, each engine with a server of its own, as on two hosts (pegaflow.direct_nics).
          PEGA_UCX_LIBRARY names a UCX with CUDA support. On a machine without RDMA cards
          PEGAFLOW_TEST_UCX_OVER_TCP=lo reads through host memory: for answers, not for times
  whole   early, but a load begins when the whole prompt is saved (pegaflow.early_load_percent 0)
  nixl    vLLM's NixlConnector: serial (--flow kv-params)
  push    vLLM's NixlPushConnector: serial (--flow kv-params), both legs at once without a router
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
import dataclasses
import json
import pathlib
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from perf.support import handover_timeline  # noqa: E402
from perf.support.neighbors import Neighbors  # noqa: E402
from perf.support.two_gpus import (  # noqa: E402
    BLOCK,
    COMPARED,
    CONFIGURATIONS,
    TOOLS,
    VOCABULARY,
    Answer,
    Rig,
    prompt,
    run_burst,
)

#: Kernels are compiled on first use, and the first transfer between two engines connects them.
WARM_UP = 2
#: Prompts of a burst, and their tokens.
BURST, BURST_TOKENS = 8, 10001


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


class Measurement:
    """The rounds of one configuration."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._options = rig.options
        #: Of requests that were alone in flight: the arm, the tokens of the prompt, and when the
        #: client sent it and had the first token.
        self.requests: list[tuple[str, int, float, float]] = []

    def _round(self, rows: dict[str, Row], tokens: int, seed: int, chance: random.Random) -> None:
        rig, output = self._rig, self._options.output_tokens
        for arm in chance.sample(rig.arms, len(rig.arms)):
            one = prompt(seed * 64 + rig.arms.index(arm), tokens, VOCABULARY)
            before = rig.metrics()
            answer, reference = rig.ask(arm, one), None
            if arm != "alone":
                reference = rig.engines[0].complete(one, output)
                rows[arm].grow(before, rig.metrics())
            rows[arm].take(answer, reference)
            first = answer.arrivals[0]
            self.requests.append((arm, tokens, first - answer.ttft_s, first))
            # Let pending saves and reports finish before the next prompt.
            time.sleep(self._options.pause)

    def measure(self, tokens: int, rounds: int) -> list[Row]:
        rig, chance = self._rig, random.Random(self._options.seed)
        rows = {arm: Row(rig.name, arm, tokens) for arm in rig.arms}
        unused = {arm: Row(rig.name, arm, tokens) for arm in rig.arms}
        for number in range(WARM_UP):
            self._round(unused, tokens, 1_000_000 + number, chance)
        self.requests.clear()
        for number in range(rounds):
            self._round(rows, tokens, self._options.seed * 10_000 + tokens + number, chance)
        return list(rows.values())

    def beside_neighbors(self, tokens: int, rounds: int) -> list[str]:
        """The same rounds while other requests decode at the decode engine: the gaps between their
        tokens from the request of a prompt to its first token. With `alone` nothing is loaded.
        """
        rig = self._rig
        engine, count = rig.engines[1], self._options.neighbors
        with Neighbors(engine, count, VOCABULARY, rig.most_tokens) as neighbors:
            self.measure(tokens, rounds)
        lines = []
        for arm in dict.fromkeys(arm for arm, *_ in self.requests):
            windows = [(begin, end) for name, _, begin, end in self.requests if name == arm]
            gaps = neighbors.gaps_ms(windows)
            if not gaps:
                raise RuntimeError(f"{rig.name}, {arm}: the neighbors had ended")
            lines.append(
                f"{rig.name}, {count} neighbors, {arm}, {tokens} tokens: gaps between their "
                f"tokens {statistics.median(gaps):.2f} ms, mean {statistics.mean(gaps):.2f}, p99 "
                f"{gaps[len(gaps) * 99 // 100]:.2f}, largest {gaps[-1]:.2f}, n = {len(gaps)}"
            )
        return lines

    def timeline(self) -> list[str]:
        """Where the time of the last length's requests went."""
        time.sleep(0.2)  # the engines write their notes
        notes = handover_timeline.read(self._rig.timeline)
        found = []
        for arm, tokens, begin, end in self.requests:
            steps = handover_timeline.of_request(
                notes, begin, end, tokens=tokens, is_alone=arm == "alone"
            )
            if steps is not None:
                found.append((f"{arm}, {tokens} tokens", steps))
        lines = handover_timeline.table(found)
        return [*lines, f"{len(found)} of {len(self.requests)} requests have all notes"]

    def bursts(self, count: int) -> list[Row]:
        """Bursts of 8 prompts, 4 a second, through each router in turns."""
        rig, output = self._rig, self._options.output_tokens
        chance = random.Random(self._options.seed)
        rows = {arm: Row(rig.name, arm, BURST_TOKENS, BURST) for arm in rig.arms}
        for number in range(count):
            for arm in chance.sample(rig.arms, len(rig.arms)):
                first = 77_000_000 + (number * len(rig.arms) + rig.arms.index(arm)) * BURST
                prompts = [prompt(first + i, BURST_TOKENS, VOCABULARY) for i in range(BURST)]
                answers = run_burst(rig.routers[arm], prompts, 4.0, output)
                for one, answer in zip(prompts, answers, strict=True):
                    if answer.error:
                        raise RuntimeError(f"{rig.name}, {arm}, burst: {answer.error}")
                    if arm != "alone":
                        reference = rig.engines[0].complete(one, output)
                        rows[arm].answers += 1
                        rows[arm].agree += answer.tokens == reference.tokens
                times = [answer.ttft_s * 1e3 for answer in answers]
                rows[arm].ttft_ms.append(statistics.mean(times))
                gaps = [answer.arrivals[1] - answer.arrivals[0] for answer in answers]
                rows[arm].second_ms.append(statistics.mean(gaps) * 1e3)
                time.sleep(self._options.pause)
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
    parser.add_argument(
        "--neighbors",
        type=int,
        default=0,
        help="after each length the same rounds beside N requests that decode",
    )
    parser.add_argument(
        "--timeline", action="store_true", help="print where the time of each arm's requests goes"
    )
    parser.add_argument("--configurations", default="ours,whole,nixl,multi")
    parser.add_argument("--gpu-blocks", type=int, default=8000)
    parser.add_argument("--pool-gib", type=int, default=40)
    parser.add_argument(
        "--one-gpu", action="store_true", help="both engines on GPU 0: for answers, not for times"
    )
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


def make_model(options: argparse.Namespace) -> None:
    """Makes --model if it does not exist."""
    if not options.model.exists():
        make = [sys.executable, TOOLS / "make_model.py", options.model, "--shape", options.shape]
        subprocess.run(make, check=True)


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    make_model(options)
    rows: list[Row] = []
    failed = []
    for name in options.configurations:
        rig = Rig(options, name)
        measurement = Measurement(rig)
        try:
            with rig.running():
                rig.shuffle()
                print(f"{name}: ready at {time.monotonic() - begin:.0f} s", flush=True)
                for tokens, rounds in options.rounds:
                    if time.monotonic() - begin > options.stop_after:
                        print(f"{name}: {tokens} tokens left out: no time left", flush=True)
                        continue
                    rows += measurement.measure(tokens, rounds)
                    lines = table(rows)[-len(rig.arms) :]
                    if options.timeline:
                        lines += measurement.timeline()
                    if options.neighbors:
                        lines += measurement.beside_neighbors(tokens, rounds)
                    print("\n".join(lines), flush=True)
                if options.bursts and time.monotonic() - begin < options.stop_after:
                    rows += measurement.bursts(options.bursts)
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
