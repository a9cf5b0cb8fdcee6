"""Scenarios with vLLM's real scheduler, the real connector and a real server; bytes are checked."""

import pytest
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from tests.python.fake_model import WrongKv
from tests.python.harness import BLOCK, Engine

KINDS = {
    "plain": {},
    "asynchronous": {"asynchronous": True},
    "v2_runner": {"v2_runner": True},
    "v2_asynchronous": {"v2_runner": True, "asynchronous": True},
    "old_release": {"old_release": True, "aggregate": True},
}


@pytest.fixture(params=KINDS)
def engine(request, pega):
    with Engine(pega.address, **KINDS[request.param]) as made:
        made.wait_ready()
        yield made
        made.run()
        made.check_at_rest()


@pytest.fixture
def plain(pega):
    with Engine(pega.address) as made:
        made.wait_ready()
        yield made
        made.run()
        made.check_at_rest()


def blocks_of(prompt_tokens: int, answer_tokens: int) -> int:
    """Full blocks that a request leaves; the last sampled token is never computed."""
    return (prompt_tokens + answer_tokens - 1) // BLOCK


# ---- saved blocks are loaded again


@pytest.mark.parametrize("length", [10, 16, 31, 32, 33, 47, 48, 255, 256, 257, 320, 700])
def test_a_prompt_is_loaded_after_the_engine_forgot_it(engine, prompt, length):
    tokens = prompt(length)
    cold = engine.ask("cold", tokens, 5)
    assert (cold.loaded, cold.local) == (0, 0)
    engine.run()
    assert engine.stats["saved_blocks"] == blocks_of(length, 5)
    assert engine.stats["save_skipped_blocks"] == 0

    engine.reset_local()
    again = engine.ask("again", tokens, 5)

    blocks = length // BLOCK
    assert again.loaded == (blocks * BLOCK if blocks >= 2 else 0)
    assert engine.stats["loaded_blocks"] == again.loaded // BLOCK
    assert engine.stats["loads"] == (1 if blocks >= 2 else 0)


def test_a_longer_chunked_prompt_is_saved_once_and_completely(plain, prompt):
    # 256 tokens a step: 4 chunks, none of which ends on the grid because of the neighbor.
    tokens, neighbor = prompt(801), prompt(37)
    plain.add("neighbor", neighbor, 40)
    plain.ask("long", tokens, 3)
    plain.run()

    assert plain.stats["saved_blocks"] == blocks_of(801, 3) + blocks_of(37, 40)
    assert plain.stats["save_skipped_blocks"] == 0
    plain.reset_local()
    assert plain.ask("again", tokens, 3).loaded == 800


def test_blocks_of_the_answer_are_loaded_too(plain, prompt):
    tokens = prompt(64)
    first = plain.ask("first", tokens, 50)
    plain.reset_local()

    longer = plain.ask("second", tokens + first.tokens, 4)

    assert longer.loaded == 64 + 48


def test_the_cache_extends_the_engines_own_prefix(engine, prompt):
    head, tail = prompt(160), prompt(200)
    engine.ask("all", head + tail, 2)
    engine.reset_local()
    assert engine.ask("head", head + prompt(30), 2).loaded == 160

    both = engine.ask("both", head + tail, 2)

    assert both.local == 160
    assert both.loaded == 360 // BLOCK * BLOCK - 160


def test_a_common_prefix_is_loaded_and_the_rest_computed(engine, prompt):
    head = prompt(128)
    engine.ask("one", head + prompt(50), 2)
    engine.reset_local()

    other = engine.ask("two", head + prompt(50), 2)

    assert other.loaded == 128


def test_another_engine_of_the_model_finds_the_blocks(pega, prompt):
    tokens = prompt(300)
    with Engine(pega.address) as first:
        first.wait_ready()
        first.ask("a", tokens)
        first.run()
    with Engine(pega.address, asynchronous=True, v2_runner=True) as second:
        second.wait_ready()
        assert second.ask("a", tokens).loaded == 288
        second.run()
        second.check_at_rest()


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_hash_algorithms(pega, prompt, algorithm):
    tokens = prompt(100)
    with Engine(pega.address, prefix_caching_hash_algo=algorithm) as engine:
        engine.wait_ready()
        engine.ask("a", tokens)
        engine.reset_local()
        assert engine.ask("b", tokens).loaded == 96


