"""Fixtures of these tests: a server, prompts, and a seed to repeat a run."""

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import pytest

from tests.support.vllm_server import PegaServer


def server_binary() -> Path:
    return Path(os.environ["PEGA_BUILD_DIR"]) / "server" / "pegaflow-server"


@pytest.fixture(scope="module")
def short_path() -> Iterator[Path]:
    """A directory whose path leaves room for a socket's name."""
    directory = Path(tempfile.mkdtemp(prefix="pega-"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module")
def pega(short_path: Path) -> Iterator[PegaServer]:
    """A server for all tests of a module that leave it alive."""
    with PegaServer(server_binary(), short_path / "shared", pool_size="256mb") as server:
        yield server


@pytest.fixture
def own_pega(short_path: Path, request: pytest.FixtureRequest) -> Iterator[PegaServer]:
    """A server that a test stops or kills, or needs small (``pool_size`` marker)."""
    marker = request.node.get_closest_marker("pool_size")
    size = marker.args[0] if marker else "64mb"
    directory = Path(tempfile.mkdtemp(prefix="own-", dir=short_path))
    with PegaServer(server_binary(), directory, pool_size=size) as server:
        yield server


@pytest.fixture(scope="session")
def seed() -> int:
    """PEGA_TEST_SEED, or a random one; it is printed, and shown with a failure."""
    value = int(os.environ.get("PEGA_TEST_SEED") or random.SystemRandom().randrange(1, 1 << 32))
    print(f"seed {value} (the same again: PEGA_TEST_SEED={value})")
    return value


class Prompts:
    """Prompts that are unique to each test, so that tests can share a server."""

    def __init__(self, name: str) -> None:
        self._random = random.Random(name)

    def __call__(self, length: int) -> list[int]:
        return [self._random.randrange(10, 1000) for _ in range(length)]


@pytest.fixture
def prompt(request: pytest.FixtureRequest) -> Prompts:
    return Prompts(request.node.nodeid)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "pool_size(text): --pool-size of own_pega")


def pytest_unconfigure() -> None:
    """Waits for the process that forks ranks (tests/python/rank.py).

    It has vLLM loaded, and would take longer to end than the runner gives a process that lost its
    parent. multiprocessing has these functions for its own tests only.
    """
    forkserver._forkserver._stop()
    resource_tracker._resource_tracker._stop()
