"""Prefill on one engine, decode on another: the handed-over blocks, and the cost of waiting.

Two engines of vLLM's real scheduler, the real connector and a real server; the router is the test.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from vllm.config.kv_events import KVEventsConfig

from pegaflow.vllm import handover
from pegaflow.vllm.messages import SaveOrder
from pegaflow.vllm.saves import Saves
from tests.python.harness import BLOCK, Answer, Engine, train
from tests.python.test_connector_engine import KINDS
from tests.python.test_connector_two_engines import run_together
from tests.support.event_consumer import consumer

ASKED = {"pegaflow": {"save_tail": True}}
#: Far longer than any of these scenarios takes; a wait that ends only by it fails its test.
LONG = {"pegaflow.handover_wait_ms": 10_000}
#: Prompts shorter than two blocks are loaded from the cache, too.
ANY_LENGTH = {"pegaflow.min_load_tokens": 1}


@contextlib.contextmanager
def engines(
    address: str, prefill: Any = None, decode: Any = None, decode_address: str = ""
) -> Iterator[tuple[Any, Any]]:
    """A prefill and a decode engine, at one server or two; both are closed at the end."""
    decode = dict(decode or {})
    decode["extra"] = LONG | decode.get("extra", {})
    with Engine(address, **prefill or {}) as p, Engine(decode_address or address, **decode) as d:
        p.wait_ready()
        d.wait_ready()
        yield p, d
        for one in (p, d):
            one.run()
            one.check_at_rest()


def prefill(engine: Engine, request_id: str, prompt: list[int], **options: Any) -> dict[str, Any]:
    """The prefill engine's response to the router."""
    made = engine.ask(request_id, prompt, 1, params=ASKED, **options)
    assert made.params is not None
    return made.params


def next_job(params: dict[str, Any]) -> dict[str, Any]:
    """The same for a job that the engine has not begun yet."""
    ours = params["pegaflow"]
    return {"pegaflow": {**ours, "job": ours["job"] + 1}}


def waits(engine: Engine, result: str) -> int:
    return engine.stats[f"handovers{{{result}}}"]


def is_waiting(engine: Engine, request_id: str, kind: str = "wait") -> bool:
    """``kind``: "wait" for a save that it names, "early" for a prefill that came with it."""
    state = engine.connector._scheduler._states.get(request_id)
    return state is not None and getattr(state, kind) is not None


def wait_steps(engine: Engine, request_id: str, steps: int = 5, kind: str = "wait") -> None:
    """Some iterations in which the request waits, and has no block of the GPU."""
    pool = engine.scheduler.kv_cache_manager.block_pool
    for _ in range(steps):
        free = pool.get_num_free_blocks()
        engine.step()
        assert is_waiting(engine, request_id, kind)
        assert engine.scheduler.kv_cache_manager.get_block_ids(request_id)[0] == []
        assert pool.get_num_free_blocks() >= free


# ---- the handed-over blocks


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [288, 289, 290, 303])
def test_all_but_the_last_token_are_loaded_from_the_prefill_engine(pega, prompt, kind, length):
    tokens = prompt(length)
    with engines(pega.address, KINDS[kind], KINDS[kind]) as (p, d):
        params = prefill(p, "x", tokens)
        assert params["pegaflow"]["tokens"] == (length if length % BLOCK != 1 else 288)

        answer = d.ask("x", tokens, 40, params=params)

        # A single token behind the last full block is computed in any case.
        partial = length % BLOCK >= 2
        assert answer.loaded == (length - 1 if partial else 288)
        assert waits(d, "over") == 1
        assert answer.params is None
        # The partial block became a full one under vLLM's own key; it is another block.
        d.reset_local()
        again = d.ask("again", tokens + answer.tokens, 2)
        assert again.loaded == (length + 39) // BLOCK * BLOCK