def test_the_fake_model_detects_a_wrong_block(pega, prompt):
    tokens = prompt(300)
    with Engine(pega.address) as engine:
        engine.wait_ready()
        engine.ask("stored", tokens)
        engine.reset_local()
        engine.add("x", tokens)
        engine.run(lambda: "x" in engine.scheduler.finished_recving_kv_req_ids)
        blocks = engine.scheduler.kv_cache_manager.get_block_ids("x")[0]
        engine.model.poison([blocks[7]])

        with pytest.raises(WrongKv, match=f"token {7 * BLOCK} of .* in block {blocks[7]}"):
            engine.run()


# ---- blocks that must not be mixed up


def test_salts_and_adapters_share_no_block(engine, prompt):
    tokens = prompt(100)
    variants = [{}, {"salt": "a"}, {"salt": "b"}, {"lora": "x"}, {"lora": "y"}]
    for i, variant in enumerate(variants):
        assert engine.ask(f"cold-{i}", tokens, **variant).loaded == 0
        engine.reset_local()
    for i, variant in enumerate(variants):
        assert engine.ask(f"again-{i}", tokens, **variant).loaded == 96
        engine.reset_local()


def test_a_request_that_skips_the_cache_reads_nothing_from_it(plain, prompt):
    tokens = prompt(100)
    plain.ask("cold", tokens)
    plain.reset_local()

    assert plain.ask("again", tokens, skip_reading=True).loaded == 0
    plain.reset_local()
    assert plain.ask("free", tokens).loaded == 96


def test_a_prompt_whose_last_token_another_connector_removed_is_not_confused(plain, prompt):
    # It is aligned and hashed as a whole; then its last token is removed and another one is added.
    tokens = prompt(64)
    made = plain.add("popped", tokens, 40)
    request = plain.scheduler.requests["popped"]
    request._all_token_ids.pop()
    request.prompt_token_ids.pop()
    request.num_prompt_tokens -= 1
    made.prompt.pop()
    plain.run()
    made.check()

    plain.run()
    assert plain.stats["saved_blocks"] == 3, "the fourth hash covers other tokens"
    plain.reset_local()
    assert plain.ask("whole", tokens).loaded == 48


def test_inconsistent_hashes_leave_the_request_uncached(pega, prompt):
    # With its own cache enabled, vLLM itself would fail on them.
    with Engine(pega.address, enable_prefix_caching=False) as engine:
        engine.wait_ready()
        made = engine.add("odd", prompt(100), 30)
        del engine.scheduler.requests["odd"].block_hashes[2:]
        engine.run()
        made.check()
        engine.run()
        assert engine.stats["saved_blocks"] == 0
        assert engine.stats["misses{uncacheable}"] == 1
        engine.check_at_rest()


# ---- roles and modes


def test_without_prefix_caching_each_request_loads_for_itself(pega, prompt):
    tokens = prompt(200)
    with Engine(pega.address, enable_prefix_caching=False) as engine:
        engine.wait_ready()
        engine.ask("cold", tokens)
        for name in ("a", "b"):
            engine.add(name, tokens)
        engine.run()
        for name in ("a", "b"):
            engine.answers[name].check()
            assert engine.answers[name].loaded == 192
        assert engine.stats["followed"] == 0
        engine.run()
        engine.check_at_rest()


@pytest.mark.parametrize(
    ("changes", "saves", "loads"),
    [
        ({"role": "kv_both"}, True, True),
        ({"role": "kv_producer"}, True, False),
        ({"role": "kv_consumer"}, False, True),
        ({"extra": {"pegaflow.mode": "save_only"}}, True, False),
    ],
)
def test_roles(pega, prompt, changes, saves, loads):
    stored, own = prompt(100), prompt(100)
    with Engine(pega.address) as both:
        both.wait_ready()
        both.ask("stored", stored)
        both.run()
    with Engine(pega.address, **changes) as engine:
        engine.wait_ready()
        assert engine.ask("stored", stored).loaded == (96 if loads else 0)
        engine.ask("own", own)
        engine.run()
        assert bool(engine.stats["saves"]) == saves
        engine.reset_local()
        assert engine.ask("again", own).loaded == (96 if loads and saves else 0)
        engine.run()
        engine.check_at_rest()


