"""Engines of several tensor-parallel sizes share blocks: what one saves, each other one loads."""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from tests.python import rank
from tests.python.fake_model import FakeModel, WrongKv
from tests.python.harness import BLOCK, Engine, model_directory
from tests.python.heads_model import FIELDS, FourHeads, ShiftedHeads, TwoHeads
from tests.python.test_connector_faults import wait_for_zero
from tests.python.test_connector_ranks import go_on_saving, stop_saving
from tests.python.test_connector_two_engines import insertions, instances

SIZES = (1, 2, 4)
#: The options of engines whose blocks are shared. With 4 ranks two hold each of 2 heads.
KINDS: dict[str, dict[str, Any]] = {
    "heads": {"model": model_directory(**FIELDS[4]), "model_class": FourHeads},
    "heads_nhd": {
        "model": model_directory(**FIELDS[4]),
        "model_class": FourHeads,
        "layout": "LBNHC",
    },
    "replicas": {"model": model_directory(**FIELDS[2]), "model_class": TwoHeads},
    "mla": {"mla": True, "model_class": FakeModel},
}


def engine(address: str, size: int, kind: str = "heads", sizes: str = "1,2,4", **options: Any):
    extra = {"pegaflow.tp_sizes": sizes} if sizes else {}
    extra |= options.pop("extra", {})
    return Engine(
        address,
        tensor_parallel_size=size,
        distributed_executor_backend="mp",
        process=True,
        extra=extra,
        **KINDS[kind] | options,
    )


@contextlib.contextmanager
def engines(address: str, **options: Any) -> Iterator[dict[int, Engine]]:
    """One engine of each size, all ready."""
    with contextlib.ExitStack() as stack:
        made = {size: stack.enter_context(engine(address, size, **options)) for size in SIZES}
        for one in made.values():
            one.wait_ready()
        yield made
        for one in made.values():
            one.run()
            one.check_at_rest()


@pytest.mark.parametrize("verify", ["off", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_size_loads_what_every_other_size_saved(own_pega, prompt, kind, verify):
    with engines(own_pega.address, kind=kind, extra={"pegaflow.verify": verify}) as made:
        prompts = {size: prompt(300) for size in SIZES}
        for size, one in made.items():
            assert one.ask(f"cold-{size}", prompts[size]).loaded == 0
            one.run()
            assert one.stats["save_skipped_blocks"] == one.stats["save_failed_blocks"] == 0
        assert insertions(own_pega) == len(SIZES) * (303 // BLOCK)

        for saver, loader in itertools.product(SIZES, SIZES):
            one = made[loader]
            one.reset_local()
            assert one.ask(f"{saver}-{loader}", prompts[saver]).loaded == 288
        for one in made.values():
            assert one.stats["load_failed_blocks"] == 0
            verified = one.stats["verified_pages"]
            assert (verified > 0) == (verify == "all"), one.stats
    wait_for_zero(own_pega, "pegaflow_claims", "pegaflow_pins")


def test_a_prompt_grows_through_engines_of_all_sizes(own_pega, prompt):
    tokens = prompt(800)
    with engines(own_pega.address) as made:
        for round_, (size, length, loaded) in enumerate(
            [(4, 200, 0), (1, 400, 192), (2, 600, 400), (4, 800, 592), (1, 800, 800)]
        ):
            made[size].reset_local()
            assert made[size].ask(f"x{round_}", tokens[:length]).loaded == loaded


def test_a_block_is_found_only_after_all_ranks_have_saved_their_cells(own_pega, prompt):
    tokens = prompt(300)
    with engine(own_pega.address, 2) as two, engine(own_pega.address, 1) as one:
        two.wait_ready()
        one.wait_ready()
        two.ranks[1].do(stop_saving)
        two.add("x", tokens)
        two.run(lambda: bool(two.answers["x"].finish_reason))
        assert one.ask("x", tokens).loaded == 0, "the other rank's cells are missing"
        one.reset_local()
        assert one.stats["saved_blocks"] == 0, "they are being saved"
        two.ranks[1].do(go_on_saving)
        two.run()
        assert one.ask("y", tokens).loaded == 288
        one.run()


def test_a_rank_killed_while_it_saves_leaves_no_block_to_other_sizes(own_pega, prompt):
    tokens = prompt(300)
    with engine(own_pega.address, 1) as one:
        one.wait_ready()
        two = engine(own_pega.address, 2)
        two.wait_ready()
        two.ranks[1].do(stop_saving)
        two.add("x", tokens)
        two.run(lambda: bool(two.answers["x"].finish_reason))
        two.ranks[1].kill()
        with pytest.raises(rank.RankDied):
            two.step()
        two.close()
        assert insertions(own_pega) == 0
        assert one.ask("x", tokens).loaded == 0
        one.reset_local()
        assert one.ask("y", tokens).loaded == 288
        one.run()
        one.check_at_rest()
    wait_for_zero(own_pega, "pegaflow_claims", "pegaflow_pins")


def test_a_server_killed_between_two_sizes_is_a_miss(own_pega, prompt):
    tokens = prompt(300)
    with engine(own_pega.address, 2) as two, engine(own_pega.address, 1) as one:
        two.wait_ready()
        one.wait_ready()
        two.ask("x", tokens)
        own_pega.kill()
        assert one.ask("x", tokens).loaded == 0
        own_pega.start()
        one.wait_ready()
        two.wait_ready()
        one.reset_local()
        one.ask("y", tokens)
        two.reset_local()
        assert two.ask("z", tokens).loaded == 288
        two.run()


def test_lists_with_another_grid_share_no_block(own_pega, prompt):
    tokens = prompt(300)
    for name, sizes in (("none", ""), ("two", "1,2"), ("four", "1,2,4")):
        with engine(own_pega.address, 1, sizes=sizes, transfer={"engine_id": name}) as made:
            made.wait_ready()
            assert made.ask("cold", tokens).loaded == 0
            made.reset_local()
            assert made.ask("again", tokens).loaded == 288
            made.run()
            made.check_at_rest()
    assert insertions(own_pega) == 3 * (303 // BLOCK)


def test_lists_with_the_same_grid_share_blocks(own_pega, prompt):
    tokens = prompt(300)
    with (
        engine(own_pega.address, 1, sizes="1,4") as one,
        engine(own_pega.address, 2, sizes="2,4") as two,
    ):
        one.wait_ready()
        two.wait_ready()
        one.ask("x", tokens)
        one.run()
        assert two.ask("x", tokens).loaded == 288
        two.run()


def test_instances_show_the_cells(own_pega):
    with engine(own_pega.address, 2) as two:
        two.wait_ready()
        (shown,) = instances(own_pega)
        assert shown["shard_count"] == 4
        assert [(one["shard"], one["cells"]) for one in shown["ranks"]] == [(0, 2), (2, 2)]


def test_heads_that_are_loaded_into_the_wrong_place_are_detected(own_pega, prompt):
    tokens = prompt(300)
    with engine(own_pega.address, 2) as two:
        two.wait_ready()
        two.ask("x", tokens)
        two.run()
    with engine(own_pega.address, 1, model_class=ShiftedHeads) as wrong:
        wrong.wait_ready()
        with pytest.raises(WrongKv):
            wrong.ask("x", tokens)
