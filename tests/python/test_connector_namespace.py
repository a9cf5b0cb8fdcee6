"""Engines that share blocks, and engines that are served at all."""

import copy
import dataclasses
import hashlib
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config.multimodal import MultiModalConfig
from vllm.config.quantization import QuantizationConfigArgs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from pegaflow.vllm import namespace
from pegaflow.vllm.build import Unservable, hash_unit, instance_id, read_geometry
from pegaflow.vllm.support import unsupported
from tests.python.fake_model import FakeModel
from tests.python.harness import kv_cache_config, vllm_config


@pytest.fixture(scope="module")
def made() -> tuple[Any, Any]:
    config = vllm_config("unix:/nowhere.sock")
    return config, kv_cache_config(config, 80)


@pytest.fixture
def configs(made):
    return copy.deepcopy(made)


def factors(config: Any, kv_config: Any, weights: str = "named:x") -> dict[str, str]:
    where = read_geometry(kv_config, FakeModel(kv_config).tensors)
    return dict(
        namespace.factors(
            config,
            kv_config,
            weights=weights,
            instance=instance_id(config),
            hash_unit=hash_unit(config, kv_config),
            layers=where.layers,
            arrangements=where.arrangements,
        )
    )


def differing(a: dict[str, str], b: dict[str, str]) -> set[str]:
    assert a.keys() == b.keys()
    return {name for name in a if a[name] != b[name]}


# ---- factors


def test_two_engines_of_one_model_have_equal_lists(made):
    other = vllm_config("unix:/elsewhere.sock", extra={"pegaflow.port": 7})
    other.kv_transfer_config.engine_id = "another"
    other.parallel_config.data_parallel_index = 3
    # Another amount of memory changes the number of blocks, not a block.
    assert factors(other, kv_cache_config(other, 99)) == factors(*made)


def test_every_factor_is_text_and_named_once(made):
    config, kv_config = made
    where = read_geometry(kv_config, FakeModel(kv_config).tensors)
    listed = namespace.factors(
        config,
        kv_config,
        weights="named:x",
        instance="i",
        hash_unit=16,
        layers=where.layers,
        arrangements=where.arrangements,
    )
    assert len({name for name, _ in listed}) == len(listed)
    assert all(isinstance(text, str) for pair in listed for text in pair)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda c: setattr(c.model_config, "dtype", torch.float16), {"dtype"}),
        (lambda c: setattr(c.model_config, "quantization", "fp8"), {"quantization"}),
        (lambda c: setattr(c.model_config, "hf_overrides", {"rope_theta": 9}), {"overrides"}),
        (lambda c: setattr(c.model_config, "hf_overrides", len), {"overrides"}),
        (lambda c: setattr(c.cache_config, "cache_dtype", "fp8"), {"kv_dtype"}),
        (
            lambda c: setattr(c.cache_config, "prefix_caching_hash_algo", "sha256"),
            {"hash_algorithm", "hash_fingerprint"},
        ),
        (
            lambda c: setattr(
                c.model_config.hf_text_config, "rope_parameters", {"rope_type": "linear"}
            ),
            {"rope", "config"},
        ),
        (lambda c: setattr(c.parallel_config, "tensor_parallel_size", 2), {"tp"}),
        (
            lambda c: setattr(c.parallel_config, "pipeline_parallel_size", 2),
            {"pp", "layers", "group", "layout"},  # of no layer alone, since stages differ in them
        ),
        (lambda c: setattr(c.parallel_config, "decode_context_parallel_size", 2), {"dcp"}),
        (lambda c: setattr(c.parallel_config, "prefill_context_parallel_size", 2), {"pcp"}),
    ],
)
def test_a_change_of_bytes_or_keys_changes_its_factor(made, configs, change, expected):
    config, kv_config = configs
    change(config)
    assert differing(factors(*made), factors(config, kv_config)) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, None),
        ({"mm_processor_cache_gb": 1, "mm_encoder_tp_mode": "data"}, None),
        ({"mm_processor_kwargs": {"num_crops": 4}}, '{"mm_processor_kwargs":{"num_crops":4}}'),
        (
            {"media_io_kwargs": {"video": {"num_frames": 40}}},
            '{"media_io_kwargs":{"video":{"num_frames":40}}}',
        ),
        ({"mm_device_do_normalize": False}, '{"mm_device_do_normalize":false}'),
    ],
)
def test_options_that_change_embeddings_but_no_hash_are_a_factor(configs, options, expected):
    config, kv_config = configs
    view = _Loose(config)
    view.model_config.multimodal_config = MultiModalConfig(**options)
    assert factors(view, kv_config).get("multimodal") == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, None),
        ({"linear": "fp8_per_tensor"}, '"float8_e4m3fn"'),
        ({"linear": "mxfp8"}, '"group_shape":[1,32]'),
        ({"linear": "mxfp8", "ignore": ["model.layers.0.*"]}, '"ignore":["model.layers.0.*"]'),
    ],
)
def test_quantization_at_load_time_is_a_factor(made, options, expected):
    if not options:
        assert "quantization_config" not in factors(*made)
        return
    config = vllm_config(
        "unix:/nowhere.sock", dtype="bfloat16", quantization="online", quantization_config=options
    )
    text = factors(config, kv_cache_config(config, 80))["quantization_config"]
    assert expected in text.replace("torch.", "")
    others = [{"linear": "fp8_per_block"}, {"linear": "mxfp8", "ignore": ["lm_head"]}]
    for other in others:
        changed = QuantizationConfigArgs(**other)
        assert namespace._quantization_config(SimpleNamespace(quantization_config=changed)) != text