def test_save_only_does_not_save_local_hits_again(pega, prompt):
    tokens = prompt(100)
    with Engine(pega.address, extra={"pegaflow.mode": "save_only"}) as engine:
        engine.wait_ready()
        engine.ask("a", tokens)
        engine.run()
        saved = engine.stats["saved_blocks"]
        engine.ask("b", tokens)
        engine.run()
        assert engine.stats["saved_blocks"] == saved
        assert engine.stats["save_skipped_blocks"] == 0


def test_short_hits_are_computed(pega, prompt):
    head = prompt(64)
    with Engine(pega.address, extra={"pegaflow.min_load_tokens": 65}) as engine:
        engine.wait_ready()
        engine.ask("cold", head + prompt(100))
        engine.reset_local()
        assert engine.ask("short", head + prompt(100)).loaded == 0
        engine.reset_local()
        assert engine.ask("long", engine.answers["cold"].prompt).loaded == 160


# ---- many requests at once


def test_64_requests_with_one_stored_prefix_load_it_once(pega, prompt):
    head = prompt(320)
    with Engine(pega.address, blocks=512) as engine:
        engine.wait_ready()
        engine.ask("cold", head + prompt(5))
        engine.reset_local()
        before = engine.stats["loaded_blocks"]

        for i in range(64):
            engine.add(f"r{i}", head + prompt(7), 3)
        engine.run()

        for i in range(64):
            engine.answers[f"r{i}"].check()
        assert engine.stats["loaded_blocks"] - before == 20
        assert engine.stats["followed"] >= 60
        engine.run()
        engine.check_at_rest()


def test_preempted_requests_resume_from_the_cache(engine, prompt):
    # Room for two of the six when they are longest.
    engine.run()
    pool = engine.scheduler.kv_cache_manager.block_pool
    spare = pool.get_new_blocks(pool.get_num_free_blocks() - 45)
    preempted = []
    engine.on_schedule = lambda output: preempted.extend(output.preempted_req_ids or ())

    for i in range(6):
        engine.add(f"r{i}", prompt(180), 200)
    engine.run()

    for i in range(6):
        engine.answers[f"r{i}"].check()
    assert preempted
    pool.free_blocks(spare)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_pins_stay_below_their_limit_and_the_rest_waits(pega, prompt, prefix_caching):
    changes = {"extra": {"pegaflow.max_pinned_percent": 5}, "max_model_len": 800}
    with Engine(
        pega.address, blocks=100, enable_prefix_caching=prefix_caching, **changes
    ) as engine:
        engine.wait_ready()
        pinned = []
        engine.on_schedule = lambda output: pinned.append(engine.connector._scheduler.saves.pinned)
        engine.ask("fast", prompt(600), 1)
        engine.run()
        dropped = engine.stats["save_dropped_blocks{pin_limit}"]
        assert max(pinned) == 5
        assert engine.stats["saved_blocks"] + dropped == 600 // BLOCK
        if prefix_caching:
            assert dropped == 0, "its blocks wait in vLLM's own cache"
        else:
            assert dropped > 0, "no cache keeps them"
        engine.check_at_rest()


def test_old_releases_also_save_blocks_in_steps_without_work(pega, prompt):
    changes = {"extra": {"pegaflow.max_pinned_percent": 5}, "max_model_len": 800}
    with Engine(pega.address, blocks=100, old_release=True, **changes) as engine:
        engine.wait_ready()
        engine.ask("a", prompt(600), 1)
        engine.run()
        assert engine.stats["saved_blocks"] == 600 // BLOCK
        engine.check_at_rest()


