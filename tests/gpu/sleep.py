#!/usr/bin/env python3
"""vLLM's sleep mode on a GPU: what an engine finds after it woke, and what others find meanwhile.

    PYTHONPATH=REPOSITORY:PACKAGE python3 -m tests.gpu.sleep --server FILE --model DIR --out DIR

Two engines share one pegaflow-server, the first with `--enable-sleep-mode`. While it sleeps, its
former memory is filled with other bytes. DIR is written with tools/vllm-cpu/make_model.py if it
does not exist: weights in files, which vLLM can load again. Exits with 0 if all checks passed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.gpu.vllm import LENGTH, PROMPTS, GpuVllm, Session, play
from tests.support.child_process import started_together
from tests.support.vllm_server import REPOSITORY, PegaServer
from tests.support.waiting import wait_until

#: As tools/vllm-cpu/make_model.py takes them: heads that Flash Attention serves, and 16 KiB of KV a
#: token and layer pair.
SHAPE = {
    "--layers": "8",
    "--hidden": "2048",
    "--heads": "16",
    "--kv-heads": "8",
    "--head-dim": "128",
    "--dtype": "bfloat16",
}
VOCABULARY = 2000
#: Fills most of the free memory of the GPU, in a process of its own.
FILL = """
import torch
free, _ = torch.cuda.mem_get_info()
kept = [torch.full((1 << 28,), 0x5A, dtype=torch.uint8, device="cuda")
        for _ in range(int(free * 0.9) >> 28)]
