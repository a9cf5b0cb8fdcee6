"""A page of the pool that another process overwrote is computed again, counted, and forgotten."""

import time
from typing import Any

import pytest

from tests.python.fake_model import WrongKv, chain
from tests.python.harness import BLOCK, Engine
from tests.support.stray_client import pool_of
from tests.support.vllm_server import PegaServer


def overwrite(server: PegaServer, tokens: list[int], token: int, content: int = 0) -> None:
    """Changes one bit of the model's KV of the token at this position.

    ``content``: the rank, by the number that FakeModel has for its bytes.
    """
    value = (chain(0, tokens[: token + 1])[token] + (content << 48)) % (1 << 64)
    with pool_of(server) as pool:
        at = pool.find(value.to_bytes(8, "little"))
        assert at >= 0, "the pool does not have this token's KV"
        pool[at] ^= 1


def wait_for_corrupt_pages(server: PegaServer, pages: int) -> None:
    """Waits for the worker's report of a wrong page, which follows the report of the load."""
    deadline = time.monotonic() + 60
    while server.metrics().total("pegaflow_corrupt_pages_total") != pages:
        assert time.monotonic() < deadline, "the report did not arrive"


def engine(server: PegaServer, verify: str, **options: Any) -> Engine:
    return Engine(server.address, extra={"pegaflow.verify": verify}, **options)


def test_a_wrong_page_is_computed_again_and_forgotten(own_pega, prompt):
    tokens = prompt(6 * BLOCK + 3)
    with engine(own_pega, "all") as made:
        made.wait_ready()
        made.ask("stored", tokens)
        made.reset_local()
        overwrite(own_pega, tokens, 3 * BLOCK + 5)

        made.ask("damaged", tokens)

        assert made.stats["verified_pages"] == 6
        assert made.stats["corrupt_pages"] == 1
        assert made.stats["load_failures{corrupt}"] == 1
        assert made.stats["load_failed_blocks"] == 3
        wait_for_corrupt_pages(own_pega, 1)
        # The computed blocks were saved, so the next request has all of them.
        made.reset_local()
        again = made.ask("again", tokens)
        assert again.loaded >= 6 * BLOCK
        assert made.stats["corrupt_pages"] == 1
        assert made.stats["verified_pages"] == 12
        made.check_at_rest()


def test_without_verification_the_same_damage_reaches_the_model(own_pega, prompt):
    """Shows that the test above detects a real fault."""
    tokens = prompt(6 * BLOCK + 3)
    with engine(own_pega, "off") as made:
        made.wait_ready()
        made.ask("stored", tokens)
        made.reset_local()
        overwrite(own_pega, tokens, 3 * BLOCK + 5)
        with pytest.raises(WrongKv):
            made.ask("damaged", tokens)
        assert "verified_pages" not in made.stats


def test_another_engine_does_not_find_an_invalidated_block(own_pega, prompt):
    tokens = prompt(6 * BLOCK + 3)
    with engine(own_pega, "all") as one, engine(own_pega, "all") as other:
        one.wait_ready()
        other.wait_ready()
        one.ask("stored", tokens)
        one.reset_local()
        overwrite(own_pega, tokens, 0)
        one.ask("damaged", tokens)
        assert one.stats["corrupt_pages"] == 1
        wait_for_corrupt_pages(own_pega, 1)
        other.ask("elsewhere", tokens)
        assert other.stats["corrupt_pages"] == 0
        assert own_pega.metrics().total("pegaflow_corrupt_pages_total") == 1


@pytest.mark.parametrize("damaged", [0, 1])
def test_a_wrong_page_of_one_rank_is_a_miss_on_all(own_pega, prompt, damaged):
    tokens = prompt(6 * BLOCK + 3)
    ranks: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with (
        engine(own_pega, "all", **ranks) as one,
        engine(own_pega, "all", role="kv_consumer", **ranks) as other,  # this engine saves nothing
    ):
        one.wait_ready()
        other.wait_ready()
        one.ask("stored", tokens)
        one.reset_local()
        overwrite(own_pega, tokens, 3 * BLOCK + 5, content=damaged)

        other.ask("damaged", tokens)  # each rank's model checks its KV

        # On both ranks three blocks, or all six on a rank that opens its pages only after the
        # other's report: a claim with an invalidated block opens nothing.
        assert other.stats["load_failed_blocks"] in (3, 6)
        assert other.stats["verified_pages"] == (
            12 if other.stats["load_failed_blocks"] == 3 else 6
        )
        assert other.stats["corrupt_pages"] == 1
        assert other.stats["load_failures{corrupt}"] + other.stats["load_failures{gone}"] == 1
        wait_for_corrupt_pages(own_pega, 1)
        # The other rank's page of that block is right, and of no use.
        other.reset_local()
        assert other.ask("again", tokens).loaded == 3 * BLOCK
        # The engine that computes it saves it again, on both ranks.
        saved = one.stats["saved_blocks"]
        assert one.ask("computed", tokens).loaded == 3 * BLOCK
        one.run()
        assert one.stats["saved_blocks"] == saved + 1
        other.reset_local()
        assert other.ask("whole", tokens).loaded == 6 * BLOCK
        assert other.stats["corrupt_pages"] == 1
        for each in (one, other):
            each.run()
            each.check_at_rest()