@pytest.mark.parametrize("length, loaded", [(10, 9), (15, 14), (16, 16), (17, 16), (18, 17)])
def test_a_prompt_of_less_than_two_blocks(pega, prompt, length, loaded):
    tokens = prompt(length)
    extra = {"extra": ANY_LENGTH}
    with engines(pega.address, extra, extra) as (p, d):
        params = prefill(p, "x", tokens)
        answer = d.ask("x", tokens, 5, params=params)

        # vLLM computes the last token of a whole prompt by itself.
        assert answer.loaded == loaded


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_larger_than_the_limit_of_pins_is_handed_over_whole(pega, prompt, kind):
    tokens = prompt(605)  # 38 blocks, and 5 may be pinned for prompts that stay here
    small = {"extra": {"pegaflow.max_pinned_percent": 5}, "max_model_len": 800, "blocks": 100}
    with engines(pega.address, KINDS[kind] | small, KINDS[kind] | {"max_model_len": 800}) as (p, d):
        params = prefill(p, "x", tokens)

        answer = d.ask("x", tokens, 4, params=params)

        assert waits(d, "over") == 1
        assert answer.loaded == 604


def test_each_chunk_of_a_prompt_to_hand_over_is_saved_with_its_own_step(pega, prompt):
    """A decode engine follows the chunks, and a busy engine's next step may come much later."""
    tokens = prompt(605)
    small = {"extra": {"pegaflow.max_pinned_percent": 5}, "max_model_len": 800, "blocks": 100}
    with engines(pega.address, small | {"max_num_batched_tokens": 160}) as (p, _):
        steps = []
        p.on_schedule = lambda output: steps.append(
            (output.total_num_scheduled_tokens, p.connector._scheduler.saves.pinned)
        )
        prefill(p, "x", tokens)

        computed = [pinned for scheduled, pinned in steps if scheduled]
        assert computed[0] == 160 // BLOCK
        assert p.stats["saves"] == len(computed) == 4


def test_both_engines_have_a_part_of_the_prompt(pega, prompt):
    head, tail = prompt(160), prompt(140)
    with engines(pega.address) as (p, d):
        p.ask("head", head, 2)
        d.ask("head", head, 2)
        params = prefill(p, "x", head + tail)

        answer = d.ask("x", head + tail, 3, params=params)

        assert (answer.local, answer.loaded) == (160, 139)


def test_a_cached_prompt_is_handed_over_without_a_job(pega, prompt):
    tokens = prompt(288)
    with engines(pega.address) as (p, d):
        prefill(p, "first", tokens)
        p.reset_local()
        params = prefill(p, "second", tokens)

        assert params["pegaflow"]["job"] == 0
        assert params["pegaflow"]["tokens"] == 288
        assert d.ask("x", tokens, 3, params=params).loaded == 288
        assert not any(name.startswith("handovers") for name in d.stats)


def test_the_same_prompt_twice_is_saved_once(pega, prompt):
    tokens = prompt(300)
    with engines(pega.address) as (p, d):
        first = p.add("a", tokens, 1, params=ASKED)
        second = p.add("b", tokens, 1, params=ASKED)
        p.run()
        assert first.params is not None and second.params is not None
        assert p.stats["saved_blocks"] == 19
        assert second.params["pegaflow"]["tokens"] == 300
        d.add("a", tokens, 3, params=first.params)
        d.add("b", tokens, 3, params=second.params)
        d.run()
        assert [d.answers[name].check() for name in "ab"] == [None, None]
        assert d.answers["a"].loaded == 299


def test_a_request_without_a_handover_gets_no_parameters_and_saves_no_partial_block(pega, prompt):
    tokens = prompt(300)
    with engines(pega.address) as (p, _):
        for params in (None, {}, {"pegaflow": None}, {"pegaflow": {"save_tail": "yes"}}):
            answer = p.ask(f"x-{params}", tokens, 1, params=params)
            assert answer.params is None
        p.run()
        assert p.stats["saved_blocks"] == 18