torch.cuda.synchronize()
print(len(kept) << 28)
"""


class SleepyVllm(GpuVllm):
    """`vllm serve` whose weights are in files."""

    weights = ()

    def sleep(self, level: int, mode: str = "wait") -> None:
        status, text = self._ask("POST", f"/sleep?level={level}&mode={mode}")
        assert status == 200, (status, text[:300])
        wait_until(self.is_sleeping, "the engine is awake", 30)

    def is_sleeping(self) -> bool:
        return bool(json.loads(self._ask("GET", "/is_sleeping")[1])["is_sleeping"])

    def wake_up(self, tags: str = "") -> None:
        status, text = self._ask("POST", "/wake_up" + (f"?tags={tags}" if tags else ""))
        assert status == 200, (status, text[:300])

    def call_workers(self, method: str) -> None:
        status, text = self._ask("POST", "/collective_rpc", json.dumps({"method": method}))
        assert status == 200, (status, text[:300])

    def reset_everywhere(self) -> None:
        """An explicit reset, which other engines of the namespace follow."""
        status, text = self._ask("POST", "/reset_prefix_cache?reset_external=true")
        assert status == 200, (status, text[:300])


class SleepyEngine(SleepyVllm):
    def command(self) -> list[str]:
        return [*super().command(), "--enable-sleep-mode"]


def gpu_bytes_in_use() -> int:
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    out = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    return int(out.splitlines()[0]) << 20


class SleepSession(Session):
    engine: SleepyEngine
    other: SleepyVllm

    def prompt(self, length: int = 0) -> list[int]:
        return [self.chance.randrange(10, VOCABULARY) for _ in range(length or LENGTH)]

    def overwrite_freed_memory(self) -> int:
        done = subprocess.run([sys.executable, "-c", FILL], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-500:]
        return int(done.stdout)

    # ---- scenarios

    def awake(self) -> str:
        self.learn()
        self.check_reload()
        self.check_reload(self.other)
        return f"{PROMPTS} prompts of {LENGTH} tokens, reloads agree in both engines"

    def level_1(self) -> str:
        before = gpu_bytes_in_use()
        freed = filled = 0
        for _ in range(3):
            self.engine.sleep(1)
            freed = before - gpu_bytes_in_use()
            assert freed > 1 << 30, f"only {freed} bytes were freed"
            filled = self.overwrite_freed_memory()
            self.check_reload(self.other)
            self.engine.wake_up()
            self.check_reload()
        assert self.engine.total("vllm:pegaflow_private_view") == 0, "a private view"
        return (
            f"3 times {freed >> 20} MiB freed and {filled >> 20} MiB overwritten; the other engine "
            "kept its hits, and all reloads agree after each"
        )

    def saves_in_flight(self) -> str:
        """Falls asleep right behind the steps that compute new blocks."""
        for _ in range(3):
            prompts = [self.prompt() for _ in range(4)]
            self.engine.ask_all(prompts, 1)
            self.engine.sleep(1)
            self.overwrite_freed_memory()
            self.engine.wake_up()
            # What was saved is right: the other engine answers as after computing it.
            loaded = self.loaded(self.other)
            answers = [self.other.ask(prompt) for prompt in prompts]
            loaded = self.loaded(self.other) - loaded
            assert loaded > 0, "nothing was saved"
            self.engine.reset()
            again = [self.engine.ask(prompt) for prompt in prompts]
            assert again == answers, "tokens differ"
        return f"3 times 4 prompts, the last time {loaded:.0f} blocks reached the other engine"

    def loads_in_flight(self) -> str:
        """Falls asleep while requests load; vLLM aborts them or waits for them."""
        for mode in ("abort", "wait", "abort", "wait"):
            self.engine.reset()
            before = self.loaded()
            asking = threading.Thread(target=self._ask_and_ignore)
            asking.start()
            while self.loaded() == before and asking.is_alive():
                pass
            self._sleep_at_last(mode)
            asking.join()
            self.overwrite_freed_memory()
            self.engine.wake_up()
            self.check_reload()
        return "2 sleeps that abort and 2 that wait, all later reloads agree"

    def _ask_and_ignore(self) -> None:
        # An aborted request has no whole answer.
        with contextlib.suppress(AssertionError):
            self.engine.ask_all(self.prompts)

    def _sleep_at_last(self, mode: str) -> None:
        """A save that does not end in time makes the call fail; the operator repeats it."""
        for _ in range(5):
            with contextlib.suppress(AssertionError):
                self.engine.sleep(1, mode)
                return
        raise AssertionError("the engine does not fall asleep")

    def killed_server(self) -> str:
        """The server is killed and started again while the engine sleeps."""
        self.engine.sleep(1)
        self.server.kill()
        self.server.start()
        self.engine.wake_up()
        begin = time.monotonic()
        self._until_saved_again(self.engine)
        used = time.monotonic() - begin
        self.learn()
        self.check_reload()
        self._until_saved_again(self.other)
        self.check_reload(self.other)
        return f"used again {used:.1f} s after the engine woke, reloads agree"

    def level_2(self) -> str:
        """The weights are gone and loaded again: nothing of before is found."""
        self.learn()
        expected = self.hits
        self.engine.sleep(2)
        self.overwrite_freed_memory()
        self.engine.wake_up("weights")
        self.engine.call_workers("reload_weights")
        self.engine.wake_up("kv_cache")
        before = self.loaded()
        cold = [self.engine.ask(prompt) for prompt in self.prompts]
        assert self.loaded() == before, "blocks of before were loaded"
        assert self.engine.total("vllm:pegaflow_private_view") == 1, "no private view"
        same = sum(a[0] == b[0] for a, b in zip(cold, expected, strict=True))
        self.learn()
        assert self.hits == expected, "the loaded weights answer otherwise"
        self.check_reload()  # of what it has saved since
        self.engine.reset_everywhere()
        self.learn(self.other)
        self.check_reload()
        assert self.engine.total("vllm:pegaflow_private_view") == 0, "a private view"
        return (
            f"nothing of before was loaded ({same} of {PROMPTS} first tokens computed alike), "
            "later its own blocks; after an explicit reset those of the other engine"
        )


def scenarios(session: SleepSession) -> Iterator[tuple[str, Any]]:
    for name in (
        "awake",
        "level_1",
        "saves_in_flight",
        "loads_in_flight",
        "killed_server",
        "level_2",
    ):
        yield name, getattr(session, name)


def make_model(directory: Path) -> None:
    program = REPOSITORY / "tools" / "vllm-cpu" / "make_model.py"
    shape = [word for pair in SHAPE.items() for word in pair]
    subprocess.run([sys.executable, program, directory, *shape], check=True)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--server", type=Path, required=True, help="the program pegaflow-server")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the logs")
    parser.add_argument("--pool", default="16gb")
    parser.add_argument("--gpu-blocks", type=int, default=8000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--vllm-arguments", default="", help="more arguments of vLLM")
    options = parser.parse_args(argv)
    options.tensor_parallel = 1
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.model.exists():
        make_model(options.model)
    print(f"seed {options.seed}", flush=True)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(PegaServer(options.server, options.out / "pega", options.pool))
        engine = SleepyEngine("first", server, options)
        other = SleepyVllm("second", server, options)
        stack.enter_context(started_together([engine, other]))
        session = SleepSession(server, engine, other, options)
        held = play(scenarios(session))
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
