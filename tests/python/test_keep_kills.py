"""A server with a kept pool that is killed, stopped, frozen and reset while engines use it.

PEGA_KEEP_KILLS sets the number of ends of the server. PEGA_KEEP_OTHER_SERVER is the server of
another build, which takes turns with the one of this build.
"""

from __future__ import annotations

import itertools
import os
import random
import subprocess
from pathlib import Path

from tests.python.checked_engine import Engine
from tests.python.conftest import server_binary
from tests.support.disk_server import AT_ONCE
from tests.support.vllm_server import PegaServer

KILLS = int(os.environ.get("PEGA_KEEP_KILLS", "20"))
OTHER = os.environ.get("PEGA_KEEP_OTHER_SERVER")
#: Two thirds of the blocks of both engines.
POOL = "64mb"
#: Operations between two ends of the server.
LEAST_OPERATIONS = 15


def release(server: PegaServer) -> str:
    """Ends the keeper; returns what the program printed."""
    command = [str(server_binary()), "--release", "--addr", server.address]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def end(server: PegaServer, chance: random.Random, keeper_too: bool) -> None:
    """Ends the server at a random point of what it does."""
    if keeper_too:
        server.kill()
        release(server)
    elif chance.random() < 0.8:
        server.kill()
    else:
        assert server.stop() == 0


def test_no_wrong_byte_comes_back_and_no_block_is_lost(short_path: Path, seed: int) -> None:
    """Nothing is lost with a keeper; without it what the disk had is found."""
    chance = random.Random(seed)
    (short_path / "s").mkdir()
    (short_path / "disk").mkdir()
    arguments = [
        *("--keep", "yes", "--reservation-timeout", "2s"),
        *("--ssd-cache-path", str(short_path / "disk" / "pegaflow.ssd")),
        *("--ssd-cache-capacity", "64mb", "--ssd-segment-size", "2mb", "--ssd-drain", "0s"),
        *AT_ONCE,
    ]
    binaries = itertools.cycle([server_binary(), Path(OTHER or server_binary())])
    adopted = resident = lost_keepers = 0
    with PegaServer(next(binaries), short_path / "s", POOL, arguments) as server:
        engines = [Engine(server, seed + i, f"engine {i}") for i in range(2)]
        try:
            for engine in engines:
                engine.wait_ready()
            for _ in range(KILLS):
                engines[0].wait_operations(chance.randrange(LEAST_OPERATIONS, 3 * LEAST_OPERATIONS))
                if chance.random() < 0.2:
                    engines[0].reset()
                keeper_too = chance.random() < 0.1
                lost_keepers += keeper_too
                before = int(server.metrics().total("pegaflow_cache_resident_blocks"))
                end(server, chance, keeper_too)
                server.binary = next(binaries)
                server.start()
                page = server.metrics()
                if not keeper_too:
                    resident += before
                    adopted += int(page.total("pegaflow_adopted_blocks"))
                for engine in engines:
                    engine.wait_ready()
        finally:
            for engine in engines:
                engine.close()
            server.kill()
            release(server)
    print(
        f"{sum(each.operations for each in engines)} operations, "
        f"{sum(each.loaded for each in engines)} of {sum(each.requested for each in engines)} "
        f"blocks loaded; {adopted} blocks adopted where {resident} were before; "
        f"{lost_keepers} of {KILLS} ends with the keeper"
    )
    assert [each.wrong for each in engines] == [[], []]
    # The engines save and evict between the look and the end.
    assert adopted > 0.8 * resident
