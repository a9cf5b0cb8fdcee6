"""Draft models with KV of their own, in a real scheduler: which blocks are saved and loaded."""

import copy
import dataclasses
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.kv_cache_interface import KVCacheGroupSpec

from pegaflow.vllm import drafts, namespace, ranks, weights
from pegaflow.vllm.build import hash_unit, instance_id, read_geometry
from pegaflow.vllm.support import unsupported
from tests.python.drafting_model import DraftingModel
from tests.python.fake_model import FakeModel
from tests.python.harness import (
    BLOCK,
    MODEL,
    Engine,
    kv_cache_config,
    kv_cache_configs,
    model_directory,
    vllm_config,
)
from tests.python.kinds_engine import state


@pytest.fixture(scope="module")
def draft_model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("draft")
    (directory / "config.json").write_text(json.dumps(MODEL | {"num_hidden_layers": 1}))
    return directory


def eagle(draft: Path, **more: Any) -> dict[str, Any]:
    return {"method": "eagle", "model": str(draft), "num_speculative_tokens": 2} | more


def engine(pega: Any, draft: Path, **changes: Any) -> Engine:
    changes = {"speculative_config": eagle(draft), "model_class": DraftingModel} | changes
    made = Engine(pega.address, **changes)
    made.wait_ready()
    return made


# ---- saves and loads


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_last_cached_block_is_computed_again(pega, prompt, draft_model, asynchronous):
    tokens = prompt(10 * BLOCK + 5)
    with engine(pega, draft_model, asynchronous=asynchronous) as one:
        one.ask("first", tokens)
        one.reset_local()
        again = one.ask("again", tokens)
        assert (again.local, again.loaded) == (0, 9 * BLOCK)
        # What vLLM's own cache has, it shortens by a block itself.
        third = one.ask("third", tokens)
        assert (third.local, third.loaded) == (9 * BLOCK, 0)
        one.check_at_rest()


def test_a_longer_prompt_loads_all_blocks_but_the_one_where_it_differs(pega, prompt, draft_model):
    tokens = prompt(6 * BLOCK)
    with engine(pega, draft_model) as one:
        answer = one.ask("first", tokens, BLOCK + 4).tokens
        one.reset_local()
        # The answer's first block is cached, too, and proves the last one of the prompt.
        turn = one.ask("next turn", [*tokens, *answer[:BLOCK], *prompt(40)])
        assert turn.loaded == 6 * BLOCK
        one.reset_local()
        branch = one.ask("branch", [*tokens[: 4 * BLOCK], *prompt(50)])
        assert branch.loaded == 3 * BLOCK
        one.check_at_rest()


def test_without_vllm_s_block_drop_no_block_is_computed_again(pega, prompt, draft_model):
    speculation = eagle(draft_model, disable_eagle_block_drop=True)
    tokens = prompt(10 * BLOCK + 5)
    with engine(pega, draft_model, speculative_config=speculation) as one:
        one.ask("first", tokens)
        one.reset_local()
        assert one.ask("again", tokens).loaded == 10 * BLOCK
        one.check_at_rest()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_block_is_saved_after_the_token_behind_it(pega, prompt, draft_model, asynchronous):
    with engine(pega, draft_model, asynchronous=asynchronous) as one:
        one.add("runs", prompt(4 * BLOCK), 2 * BLOCK + 1)
        saved = []

        def look(output: Any) -> None:
            if (state := one.connector._scheduler._states.get("runs")) is not None:
                request = state.request
                written = request.num_computed_tokens - request.num_in_flight_tokens
                assert state.progress.next_save * BLOCK < max(1, written)
                saved.append(state.progress.next_save)

        one.on_schedule = look
        one.run()
        assert {0, 4, 5} <= set(saved), saved
        assert one.stats["saved_blocks"] == 6, "the last one, too, once the request has ended"
        assert one.model.accepted > 0 and one.model.rejected > 0
        one.check_at_rest()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_random_requests_with_drafts(pega, draft_model, asynchronous, seed):
    """Shared beginnings, preemptions and resets, with few blocks on the GPU."""
    chance = random.Random(seed)
    trunks = [[chance.randrange(10, 900) for _ in range(12 * BLOCK)] for _ in range(3)]
    with engine(pega, draft_model, asynchronous=asynchronous, blocks=80) as one:
        loaded = 0
        for turn in range(12):
            answers = []
            for number in range(4):
                trunk = chance.choice(trunks)[: chance.randrange(1, 12 * BLOCK)]
                tail = [chance.randrange(10, 900) for _ in range(chance.randrange(1, 40))]
                name = f"{turn}.{number}"
                answers.append(one.add(name, trunk + tail, chance.randrange(1, 60)))
            if turn % 3 == 1:
                one.run(until=lambda: len(one.scheduler.running) > 1)
                one.preempt_all()
            one.run()
            for answer in answers:
                answer.check()
                loaded += answer.loaded
            if turn % 2:
                one.reset_local()
        assert loaded > 0
        # Branches of the shared beginnings; up to a twentieth, by the seed.
        assert one.model.stale_tokens * 5 < one.model.checked_ends
        one.check_at_rest()


