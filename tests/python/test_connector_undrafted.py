"""Blocks for which vLLM computed no draft KV, in a real scheduler: none is ever saved.

A request near the longest length ends the drafts of all requests beside it. vLLM's own cache offers
their blocks to later requests nevertheless.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from pegaflow.vllm.saves import Late
from tests.python.drafting_model import DraftingModel
from tests.python.harness import BLOCK, Answer, Engine, model_directory

DRAFTED = 6
LONGEST = 61 * BLOCK


def drafting(pega: Any, **changes: Any) -> Engine:
    """An engine that computes no drafts beside a request of almost ``LONGEST`` tokens."""
    speculation = {"method": "eagle", "model": model_directory(num_hidden_layers=1)}
    speculation |= {"num_speculative_tokens": DRAFTED}
    changes = {"max_model_len": LONGEST, "blocks": 100} | changes
    made = Engine(
        pega.address, model_class=DraftingModel, speculative_config=speculation, **changes
    )
    made.model.undrafted_from = LONGEST - DRAFTED
    made.wait_ready()
    return made


def begin_long(one: Engine, prompt: Any) -> Answer:
    """In the next step vLLM drafts nothing, and so until this request ends soon after."""
    answer = one.add("long", prompt(LONGEST - 11), 11, skip_reading=True)
    one.run(until=lambda: len(answer.tokens) > 0)
    return answer


def ask_undrafted(one: Engine, prompt: Any, tokens: list[int], length: int = 4) -> Answer:
    """The answer to a prompt that is computed without drafts."""
    begin_long(one, prompt)
    # A lookup would delay it, until drafts are computed again.
    return one.ask("undrafted", tokens, length, skip_reading=True)


def check_computed_once(one: Engine, tokens: list[int]) -> None:
    """Checks that the cache has no block of a prompt, and all of them after it was computed."""
    one.reset_local()
    assert one.ask("computed", tokens).loaded == 0
    one.reset_local()
    assert one.ask("loaded", tokens).loaded == (len(tokens) // BLOCK - 1) * BLOCK
    one.check_at_rest()


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def asynchronous(request: pytest.FixtureRequest) -> bool:
    return request.param


def test_the_request_that_computes_undrafted_blocks_does_not_save_them(pega, prompt, asynchronous):
    tokens = prompt(4 * BLOCK)
    with drafting(pega, asynchronous=asynchronous) as one:
        # It goes on with drafts, behind blocks that have none.
        answer = ask_undrafted(one, prompt, tokens, 4 * BLOCK).tokens
        check_computed_once(one, [*tokens, *answer, *prompt(20)])


def test_a_request_that_hits_undrafted_blocks_does_not_save_them(pega, prompt, asynchronous):
    tokens = prompt(4 * BLOCK)
    with drafting(pega, asynchronous=asynchronous) as one:
        ask_undrafted(one, prompt, tokens)
        longer = [*tokens, *prompt(3 * BLOCK)]
        assert one.ask("hit", longer).local == 3 * BLOCK
        assert one.ask("second hit", longer).local == 5 * BLOCK
        check_computed_once(one, longer)


def test_blocks_before_the_undrafted_ones_are_saved(pega, prompt, asynchronous):
    tokens = prompt(4 * BLOCK)
    with drafting(pega, asynchronous=asynchronous) as one:
        answer = one.add("becomes undrafted", tokens, 400)
        one.run(until=lambda: len(answer.tokens) > 20)
        begin_long(one, prompt)
        one.run()
        answer.check()
        longer = [*tokens, *answer.tokens, *prompt(BLOCK)]
        assert one.ask("hit", longer).local > 20 * BLOCK
        one.reset_local()
        loaded = one.ask("again", longer).loaded
        assert 4 * BLOCK <= loaded < 20 * BLOCK
        one.check_at_rest()


def test_a_request_that_hits_blocks_while_they_are_computed_does_not_save_them(
    pega, prompt, asynchronous
):
    tokens = prompt(4 * BLOCK + 3)
    with drafting(pega, asynchronous=asynchronous) as one:
        begin_long(one, prompt)
        answers = [
            one.add("computes", tokens, 2 * BLOCK, skip_reading=True),
            one.add("hits", tokens, 2 * BLOCK),
        ]
        one.run()
        for answer in answers:
            answer.check()
        assert answers[1].local == 3 * BLOCK
        check_computed_once(one, tokens)


def test_a_preempted_request_does_not_save_them_after_it_resumes(pega, prompt):
    tokens = prompt(4 * BLOCK)
    with drafting(pega) as one:
        answer = one.add("preempted", tokens, 400)
        one.run(until=lambda: len(answer.tokens) > 20)
        long = begin_long(one, prompt)
        one.run(until=lambda: long.finish_reason == "length")
        undrafted = len(answer.tokens)
        # vLLM computes the last block of its hit again.
        one.run(until=lambda: len(answer.tokens) > undrafted + 3 * BLOCK)
        one.preempt_all()
        one.run()
        answer.check()
        longer = [*tokens, *answer.tokens]
        one.reset_local()
        loaded = one.ask("again", longer).loaded
        assert 4 * BLOCK <= loaded < 20 * BLOCK
        one.check_at_rest()


def test_blocks_that_are_computed_again_with_drafts_are_saved(pega, prompt, asynchronous):
    """vLLM allocates the same blocks once more, without a reset."""
    with drafting(pega, asynchronous=asynchronous) as one:
        ask_undrafted(one, prompt, prompt(10 * BLOCK))
        undrafted = one.connector._scheduler._undrafted
        assert len(undrafted) >= 10
        for turn in range(3):
            tokens = prompt(50 * BLOCK)
            one.ask(f"{turn}", tokens)
            one.reset_local()
            assert one.ask(f"{turn} again", tokens).loaded == 49 * BLOCK
        assert len(undrafted) == 0
        one.check_at_rest()


def test_undrafted_blocks_that_are_loaded_have_drafts(pega, prompt, asynchronous):
    tokens = prompt(50 * BLOCK)
    with drafting(pega, asynchronous=asynchronous) as one:
        one.ask("drafted", tokens)
        ask_undrafted(one, prompt, prompt(10 * BLOCK))
        undrafted = one.connector._scheduler._undrafted
        assert len(undrafted) >= 10
        for turn in range(3):
            one.reset_local()
            assert one.ask(f"{turn}", tokens).loaded == 49 * BLOCK
        assert len(undrafted) == 0
        one.check_at_rest()


def test_a_new_server_does_not_get_them(own_pega, prompt):
    """A server without blocks is given those of live requests once more."""
    tokens = prompt(4 * BLOCK)
    with drafting(own_pega) as one:
        ask_undrafted(one, prompt, tokens)
        answer = one.add("hit", [*tokens, *prompt(BLOCK)], 200)
        one.run(until=lambda: len(answer.tokens) > 5)
        assert answer.local == 3 * BLOCK
        own_pega.kill()
        one.run(until=lambda: len(answer.tokens) > 60)
        own_pega.start()
        one.wait_ready()
        one.run()
        answer.check()
        check_computed_once(one, tokens)


def test_those_of_a_time_without_server_are_not_saved_later(own_pega, prompt, asynchronous):
    tokens = prompt(4 * BLOCK)
    with drafting(own_pega, asynchronous=asynchronous) as one:
        with stopped(one, own_pega):
            begin_long(one, prompt)
            answer = one.add("undrafted", tokens, 200, skip_reading=True)
            one.run(until=lambda: len(answer.tokens) > 60)
        one.run()
        answer.check()
        one.ask("hit", [*tokens, *prompt(BLOCK)])
        check_computed_once(one, tokens)


def test_a_late_block_that_was_reallocated_without_drafts_is_not_saved(pega, prompt):
    """vLLM's hash is the same: the tokens are."""
    tokens = prompt(4 * BLOCK)
    with drafting(pega) as one:
        ask_undrafted(one, prompt, tokens)
        name = one.hashes(tokens)[0]
        pool = one.scheduler.kv_cache_manager.block_pool
        (block,) = (b.block_id for b in pool.blocks if b.block_hash and b.block_hash[:-4] == name)
        side = one.connector._scheduler
        late = Late(bytes(32), name, (block,), None, 0, 0)
        side.saves.wait(late)
        assert side.saves.orders() == []
        side._undrafted.allocated([block])
        side.saves.wait(late)
        assert [order.blocks for order in side.saves.orders()] == [[block]]
        side.saves.drop_unsent("reset")
        one.check_at_rest()


@contextlib.contextmanager
def stopped(one: Engine, pega: Any) -> Iterator[None]:
    pega.kill()
    one.wait_states({"connecting"})
    yield
    pega.start()
    one.wait_ready()
