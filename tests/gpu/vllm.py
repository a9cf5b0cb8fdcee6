#!/usr/bin/env python3
"""A real vLLM on a GPU while its cache is aborted, stopped, killed and damaged.

    PYTHONPATH=REPOSITORY:PACKAGE python3 -m tests.gpu.vllm --server FILE --model DIR --out DIR

Two engines on one GPU, the second with `pegaflow.verify=all`, share one pegaflow-server. Answers
depend on the KV cache (tools/vllm-gpu/plugin): a loaded prefix agrees with a hit on the GPU in
every token, or is wrong. The model is tools/vllm-gpu/make_model.py's; one with windows or states
needs vLLM 0.30. Exits with 0 if all checks passed.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.gpu.scenarios import PATIENCE_S, PoolView
from tests.support.child_process import ChildProcess, started_together
from tests.support.prometheus import read_metrics
from tests.support.vllm_server import REPOSITORY, PegaServer, free_port
from tests.support.waiting import wait_until

PROMPTS, LENGTH, BLOCK = 6, 4008, 16
TOKENS = 16


class GpuVllm(ChildProcess):
    """`vllm serve` with our connector and random weights; without a ``server`` plain vLLM."""

    #: The connector's class, and its module.
    connector = ("PegaKVConnector", "pegaflow.connector")
    #: The model's weights: vLLM's options.
    weights = ("--load-format", "pegaflow_seeded")
    block_tokens = BLOCK

    def __init__(
        self, name: str, server: PegaServer | None, options: argparse.Namespace, **extra: Any
    ):
        plugin = REPOSITORY / "tools" / "vllm-gpu" / "plugin"
        super().__init__(
            f"vllm {name}",
            options.out / f"vllm-{name}.log",
            {
                "PYTHONPATH": f"{plugin}:{os.environ.get('PYTHONPATH', '')}",
                "VLLM_SERVER_DEV_MODE": "1",
                "PYTHONHASHSEED": "0",
                "HF_HUB_OFFLINE": "1",
            },
        )
        self._options = options
        self._extra = extra
        self._server = server
        self.port = free_port()

    def _transfer(self) -> list[str]:
        if self._server is None:
            return []
        name, module = self.connector
        transfer = {
            "kv_connector": name,
            "kv_role": "kv_both",
            "kv_connector_module_path": module,
            "kv_connector_extra_config": {
                "pegaflow.host": self._server.address,
                "pegaflow.weights_id": "pegaflow_seeded",
                "pegaflow.load_policy": "always",
                "pegaflow.untested": True,
                **self._extra,
            },
        }
        return ["--kv-transfer-config", json.dumps(transfer)]

    def command(self) -> list[str]:
        return [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(self._options.model)),
            *("--served-model-name", "model", "--host", "127.0.0.1", "--port", str(self.port)),
            *self.weights,
            *("--max-model-len", "8192"),
            *(
                "--max-num-seqs",
                "16",
                "--block-size",
                str(self.block_tokens),
                "--gpu-memory-utilization",
                "0.4",
            ),
            *("--num-gpu-blocks-override", str(self._options.gpu_blocks)),
            *("--compilation-config", '{"mode":0,"cudagraph_mode":"NONE"}'),
            *("--tensor-parallel-size", str(self._options.tensor_parallel)),
            *self._transfer(),
            *self._options.vllm_arguments.split(),
        ]

    def is_ready(self) -> bool:
        with contextlib.suppress(OSError):
            return self._ask("GET", "/health")[0] == 200
        return False

    def _ask(self, method: str, path: str, body: str = "") -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        connection.request(method, path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        found = answer.status, answer.read()
        connection.close()
        return found

    def ask(self, prompt: list[int], tokens: int = TOKENS) -> list[str]:
        """The answer's tokens; raises if there is none."""
        body = {"model": "model", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        status, text = self._ask("POST", "/v1/completions", json.dumps(body | {"ignore_eos": True}))
        assert status == 200, (status, text[:300])
        return json.loads(text)["choices"][0]["text"].split()

    def ask_all(self, prompts: Sequence[list[int]], tokens: int = TOKENS) -> list[list[str]]:
        """All at once; the answers depend on which requests shared a batch."""
        found: dict[int, list[str] | str] = {}

        def one(number: int) -> None:
            try:
                found[number] = self.ask(prompts[number], tokens)
            except Exception as error:
                found[number] = repr(error)

        threads = [threading.Thread(target=one, args=(n,)) for n in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        failed = [found[n] for n in range(len(prompts)) if isinstance(found[n], str)]
        assert not failed, failed
        return [found[n] for n in range(len(prompts))]  # type: ignore[misc]

    def abort(self, prompt: list[int], after_s: float) -> None:
        """Sends a request, and leaves before the answer."""
        body = {"model": "model", "prompt": prompt, "max_tokens": 400, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        time.sleep(after_s)  # the abort comes at a random moment
        connection.close()

    def reset(self) -> None:
        """Empties vLLM's own cache, as soon as nothing is in flight."""
        wait_until(
            lambda: bool(
                json.loads(self._ask("POST", "/reset_prefix_cache")[1] or b"{}").get("success")
            ),
            "the prefix cache could not be emptied",
            PATIENCE_S,
        )

    def total(self, name: str) -> float:
        return read_metrics(f"127.0.0.1:{self.port}").total(name)

    def wait_for(self, name: str, least: float) -> None:
        wait_until(lambda: self.total(name) >= least, f"{name} stays below {least}", PATIENCE_S)


class Session:
    """The state that the scenarios share; each returns its observations."""

    def __init__(
        self,
        server: PegaServer,
        engine: GpuVllm,
        other: GpuVllm | None,
        options: argparse.Namespace,
        plain: GpuVllm | None = None,
    ):
        self.server, self.engine, self.other, self.plain = server, engine, other, plain
        self._options = options
        self.chance = random.Random(options.seed)
        self.prompts = [self.prompt() for _ in range(PROMPTS)]
        self.hits: list[list[str]] = []
        self.stable = 0  #: First tokens that are equal if all of the prompt is computed.
        self.hit_tokens = 0.0  #: Of all prompts together, if the cache has all that it can have.

    def prompt(self, length: int = 0) -> list[int]:
        return [self.chance.randrange(10, 32000) for _ in range(length or LENGTH)]

    def loaded(self, engine: GpuVllm | None = None) -> float:
        return (engine or self.engine).total("vllm:pegaflow_loaded_blocks_total")

    def external_hits(self, engine: GpuVllm | None = None) -> float:
        return (engine or self.engine).total("vllm:external_prefix_cache_hits_total")

    def learn(self, engine: GpuVllm | None = None) -> None:
        """Computes, saves, and records the answers of hits on the GPU."""
        engine = engine or self.engine
        engine.reset()
        self.hits, self.stable = [], 0
        for prompt in self.prompts:
            cold = engine.ask(prompt)
            self.hits.append(engine.ask(prompt))
            self.stable += cold[0] == self.hits[-1][0]
        engine.reset()  # Blocks that are being saved are in use until then.

    def reload(self, engine: GpuVllm | None = None) -> list[list[str]]:
        """One after the other, like the hits: rounding differs from batch to batch."""
        engine = engine or self.engine
        engine.reset()
        return [engine.ask(prompt) for prompt in self.prompts]

    def check_reload(self, engine: GpuVllm | None = None) -> None:
        before = self.loaded(engine)
        found = self.reload(engine)
        assert found == self.hits, f"tokens differ from the GPU's own cache: {found} {self.hits}"
        assert self.loaded(engine) > before, "nothing was loaded"

    # ---- scenarios

    def every_token(self) -> str:
        self.learn()
        before = self.external_hits()
        self.check_reload()
        self.hit_tokens = self.external_hits() - before
        return (
            f"{PROMPTS} prompts of {LENGTH} tokens, {self.hit_tokens:.0f} tokens reloaded, all "
            f"{PROMPTS * TOKENS} answered tokens agree{self._beside_plain()}"
        )

    def _beside_plain(self) -> str:
        """Compares with hits on the GPU of an engine without a connector."""
        if self.plain is None:
            return ""
        answers = []
        for prompt in self.prompts:
            self.plain.ask(prompt)
            answers.append(self.plain.ask(prompt))
        assert answers == self.hits, f"an engine without a connector answers {answers}"
        return ", also with an engine without a connector"

    def branches(self) -> str:
        """A prompt that leaves another one within it, and one that continues an answer."""
        before, found = self.external_hits(), 0
        for number, prompt in enumerate(self.prompts):
            fresh = self.prompt(LENGTH // 8)
            answer = [int(word.removeprefix("t")) for word in self.hits[number]]
            for longer in (prompt[: LENGTH * 3 // 4] + fresh, prompt + answer + fresh):
                self.engine.reset()
                loaded = self.engine.ask(longer)
                # Its hit on the GPU is behind more of the prompt, so the first token is compared.
                found += loaded[0] == self.engine.ask(longer)[0]
        tokens = self.external_hits() - before
        assert tokens > 0, "nothing was loaded"
        # Wrong KV changes nearly all of them, and so does rounding with some models.
        said = f"{found} of {2 * PROMPTS} first tokens agree with a hit of the whole prompt"
        assert found >= PROMPTS or self.stable < PROMPTS // 2, said
        return (
            f"{tokens:.0f} tokens reloaded, {said}, as {self.stable} of {PROMPTS} between a "
            "computed prompt and its hit"
        )

    def two_engines(self) -> str:
        """The second engine loads the first one's blocks while that one computes."""
        assert self.other is not None
        busy = threading.Thread(
            target=lambda: self.engine.ask_all([self.prompt() for _ in range(4)])
        )
        busy.start()
        self.check_reload(self.other)
        busy.join()
        return "with the first engine's blocks the second one has the same answers"

    def aborts(self) -> str:
        """Reloads aborted at random; prompts that are computed meanwhile reuse the blocks."""
        aborted = 0
        for _ in range(6):
            self.engine.reset()
            names = self.chance.sample(range(PROMPTS), 3)
            fresh = [self.prompt(LENGTH // 4) for _ in range(3)]
            threads = [
                threading.Thread(
                    target=self.engine.abort, args=(self.prompts[n], self.chance.random() * 0.08)
                )
                for n in names
            ]
            for thread in threads:
                thread.start()
            rest = [n for n in range(PROMPTS) if n not in names]
            self.engine.ask_all([self.prompts[n] for n in rest] + fresh)
            for thread in threads:
                thread.join()
            aborted += len(names)
            # The blocks on the GPU now come from the cache, beside reused ones.
            for n in rest:
                assert self.engine.ask(self.prompts[n]) == self.hits[n], "tokens differ"
        self.check_reload()
        return f"{aborted} aborted in 6 rounds, the tokens of the others and of reloads agree"

    def preemptions(self) -> str:
        """More than the GPU has room for: requests are preempted, their KV is loaded again."""
        before = self.engine.total("vllm:num_preemptions_total")
        self.engine.reset()
        prompts = list(self.prompts)
        for _ in range(5):  # the room for requests depends on the kinds of blocks
            self.engine.ask_all(prompts, self._options.long_answer)
            preempted = self.engine.total("vllm:num_preemptions_total") - before
            if preempted > 0:
                break
            prompts += [self.prompt(), self.prompt()]
        assert preempted > 0, "no request was preempted"
        self.check_reload()
        return f"{preempted:.0f} preemptions, the tokens of later reloads agree"

    def stopped_server(self) -> str:
        """SIGSTOP in the middle of reloads: every request is answered."""
        self.engine.reset()
        try:
            took = self._disturb(lambda: os.kill(self.server.pid, signal.SIGSTOP))
        finally:
            os.kill(self.server.pid, signal.SIGCONT)
        self._until_used_again()
        return f"{PROMPTS} + {PROMPTS} answers without a server, the last after {took:.1f} s"

    def killed_server(self) -> str:
        """SIGKILL in the middle of reloads, and a new server."""
        self.engine.reset()
        try:
            took = self._disturb(self.server.kill)
        finally:
            self.server.start()
        begin = time.monotonic()
        self._until_saved_again(self.engine)
        used = time.monotonic() - begin
        self.learn()
        self.check_reload()
        return (
            f"all answered, the last after {took:.1f} s; saves again {used:.1f} s after the start"
        )

    def _disturb(self, disturb: Any) -> float:
        begin = time.monotonic()
        loaded = self.loaded()
        asking = threading.Thread(target=lambda: answers.extend(self.engine.ask_all(self.prompts)))
        answers: list[list[str]] = []
        asking.start()
        while self.loaded() == loaded and asking.is_alive():
            pass
        disturb()
        asking.join()
        assert len(answers) == PROMPTS, "a request was not answered"
        self.engine.reset()
        self.engine.ask_all(self.prompts)
        return time.monotonic() - begin

    def _until_used_again(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            before = self.external_hits()
            found = self.reload()
            if self.external_hits() - before >= self.hit_tokens:
                assert found == self.hits, "tokens differ"
                return
            assert time.monotonic() < deadline, "the cache is not used again"

    def _until_saved_again(self, engine: GpuVllm) -> None:
        saved = engine.total("vllm:pegaflow_saved_blocks_total")
        deadline = time.monotonic() + PATIENCE_S
        while engine.total("vllm:pegaflow_saved_blocks_total") == saved:
            assert time.monotonic() < deadline, "nothing is saved"
            engine.ask(self.prompt())

    def planted_error(self) -> str:
        """One block of the pool gets another's bytes: tokens differ, or a checksum fails."""
        assert self.other is not None
        self.server.kill()  # an empty pool, so that the pages in use are known
        self.server.start()
        self._until_saved_again(self.other)
        self._until_saved_again(self.engine)
        self.learn(self.other)  # this engine computes checksums, so it does the saving
        self.check_reload(self.engine)
        self.check_reload(self.other)
        view = PoolView(self.server)
        page = self._options.planted_kib << 10
        used = [at for at in range(0, len(view.bytes), page) if any(view.bytes[at : at + 64])]
        caught, trials = 0, 8
        for _ in range(trials):
            at, source = self.chance.sample(used[len(used) // 4 :], 2)
            whole = view.bytes[at : at + page]
            view.bytes[at : at + page] = view.bytes[source : source + page]
            caught += self.reload() != self.hits
            view.bytes[at : at + page] = whole
        self.check_reload()
        # Not all used pages belong to these prompts, and no block behind a wrong one is loaded.
        source, *wrong = self.chance.sample(used[len(used) // 4 :], 1 + trials)
        for at in wrong:
            view.bytes[at : at + page] = view.bytes[source : source + page]
        view.close()
        name = "vllm:pegaflow_corrupt_pages_total"
        corrupt = self.other.total(name)
        self.reload(self.other)
        self.other.wait_for(name, corrupt + 1)
        found = self.other.total(name) - corrupt
        assert caught > 0, "no token shows a wrong block"
        return (
            f"of {len(used)} pieces {trials} were wrong one by one, of which tokens show {caught}, "
            f"then {trials} at once, of which checksums show {found:.0f}"
        )


def scenarios(session: Session) -> Iterator[tuple[str, Any]]:
    yield "every_token", session.every_token
    yield "branches", session.branches
    if session.other is not None:
        yield "two_engines", session.two_engines
    yield "aborts", session.aborts
    yield "preemptions", session.preemptions
    yield "stopped_server", session.stopped_server
    yield "killed_server", session.killed_server
    if session.other is not None:
        yield "planted_error", session.planted_error


def play(scenarios: Iterable[tuple[str, Callable[[], str]]]) -> bool:
    """Runs all and prints what each observed; whether none of them raised."""
    held = True
    for name, scenario in scenarios:
        begin = time.monotonic()
        try:
            said, good = scenario(), True
        except Exception:
            said, good = traceback.format_exc(), False
        held = held and good
        took = time.monotonic() - begin
        print(f"{'ok    ' if good else 'FAILED'} {name} ({took:.1f} s): {said}", flush=True)
    return held


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--server", type=Path, required=True, help="the program pegaflow-server")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the logs")
    parser.add_argument("--pool", default="32gb")
    parser.add_argument(
        "--gpu-blocks",
        type=int,
        default=1540,
        help="blocks on the GPU: enough for all prompts, but not for all their computed blocks",
    )
    parser.add_argument(
        "--planted-kib", type=int, default=1024, help="size of a wrong piece of the pool"
    )
    parser.add_argument(
        "--long-answer",
        type=int,
        default=200,
        help="tokens of the answers of requests that are preempted: these need further blocks",
    )
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--one-engine", action="store_true")
    parser.add_argument(
        "--plain", action="store_true", help="compare with an engine without a connector, too"
    )
    parser.add_argument(
        "--together",
        action="store_true",
        help="start all engines at once; their kernels may then be tuned differently, and round "
        "differently",
    )
    parser.add_argument("--only", default="", help="names of scenarios, separated by commas")
    parser.add_argument("--vllm-arguments", default="", help="more arguments of vLLM")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    print(f"seed {options.seed}", flush=True)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(PegaServer(options.server, options.out / "pega", options.pool))
        engine, other = GpuVllm("first", server, options), None
        if not options.one_engine:
            other = GpuVllm("second", server, options, **{"pegaflow.verify": "all"})
        plain = GpuVllm("plain", None, options) if options.plain else None
        engines = [vllm for vllm in (engine, other, plain) if vllm is not None]
        if options.together:
            stack.enter_context(started_together(engines))
        else:
            for vllm in engines:
                stack.enter_context(vllm)
        session = Session(server, engine, other, options, plain)
        wanted = options.only.split(",") if options.only else None
        held = play(one for one in scenarios(session) if wanted is None or one[0] in wanted)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