def test_no_partial_block_is_handed_over(pega, prompt, draft_model):
    with engine(pega, draft_model) as one:
        params = {"pegaflow": {"save_tail": True}}
        answer = one.ask("prefill", prompt(3 * BLOCK + 5), 1, params=params)
        assert answer.params["pegaflow"]["tokens"] == 3 * BLOCK


@pytest.mark.parametrize("v2_runner", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_blocks_that_two_requests_of_a_step_share_are_saved_with_their_drafts(
    pega, prompt, draft_model, asynchronous, v2_runner
):
    tokens = prompt(8 * BLOCK + 3)
    options = {"asynchronous": asynchronous, "v2_runner": v2_runner}
    with engine(pega, draft_model, **options) as one:
        answers = [one.add(name, tokens, 5) for name in ("a", "b")]
        one.run()
        for answer in answers:
            answer.check()
        assert max(answer.local for answer in answers) > 0, "one hits what the other computes"
        one.reset_local()
        assert one.ask("again", tokens, 5).loaded == 7 * BLOCK
        one.check_at_rest()


def test_no_request_is_sent_to_both_engines_at_once_if_they_draft(pega, prompt, draft_model):
    # The last full block of a prompt is saved when the token after it is known, or never.
    with engine(pega, draft_model) as one:
        answer = one.ask("x", prompt(300), 1, params={"pegaflow": {"save_tail": True}})
        assert answer.params is not None
        assert "early" not in answer.params["pegaflow"]


def test_engines_with_and_without_drafts_share_no_blocks(pega, prompt, draft_model):
    tokens = prompt(6 * BLOCK)
    with engine(pega, draft_model) as one:
        one.ask("first", tokens)
    with Engine(pega.address) as other:
        other.wait_ready()
        assert other.ask("second", tokens).loaded == 0


# ---- the namespace


@pytest.fixture
def factors(draft_model):
    def made(config: Any, draft_weights: str = "") -> dict[str, str]:
        kv_config = kv_cache_config(config, 80)
        where = read_geometry(kv_config, FakeModel(kv_config).tensors)
        listed = namespace.factors(
            config,
            kv_config,
            weights="named:x",
            draft_weights=draft_weights,
            instance=instance_id(config),
            hash_unit=hash_unit(config, kv_config),
            layers=where.layers,
            arrangements=where.arrangements,
        )
        assert len(dict(listed)) == len(listed)
        return dict(listed)

    return made


def test_the_draft_model_is_in_the_namespace(factors, draft_model, tmp_path):
    plain = factors(vllm_config("unix:/nowhere.sock"))
    one = factors(vllm_config("unix:/nowhere.sock", speculative_config=eagle(draft_model)), "a")
    assert one.keys() - plain.keys() == {"draft", "draft_weights", "draft_config", "draft_rope"}
    assert {name: one[name] for name in plain} == plain
    assert (one["draft"], one["draft_weights"]) == ("eagle", "a")

    (tmp_path / "config.json").write_text(json.dumps(MODEL | {"num_hidden_layers": 2}))
    two = factors(vllm_config("unix:/nowhere.sock", speculative_config=eagle(tmp_path)), "b")
    assert {name for name in one if one[name] != two[name]} == {"draft_weights", "draft_config"}


@pytest.mark.parametrize(
    "change",
    [
        {"kv_cache_dtype": "fp8_e4m3"},
        {"kv_cache_dtype": "fp8_e5m2"},
        {"revision": "abc"},
        {"quantization": "fp8"},
    ],
)
def test_what_changes_the_draft_changes_the_namespace(factors, change):
    """Also for a draft model at the path of the target."""
    plain = factors(vllm_config("unix:/nowhere.sock", speculative_config=eagle(model_directory())))
    other = vllm_config("unix:/nowhere.sock", speculative_config=eagle(model_directory(), **change))
    assert factors(other, "another" if "revision" in change else "") != plain


def test_the_served_length_is_not_in_the_namespace(factors, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL | {"max_position_embeddings": 512}))
    one, other = (
        vllm_config("unix:/nowhere.sock", speculative_config=eagle(tmp_path), max_model_len=length)
        for length in (1000, 1100)
    )
    assert factors(one) == factors(other)