def test_a_server_may_refuse_saves_until_the_engine_hands_a_prompt_over(pega, prompt, monkeypatch):
    allowed = []
    orders = Saves.orders

    def recorded(self: Saves) -> list[SaveOrder]:
        made = orders(self)
        allowed.extend(order.may_refuse for order in made)
        return made

    monkeypatch.setattr(Saves, "orders", recorded)
    with engines(pega.address) as (p, _):
        p.ask("a", prompt(300), 1)
        p.run()
        assert allowed and all(allowed)

        allowed.clear()
        prefill(p, "b", prompt(300))
        p.run()
        assert allowed and not any(allowed)

        # A later prompt may wait for a block that another request saves.
        allowed.clear()
        p.ask("c", prompt(300), 1)
        p.run()
        assert allowed and not any(allowed)


def test_an_engine_that_continues_saves_no_partial_block(pega, prompt):
    # It would be written while it is saved.
    tokens = prompt(290)
    with engines(pega.address) as (p, d):
        answer = p.ask("x", tokens, 40, params=ASKED)
        p.run()
        assert p.stats["saved_blocks"] == (290 + 39) // BLOCK
        assert answer.params is not None
        assert answer.params["pegaflow"]["tokens"] == (290 + 39) // BLOCK * BLOCK
        assert d.ask("x", tokens, 3, params=answer.params).loaded == 288


def test_ranks_that_share_a_block_wait_for_all_its_shards(pega, prompt):
    tokens = prompt(300)
    two = {"tensor_parallel_size": 2}
    with engines(pega.address, two, two) as (p, d):
        params = prefill(p, "x", tokens)
        assert d.ask("x", tokens, 20, params=params).loaded == 299
        assert waits(d, "over") == 1


@pytest.mark.parametrize("mine, theirs", [("a", "b"), ("a", None), (None, "b")])
@pytest.mark.parametrize("kind", ["salt", "lora"])
def test_another_tenant_or_adapter_has_other_blocks(pega, prompt, kind, mine, theirs):
    tokens = prompt(300)
    short = tokens[:11]  # Its only block is a partial one.
    adapters = {"enable_lora": True} if kind == "lora" else {}
    extra = {"extra": ANY_LENGTH} | adapters
    with engines(pega.address, extra, extra) as (p, d):
        for name, words in (("long", tokens), ("short", short)):
            params = prefill(p, name, words, **{kind: mine})
            assert d.ask(f"other-{name}", words, 3, params=params, **{kind: theirs}).loaded == 0
            d.reset_local()
            assert d.ask(name, words, 3, params=params, **{kind: mine}).loaded == len(words) - 1
            d.reset_local()


@pytest.mark.parametrize("length", [11, 43])
def test_the_partial_block_of_a_retrained_adapter_is_another_block(pega, prompt, tmp_path, length):
    words = prompt(length)
    extra = {"extra": ANY_LENGTH, "enable_lora": True}
    monday = train(tmp_path / "x", "monday", name="x", number=1)
    with engines(pega.address, extra, extra) as (p, d):
        params = prefill(p, "x", words, lora=monday)
        assert d.ask("x", words, 3, params=params, lora=monday).loaded == length - 1
    tuesday = train(tmp_path / "x", "tuesday", name="x", number=1)
    with engines(pega.address, extra, extra) as (p, d):
        # The name, the path and vLLM's hashes are those of the former adapter.
        assert d.ask("x", words, 3, params=params, lora=tuesday).loaded == 0
        params = prefill(p, "x", words, lora=tuesday)
        assert d.ask("own", words[:-1], 3, params=params, lora=tuesday).loaded == 0 or length > 16


def test_the_partial_block_of_another_prompt_is_another_block(pega, prompt):
    head = prompt(288)
    with engines(pega.address) as (p, d):
        params = prefill(p, "x", head + prompt(10))
        assert d.ask("y", head + prompt(10), 20, params=params).loaded == 288


