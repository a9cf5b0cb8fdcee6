#!/usr/bin/env python3
"""Direct reads between two real vLLMs on GPUs, while clients leave and engines are killed.

    PYTHONPATH=REPOSITORY:PACKAGE python3 -m tests.gpu.direct_vllm --bin DIR --out DIR

Prompts go through a router with --flow auto. With --far each engine has a server of its own, as in
the configuration of that name of perf/handover_gpu.py. Each answer is compared with the one that an
engine gives from its own cache. Afterwards no block of an engine may be in use. Needs what
perf/handover_gpu.py needs, and nvidia-ml-py. Exits with 0 if all checks passed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence

import pynvml

from perf.gpu_report import wait_until
from perf.handover_gpu import make_model, parse
from perf.support.two_gpus import VOCABULARY, Answer, Rig, Server, prompt
from tests.gpu.multi import Checks, all_at_once

LENGTHS = (2001, 4001, 10001)
CLIENTS = 8
#: With --far: UCX over TCP is slow, and a save waits 2 s for its readers.
FAR_LENGTHS = (401, 801)
FAR_CLIENTS = 2
OUTPUT = 8
BLOCK_BYTES = 2 << 20
#: An engine's blocks are free after this time: it keeps those that others read for 2 s at most.
FREE_WITHIN_S = 2.5
#: The memory of a killed engine is. Releases of vLLM and the driver take longer to end a process:
#: then it is compared with one that no other engine reads.
FREE_AFTER_KILL_S = 1.0


def used_mib(gpu: int) -> int:
    """Memory of a GPU that is in use, by whichever process."""
    return pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(gpu)).used >> 20


class Test:
    def __init__(self, rig: Rig, seed: int) -> None:
        self.rig = rig
        far = rig.name == "far"
        self._lengths, self._clients = (FAR_LENGTHS, FAR_CLIENTS) if far else (LENGTHS, CLIENTS)
        self.checks = Checks()
        self._chance = random.Random(seed)
        self._number = seed * 100_000

    def _prompt(self, length: int) -> list[int]:
        self._number += 1
        return prompt(self._number, length, VOCABULARY)

    def _direct_bytes(self) -> float:
        found = self.rig.metrics()[1]
        return sum(v for k, v in found.items() if k.startswith("vllm:pegaflow_direct_bytes"))

    def _compare(
        self, what: str, pairs: Sequence[tuple[Answer, Answer]], *, computed: bool = False
    ) -> None:
        """Answers and what an engine says from its cache.

        With wrong blocks, first tokens differ. A prompt of which a part was ``computed`` is rounded
        otherwise than a hit: of 120 prompts of 10,001 tokens, 4 at a time, 109 agreed in the first
        token with an engine without a connector.
        """
        errors = [one.error or other.error for one, other in pairs if one.error or other.error]
        self.checks.say(f"{what}, requests that failed", not errors, f"{len(errors)} {errors[:1]}")
        good = [(one, other) for one, other in pairs if not one.error and not other.error]
        first = sum(one.tokens[0] == other.tokens[0] for one, other in good)
        whole = sum(one.tokens == other.tokens for one, other in good)
        self.checks.say(
            f"{what}, answers",
            first >= len(good) / (2 if computed else 1) > 0,
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

    def clients_leave(self, rounds: int) -> None:
        """Half of the clients leave, at any moment from the request to the end of the answer.

        What the others have loaded is compared when nothing else runs: both engines then answer
        from their caches. A batch with other requests is rounded otherwise.
        """
        prefill, decode = self.rig.engines
        before, expected, left, failed, pairs = self._direct_bytes(), 0, 0, [], []
        for _ in range(rounds):
            leaving = [self._chance.random() < 0.5 for _ in range(self._clients)]
            prompts = [self._prompt(self._chance.choice(self._lengths)) for _ in leaving]
            answers = all_at_once(
                [
                    self._leave(one, self._chance.uniform(0.0, 0.9)) if leaves else self._ask(one)
                    for one, leaves in zip(prompts, leaving, strict=True)
                ]
            )
            left += sum(leaving)
            failed += [answer.error for answer in answers if answer.error]
            for one, leaves in zip(prompts, leaving, strict=True):
                if not leaves:
                    pairs.append((decode.complete(one, OUTPUT), prefill.complete(one, OUTPUT)))
                    expected += len(one) // 16 * BLOCK_BYTES
        what = f"{left} of {rounds * self._clients} clients left"
        self.checks.say(f"{what}, requests that failed", not failed, f"{len(failed)} {failed[:1]}")
        same = sum(mine.tokens == other.tokens for mine, other in pairs)
        self.checks.say(f"{what}, answers", same == len(pairs), f"{same} of {len(pairs)} are equal")
        read = self._direct_bytes() - before
        self.checks.say(
            f"{what}, read directly",
            # Short prompts are in the pools almost at once.
            read > (0 if self.rig.name == "far" else expected / 2),
            f"{read / max(expected, 1):.2f} of the others'",
        )
        self._free(what, (0, 1))

    def _ask(self, tokens: list[int]) -> Callable[[], Answer]:
        return lambda: self.rig.routers["early"].complete(tokens, OUTPUT)

    def _leave(self, tokens: list[int], delay_s: float) -> Callable[[], Answer]:
        def leave() -> Answer:
            router = self.rig.routers["early"]
            assert isinstance(router, Server)
            connection = router.begin(tokens, OUTPUT)
            time.sleep(delay_s)
            connection.close()
            return Answer()

        return leave

    def prefill_killed(self, stack: contextlib.ExitStack, count: int) -> None:
        """In the middle of prompts: the decode engine computes what it has not read. The prefill
        engine's memory is free as soon as that of an engine that no other one reads.
        """
        decode, killed = self.rig.engines[1], []
        for number in range(count):
            prompts = [self._prompt(10001) for _ in range(4)]
            delay = self._chance.uniform(0.05, 0.9)
            what = f"prefill engine killed after {delay:.2f} s"
            killer = threading.Timer(delay, lambda what=what: killed.append((what, self._kill(0))))
            killer.start()
            answers = all_at_once([self._ask(one) for one in prompts])
            killer.join()
            own = [decode.complete(one, OUTPUT) for one in prompts]
            self._compare(what, list(zip(answers, own, strict=True)), computed=True)
            self._free(what, (1,))
            if number + 1 < count:
                self._start_again(stack)
        unread = self._kill(1)
        for what, free_s in killed:
            self.checks.say(
                f"{what}, its GPU",
                free_s <= max(FREE_AFTER_KILL_S, 1.2 * unread),
                f"free after {free_s:.2f} s; that of an engine that no other one reads: "
                f"{unread:.2f} s",
            )

    def _kill(self, number: int) -> float:
        """Seconds until the memory of an engine is free; 10 if it is not."""
        engine, one_gpu = self.rig.children[f"engine-{number}"], self.rig.options.one_gpu
        gpu = 0 if one_gpu else number
        # The other engine may be on the same GPU.
        blocks = self.rig.options.gpu_blocks * BLOCK_BYTES >> 20
        limit = used_mib(gpu) - blocks if one_gpu else 4096
        os.killpg(engine.pid, signal.SIGKILL)
        begin = time.monotonic()
        while used_mib(gpu) > limit and time.monotonic() - begin < 10:
            time.sleep(0.01)
        return time.monotonic() - begin

    def _start_again(self, stack: contextlib.ExitStack) -> None:
        url, log = self.rig.begin_engine(0, stack)
        wait_until(self.rig.children["engine-0"], url, log, 240)
        for length in self._lengths:  # its kernels are compiled, and the router knows it
            self.rig.ask("early", self._prompt(length))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--far", action="store_true")
    own, rest = parser.parse_known_args(argv)
    lengths = ",".join(f"{length}:1" for length in LENGTHS)
    name = "far" if own.far else "direct"
    options = parse([*rest, "--lengths", lengths, "--configurations", name])
    options.out.mkdir(parents=True, exist_ok=True)
    pynvml.nvmlInit()
    make_model(options)
    rig = Rig(options, name)
    print(f"seed {options.seed}", flush=True)
    test = Test(rig, options.seed)
    with rig.running() as stack:
        rig.shuffle()
        for length in FAR_LENGTHS if own.far else LENGTHS:
            rig.ask("early", prompt(7, length, VOCABULARY))
        test.clients_leave(own.rounds)
        if own.kills:
            test.prefill_killed(stack, own.kills)
    print(f"failed: {test.checks.failed}", flush=True)
    return 1 if test.checks.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
