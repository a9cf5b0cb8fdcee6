#!/usr/bin/env python3
"""NIXL's connector and ours in one MultiConnector on two GPUs, whose processes are killed.

    PYTHONPATH=REPOSITORY:PACKAGE python3 -m tests.gpu.multi --bin DIR --out DIR

So a fleet can move from one to the other. A router with --flow kv-params loads by NIXL, one with
--flow store by PegaFlow. Every answer is compared with the one that an engine gives from its own
cache. Needs what perf/handover_gpu.py needs. Exits with 0 if all checks passed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence

from perf.handover_gpu import make_model, parse
from perf.support.two_gpus import VOCABULARY, Answer, Rig, prompt

TOKENS = 4001
PROMPTS = 6
OUTPUT = 8


class Checks:
    def __init__(self) -> None:
        self.failed = 0

    def say(self, what: str, held: bool, detail: str) -> None:
        self.failed += not held
        print(f"{'ok  ' if held else 'BAD '} {what}: {detail}", flush=True)


def all_at_once(asks: Sequence[Callable[[], Answer]]) -> list[Answer]:
    answers = [Answer(error="no answer") for _ in asks]

    def one(index: int) -> None:
        try:
            answers[index] = asks[index]()
        except OSError as error:
            answers[index] = Answer(error=repr(error))

    threads = [threading.Thread(target=one, args=(index,)) for index in range(len(asks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


class Test:
    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.checks = Checks()
        self._seed = 0

    def _prompts(self) -> list[list[int]]:
        self._seed += 1
        return [prompt(self._seed * 1000 + i, TOKENS, VOCABULARY) for i in range(PROMPTS)]

    def _compare(self, what: str, prompts: list[list[int]], answers: list[Answer], gpu: int) -> str:
        """Compares with what one engine answers from its cache; the number of equal answers."""
        errors = [answer.error for answer in answers if answer.error]
        same = 0
        for one, answer in zip(prompts, answers, strict=True):
            reference = self.rig.engines[gpu].complete(one, OUTPUT)
            # What an engine has computed itself is rounded otherwise than a hit of one token.
            again = self.rig.engines[gpu].complete(one, OUTPUT)
            same += not answer.error and answer.tokens in (reference.tokens, again.tokens)
        self.checks.say(
            f"{what}, requests that failed", not errors, f"{len(errors)} {errors[:1] or ''}"
        )
        return f"{same} of {len(prompts)}"

    def _bytes(self) -> dict[str, float]:
        found = self.rig.metrics()[1]
        names = {
            "pegaflow": "vllm:pegaflow_loaded_bytes",
            "nixl": "vllm:nixl_bytes_transferred_sum",
        }
        return {
            key: sum(v for k, v in found.items() if k.startswith(name))
            for key, name in names.items()
        }

    def prompts_by_either(self) -> None:
        """Tokens are equal, and the bytes come by the connector that the router chose."""
        for arm, mine, other in (("kv-params", "nixl", "pegaflow"), ("serial", "pegaflow", "nixl")):
            before = self._bytes()
            prompts = self._prompts()
            answers = [self.rig.routers[arm].complete(one, OUTPUT) for one in prompts]
            same = self._compare(arm, prompts, answers, 0)
            self.checks.say(f"{arm}, equal answers", same == f"{PROMPTS} of {PROMPTS}", same)
            expected = PROMPTS * (TOKENS // 16) * (2 << 20)
            # The last load is in the metrics of a later step.
            end = time.monotonic() + 20
            while self._bytes()[mine] - before[mine] < expected and time.monotonic() < end:
                pass
            rose = {key: value - before[key] for key, value in self._bytes().items()}
            came = f"{mine} {rose[mine] / 1e6:.0f} of {expected / 1e6:.0f} MB"
            self.checks.say(
                f"{arm}, bytes by connector",
                rose[mine] >= expected and rose[other] == 0,
                f"{came}, {other} {rose[other]:.0f}",
            )

    def server_killed(self, stack: contextlib.ExitStack) -> None:
        """While prompts are in flight by both."""
        prompts = self._prompts()
        arms = ["kv-params", "serial"] * (PROMPTS // 2)
        asks = [
            lambda one=one, arm=arm: self.rig.routers[arm].complete(one, OUTPUT)
            for one, arm in zip(prompts, arms, strict=True)
        ]
        killer = threading.Timer(0.15, self.rig.children["server"].send_signal, [signal.SIGKILL])
        killer.start()
        answers = all_at_once(asks)
        killer.join()
        same = self._compare("server killed", prompts, answers, 0)
        print(f"     server killed, answers as from the prefill engine's cache: {same}", flush=True)
        self.rig.start_server(stack)
        prompts = self._prompts()
        before = self._bytes()["pegaflow"]
        begin = time.monotonic()
        while self._bytes()["pegaflow"] == before and time.monotonic() - begin < 20:
            answers = [self.rig.routers["serial"].complete(one, OUTPUT) for one in prompts]
            self._compare("server started again", prompts, answers, 0)
            prompts = self._prompts()
        self.checks.say(
            "server started again, loads by it",
            self._bytes()["pegaflow"] > before,
            f"after {time.monotonic() - begin:.1f} s",
        )

    def prefill_killed(self) -> None:
        """While prompts are in flight by both: the decode engine computes them."""
        prompts = self._prompts()
        arms = ["kv-params", "serial"] * (PROMPTS // 2)
        asks = [
            lambda one=one, arm=arm: self.rig.routers[arm].complete(one, OUTPUT)
            for one, arm in zip(prompts, arms, strict=True)
        ]
        group = self.rig.children["engine-0"].pid
        killer = threading.Timer(0.2, os.killpg, [group, signal.SIGKILL])
        killer.start()
        answers = all_at_once(asks)
        killer.join()
        same = self._compare("prefill engine killed", prompts, answers, 1)
        print(f"     prefill killed, answers as from the decode engine's cache: {same}", flush=True)
        prompts = self._prompts()
        answers = [
            self.rig.routers[arm].complete(one, OUTPUT)
            for one, arm in zip(prompts, arms, strict=True)
        ]
        self._compare("after the prefill engine's end", prompts, answers, 1)


def main(argv: Sequence[str]) -> int:
    options = parse([*argv, "--lengths", f"{TOKENS}:1", "--configurations", "multi"])
    make_model(options)
    options.out.mkdir(parents=True, exist_ok=True)
    rig = Rig(options, "multi")
    test = Test(rig)
    with rig.running() as stack:
        rig.shuffle()
        for arm in ("kv-params", "serial"):  # the first request connects the engines
            rig.ask(arm, prompt(7, TOKENS, VOCABULARY))
        test.prompts_by_either()
        test.server_killed(stack)
        test.prefill_killed()
    print(f"failed: {test.checks.failed}", flush=True)
    return 1 if test.checks.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