def test_the_processor_is_a_factor_of_models_with_one(made):
    config, kv_config = made
    where = read_geometry(kv_config, FakeModel(kv_config).tensors)
    more = {"weights": "named:x", "instance": instance_id(config), "hash_unit": 16}
    more |= {"layers": where.layers, "arrangements": where.arrangements}
    without = namespace.factors(config, kv_config, **more)
    assert namespace.factors(config, kv_config, processor="", **more) == without
    listed = namespace.factors(config, kv_config, processor="0123", **more)
    assert listed == [*without, ("processor", "0123")]


@pytest.mark.parametrize(("stages", "expected"), [(1, None), (2, "0,2")])
def test_the_layers_with_another_format_are_a_factor_of_stages(configs, stages, expected):
    """The layers of one stage do not determine the excluded layers of the others."""
    config, kv_config = configs
    config.parallel_config.pipeline_parallel_size = stages
    without = factors(config, kv_config)
    config.cache_config.kv_cache_dtype_skip_layers = ["0", "2"]
    listed = factors(config, kv_config)
    assert listed.pop("kv_dtype_skip_layers", None) == expected
    assert listed == without


def test_a_base_of_rope_outside_its_parameters_is_a_factor(configs):
    config, kv_config = configs
    view = SimpleNamespace(rope_parameters=None, rope_scaling=None, rope_theta=10_000.0)
    model = SimpleNamespace(hf_text_config=view, hf_config=view, max_model_len=1024)
    first = namespace._rope(model)
    view.rope_theta = 500_000.0
    assert (first, namespace._rope(model)) == ("{}; rope_theta=10000.0", "{}; rope_theta=500000.0")


@pytest.mark.parametrize("change", [{"sliding_window": 64}, {"attention_chunk_size": 64}])
def test_windows_are_in_the_factor_of_the_group(made, configs, change):
    config, kv_config = configs
    group = kv_config.kv_cache_groups[0]
    group.kv_cache_spec = dataclasses.replace(group.kv_cache_spec, **change)
    assert differing(factors(*made), factors(config, kv_config)) == {"group"}


def test_the_weights_are_a_factor(made):
    assert differing(factors(*made), factors(*made, weights="named:y")) == {"weights"}


def test_the_groups_spec_is_a_factor(made):
    config, kv_config = made
    spec = kv_config.kv_cache_groups[0].kv_cache_spec
    fields = {"num_kv_heads": 4, "head_size": 8}
    other = kv_cache_config(
        copy.deepcopy(config),
        80,
        {name: dataclasses.replace(spec, head_size_v=8, **fields) for name in layer_names(made)},
    )
    assert {"group", "layout"} <= differing(factors(*made), factors(config, other))


def layer_names(made) -> list[str]:
    return made[1].kv_cache_groups[0].layer_names


