"""Prefill and decode on two real vLLMs: both legs at once beside one after the other.

One pegaflow-server, two vLLMs on the CPU, and four routers in front of them: with --flow store,
with --flow auto, one that sends the prompt to the prefill engine alone, and one that sends it to
the decode engine alone, whose own prefix cache has it. Prompts are random. Each round sends one
prompt through each router, in a random order, and measures the time to the first token. What the
router and the decode engine add to the prefill is the difference to the third one. A hit, the
fourth one, is what the decode engine needs without any transfer.

The target: with both legs at once, the first token comes no later than with one after the other.

With --beside there is a further decode engine that differs in one option of the connector, with a
router that sends both legs at once to it. For each decode engine the run notes its processor time
for a request, and how many steps a second it made while it waited. If the option is
pegaflow.direct_group, the prefill engine has it too, and the target is half of the time that both
legs at once add to the prefill without it.

With --nodes 2 the prefill engine and the decode engines have a server each. Blocks cross between
them over UCX on TCP of the loopback device: --beside pegaflow.direct_group=NAME then reads them out
of the prefill engine's memory over the same.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from demo.client import complete
from demo.stage import LONG_DEADLINES, SMALL
from perf.support.figure import Figure, note, publish
from perf.support.servers import parser
from tests.support.vllm_server import (
    ModelShape,
    PegaServer,
    RouterServer,
    VllmOptions,
    VllmServer,
    ensure_model,
)

ARMS = ("serial", "early", "alone", "hit")
DIRECT = "pegaflow.direct_group"
NICS = "pegaflow.direct_nics"


@dataclasses.dataclass
class Sample:
    """One request through a router."""

    ttft_s: float
    cpu_s: float = 0.0  #: Processor time of the decode engine.
    idle_steps: int = 0  #: Its steps in which the request waited.
    waited_s: float = 0.0


class Rig:
    """The servers, and a router for each arm."""

    def __init__(self, build: Path, directory: Path, given: argparse.Namespace) -> None:
        self._build = build
        self._directory = directory
        self.shape = ModelShape(*given.shape) if given.shape else SMALL
        binary = build / "server" / "pegaflow-server"

        listen = ["--peer-listen", "127.0.0.1:0"] if given.nodes == 2 else []
        self.pega = PegaServer(binary, directory / "pega", "2gb", listen)
        #: That of the decode engines.
        self.other = PegaServer(binary, directory / "other", "2gb") if given.nodes == 2 else None
        chunk = ("--max-num-batched-tokens", str(given.chunk)) if given.chunk else ()
        options = VllmOptions(
            ensure_model(self.shape),
            connector=self.pega.address,
            extra_config=LONG_DEADLINES | {"pegaflow.handover_wait_ms": 10_000},
            kv_cache_bytes=1 << 30 if given.shape else 1 << 29,
            python_path=[build / "python"],
        )
        groups = dict(text.split("=", 1) for text in given.beside if text.startswith(DIRECT))
        if groups and self.other:
            groups[NICS] = "auto"
        prefill = dataclasses.replace(
            options, arguments=chunk, extra_config=options.extra_config | groups
        )
        self.prefill = self._engine("prefill", prefill, given.niceness, given.pin)
        #: By arm. The cores of --pin-decode are those of all of them: one works at a time.
        if self.other:
            options = dataclasses.replace(options, connector=self.other.address)
        decode = self._engine("decode", options, given.decode_niceness, given.pin_decode)
        self.decodes = {"serial": decode, "early": decode}
        for number, text in enumerate(given.beside):
            name, _, value = text.partition("=")
            extra = {**options.extra_config, name: value}
            if name == DIRECT and self.other:
                extra[NICS] = "auto"
            changed = dataclasses.replace(options, extra_config=extra)
            self.decodes[text] = self._engine(
                f"decode-{number}", changed, given.decode_niceness, given.pin_decode
            )
        self.arms = (*ARMS, *given.beside)
        self.routers: dict[str, RouterServer] = {}

    def _engine(self, name: str, options: VllmOptions, niceness: int, cores: str) -> VllmServer:
        (self._directory / name).mkdir()
        engine = VllmServer(options, self._directory / name)
        pinned = ["taskset", "--cpu-list", cores] if cores else []
        engine.prefix = [*pinned, "nice", "-n", str(niceness)]
        return engine

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.pega)
            if self.other:
                self.other.arguments += ["--peers", self.pega.peer_listen]
                stack.enter_context(self.other)
            for server in dict.fromkeys((self.prefill, *self.decodes.values())):
                stack.enter_context(server)
            binary = self._build / "router" / "pegaflow-router"
            for number, arm in enumerate(self.arms):
                p = self.prefill.http
                decode = self.decodes.get(arm, self.decodes["early"]).http
                legs = {"alone": ([], [p]), "hit": ([], [decode])}.get(arm, ([p], [decode]))
                (self._directory / f"router-{number}").mkdir()
                router = RouterServer(binary, self._directory / f"router-{number}", *legs)
                router.arguments += [
                    "--flow",
                    "auto" if arm in self.decodes and arm != "serial" else "store",
                ]
                self.routers[arm] = stack.enter_context(router)
            yield

    def handovers(self, arm: str, result: str) -> int:
        metrics = self.routers[arm].metrics()
        return int(metrics.total("pegaflow_router_handover_total", result=result))

    def ask(self, arm: str, prompt: list[int]) -> Sample:
        """
        Raises:
            AssertionError: the decode engine has not loaded all but the last token.
        """
        if arm == "hit":
            complete(self.routers[arm].http, prompt, 1)
        if arm not in self.decodes:
            return Sample(complete(self.routers[arm].http, prompt, 2).ttft_s)
        engine = self.decodes[arm]
        before, cpu_s = engine.metrics(), engine.cpu_seconds()
        sample = Sample(complete(self.routers[arm].http, prompt, 2).ttft_s)
        sample.cpu_s = engine.cpu_seconds() - cpu_s
        after = engine.metrics()

        def rise(name: str) -> float:
            return after.total(f"vllm:{name}") - before.total(f"vllm:{name}")

        sample.idle_steps = int(rise("pegaflow_idle_steps_total"))
        sample.waited_s = rise("pegaflow_early_handover_seconds_sum") + rise(
            "pegaflow_handover_seconds_sum"
        )
        loaded = rise("external_prefix_cache_hits_total")
        # vLLM counts the tokens when it admits a request, and a load may end short.
        failed = rise("pegaflow_load_failed_blocks_total")
        if loaded != len(prompt) - 1 or failed:
            raise AssertionError(
                f"{arm}: {loaded:.0f} of {len(prompt) - 1} tokens loaded, "
                f"{failed:.0f} blocks failed"
            )
        return sample


def rounds(rig: Rig, rng: random.Random, tokens: int, count: int) -> dict[str, list[Sample]]:
    samples: dict[str, list[Sample]] = {arm: [] for arm in rig.arms}
    for _ in range(count):
        for arm in rng.sample(rig.arms, len(rig.arms)):
            prompt = [rng.randrange(3, rig.shape.vocabulary) for _ in range(tokens)]
            samples[arm].append(rig.ask(arm, prompt))
    return samples


def figure(tokens: int, samples: dict[str, list[Sample]]) -> Figure:
    times = {arm: [one.ttft_s for one in taken] for arm, taken in samples.items()}
    median = {arm: statistics.median(values) * 1e3 for arm, values in times.items()}
    for arm, values in times.items():
        note(
            f"{tokens} tokens, {arm}: {median[arm]:.1f} ms "
            f"({min(values) * 1e3:.1f} to {max(values) * 1e3:.1f})"
        )
        if waited := sum(one.waited_s for one in samples[arm]):
            note(
                f"{tokens} tokens, {arm}: decode engine: "
                f"{sum(one.idle_steps for one in samples[arm]) / waited:.0f} steps per second of "
                f"waiting, {statistics.mean(one.cpu_s for one in samples[arm]) * 1e3:.0f} ms of "
                f"processor time per request, of which it waited {waited / len(values) * 1e3:.0f} "
                "ms"
            )
    pairs = [
        (serial - early) * 1e3
        for serial, early in zip(times["serial"], times["early"], strict=True)
    ]
    note(
        f"{tokens} tokens: added to the prefill alone: serial "
        f"{median['serial'] - median['alone']:.1f} ms, early "
        f"{median['early'] - median['alone']:.1f} ms; serial - early of a round: median "
        f"{statistics.median(pairs):.1f} ms ({min(pairs):.1f} to {max(pairs):.1f})"
    )
    early, serial = times["early"], times["serial"]
    return Figure(
        run="handover",
        params={"tokens": tokens},
        figure=median["early"],
        unit="ms",
        bound=median["serial"],
        bound_name="one leg after the other",
        target=1.0,
        n=len(early),
        spread=f"{min(early) * 1e3:.1f} to {max(early) * 1e3:.1f} ms "
        f"(bound: {min(serial) * 1e3:.1f} to {max(serial) * 1e3:.1f})",
    )


def direct_figure(tokens: int, arm: str, samples: dict[str, list[Sample]]) -> Figure | None:
    """
    The time that a decode engine which reads directly adds to the prefill alone, in each round.
    None when one that loads from the pool adds nothing: then the prefill varies by more than that.
    """
    added = {
        name: [
            (one.ttft_s - alone.ttft_s) * 1e3
            for one, alone in zip(samples[name], samples["alone"], strict=True)
        ]
        for name in (arm, "early")
    }
    saved = [early - direct for early, direct in zip(added["early"], added[arm], strict=True)]
    note(
        f"{tokens} tokens, {arm}: through the pool - directly, of a round: median "
        f"{statistics.median(saved):.1f} ms ({min(saved):.1f} to {max(saved):.1f})"
    )
    if statistics.median(added["early"]) <= 0:
        note(f"{tokens} tokens: the prefill alone varies by more than is added to it: no ratio")
        return None
    return Figure(
        run="direct reads: added to the prefill",
        params={"tokens": tokens},
        figure=statistics.median(added[arm]),
        unit="ms",
        bound=statistics.median(added["early"]),
        bound_name="the same through the pool",
        target=0.5,
        n=len(added[arm]),
        spread=f"{min(added[arm]):.1f} to {max(added[arm]):.1f} ms "
        f"(bound: {min(added['early']):.1f} to {max(added['early']):.1f})",
    )


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=9)
    arguments.add_argument(
        "--tokens", type=int, nargs="*", default=[1010, 3010], help="of a prompt"
    )
    arguments.add_argument(
        "--nodes", type=int, default=1, choices=(1, 2), help="servers of the engines"
    )
    arguments.add_argument("--niceness", type=int, default=0, help="of the prefill engine")
    arguments.add_argument("--decode-niceness", type=int, default=0, help="of the decode engine")
    arguments.add_argument(
        "--pin", default="", metavar="CPUS", help="cores of the prefill engine, as for taskset"
    )
    arguments.add_argument(
        "--pin-decode", default="", metavar="CPUS", help="cores of the decode engines"
    )
    arguments.add_argument(
        "--beside",
        action="append",
        default=[],
        metavar="pegaflow.OPTION=VALUE",
        help="adds a decode engine with this option",
    )
    arguments.add_argument(
        "--chunk", type=int, default=0, help="of the prefill engine, in tokens; 0: vLLM's default"
    )
    arguments.add_argument(
        "--shape",
        type=int,
        nargs=5,
        metavar=("LAYERS", "HIDDEN", "HEADS", "KV_HEADS", "HEAD_DIM"),
        help="of the model, in float32",
    )
    options = arguments.parse_args()
    if options.nodes == 2:
        os.environ["PEGAFLOW_TEST_UCX_OVER_TCP"] = "lo"
    rng = random.Random(options.seed)
    directory = Path(tempfile.mkdtemp(prefix="pega-perf-"))
    rig = Rig(options.build_dir, directory, options)
    figures = []
    try:
        with rig.running():
            rounds(rig, rng, 1010, 2)
            for tokens in options.tokens:
                early = rig.handovers("early", "early")
                samples = rounds(rig, rng, tokens, options.rounds)
                if rig.handovers("early", "early") - early != options.rounds:
                    raise AssertionError("a request was not sent to both engines at once")
                figures.append(figure(tokens, samples))
                direct = [arm for arm in options.beside if arm.startswith(DIRECT)]
                made = [direct_figure(tokens, arm, samples) for arm in direct]
                figures += [one for one in made if one is not None]
    except Exception:
        note(f"the logs are in {directory}")
        raise
    shutil.rmtree(directory, ignore_errors=True)
    return 0 if publish(figures, options.json) else 1


if __name__ == "__main__":
    sys.exit(main())