def test_unpinned_blocks_that_other_requests_reuse_are_not_saved(pega, prompt):
    changes = {"extra": {"pegaflow.max_pinned_percent": 5}, "max_model_len": 800}
    with Engine(pega.address, blocks=60, **changes) as engine:
        engine.wait_ready()
        prompts = [prompt(700) for _ in range(4)]
        for i, tokens in enumerate(prompts):
            engine.add(f"cold-{i}", tokens, 1)
        engine.run()
        dropped = engine.stats["save_dropped_blocks{pin_limit}"]
        assert dropped > 0
        assert engine.stats["saved_blocks"] + dropped == 4 * (700 // BLOCK)
        for i, tokens in enumerate(prompts):
            engine.reset_local()
            engine.ask(f"again-{i}", tokens, 1)  # the model checks the bytes
        engine.run()
        engine.check_at_rest()


def test_an_idle_engine_steps_until_its_saves_are_reported(plain, prompt):
    plain.add("a", prompt(100), 1)
    plain.run()
    assert not plain.scheduler.has_requests()
    assert plain.connector._scheduler.saves.pinned == 0
    assert plain.stats["saved_blocks"] == 6


# ---- consecutive requests with one id


def test_the_next_request_with_an_id_is_another_request(engine, prompt):
    tokens, other = prompt(120), prompt(120)
    for round_ in range(4):
        engine.add("same", tokens if round_ % 2 else other, 20 + round_)
        # Until its answer is complete; its saves are still in flight then.
        engine.run(lambda: bool(engine.answers["same"].finish_reason))
        engine.answers["same"].check()
    engine.run()
    engine.reset_local()
    assert engine.ask("a", tokens).loaded == 112
    assert engine.ask("b", other).loaded == 112


# ---- the cache as a whole


def test_after_a_reset_no_older_block_is_found(engine, prompt):
    tokens = prompt(150)
    engine.ask("cold", tokens)
    engine.run()
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)

    assert engine.ask("after", tokens).loaded == 0
    engine.reset_local()
    assert engine.ask("again", tokens).loaded == 144


def test_a_load_that_vllm_allocates_after_a_reset_is_computed(engine, prompt):
    """vLLM 0.33 allocates a deferred load steps after its query."""
    tokens = prompt(150)
    engine.ask("cold", tokens)
    engine.reset_local()
    original = engine.connector.update_state_after_alloc

    def allocated_late(request, blocks, external_tokens):
        if external_tokens:
            engine.connector.reset_cache()
        original(request, blocks, external_tokens)

    engine.connector.update_state_after_alloc = allocated_late
    engine.ask("late", tokens)  # its tokens are checked
    engine.connector.update_state_after_alloc = original
    assert engine.stats["load_failures{reset}"] == 1

    engine.reset_local()
    assert engine.ask("again", tokens).loaded > 0, "the connector is switched off"


def test_a_reset_during_requests_excludes_their_blocks(plain, prompt):
    tokens = prompt(150)
    plain.add("running", tokens, 60)
    plain.run(lambda: len(plain.answers["running"].tokens) > 3)
    # vLLM cannot empty its own cache now, reports that, and expects another call.
    assert not plain.scheduler.reset_prefix_cache(reset_connector=True)
    plain.run()
    plain.answers["running"].check()
    saved = plain.stats["saved_blocks"]
    plain.run()
    assert plain.scheduler.reset_prefix_cache(reset_connector=True)

    assert plain.stats["saved_blocks"] == saved
    assert plain.ask("after", tokens).loaded == 0


# ---- an engine that is not served runs as plain vLLM


def check_plain(engine, prompt):
    tokens = prompt(100)
    for name in ("a", "b"):
        engine.ask(name, tokens)
        engine.reset_local()
        assert engine.answers[name].loaded == 0
    assert engine.stats["serving{scheduler}"] == 0
    assert engine.stats["saves"] == 0
    engine.check_at_rest()


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"pegaflow.prot": 7}, "unknown option pegaflow.prot; the nearest is pegaflow.port"),
        ({"pegaflow.mode": "x"}, "not one of read_write, save_only"),
        ({"pegaflow.host": "192.0.2.7"}, "192.0.2.7 is not this machine"),
    ],
)
def test_an_invalid_option_disables_the_cache_only(pega, prompt, caplog, extra, words):
    with Engine(pega.address, extra=extra) as engine:
        check_plain(engine, prompt)
    warnings = [r.getMessage() for r in caplog.records if "without the cache" in r.getMessage()]
    assert len(warnings) == 1
    assert words in warnings[0]


def test_an_unsupported_model_runs_without_the_cache(pega, prompt, caplog, monkeypatch):
    def window(**fields):
        return SlidingWindowSpec(**fields, sliding_window=1)

    monkeypatch.setattr("tests.python.harness.FullAttentionSpec", window)
    with Engine(pega.address) as engine:
        check_plain(engine, prompt)
    warnings = [r.getMessage() for r in caplog.records if "without the cache" in r.getMessage()]
    assert warnings == [
        "pegaflow: this engine runs without the cache: a sliding window of 1 token has no past"
    ]