def test_rope_that_depends_on_the_maximum_length_has_it_in_its_factor(configs):
    config, kv_config = configs
    config.model_config.hf_text_config.rope_parameters = {"rope_type": "longrope"}
    first = factors(config, kv_config)
    config.model_config.max_model_len = 4096
    assert differing(first, factors(config, kv_config)) == {"rope"}


# ---- ids that must not change


def golden(group: Any, arrangements: list[str], **changes: Any) -> str:
    """A digest over the factors of a configuration that consists of plain values."""
    layers = list(group.layer_names)
    hf_config = SimpleNamespace(
        architectures=["LlamaForCausalLM"],
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        num_key_value_heads=2,
    )
    model = {
        "hf_config": hf_config,
        "dtype": "torch.bfloat16",
        "quantization": None,
        "hf_overrides": {},
        "max_model_len": 4096,
        "get_total_num_kv_heads": lambda: 2,
        "get_total_num_hidden_layers": lambda: 4,
        "multimodal_config": None,
    }
    parallel = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
    cache = {"prefix_caching_hash_algo": "sha256_cbor", "cache_dtype": "auto"}
    for values in (model, parallel, cache):
        values.update({name: changes.pop(name) for name in list(changes) if name in values})
    listed = namespace.factors(
        SimpleNamespace(
            model_config=SimpleNamespace(**model),
            cache_config=SimpleNamespace(**cache, **changes),
            parallel_config=SimpleNamespace(**parallel),
        ),
        SimpleNamespace(kv_cache_groups=[group], kv_cache_layout="LBHNC"),
        weights="named:x",
        instance="i",
        hash_unit=16,
        layers=layers,
        arrangements=arrangements,
    )
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()[:16]


