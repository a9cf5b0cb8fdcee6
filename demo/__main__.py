"""Demonstrates PegaFlow: a real vLLM whose prompts are loaded from the cache.

Prompts that vLLM has computed are loaded after its own cache was emptied, in a second vLLM beside
it, after it was killed and restarted, and while pegaflow-server is killed; and the answers are
right. Exits with 0 only if each of these claims held.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from demo.claims.cold import record_baseline, store_all, warm_up
from demo.claims.damaged import NoTestHooks, damage_is_seen
from demo.claims.direct import run_direct
from demo.claims.directory import run_directory
from demo.claims.engine_killed import kill_engine
from demo.claims.kinds import run_kinds
from demo.claims.nodes import run_nodes
from demo.claims.prefill_decode import run_split
from demo.claims.rank_killed import kill_rank
from demo.claims.rank_page import damage_rank
from demo.claims.reload import compare_ttft, reload_all
from demo.claims.routing import run_routing
from demo.claims.second_engine import share
from demo.claims.server_killed import kill_server
from demo.claims.sglang import run_sglang
from demo.claims.ssd import run_ssd
from demo.client import RequestFailed
from demo.device import DEVICES, Choice, NoGpu, choose
from demo.directory_stage import PLACES, DirectoryStage
from demo.kinds_stage import KindsStage
from demo.nodes_stage import NAMES, NodesStage
from demo.pd_stage import PdStage
from demo.prompts import BLOCK_TOKENS
from demo.report import Claim, claim_table, prompt_table, write_json
from demo.routing_stage import RoutingStage
from demo.sglang_stage import SglangStage
from demo.ssd_stage import SsdStage
from demo.stage import Late, Stage
from demo.subjects import DRAFTS, MODELS
from tests.support.memory_reads import why_forbidden
from tests.support.network import Network, NoNetwork
from tests.support.vllm_server import REPOSITORY, ChildFailed

EXIT_CLAIM_FAILED = 1
EXIT_SETUP_FAILED = 2

EXIT_STATUS = """exit status:
  0  each claim held
  1  a claim did not hold; its differences, the servers' counters and their logs are shown
  2  the demo could not start, or an option is wrong"""

AnyStage = Stage | PdStage | NodesStage | KindsStage | SglangStage | SsdStage | RoutingStage


def main(argv: list[str]) -> int:
    options = _parse(argv)
    signal.signal(signal.SIGTERM, _end_by_signal)
    build = options.build_dir or REPOSITORY / "build" / ("hooks" if options.prove else "release")
    binary = build / "server" / "pegaflow-server"
    if not binary.exists():
        print(f"demo: {binary} is missing; `./dev demo` builds it", file=sys.stderr)
        return EXIT_SETUP_FAILED

    # A separate short path: that of a Unix socket has at most 107 characters.
    with (
        tempfile.TemporaryDirectory(prefix="pega-demo-") as sockets,
        contextlib.ExitStack() as resources,
    ):
        logs = options.keep_logs or Path(tempfile.mkdtemp(prefix="pega-demo-logs-"))
        print(f"seed {options.seed} (repeat with --seed {options.seed}); logs in {logs}")
        stage = _set_up(build, logs, Path(sockets), options, resources)
        if stage is None:
            return EXIT_SETUP_FAILED
        try:
            if isinstance(stage, Stage):
                claims = _run(stage, options.prove)
            elif isinstance(stage, PdStage):
                claims = _run_one_by_one(stage, _parts_of_pd(stage, options))
            elif isinstance(stage, KindsStage):
                claims = _run_one_by_one(stage, run_kinds(stage))
            elif isinstance(stage, SglangStage):
                claims = _run_one_by_one(stage, run_sglang(stage))
            elif isinstance(stage, SsdStage):
                claims = _run_one_by_one(stage, run_ssd(stage))
            elif isinstance(stage, RoutingStage):
                claims = _run_one_by_one(stage, run_routing(stage))
            elif isinstance(stage, DirectoryStage):
                claims = _run_one_by_one(stage, run_directory(stage))
            else:
                claims = _run_one_by_one(stage, run_nodes(stage))
        except (KeyboardInterrupt, SystemExit):
            if options.keep_logs is None:
                shutil.rmtree(logs)
            raise
    held = all(claim.held for claim in claims)
    _print_end(stage, claims)
    if options.json:
        write_json(options.json, claims, stage.figures)
    if not held:
        print(f"\n{stage.diagnosis}")
        print(f"\nThe logs are in {logs}.")
        return EXIT_CLAIM_FAILED
    if options.keep_logs is None:
        shutil.rmtree(logs)
    return 0


def _parts_of_pd(stage: PdStage, options: argparse.Namespace) -> Iterator[Claim]:
    if not options.direct:
        return run_split(stage)
    choice: Choice = options.choice
    stage.figures["device"] = choice.device
    stage.progress.say(f"both vLLMs run on {choice.device}: {choice.reason}")
    return run_direct(stage)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="./dev demo",
        description=__doc__,
        epilog=EXIT_STATUS,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the claims and figures to FILE as JSON"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=None,
        metavar="N",
        help="draw the prompts from seed N, to repeat a run (default: a new seed, printed)",
    )
    parser.add_argument(
        "--keep-logs",
        type=Path,
        metavar="DIR",
        help="keep the servers' logs in DIR, and the chart of --ssd (hit-rate.svg) or --routing\n"
        "(routing.svg); default: keep them only if a claim failed",
    )
    parser.add_argument(
        "--prove",
        action="store_true",
        help="prove the comparison of answers instead: one overwritten block of the pool\n"
        "must make it fail (needs the build with test hooks, build/hooks)",
    )
    parser.add_argument(
        "--build-dir",
        type=Path,
        metavar="DIR",
        help="run the programs of this Meson build directory (default: build/release,\n"
        "with --prove build/hooks)",
    )
    _add_setups(parser)
    return parser


def _add_setups(parser: argparse.ArgumentParser) -> None:
    """The options that choose other engines and claims."""
    parser.add_argument(
        "--tp",
        type=int,
        default=1,
        metavar="N",
        help="run each vLLM on N tensor-parallel ranks with a small model: prompts are\n"
        "loaded on all ranks, also after a page of one was overwritten, and after one\n"
        "was killed",
    )
    parser.add_argument(
        "--pd",
        action="store_true",
        help="run two vLLMs behind pegaflow-router: prompts are prefilled on one and decoded\n"
        "on the other, which is killed before and in the middle of an answer",
    )
    parser.add_argument(
        "--direct",
        action="store_true",
        help="with --pd: the decode engine reads blocks out of the prefill engine's memory while\n"
        "they are saved; engines, server and client end in the middle of it",
    )
    parser.add_argument(
        "--device",
        choices=DEVICES,
        default="auto",
        help="with --pd --direct: run both vLLMs on the CPU, or on GPUs of NVIDIA (cuda), the\n"
        "prefill engine on the first and the decode engine on the second, if there is one\n"
        "(default: auto, GPUs where nvidia-smi lists one)",
    )
    parser.add_argument(
        "--nodes",
        type=int,
        choices=[2, len(NAMES)],
        metavar="N",
        help="2, with --pd: run the two vLLMs on two nodes, whose servers are peers\n"
        "3: run three nodes in separate network namespaces (needs root), two vLLMs:\n"
        "prompts computed on one node are hit on another, one node is killed during a\n"
        "transfer, and the network drops all packets of one",
    )
    parser.add_argument(
        "--directory",
        action="store_true",
        help="with --nodes 3: the servers know each other only by a directory on a real Redis,\n"
        "which is killed, stopped, flushed and cut off from the network under load",
    )
    _add_models(parser)


def _add_models(parser: argparse.ArgumentParser) -> None:
    """The options with other models, or other parts of the engine."""
    parser.add_argument(
        "--model",
        choices=MODELS,
        help="run a small model with sliding windows or recurrent states, of random weights:\n"
        "the blocks of each kind are counted, also after the engine, and the server,\n"
        "were killed",
    )
    parser.add_argument(
        "--draft",
        choices=DRAFTS,
        help="run a small model with speculative decoding: the same, and after a load as\n"
        "many drafts are accepted as before",
    )
    parser.add_argument(
        "--sglang",
        action="store_true",
        help="run SGLang's cache classes without a model, in two processes, with HiCache and\n"
        "with the linker: pages are counted and their bytes compared, also after an\n"
        "engine, and the server, were killed",
    )
    parser.add_argument(
        "--ssd",
        action="store_true",
        help="run one vLLM with a pool much smaller than its prompts and a cache file on a disk:\n"
        "prompts come back from the disk, also after the server was stopped and killed,\n"
        "after bytes of the file were damaged, and when the file is too small",
    )
    parser.add_argument(
        "--routing",
        action="store_true",
        help="run two vLLMs on two nodes behind pegaflow-router: conversations go where their\n"
        "cache is, beside round robin, also when an engine, events and a router are lost",
    )


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = _parser()
    options = parser.parse_args(argv)
    if options.pd and (options.prove or options.tp != 1):
        parser.error("--pd cannot be combined with --prove or --tp")
    if options.nodes and (options.prove or options.tp != 1):
        parser.error("--nodes cannot be combined with --prove or --tp")
    if options.nodes and options.pd != (options.nodes == 2):
        parser.error("--nodes 2 needs --pd, and --pd has two nodes at most")
    if options.direct and (not options.pd or options.nodes):
        parser.error("--direct needs --pd, on one node")
    if options.device == "cuda" and not options.direct:
        parser.error("--device cuda needs --pd --direct")
    options.choice = Choice((), "")
    if options.direct:
        try:
            options.choice = choose(options.device)
        except NoGpu as error:
            parser.error(str(error))
        # The lane between GPUs does not use process_vm_readv().
        if not options.choice.gpus and (why := why_forbidden()):
            parser.error(f"--direct: {why}")
    if options.directory and options.nodes != len(NAMES):
        parser.error(f"--directory needs --nodes {len(NAMES)}")
    if options.model and options.draft:
        parser.error("--model and --draft are two runs: drafts beside several kinds are not served")
    if (options.model or options.draft) and (
        options.pd or options.nodes or options.prove or options.tp != 1
    ):
        name = "--model" if options.model else "--draft"
        parser.error(f"{name} cannot be combined with --pd, --nodes, --prove or --tp")
    if options.sglang and (
        options.pd or options.nodes or options.prove or options.model or options.draft
    ):
        parser.error("--sglang cannot be combined with another setup")
    for name in ("ssd", "routing"):
        if getattr(options, name) and (
            options.pd
            or options.nodes
            or options.prove
            or options.model
            or options.draft
            or options.sglang
            or options.tp != 1
            or (options.ssd and options.routing)
        ):
            parser.error(f"--{name} cannot be combined with another setup")
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(1 << 32)
    if options.keep_logs is not None:
        options.keep_logs.mkdir(parents=True, exist_ok=True)
    return options


def _end_by_signal(number: int, frame: FrameType | None) -> None:
    """Turns SIGTERM into an exception, so that every server is stopped on the way out."""
    raise SystemExit(128 + number)


def _set_up(
    build: Path,
    logs: Path,
    sockets: Path,
    options: argparse.Namespace,
    resources: contextlib.ExitStack,
) -> AnyStage | None:
    seed, tp = options.seed, options.tp
    stage: AnyStage
    try:
        if options.sglang:
            stage = SglangStage(build, logs, sockets, seed)
        elif options.ssd:
            # Not in /tmp, which may be memory.
            files = resources.enter_context(
                tempfile.TemporaryDirectory(prefix="demo-ssd-", dir=REPOSITORY / "build")
            )
            stage = SsdStage(build, logs, sockets, seed, Path(files))
        elif options.routing:
            stage = RoutingStage(build, logs, sockets, seed)
        elif options.pd:
            nodes, gpus = options.nodes or 1, options.choice.gpus
            stage = PdStage(build, logs, sockets, seed, nodes, direct=options.direct, gpus=gpus)
        elif options.model or options.draft:
            subject = MODELS[options.model] if options.model else DRAFTS[options.draft]
            stage = KindsStage(build, logs, sockets, seed, subject)
        elif options.nodes:
            places, kind = (PLACES, DirectoryStage) if options.directory else (NAMES, NodesStage)
            stage = kind(build, logs, sockets, seed, resources.enter_context(Network(places)))
        else:
            stage = Stage(build, logs, sockets, seed, tp=tp)
        version = _version(stage)
    except (ChildFailed, NoNetwork, OSError, subprocess.CalledProcessError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return None
    stage.figures |= {
        "seed": seed,
        "versions": {
            "pegaflow-server": version,
            **_engine_version(stage),
            "python": platform.python_version(),
        },
        "machine": {"cpus": os.cpu_count(), "load_average": os.getloadavg()},
    }
    if isinstance(stage, KindsStage | SglangStage):
        model = stage.describe()
    else:
        stage.figures |= {
            "model": stage.shape.directory().name,
            "tp": tp,
            "block_tokens": BLOCK_TOKENS,
            "block_bytes": stage.page_bytes,
        }
        model = (
            f"model {stage.shape.directory().name}, tensor parallel {tp}, blocks of "
            f"{BLOCK_TOKENS} tokens ({stage.page_bytes / (1 << 20):.1f} MiB)"
        )
    engine = ", ".join(f"{name} {number}" for name, number in _engine_version(stage).items())
    stage.progress.say(f"{engine}, {version}; {model}")
    return stage


def _version(stage: AnyStage) -> str:
    command = [stage.pega.binary, "--version"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _engine_version(stage: AnyStage) -> dict[str, str]:
    if isinstance(stage, SglangStage):
        return stage.versions
    return {"vllm": importlib.metadata.version("vllm")}


def _run(stage: Stage, prove: bool) -> list[Claim]:
    """The claims in order, up to the first that cannot be completed."""
    claims: list[Claim] = []
    parts: list[tuple[str, Callable[[Stage], Claim | list[Claim]]]] = [("cold prompts", store_all)]
    if prove:
        parts += [("a damaged block is detected", damage_is_seen)]
    elif stage.tp > 1:
        parts += [
            ("prompts come back", reload_all),
            ("one rank's page is wrong", damage_rank),
            ("one rank is killed", kill_rank),
        ]
    else:
        parts += [
            ("prompts come back", reload_all),
            ("loaded prompts begin early", compare_ttft),
            ("a second engine", share),
            ("the engine is killed", kill_engine),
            ("the server is killed", kill_server),
        ]
    trying = "vLLM without the connector"
    try:
        record_baseline(stage)
        trying = "start with the connector"
        with stage.connected_servers():
            trying = "warm-up"
            warm_up(stage)
            for name, part in parts:
                trying = name
                result = part(stage)
                claims += result if isinstance(result, list) else [result]
                if not all(claim.held for claim in claims):
                    stage.diagnose()
    except (ChildFailed, RequestFailed, Late, NoTestHooks, OSError) as error:
        what = error.what if isinstance(error, ChildFailed) else error
        claims.append(Claim(trying, False, f"ended early: {what}"))
    stage.figures |= {"asked_again": stage.asked_again, "seconds": stage.progress.elapsed_s()}
    return claims


def _run_one_by_one(
    stage: PdStage | NodesStage | KindsStage | SglangStage | SsdStage | RoutingStage,
    parts: Iterator[Claim],
) -> list[Claim]:
    """The claims of --pd, --nodes, --model, --draft, --sglang, --ssd or --routing, in order."""
    claims: list[Claim] = []
    try:
        for claim in parts:
            claims.append(claim)
            if not claim.held:
                stage.diagnose()
    except (ChildFailed, RequestFailed, Late, NoNetwork, OSError) as error:
        what = error.what if isinstance(error, ChildFailed) else error
        claims.append(Claim("the claim after the last one", False, f"ended early: {what}"))
    stage.figures["seconds"] = stage.progress.elapsed_s()
    return claims


def _print_end(stage: AnyStage, claims: list[Claim]) -> None:
    print()
    if isinstance(stage, Stage) and any(row.loaded_s for row in stage.rows.values()):
        print(prompt_table(list(stage.rows.values())))
        print()
    if isinstance(stage, SsdStage | RoutingStage):
        print(f"{stage.chart()}\n")
    if isinstance(stage, RoutingStage) and stage.table:
        print(f"{stage.table}\n")
    print(claim_table(claims))
    held = sum(claim.held for claim in claims)
    seed, seconds = stage.figures["seed"], stage.figures["seconds"]
    print(f"\n  {held} of {len(claims)} claims held, {seconds:.0f} s, seed {seed}")
    if isinstance(stage, Stage | NodesStage) and stage.asked_again:
        print(
            f"  {stage.asked_again} times a request missed a deadline, as happens on "
            "a busy machine, and was repeated"
        )


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        print("\ndemo: interrupted; all servers are stopped", file=sys.stderr)
        sys.exit(130)
