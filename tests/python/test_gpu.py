"""The scenarios of tests/gpu: rehearsed in ordinary memory, and on a GPU if there is one."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.python.conftest import server_binary

#: Scenarios that no other test runs in ordinary memory; all of them run on a GPU.
REHEARSED = "layouts,every_byte,planted_error"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.gpu.run", "--server", str(server_binary())]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [*command, *arguments], cwd=root, text=True, capture_output=True, timeout=280, check=False
    )
    print(done.stdout, done.stderr[-3000:])
    return done


def test_the_scenarios_pass_in_ordinary_memory(seed):
    done = run("--device", "cpu", "--only", REHEARSED, "--seed", str(seed % (1 << 30)))
    assert done.returncode == 0
    assert done.stdout.count("\nok ") == len(REHEARSED.split(","))


def test_the_scenarios_pass_on_the_gpus_of_this_machine():
    done = run()
    if done.returncode == 77:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0
