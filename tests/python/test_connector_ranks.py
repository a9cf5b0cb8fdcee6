"""Tensor- and pipeline-parallel engines: each rank a process with the real worker side."""

import os
import shutil
import time
from typing import Any

import pytest

from tests.python import rank
from tests.python.harness import BLOCK, Engine, model_directory
from tests.python.test_connector_faults import (
    state_of,
    wait_for_zero,
    when_load_is_ordered,
)
from tests.python.test_connector_two_engines import insertions, instances
from tests.support.waiting import wait_until

#: The model has 2 KV heads: with 4 ranks two ranks hold each head, and MLA's latent is on all.
KINDS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_parallel_size": 2},
    "tp4_two_replicas": {"tensor_parallel_size": 4},
    "mla_tp2": {"tensor_parallel_size": 2, "mla": True},
    "pp2_uneven": {"pipeline_parallel_size": 2},
    "tp2_pp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}
#: The number of times that a block's bytes are stored, if all pages had one size.
SHARDS = {"tp2": 2, "tp4_two_replicas": 2, "mla_tp2": 1, "pp2_uneven": 2, "tp2_pp2": 4}


def engine(address: str, kind: str = "tp2", **options: Any) -> Engine:
    return Engine(address, distributed_executor_backend="mp", **KINDS[kind], **options)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_is_loaded_on_all_ranks(own_pega, prompt, kind):
    tokens = prompt(700)
    with engine(own_pega.address, kind) as made:
        made.wait_ready()
        made.ask("cold", tokens, 5)
        made.reset_local()
        assert made.stats["saved_blocks"] == 704 // BLOCK
        assert made.stats["save_skipped_blocks"] == made.stats["save_failed_blocks"] == 0
        assert insertions(own_pega) == 704 // BLOCK

        again = made.ask("again", tokens, 5)

        assert again.loaded == 688
        assert made.stats["loads"] == 1
        assert made.stats["loaded_blocks"] == 43
        made.run()
        made.check_at_rest()
        saved, loaded = made.stats["saved_bytes"], made.stats["loaded_bytes"]
        ranks = made.config.parallel_config.world_size
        assert loaded / 43 / (saved / 44) == ranks / SHARDS[kind], "replicas load and do not save"
    wait_for_zero(own_pega, "pegaflow_claims", "pegaflow_pins")


@pytest.mark.parametrize("kind", KINDS)
def test_another_engine_with_the_same_ranks_loads_the_blocks(own_pega, prompt, kind):
    tokens = prompt(300)
    with engine(own_pega.address, kind) as first, engine(own_pega.address, kind) as second:
        first.wait_ready()
        second.wait_ready()
        first.ask("x", tokens)
        first.run()
        assert second.ask("x", tokens).loaded == 288
        second.run()
        for one in (first, second):
            one.check_at_rest()


