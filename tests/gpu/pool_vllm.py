#!/usr/bin/env python3
"""A real vLLM on a GPU that reads blocks out of the pool of another node into its memory.

    PYTHONPATH=REPOSITORY:PACKAGE python3 -m tests.gpu.pool_vllm --server FILE --model DIR --out DIR

Two nodes, each with an engine, on one GPU; UCX runs over TCP (PEGA_UCX_LIBRARY: one with CUDA
support). The first engine saves, the second reads; answers are compared with hits of the first
one's own GPU cache, as in tests/gpu/vllm.py, which describes the model. Exits with 0 if all checks
passed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.gpu.direct import TEST_VARIABLE
from tests.gpu.vllm import LENGTH, PROMPTS, GpuVllm, Session
from tests.support.child_process import started_together
from tests.support.vllm_server import PegaServer
from tests.support.waiting import wait_until

#: UCX copies some 60 to 400 MB/s between GPU memory and TCP.
PATIENCE = {"pegaflow.load_bytes_per_second": 2e7}
PATIENT_PEERS = ("--peer-deadline", "500ms", "--fetch-deadline", "8s")


def pool_blocks(server: PegaServer, result: str) -> float:
    return server.metrics().total("pegaflow_direct_pool_blocks_total", result=result)


def check_free(owner: PegaServer, here: PegaServer) -> None:
    for server, name in (
        (here, "pegaflow_direct_pool_claims"),
        (here, "pegaflow_direct_pool_reads"),
        (here, "pegaflow_claims"),
        (owner, "pegaflow_leases"),
    ):
        wait_until(lambda s=server, n=name: s.metrics().total(n) == 0, f"{name} is not 0", 30)


def run(owner: PegaServer, here: PegaServer, options: argparse.Namespace) -> list[str]:
    writer = GpuVllm("writer", owner, options)
    network = {"pegaflow.direct_group": "pools", "pegaflow.direct_nics": "auto"} | PATIENCE
    reader = GpuVllm("reader", here, options, **network)
    said = []
    with started_together([writer, reader]):
        session = Session(owner, writer, reader, options)
        session.learn()
        answers = [reader.ask(prompt) for prompt in session.prompts]
        assert answers == session.hits, f"tokens differ: {answers} {session.hits}"
        loaded = pool_blocks(here, "loaded")
        assert loaded > 0, "no block was read past the pool"
        assert here.metrics().total("pegaflow_fetch_bytes_total") == 0
        direct = reader.total("vllm:pegaflow_direct_bytes_total")
        assert direct == reader.total("vllm:pegaflow_loaded_bytes_total") > 0
        said.append(
            f"{PROMPTS} prompts of {LENGTH} tokens: {loaded:.0f} blocks, {direct / 1e6:.0f} MB "
            "read past the pool, all tokens agree with hits on the writer's GPU"
        )
        check_free(owner, here)
        aborted = 0
        for round_ in range(options.rounds):
            reader.reset()
            prompt = session.prompts[round_ % PROMPTS]
            reader.abort(prompt, session.chance.random() * 0.6)
            other = (round_ + 1) % PROMPTS
            assert reader.ask(session.prompts[other]) == session.hits[other], "tokens differ"
            aborted += 1
        check_free(owner, here)
        said.append(f"{aborted} clients left meanwhile: the next answers agree, no block stays")
        reader.reset()
        owner.kill()
        again = [reader.ask(prompt) for prompt in session.prompts]
        assert all(again), "an answer is missing"
        said.append("the other node was killed: every request is answered")
        here_free = here.metrics().total("pegaflow_direct_pool_reads")
        assert here_free == 0, here_free
    return said


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--server", type=Path, required=True, help="the program pegaflow-server")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="directory of the logs")
    parser.add_argument("--gpu-blocks", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=12, help="clients that leave")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--vllm-arguments", default="", help="more options of vllm serve")
    options = parser.parse_args(argv)
    options.tensor_parallel = 1
    options.out.mkdir(parents=True, exist_ok=True)
    print(f"seed {options.seed}", flush=True)
    os.environ[TEST_VARIABLE] = "lo"
    begin = time.monotonic()
    with contextlib.ExitStack() as stack:
        listens = ("--peer-listen", "127.0.0.1:0", *PATIENT_PEERS)
        owner = PegaServer(options.server, options.out / "owner", "8gb", listens)
        stack.enter_context(owner)
        reads = ("--peers", owner.peer_listen, "--direct-pool", "force", *PATIENT_PEERS)
        here = PegaServer(options.server, options.out / "here", "8gb", reads)
        stack.enter_context(here)
        wait_until(
            lambda: here.metrics().total("pegaflow_peer_lane", lane="rdma") == 1,
            "the nodes do not read over UCX",
        )
        for line in run(owner, here, options):
            print(f"ok     {line}", flush=True)
    print(f"passed after {time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