def test_later_factors_do_not_change_the_ids_of_engines_without_them(monkeypatch):
    """A changed id loses each user's cache at the upgrade: raise VERSION if it must change."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    dense = ["float32[1:2,2:16]"] * 3
    window = dataclasses.replace(FULL, sliding_window=64)
    ids = {
        "dense": golden(group(FULL), dense),
        "mla": golden(group(MLA), ["uint8[1:16,2:576]"] * 3),
        "mixed": golden(group(FULL, window, FULL), dense),
        "fp8": golden(group(FULL), dense, cache_dtype="fp8"),
        "tensor parallel": golden(group(FULL), dense, tensor_parallel_size=2),
        "stages": golden(group(FULL, window, FULL), dense, pipeline_parallel_size=2),
        "images": golden(
            group(FULL),
            dense,
            multimodal_config=MultiModalConfig(mm_processor_kwargs={"num_crops": 4}),
        ),
        "images, vLLM's options": golden(group(FULL), dense, multimodal_config=MultiModalConfig()),
    }
    assert len(set(ids.values())) == len(ids) - 1
    assert ids["images, vLLM's options"] == ids["dense"]
    assert ids == GOLDEN


GOLDEN = {
    "dense": "89be2962a8445c62",
    "mla": "41e6a4acf1188d84",
    "mixed": "c3d749bc8a67ab79",
    "fp8": "3732cfff73b16816",
    "tensor parallel": "3eb3fdcd4668d377",
    "stages": "9064888082f3966d",
    "images": "53e418069985b0c8",
    "images, vLLM's options": "89be2962a8445c62",
}


# ---- the model's configuration


def test_the_configuration_is_a_factor(made, configs):
    config, kv_config = configs
    config.model_config.hf_config.rms_norm_eps *= 10
    assert differing(factors(*made), factors(config, kv_config)) == {"config"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("_name_or_path", "/elsewhere"),
        ("transformers_version", "4.1"),
        ("_commit_hash", "0123456789abcdef0123456789abcdef01234567"),
    ],
)
def test_the_place_and_the_writer_of_a_configuration_are_not_a_factor(made, configs, name, value):
    config, kv_config = configs
    setattr(config.model_config.hf_config, name, value)
    assert factors(config, kv_config) == factors(*made)


def test_a_models_own_classes_are_equal_in_a_directory_and_in_a_repository(configs):
    config, kv_config = configs
    config.model_config.hf_config.auto_map = {"AutoConfig": "configuration_x.XConfig"}
    local = factors(config, kv_config)
    config.model_config.hf_config.auto_map = {"AutoConfig": "org/name--configuration_x.XConfig"}
    assert factors(config, kv_config) == local


def test_a_value_without_a_stable_text_does_not_distinguish_processes(configs):
    config, kv_config = configs
    config.model_config.hf_config.extra = object()
    first = factors(config, kv_config)
    config.model_config.hf_config.extra = object()
    assert factors(config, kv_config) == first


# ---- the hash chains' beginning


def test_the_fingerprint_is_vllms_none_hash(monkeypatch):
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    for algorithm in ("sha256", "sha256_cbor"):
        for seed in (None, "7"):
            monkeypatch.delenv("PYTHONHASHSEED", raising=False)
            if seed is not None:
                monkeypatch.setenv("PYTHONHASHSEED", seed)
            kv_cache_utils.init_none_hash(get_hash_fn_by_name(algorithm))
            expected = kv_cache_utils.NONE_HASH.hex()
            assert namespace.hash_fingerprint(algorithm, "i") == expected


def test_a_random_seed_makes_the_namespace_private_to_the_instance(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert namespace.hash_fingerprint("xxhash", "i") == "private:i"
    # Releases up to 0.28 choose a random seed for every algorithm.
    from vllm.v1.core import kv_cache_utils

    monkeypatch.delattr(kv_cache_utils, "resolve_none_hash_seed")
    assert namespace.hash_fingerprint("sha256_cbor", "i") == "private:i"


# ---- the instance


def test_scheduler_and_workers_name_the_instance_alike(configs):
    config, _ = configs
    assert instance_id(config, {}) == config.kv_transfer_config.engine_id
    assert instance_id(config, {"PEGAFLOW_INSTANCE_ID": "a"}) == "a"
    config.parallel_config.data_parallel_size = 2
    config.parallel_config.data_parallel_index = 1
    assert instance_id(config, {"PEGAFLOW_INSTANCE_ID": "a"}) == "a-dp1"


# ---- supported configurations


def test_a_plain_model_is_served(made):
    assert unsupported(*made) == ""


def group(*specs: Any, names: int = 3) -> KVCacheGroupSpec:
    layers = [f"layer.{i}" for i in range(names)]
    if len(specs) == 1:
        return KVCacheGroupSpec(layers, specs[0])
    return KVCacheGroupSpec(
        layers,
        UniformTypeKVCacheSpecs(
            block_size=16, kv_cache_specs=dict(zip(layers, specs, strict=True))
        ),
    )


def other(spec: Any) -> KVCacheGroupSpec:
    """A group of another layer."""
    return KVCacheGroupSpec(["other.0"], spec)


HEADS = {"block_size": 16, "num_kv_heads": 2, "head_size": 16, "dtype": torch.float32}
FULL = FullAttentionSpec(**HEADS)
MLA = MLAAttentionSpec(**HEADS | {"num_kv_heads": 1})
WINDOW = SlidingWindowSpec(**HEADS, sliding_window=64)
CHUNK = ChunkedLocalAttentionSpec(**HEADS, attention_chunk_size=64)
SINK = SinkFullAttentionSpec(**HEADS, sink_len=16)
RSWA = RSWASpec(**HEADS, rswa_window=64)
MAMBA = MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,))


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([group(FULL)], ""),
        ([group(MLA)], ""),
        ([group(FULL, FULL, dataclasses.replace(FULL, head_size=32))], ""),
        ([group(dataclasses.replace(FULL, sliding_window=64))], ""),
        ([group(dataclasses.replace(FULL, attention_chunk_size=64))], ""),
        ([group(FULL, FULL, dataclasses.replace(FULL, sliding_window=64))], ""),
        ([], "0 cache groups"),
        ([group(FULL), other(WINDOW)], ""),
        ([group(FULL), other(CHUNK)], "--disable-hybrid-kv-cache-manager makes them one"),
        ([group(FULL), other(MAMBA)], "states need --mamba-cache-mode align"),
        ([group(WINDOW), other(CHUNK)], "of kinds chunk, window are not verified on this device"),
        ([group(FULL), group(WINDOW)], "cache groups that share layer layer.0"),
        ([group(WINDOW)], ""),
        ([group(MAMBA)], "states need --mamba-cache-mode align"),
        ([group(SINK)], "kind SinkFullAttentionSpec"),
        ([group(RSWA)], "kind RSWASpec"),
        ([group(dataclasses.replace(FULL, non_causal=True))], "look ahead"),
        ([dataclasses.replace(group(FULL), is_eagle_group=True)], "draft model"),
        ([dataclasses.replace(group(FULL), host_resident=True)], "a connector may not transfer"),
        (
            [dataclasses.replace(group(FULL), enable_kv_transfer=False)],
            "a connector may not transfer",
        ),
    ],
)
def test_cache_groups(configs, groups, words):
    config, kv_config = configs
    kv_config.kv_cache_groups = groups
    reason = unsupported(config, kv_config)
    assert words in reason
    assert bool(reason) == bool(words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda c: setattr(c.parallel_config, "decode_context_parallel_size", 2),
            "decode context",
        ),
        (
            lambda c: setattr(c.parallel_config, "prefill_context_parallel_size", 2),
            "prefill context",
        ),
        (lambda c: setattr(c, "speculative_config", object()), "speculative decoding by None"),
        (lambda c: setattr(c, "speculative_config", drafts("medusa")), "decoding by medusa is not"),
        (lambda c: setattr(c, "speculative_config", drafts("dflash")), "decoding by dflash is not"),
        (
            lambda c: setattr(c, "speculative_config", drafts("ngram", draft="other")),
            "ngram with a draft model",
        ),
        (lambda c: images_by_number(c), "blocks with images have no name"),
        (lambda c: setattr(c.model_config, "enable_sleep_mode", True), "sleep mode"),
        (
            lambda c: setattr(c.cache_config, "calculate_kv_scales", True),
            "with --calculate-kv-scales each process calculates",
        ),
    ],
)
def test_configurations(made, change, words):
    config, kv_config = made
    # A shallow copy of each part, since vLLM validates deep copies.
    config = copy.copy(config)
    for part in ("parallel_config", "model_config", "cache_config"):
        object.__setattr__(config, part, copy.copy(getattr(config, part)))
    view = _Loose(config)
    change(view)
    assert words in unsupported(view, kv_config)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_drafts_without_kv_are_served(made, method):
    config, kv_config = made
    view = _Loose(config)
    view.speculative_config = drafts(method, draft="model" if method == "ngram" else None)
    assert unsupported(view, kv_config) == ""


def drafts(method: str, draft: str | None = None) -> Any:
    target = SimpleNamespace(model="model")
    other = SimpleNamespace(model=draft) if draft else None
    return SimpleNamespace(method=method, draft_model_config=other, target_model_config=target)


def images_by_number(config: Any) -> None:
    config.model_config.multimodal_config = MultiModalConfig(mm_processor_cache_gb=0)
    config.cache_config.enable_prefix_caching = False


@pytest.mark.parametrize(("cache_gb", "prefix_caching"), [(4, False), (0, True), (4, True)])
def test_images_that_vllm_hashes_are_served(made, cache_gb, prefix_caching):
    config, kv_config = made
    config = copy.copy(config)
    for part in ("model_config", "cache_config"):
        object.__setattr__(config, part, copy.copy(getattr(config, part)))
    view = _Loose(config)
    images_by_number(view)
    view.model_config.multimodal_config = MultiModalConfig(mm_processor_cache_gb=cache_gb)
    view.cache_config.enable_prefix_caching = prefix_caching
    assert unsupported(view, kv_config) == ""


class _Loose:
    """Accepts any attribute, unlike vLLM's configuration, which checks types."""

    def __init__(self, wrapped: Any) -> None:
        object.__setattr__(self, "_wrapped", wrapped)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._wrapped, name)
        if name.endswith("_config") and value is not None:
            value = _Loose(value)
            object.__setattr__(self, name, value)
        return value


def test_layers_that_share_the_kv_of_others_are_rejected(made):
    _, kv_config = made
    tensors = FakeModel(kv_config).tensors
    tensors["model.layers.9.attn"] = next(iter(tensors.values()))
    with pytest.raises(Unservable, match="share the KV of others"):
        read_geometry(kv_config, tensors)


def test_hash_units_that_do_not_divide_a_block_are_rejected(configs):
    config, kv_config = configs
    kv_config.hash_block_size = 5
    with pytest.raises(Unservable, match="hashes every 5 tokens do not fit blocks of 16"):
        hash_unit(config, kv_config)
