"""A server with an SSD tier that is killed, stopped, reset and damaged while an engine uses it.

PEGA_SSD_KILLS sets the number of ends of the server.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

from tests.python.checked_engine import Engine
from tests.python.conftest import server_binary
from tests.support.disk_server import AT_ONCE
from tests.support.vllm_server import PegaServer

KILLS = int(os.environ.get("PEGA_SSD_KILLS", "20"))
#: A sixth of all blocks; the disk has room for three quarters of them.
POOL = "8mb"
DISK = "36mb"
#: Operations between two ends of the server.
LEAST_OPERATIONS = 15


def damage(file: Path, chance: random.Random) -> None:
    """Overwrites bytes of some pages behind the superblocks and the names."""
    size = file.stat().st_size
    with file.open("r+b") as opened:
        for _ in range(20):
            opened.seek(chance.randrange(1 << 20, size - 8))
            opened.write(chance.randbytes(8))


def test_no_wrong_byte_comes_back_whatever_ends_the_server(short_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    file = short_path / "disk" / "pegaflow.ssd"
    file.parent.mkdir()
    (short_path / "s").mkdir()
    arguments = [
        *("--ssd-cache-path", str(file), "--ssd-cache-capacity", DISK),
        *("--ssd-segment-size", "2mb", "--ssd-drain", "5s", *AT_ONCE),
    ]
    restored = damaged = warm = 0
    with PegaServer(server_binary(), short_path / "s", POOL, arguments) as server:
        engine = Engine(server, seed)
        try:
            engine.wait_ready()
            for _ in range(KILLS):
                engine.wait_operations(chance.randrange(LEAST_OPERATIONS, 3 * LEAST_OPERATIONS))
                if chance.random() < 0.2:
                    engine.reset()
                    engine.wait_operations(LEAST_OPERATIONS)
                page = server.metrics()
                restored += int(page.total("pegaflow_ssd_hits_blocks_total"))
                damaged += int(page.total("pegaflow_ssd_proof_failures_total"))
                if chance.random() < 0.7:
                    server.kill()
                else:
                    assert server.stop() == 0
                if chance.random() < 0.3:
                    damage(file, chance)
                server.start()
                engine.wait_ready()
                warm += int(server.metrics().total("pegaflow_ssd_blocks")) > 0
        finally:
            engine.close()
    print(
        f"{engine.operations} operations, {engine.loaded} blocks loaded, {restored} from the disk, "
        f"{damaged} failed proofs, {warm} of {KILLS} starts warm"
    )
    assert engine.wrong == []
    assert restored > 0
    assert warm > KILLS / 2
