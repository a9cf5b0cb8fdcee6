"""A real vLLM with one rank and with two: each loads the blocks that the other size saved."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.python.vllm_cases import BLOCK, SMALL, ask, serve
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


@pytest.mark.parametrize(("saver", "loader"), [(1, 2), (2, 1)])
def test_answers_from_the_blocks_of_another_size_are_those_of_a_cold_engine(
    own_pega: PegaServer, short_path: Path, prompt: Any, saver: int, loader: int
) -> None:
    tokens, branch = prompt(LENGTH), prompt(LENGTH)
    branch[:300] = tokens[:300]
    with engine(short_path, None, loader) as vllm:
        cold = ask(vllm, tokens, 16)[0]
        cold_branch = ask(vllm, branch, 16)[0]
    with engine(short_path / "saver", own_pega, saver) as vllm:
        assert ask(vllm, tokens, 16)[1] == 0
    with engine(short_path / "loader", own_pega, loader) as vllm:
        assert ask(vllm, tokens, 16) == (cold, WHOLE)
        assert ask(vllm, branch, 16) == (cold_branch, 300 // BLOCK * BLOCK)
    assert cold != cold_branch
