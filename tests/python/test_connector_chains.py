"""Which blocks a prompt has, as the connector reports it to routers through the server's journal.

vLLM's real scheduler, the real connector and a real server; the router is the test.
"""

import struct
import time
import urllib.parse
from typing import Any

from demo.stage import wait_until
from tests.python.harness import BLOCK, Engine

PATIENCE_S = 20.0


class Router:
    """Reads the chains of prompts of an engine's namespace, and nothing else of the journal."""

    def __init__(self, pega: Any, engine: Engine) -> None:
        self._pega = pega
        self._session = engine.connector._scheduler._session
        self._space = self._session.status()["namespace_hash"] or self._space_of_only_engine()
        self._chains = self._get()[0]
        # The connector asks once a second whether a router reads.
        wait_until("the engine knows of a router", self._is_known, PATIENCE_S)

    def _space_of_only_engine(self) -> str:
        connected = [
            one
            for one in self._pega.get_by_socket("/links")["engines"]
            if one["state"] == "connected"
        ]
        assert len({one["namespace"] for one in connected}) == 1
        return str(connected[0]["namespace"])

    def _is_known(self) -> bool:
        if self._session.wants_chains():
            self._session.report_chain("another's", b"", 32, BLOCK)
        return self._session.wants_chains() and self._session.wants_chains()

    def _get(self, **where: int) -> tuple[int, list[tuple[int, list[int]]]]:
        parameters = {"namespace": self._space, "keys": 8, "chains": 1} | where
        status, body = self._pega._ask("GET", f"/journal?{urllib.parse.urlencode(parameters)}")
        assert status == 200, body
        (entries,) = struct.unpack_from("<I", body, 44)
        (chains,) = struct.unpack_from("<I", body, 60)
        at = 64 + 8 * entries + (entries + 7) // 8
        (position,) = struct.unpack_from("<Q", body, at)
        at += 8
        told = []
        for _ in range(chains):
            _, tokens, count = struct.unpack_from("<QII", body, at)
            told.append((tokens, list(struct.unpack_from(f"<{count}Q", body, at + 16))))
            at += 16 + 8 * count
        assert at == len(body)
        return position, told

    def read(self) -> list[tuple[int, list[int]]]:
        """(tokens of a block, keys) of the chains with keys since the last call."""
        # From position 0 on the blocks of the pool are lost, so the answer comes at once.
        self._chains, told = self._get(chain_position=self._chains, position=0)
        return [chain for chain in told if chain[1]]

    def wait(self, count: int) -> list[tuple[int, list[int]]]:
        told: list[tuple[int, list[int]]] = []

        def are_there() -> bool:
            told.extend(self.read())
            return len(told) >= count

        wait_until(f"{count} chains have come", are_there, PATIENCE_S)
        return told


def low_bits(hashes: list[bytes]) -> list[int]:
    return [int.from_bytes(one[-8:], "big") for one in hashes]


def test_a_router_learns_the_full_blocks_of_each_prompt_with_a_session(own_pega, prompt):
    tokens = prompt(10 * BLOCK + 5)
    with Engine(own_pega.address) as engine:
        engine.wait_ready()
        router = Router(own_pega, engine)
        answer = engine.ask("a", tokens, session="pf1:a")
        expected = low_bits(engine.hashes(tokens))
        assert router.wait(1) == [(BLOCK, expected)]
        # Nothing of it reaches the client.
        assert answer.params is None
        # Blocks that were only loaded, or that vLLM still has, are among them.
        engine.run()
        engine.reset_local()
        assert engine.ask("b", tokens, session="pf1:b").loaded > 0
        assert engine.ask("c", tokens, session="pf1:c").local > 0
        assert router.wait(2) == [(BLOCK, expected)] * 2
        engine.check_at_rest()


def test_requests_without_a_session_and_without_a_full_block_are_not_reported(own_pega, prompt):
    with Engine(own_pega.address) as engine:
        engine.wait_ready()
        router = Router(own_pega, engine)
        engine.ask("a", prompt(3 * BLOCK))
        engine.ask("b", prompt(BLOCK - 1), session="pf1:b")
        engine.ask("c", prompt(3 * BLOCK), session="x" * 257)
        engine.ask("d", prompt(2 * BLOCK), session="the client's own")
        (told,) = router.wait(1)
        assert len(told[1]) == 2
        assert router.read() == []


def test_an_engine_that_only_saves_reports_its_prompts_too(own_pega, prompt):
    tokens = prompt(4 * BLOCK)
    with Engine(own_pega.address, role="kv_producer") as engine:
        engine.wait_ready()
        router = Router(own_pega, engine)
        engine.ask("a", tokens, session="pf1:a")
        assert router.wait(1) == [(BLOCK, low_bits(engine.hashes(tokens)))]


def test_without_a_router_one_prompt_a_second_is_reported_and_dropped(own_pega, prompt):
    with Engine(own_pega.address) as engine:
        engine.wait_ready()
        began = time.monotonic()
        for number in range(20):
            engine.add(f"r{number}", prompt(4 * BLOCK), session=f"pf1:{number}")
        seconds = time.monotonic() - began
        engine.run()
        calls = own_pega.metrics().total("pegaflow_rpc_requests_total", method="report_chain")
        assert 1 <= calls <= 1 + seconds
        assert own_pega.metrics().total("pegaflow_prompt_chains") == 0
