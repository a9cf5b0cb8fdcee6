#!/usr/bin/env python3
"""Direct reads between two real vLLMs on two GPUs, while clients leave and engines are killed.

    PYTHONPATH=REPOSITORY:PACKAGE python3 -m tests.gpu.direct_vllm --bin DIR --out DIR

Prompts go through a router with --flow auto. Each answer is compared with the one that an engine
gives from its own cache. Afterwards no block of an engine may be in use. Needs what
perf/handover_gpu.py needs. Exits with 0 if all checks passed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from perf.gpu_report import wait_until
from perf.handover_gpu import parse
from perf.support.two_gpus import VOCABULARY, Answer, Rig, Server, prompt
from tests.gpu.multi import Checks, all_at_once

LENGTHS = (2001, 4001, 10001)
OUTPUT = 8
#: Requests in flight, and how many prompts they are in all.
CLIENTS, PROMPTS = 8, 96
#: An engine's blocks are free after this time; the prefill engine keeps those that are read for 2 s.
FREE_WITHIN_S = 2.5


def used_mib(gpu: int) -> int:
    """Memory of a GPU that is in use, by whichever process."""
    command = ["nvidia-smi", f"--id={gpu}", "--query-gpu=memory.used"]
    command += ["--format=csv,noheader,nounits"]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


class Test:
    def __init__(self, rig: Rig, seed: int) -> None:
        self.rig = rig
        self.checks = Checks()
        self._chance = random.Random(seed)
        self._number = seed * 100_000

    def _prompt(self, length: int) -> list[int]:
        self._number += 1
        return prompt(self._number, length, VOCABULARY)

    def _direct_bytes(self) -> float:
        found = self.rig.metrics()[1]
        return sum(v for k, v in found.items() if k.startswith("vllm:pegaflow_direct_bytes"))

    def _compare(self, what: str, pairs: Sequence[tuple[Answer, Answer]]) -> None:
        """Answers and what an engine says from its cache.

        A prompt of which a part was computed again is rounded otherwise, and may continue otherwise
        after the first token. With a wrong block, the first token differs.
        """
        errors = [one.error or other.error for one, other in pairs if one.error or other.error]
        self.checks.say(f"{what}, requests that failed", not errors, f"{len(errors)} {errors[:1]}")
        good = [(one, other) for one, other in pairs if not one.error and not other.error]
        first = sum(one.tokens[0] == other.tokens[0] for one, other in good)
        whole = sum(one.tokens == other.tokens for one, other in good)
        self.checks.say(
            f"{what}, answers",
            first == len(good) > 0,
            f"{len(good)}, of which {first} agree in the first token, {whole} in all",
        )

    def _free(self, what: str, gpus: Sequence[int]) -> None:
        for gpu in gpus:
            try:
                took = self.rig.engines[gpu].empty_prefix_cache()
            except TimeoutError as error:
                self.checks.say(f"{what}, blocks of engine {gpu}", False, str(error))
                continue
            self.checks.say(
                f"{what}, blocks of engine {gpu}",
                took < FREE_WITHIN_S,
                f"none is in use after {took:.2f} s",
            )

    def clients_leave(self) -> None:
        """Half of the clients leave, at any moment from the request to the end of the answer."""
        router, prefill = self.rig.routers["early"], self.rig.engines[0]
        assert isinstance(router, Server)
        lock, pairs, left = threading.Lock(), [], []
        work = [
            (self._prompt(self._chance.choice(LENGTHS)), self._chance.random() < 0.5, delay)
            for delay in (self._chance.uniform(0.0, 0.9) for _ in range(PROMPTS))
        ]

        def client() -> None:
            while True:
                with lock:
                    if not work:
                        return
                    tokens, leaves, delay = work.pop()
                if leaves:
                    connection = router.begin(tokens, OUTPUT)
                    time.sleep(delay)
                    connection.close()
                    left.append(delay)
                    continue
                answer = router.complete(tokens, OUTPUT)
                pairs.append((answer, prefill.complete(tokens, OUTPUT)))

        before = self._direct_bytes()
        clients = [threading.Thread(target=client) for _ in range(CLIENTS)]
        for one in clients:
            one.start()
        for one in clients:
            one.join()
        self._compare(f"{len(left)} of {PROMPTS} clients left", pairs)
        read = self._direct_bytes() - before
        self.checks.say("clients leave, read directly", read > 0, f"{read / 1e9:.1f} GB")
        self._free("clients leave", (0, 1))

    def prefill_killed(self, stack: contextlib.ExitStack, count: int) -> None:
        """In the middle of prompts: the decode engine computes what it has not read."""
        router, decode = self.rig.routers["early"], self.rig.engines[1]
        for number in range(count):
            prompts = [self._prompt(10001) for _ in range(4)]
            engine = self.rig.children["engine-0"]
            delay = self._chance.uniform(0.05, 0.9)
            freed: list[float] = []

            def kill(engine: subprocess.Popen = engine, freed: list[float] = freed) -> None:
                os.killpg(engine.pid, signal.SIGKILL)
                killed = time.monotonic()
                while used_mib(0) > 4096 and time.monotonic() - killed < 10:
                    pass
                freed.append(time.monotonic() - killed)

            killer = threading.Timer(delay, kill)
            killer.start()
            answers = all_at_once([lambda one=one: router.complete(one, OUTPUT) for one in prompts])
            killer.join()
            what = f"prefill engine killed after {delay:.2f} s"
            own = [decode.complete(one, OUTPUT) for one in prompts]
            self._compare(what, list(zip(answers, own, strict=True)))
            self.checks.say(f"{what}, its GPU", freed[0] < 2, f"free after {freed[0]:.2f} s")
            self._free(what, (1,))
            if number + 1 < count:
                self._start_again(stack)

    def _start_again(self, stack: contextlib.ExitStack) -> None:
        url, log = self.rig.begin_engine(0, stack)
        wait_until(self.rig.children["engine-0"], url, log, 240)
        for length in LENGTHS:  # its kernels are compiled, and the router knows it
            self.rig.ask("early", self._prompt(length))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--kills", type=int, default=5)
    own, rest = parser.parse_known_args(argv)
    lengths = ",".join(f"{length}:1" for length in LENGTHS)
    options = parse([*rest, "--lengths", lengths, "--configurations", "direct"])
    options.out.mkdir(parents=True, exist_ok=True)
    rig = Rig(options, "direct")
    print(f"seed {options.seed}", flush=True)
    test = Test(rig, options.seed)
    with rig.running() as stack:
        rig.shuffle()
        for length in LENGTHS:
            rig.ask("early", prompt(7, length, VOCABULARY))
        test.clients_leave()
        if own.kills:
            test.prefill_killed(stack, own.kills)
    print(f"failed: {test.checks.failed}", flush=True)
    return 1 if test.checks.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