def test_no_event_reports_a_partial_block(pega, prompt, short_path, monkeypatch):
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    tokens = prompt(300)
    with (
        consumer(short_path, "p") as (p_config, p_connect),
        consumer(short_path, "d") as (d_config, d_connect),
        engines(
            pega.address,
            {"kv_events_config": KVEventsConfig(**p_config)},
            {"kv_events_config": KVEventsConfig(**d_config)},
        ) as (p, d),
    ):
        routers = p_connect(), d_connect()
        params = prefill(p, "x", tokens)
        p.run()
        assert d.ask("x", tokens, 3, params=params).loaded == 299
        d.run()
        for one, router in zip((p, d), routers, strict=True):
            one.scheduler.kv_event_publisher._event_queue.join()
            assert set(router.read().blocks["CPU"]) == {bytes(k) for k in one.hashes(tokens)}


# ---- waiting requests and their limits


def test_without_patience_no_request_waits(pega, prompt):
    tokens = prompt(300)
    with engines(pega.address, None, {"extra": {"pegaflow.handover_wait_ms": 0}}) as (p, d):
        params = next_job(prefill(p, "x", tokens))
        p.run()
        assert d.ask("x", tokens, 5, params=params).loaded == 299
        assert not any(name.startswith("handovers") for name in d.stats)


def test_the_number_of_waiting_requests_is_limited(pega, prompt, monkeypatch):
    monkeypatch.setattr(handover, "MAX_WAITS", 1)
    tokens = prompt(300)
    with engines(pega.address) as (p, d):
        params = next_job(prefill(p, "warm-up", prompt(40)))
        d.add("x", tokens, 5, params=params)
        wait_steps(d, "x")

        d.add("too many", prompt(50), 5, params=params)
        d.run(lambda: d.answers["too many"].finish_reason != "")

        assert is_waiting(d, "x")
        assert waits(d, "busy") == 1
        params = prefill(p, "x", tokens)
        run_together([p, d])
        # That wait has ended, and the next request may wait.
        d.add("y", prompt(300), 5, params=next_job(params))
        wait_steps(d, "y")
        d.abort("y")
        d.run()


def test_an_abort_while_waiting_leaves_nothing_behind(own_pega, prompt):
    with engines(own_pega.address) as (p, d):
        params = next_job(prefill(p, "warm-up", prompt(40)))
        d.add("x", prompt(300), 5, params=params)
        wait_steps(d, "x")

        d.abort("x")

        d.run()
        d.check_at_rest()
        assert waits(d, "dropped") == 1
        # The same id again, for a request that does not wait.
        d.ask("x", prompt(300), 5)
        run_together([p, d])


def test_equal_ids_of_different_requests(pega, prompt):
    first, second = prompt(300), prompt(200)
    with engines(pega.address) as (p, d):
        params = prefill(p, "same", first)
        other = prefill(p, "same", second)
        assert d.ask("same", first, 3, params=params).loaded == 299
        assert d.ask("same", second, 3, params=other).loaded == 199


def test_a_preempted_request_does_not_wait_again(pega, prompt):
    tokens = prompt(300)
    with engines(pega.address) as (p, d):
        params = prefill(p, "x", tokens)
        d.add("x", tokens, 30, params=params)
        d.run(lambda: len(d.answers["x"].tokens) >= 8)
        d.preempt_all()
        d.run()
        d.answers["x"].check()
        assert waits(d, "over") == 1


def test_a_prefill_engine_that_has_left_is_not_waited_for(own_pega, prompt):
    tokens = prompt(300)
    with Engine(own_pega.address, extra=LONG) as d:
        d.wait_ready()
        with Engine(own_pega.address) as p:
            p.wait_ready()
            params = prefill(p, "x", tokens)
            p.run()
        assert d.ask("x", tokens, 5, params=params).loaded == 299
        assert waits(d, "gone") == 1
        d.run()
        d.check_at_rest()