def test_ranks_hold_the_same_bytes_only_if_their_drafts_do(tmp_path):
    """The model's two KV heads are on four ranks twice, the draft's four heads once."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL | {"num_key_value_heads": 4}))
    config = vllm_config(
        "unix:/nowhere.sock",
        speculative_config=eagle(tmp_path),
        tensor_parallel_size=4,
        distributed_executor_backend="mp",
    )
    kv_config = kv_cache_configs(config, 80)[0]
    assert ranks.replicas(config, kv_config) == 1
    config.speculative_config = None
    assert ranks.replicas(config, kv_config) == 2


def test_ranks_of_a_model_of_states_hold_different_bytes():
    config = vllm_config(
        "unix:/nowhere.sock", tensor_parallel_size=2, distributed_executor_backend="mp"
    )
    groups = [KVCacheGroupSpec(["mixer.0"], state(64))]
    assert ranks.replicas(config, SimpleNamespace(kv_cache_groups=groups)) == 1


def test_the_number_of_drafted_tokens_is_not_in_the_namespace(factors, draft_model):
    speculation = eagle(draft_model)
    one = factors(vllm_config("unix:/nowhere.sock", speculative_config=speculation))
    speculation = eagle(draft_model, num_speculative_tokens=4)
    assert factors(vllm_config("unix:/nowhere.sock", speculative_config=speculation)) == one


def test_drafts_without_kv_leave_the_namespace_as_it_is(factors):
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    drafted = vllm_config("unix:/nowhere.sock", speculative_config=ngram)
    assert factors(drafted) == factors(vllm_config("unix:/nowhere.sock"))
    assert not drafts.have_kv(drafted)


# ---- weights


def test_a_draft_model_needs_files_that_can_be_identified(draft_model):
    config = vllm_config("unix:/nowhere.sock", speculative_config=eagle(draft_model))
    view = SimpleNamespace(
        model_config=SimpleNamespace(model=model_directory(), hf_config=SimpleNamespace()),
        load_config=SimpleNamespace(load_format="auto"),
        parallel_config=config.parallel_config,
        speculative_config=copy.copy(config.speculative_config),
    )
    assert weights.refusal(view, "") == ""
    view.speculative_config.draft_load_config = SimpleNamespace(load_format="dummy")
    assert weights.refusal(view, "").startswith("the draft model: with load format dummy")
    assert weights.refusal(view, "named") == "", "the name is of both models"


def test_the_id_of_a_draft_model_is_that_of_its_files(draft_model, tmp_path, monkeypatch):
    """An MTP module is in the target's files, and has no id of its own."""
    monkeypatch.setattr(weights, "weights_id", lambda config, *_: config.model_config.model)
    config = vllm_config("unix:/nowhere.sock", speculative_config=eagle(draft_model))
    assert weights.draft_weights_id(config, "", "instance") == str(draft_model)
    assert weights.draft_weights_id(config, "named", "instance") == ""
    config.speculative_config.draft_model_config = config.model_config
    assert weights.draft_weights_id(config, "", "instance") == ""


def test_an_engine_whose_draft_has_no_files_runs_without_the_cache(
    pega, prompt, draft_model, tmp_path
):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (draft_model / "model.safetensors").unlink(missing_ok=True)
    options = {"model": str(tmp_path), "load_format": "auto"}
    with Engine(
        pega.address,
        speculative_config=eagle(draft_model),
        model_class=DraftingModel,
        extra={"pegaflow.weights_id": ""},
        **options,
    ) as one:
        assert one.ask("one", prompt(6 * BLOCK)).loaded == 0
        assert one.connector._scheduler._away[0].startswith(f"{draft_model} has no weight files")


@pytest.mark.parametrize(
    ("speculation", "options", "words"),
    [
        ({"max_model_len": 64}, {}, "the draft model serves 64 tokens and the model 1024"),
        (
            {},
            {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"},
            "draft models with pipeline parallelism",
        ),
    ],
)
def test_drafts_that_are_not_served(draft_model, speculation, options, words):
    speculation = eagle(draft_model, **speculation)
    config = vllm_config("unix:/nowhere.sock", speculative_config=speculation, **options)
    assert words in unsupported(config, kv_cache_configs(config, 80)[0])


def test_drafts_of_several_mtp_modules_are_not_served(draft_model):
    config = vllm_config("unix:/nowhere.sock", speculative_config=eagle(draft_model))
    config.speculative_config.method = "mtp"
    assert unsupported(config, kv_cache_config(config, 80)) == ""
    config.speculative_config.draft_model_config.hf_config.num_nextn_predict_layers = 3
    assert "several MTP modules" in unsupported(config, kv_cache_config(config, 80))


def test_a_draft_s_own_group_is_refused(draft_model):
    config = vllm_config("unix:/nowhere.sock", speculative_config=eagle(draft_model))
    kv_config = kv_cache_config(config, 80)
    (group,) = kv_config.kv_cache_groups
    kv_config.kv_cache_groups = [dataclasses.replace(group, is_eagle_group=True)]
    assert unsupported(config, kv_config) == ""
    own = dataclasses.replace(group, layer_names=["draft.layers.0.self_attn.attn"])
    kv_config.kv_cache_groups = [group, own]
    assert "speculative decoding by eagle" in unsupported(config, kv_config)