def test_ranks_agree_on_a_namespace_while_their_weights_have_no_id(own_pega, prompt, tmp_path):
    tokens = prompt(300)
    shutil.copytree(model_directory(), tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    in_an_hour = time.time() + 3600  # younger than the process that starts the ranks
    os.utime(tmp_path / "model.safetensors", (in_an_hour, in_an_hour))
    options = {
        "model": str(tmp_path),
        "load_format": "auto",
        "extra": {"pegaflow.weights_id": ""},
    }
    for name in ("first", "second"):
        with engine(own_pega.address, transfer={"engine_id": name}, **options) as made:
            made.wait_ready()
            assert made.ask("cold", tokens).loaded == 0, "another engine's blocks"
            made.reset_local()
            assert made.ask("again", tokens).loaded == 288
            made.run()
            made.check_at_rest()
            (shown,) = (one for one in instances(own_pega) if one["instance"] == name)
            (weights,) = (f["value"] for f in shown["factors"] if f["name"] == "weights")
            assert weights.startswith(f"private:{name}:")


def test_engines_of_different_numbers_of_ranks_share_no_block(own_pega, prompt):
    tokens = prompt(300)
    kinds = ["tp2", "tp4_two_replicas", "mla_tp2", "pp2_uneven"]
    for kind in kinds:
        with engine(own_pega.address, kind) as made:
            made.wait_ready()
            assert made.ask("cold", tokens).loaded == 0
            made.reset_local()
            assert made.ask("again", tokens).loaded == 288
            made.run()
            made.check_at_rest()
    assert insertions(own_pega) == len(kinds) * (303 // BLOCK), "each stores its own"


def test_nothing_is_offered_while_a_rank_is_missing(own_pega, prompt):
    tokens = prompt(300)
    with engine(own_pega.address) as made:
        made.wait_ready()
        made.ask("x", tokens)
        made.reset_local()
        assert complete(made)
        made.ranks[1].do(close_mover)
        wait_until(lambda: not complete(made), "the instance stays complete")

        assert made.ask("again", tokens).loaded == 0

        assert made.stats["misses{not_registered}"] == 1
        made.run()
        made.check_at_rest()


def close_mover(one: rank.Rank) -> None:
    one.worker._worker.mover.close()


def complete(made: Engine) -> bool:
    """True if the server has all ranks of the instance."""
    session = made.connector._scheduler._session
    answer = session.take(session.lookup(bytes(32), 32), 10.0)
    assert answer is not None
    return answer[1]


# ---- a rank that fails, is slow, or dies


def fail_pages(one: rank.Rank, blocks: int) -> None:
    """This rank's next load misses its last ``blocks`` blocks; the loaded bytes are overwritten."""
    side = one.worker._worker
    ended = side._load_ended

    def spoil(job: Any, done: Any) -> None:
        side._load_ended = ended
        bad = job.order.blocks[-blocks:]
        one.model.poison(bad)
        ended(job, _Failed(done, bad))

    side._load_ended = spoil


class _Failed:
    """The report of a load, with some blocks marked as missing."""

    def __init__(self, done: Any, failed: list[int]) -> None:
        self._done = done
        self.failed_blocks = failed
        self.blocks = done.blocks - len(failed)
        self.bytes, self.took_s = done.bytes, done.took_s
        self.error, self.error_code = "gone: planted", "gone"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._done, name)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_page_that_fails_on_one_rank_is_computed_on_all(own_pega, prompt, failing):
    tokens = prompt(300)
    with engine(own_pega.address) as made:
        made.wait_ready()
        made.ask("stored", tokens)
        made.reset_local()
        made.ranks[failing].do(fail_pages, 5)

        made.ask("x", tokens, 20)  # each rank's model checks its KV

        assert made.stats["load_failures{gone}"] == 1
        assert made.stats["load_failed_blocks"] == 5
        assert made.stats["loaded_blocks"] == 13
        made.reset_local()
        assert made.ask("again", tokens, 20).loaded == 288
        made.run()
        made.check_at_rest()


def test_different_pages_that_fail_on_different_ranks(own_pega, prompt):
    tokens = prompt(300)
    with engine(own_pega.address) as made:
        made.wait_ready()
        made.ask("stored", tokens)
        made.reset_local()
        made.ranks[0].do(fail_pages, 2)
        made.ranks[1].do(fail_pages, 9)

        made.ask("x", tokens, 20)

        assert made.stats["load_failed_blocks"] == 9
        made.run()
        made.check_at_rest()


def hold_reports(one: rank.Rank) -> None:
    """This rank's jobs end without a report."""
    one.worker._worker.collect = lambda: None


def report_again(one: rank.Rank) -> None:
    del one.worker._worker.collect


def test_a_slow_rank_delays_only_the_request_of_its_load(own_pega, prompt):
    tokens = prompt(300)
    with engine(own_pega.address) as made:
        made.wait_ready()
        made.ask("stored", tokens)
        made.reset_local()
        made.ranks[1].do(hold_reports)
        slow = made.add("slow", tokens)
        other = made.add("other", prompt(40))
        made.run(lambda: bool(other.finish_reason))
        for _ in range(20):
            made.step()
        assert not slow.tokens, "not all ranks have its KV"
        made.ranks[1].do(report_again)
        made.run()

        slow.check()
        other.check()
        assert slow.loaded == 288
        made.check_at_rest()


def stop_saving(one: rank.Rank) -> None:
    """The pages of this rank's next save job are never published: its copies do not begin."""
    side = one.worker._worker
    mover = side.mover

    class Held:
        def save(self, *arguments: Any, **_more: Any) -> None:
            held.append(arguments)

        def __getattr__(self, name: str) -> Any:
            return getattr(mover, name)

    held: list[Any] = []
    side.mover = Held()
    side.held, side.real_mover = held, mover


def go_on_saving(one: rank.Rank) -> None:
    side = one.worker._worker
    side.mover = side.real_mover
    for arguments in side.held:
        side.mover.save(*arguments)


def test_a_block_is_found_only_after_the_slow_rank_has_saved_it_too(own_pega, prompt):
    tokens = prompt(300)
    with engine(own_pega.address) as made, engine(own_pega.address) as other:
        made.wait_ready()
        other.wait_ready()
        made.ranks[1].do(stop_saving)
        made.add("x", tokens)
        made.run(lambda: bool(made.answers["x"].finish_reason))
        assert made.connector._scheduler.saves.pinned > 0, "its blocks stay until all have reported"
        assert other.ask("x", tokens).loaded == 0, "the other rank's share is missing"
        made.ranks[1].do(go_on_saving)
        made.run()
        made.check_at_rest()
        other.reset_local()
        assert other.ask("y", tokens).loaded == 288
        other.run()
        other.check_at_rest()


def test_a_rank_killed_between_reserve_and_publish_leaves_no_block(own_pega, prompt):
    tokens, stored = prompt(300), prompt(300)
    made = engine(own_pega.address)
    made.wait_ready()
    made.ask("stored", stored)
    made.run()
    before = insertions(own_pega)
    # Its copies never begin: rank 0 has reserved for both, and publishes its share.
    made.ranks[1].do(stop_saving)
    made.add("x", tokens)
    made.run(lambda: bool(made.answers["x"].finish_reason))
    made.ranks[1].kill()
    with pytest.raises(rank.RankDied):
        made.step()  # vLLM then ends the whole engine
    made.close()

    with engine(own_pega.address) as again:
        again.wait_ready()
        assert insertions(own_pega) == before, "no incomplete block"
        assert again.ask("x", tokens).loaded == 0
        again.reset_local()
        assert again.ask("stored", stored).loaded == 288
        again.reset_local()
        assert again.ask("y", tokens).loaded == 288
        again.run()
        again.check_at_rest()
    wait_for_zero(own_pega, "pegaflow_claims", "pegaflow_pins")


def test_a_server_killed_while_all_ranks_load_costs_no_answer(own_pega, prompt):
    prompts = [prompt(300) for _ in range(4)]
    with engine(own_pega.address) as made:
        made.wait_ready()
        for i, tokens in enumerate(prompts):
            made.ask(f"stored-{i}", tokens)
        made.reset_local()
        when_load_is_ordered(made, own_pega.kill)
        for i, tokens in enumerate(prompts):
            made.add(f"x{i}", tokens, 10)
        made.run()
        for i in range(len(prompts)):
            made.answers[f"x{i}"].check()
        own_pega.start()
        made.wait_ready()
        made.ask("y", prompts[0])
        made.reset_local()
        assert made.ask("z", prompts[0]).loaded == 288
        made.run()
        made.check_at_rest()


def test_an_abort_while_ranks_load_waits_for_all_of_them(own_pega, prompt):
    tokens = prompt(300)
    with engine(own_pega.address) as made:
        made.wait_ready()
        made.ask("stored", tokens)
        made.reset_local()
        made.add("x", tokens, 10)
        made.run(lambda: getattr(state_of(made, "x"), "load", None) is not None or ended(made, "x"))
        made.abort("x")
        made.run()
        made.check_at_rest()
        # A load that ended before the abort has filled vLLM's own cache.
        made.reset_local()
        assert made.ask("y", tokens).loaded == 288
        made.run()


def ended(made: Engine, request_id: str) -> bool:
    return bool(made.answers[request_id].tokens)
