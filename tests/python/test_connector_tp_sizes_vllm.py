"""A real vLLM with one rank and with two: each loads the blocks that the other size saved."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.python.vllm_cases import BLOCK, SMALL, ask, forget, serve
from tests.support.vllm_server import PegaServer, VllmServer, ensure_model

LENGTH = 500
WHOLE = LENGTH // BLOCK * BLOCK


def several(size: int) -> tuple[str, ...]:
    if size == 1:
        return ()
    return ("--tensor-parallel-size", str(size), "--distributed-executor-backend", "mp")


@contextlib.contextmanager
def engine(directory: Path, pega: PegaServer | None, size: int) -> Iterator[VllmServer]:
    # Each rank spins on its threads while it waits for the others.
    env = {"OMP_NUM_THREADS": "1"} if size > 1 else {}
    extra = {"pegaflow.tp_sizes": "1,2,4", "pegaflow.verify": "all"}
    name = directory / f"tp{size}-{'plain' if pega is None else 'pega'}"
    with serve(ensure_model(SMALL), name, pega, *several(size), env=env, extra=extra) as vllm:
        yield vllm


def test_answers_from_the_blocks_of_another_size_are_those_of_a_cold_engine(
    own_pega: PegaServer, short_path: Path, prompt: Any
) -> None:
    one, two = prompt(LENGTH), prompt(LENGTH)  # saved with one rank, and with two
    branches = {size: [*tokens[:300], *prompt(200)] for size, tokens in ((1, one), (2, two))}
    reused = 300 // BLOCK * BLOCK
    cold = {}
    for size, tokens in ((2, one), (1, two)):
        with engine(short_path, None, size) as vllm:
            cold[size] = [ask(vllm, each, 16)[0] for each in (tokens, branches[3 - size])]
        assert cold[size][0] != cold[size][1]

    with engine(short_path / "a", own_pega, 1) as first:
        assert ask(first, one, 16)[1] == 0
        with engine(short_path / "b", own_pega, 2) as second:
            assert ask(second, one, 16) == (cold[2][0], WHOLE)
            assert ask(second, branches[1], 16) == (cold[2][1], reused)
            assert ask(second, two, 16)[1] == 0
            forget(second)  # its blocks are saved by now
        assert ask(first, two, 16) == (cold[1][0], WHOLE)
        assert ask(first, branches[2], 16) == (cold[1][1], reused)