@pytest.mark.pool_size("1mb")
def test_saves_that_had_no_room_are_computed(own_pega, prompt):
    tokens = prompt(1600)  # 100 blocks; the pool has room for 85 of 12 KiB.
    large = {"blocks": 1024, "max_model_len": 2048}
    with engines(own_pega.address, large, large) as (p, d):
        params = prefill(p, "x", tokens)

        answer = d.ask("x", tokens, 3, params=params)

        assert answer.loaded < 1599  # The first of its blocks were evicted for the last ones.
        assert waits(d, "over") == 1


def test_another_model_waits_and_computes(pega, prompt):
    tokens = prompt(300)
    other = {"extra": {"pegaflow.weights_id": "another"}}
    with engines(pega.address, None, other) as (p, d):
        params = prefill(p, "x", tokens)
        assert d.ask("x", tokens, 3, params=params).loaded == 0


def test_a_server_that_dies_ends_every_wait(own_pega, prompt):
    tokens = prompt(300)
    with Engine(own_pega.address) as p, Engine(own_pega.address, extra=LONG) as d:
        p.wait_ready()
        d.wait_ready()
        params = next_job(prefill(p, "x", tokens))
        p.run()
        d.add("x", tokens, 3, params=params)
        wait_steps(d, "x")
        own_pega.kill()
        d.run()
        d.answers["x"].check()
        assert waits(d, "no_server") == 1
        # A prefill engine without a server hands over nothing, once it has noticed.
        p.wait_states({"connecting"})
        for number in range(10_000):
            lost = p.ask(f"y{number}", tokens, 1, params=ASKED)
            if lost.params is None:
                break
        assert lost.params is None
        p.run()


def test_after_a_reset_no_request_waits(pega, prompt):
    tokens = prompt(300)
    with engines(pega.address) as (p, d):
        params = next_job(prefill(p, "x", tokens))
        p.run()
        d.add("x", tokens, 3, params=params)
        wait_steps(d, "x")
        assert d.connector.reset_cache()
        d.run()
        d.answers["x"].check()
        assert d.answers["x"].loaded == 0
        assert waits(d, "dropped") == 1


GOOD = {"node": "1" * 32, "incarnation": "2" * 32, "job": 3, "tokens": 300}


@pytest.mark.parametrize(
    "params",
    [
        {"pegaflow": "text"},
        {"pegaflow": {}},
        {"pegaflow": GOOD | {"node": 7}},
        {"pegaflow": GOOD | {"node": "11"}},
        {"pegaflow": GOOD | {"incarnation": "z" * 32}},
        {"pegaflow": GOOD | {"job": "3"}},
        {"pegaflow": GOOD | {"job": True}},
        {"pegaflow": GOOD | {"job": -1}},
        {"pegaflow": GOOD | {"job": 1 << 63}},
        {"pegaflow": GOOD | {"tokens": None}},
        {"do_remote_prefill": True, "remote_block_ids": [[1]]},
    ],
    ids=lambda params: str(params)[:60],
)
def test_invalid_parameters_are_not_a_handover(pega, prompt, params):
    with Engine(pega.address, extra=LONG) as engine:
        engine.wait_ready()
        engine.ask("x", prompt(100), 2, params=params)
        assert not any(name.startswith("handovers") for name in engine.stats)
        engine.run()
        engine.check_at_rest()


def test_a_wait_for_another_server_ends_at_once(pega, prompt):
    with Engine(pega.address, extra=LONG) as engine:
        engine.wait_ready()
        made: Answer = engine.ask("x", prompt(100), 2, params={"pegaflow": GOOD})
        assert made.loaded == 0
        # The one wait ended because there is no such server, and not by its patience.
        assert {
            name: count for name, count in engine.stats.items() if name.startswith("handovers{")
        } == {"handovers{gone}": 1}
        engine.run()
        engine.check_at_rest()
