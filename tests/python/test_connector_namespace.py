"""Which engines share blocks, and which engines are served at all."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from pegaflow.connector import namespace
from pegaflow.connector.build import Unservable, hash_unit, instance_id, read_geometry
from pegaflow.connector.support import unsupported
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
            arrangement=where.arrangement,
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
    # Another amount of memory is another number of blocks, not another block.
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
        arrangement=where.arrangement,
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
            {"rope"},
        ),
        (lambda c: setattr(c.parallel_config, "tensor_parallel_size", 2), {"tp"}),
        (lambda c: setattr(c.parallel_config, "pipeline_parallel_size", 2), {"pp", "layers"}),
        (lambda c: setattr(c.parallel_config, "decode_context_parallel_size", 2), {"dcp"}),
        (lambda c: setattr(c.parallel_config, "prefill_context_parallel_size", 2), {"pcp"}),
    ],
)
def test_what_changes_the_bytes_or_the_keys_changes_its_factor(made, configs, change, expected):
    config, kv_config = configs
    change(config)
    assert differing(factors(*made), factors(config, kv_config)) == expected


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


def test_rope_that_depends_on_the_longest_sequence_has_it_in_its_factor(configs):
    config, kv_config = configs
    config.model_config.hf_text_config.rope_parameters = {"rope_type": "longrope"}
    first = factors(config, kv_config)
    config.model_config.max_model_len = 4096
    assert differing(first, factors(config, kv_config)) == {"rope"}


# ---- weights


def test_configured_weights_come_first(made):
    assert namespace.weights_id(made[0], "llama-7") == "named:llama-7"


def test_dummy_weights_are_named_by_their_seed_and_shape(configs):
    config, _ = configs
    first = namespace.weights_id(config, "")
    assert first.startswith("dummy:")
    config.model_config.seed += 1
    second = namespace.weights_id(config, "")
    config.model_config.hf_config.hidden_size *= 2
    assert len({first, second, namespace.weights_id(config, "")}) == 3


def test_the_hub_commit_names_weights_wherever_they_lie(configs):
    config, _ = configs
    config.load_config.load_format = "auto"
    commit = "0123456789abcdef0123456789abcdef01234567"
    config.model_config.model = f"/home/a/.cache/hub/models--x--y/snapshots/{commit}"
    assert namespace.weights_id(config, "") == f"commit:{commit}"
    config.model_config.model = "x/y"
    config.model_config.hf_config._commit_hash = commit
    assert namespace.weights_id(config, "") == f"commit:{commit}"


def test_local_files_are_named_by_their_edges(configs, tmp_path):
    config, _ = configs
    config.load_config.load_format = "auto"
    config.model_config.hf_config._commit_hash = None

    def identity(directory: str, **parts: bytes) -> str:
        folder = tmp_path / directory
        folder.mkdir()
        for name, data in parts.items():
            (folder / f"{name}.safetensors").write_bytes(data)
        (folder / "config.json").write_text(directory)
        config.model_config.model = str(folder)
        return namespace.weights_id(config, "")

    size = 300_000
    weights = bytes(range(256)) * (size // 256)
    first = identity("a", model=weights)
    assert identity("b", model=weights) == first, "where they lie does not matter"
    assert identity("c", model=b"\1" + weights[1:]) != first
    assert identity("d", model=weights[:-1] + b"\0") != first
    assert identity("e", model=weights + b"\0") != first
    assert identity("f", other=weights) != first
    assert identity("g", model=weights, more=weights) != first


def test_weights_that_nothing_names_are_refused(configs, tmp_path):
    config, _ = configs
    config.load_config.load_format = "auto"
    config.model_config.hf_config._commit_hash = None
    config.model_config.model = str(tmp_path)
    with pytest.raises(namespace.UnknownWeights, match="name the weights with pegaflow.weights_id"):
        namespace.weights_id(config, "")
    config.load_config.load_format = "runai_streamer"
    with pytest.raises(namespace.UnknownWeights, match="load format runai_streamer"):
        namespace.weights_id(config, "")


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


def test_a_secret_seed_makes_the_namespace_the_instances_own(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert namespace.hash_fingerprint("xxhash", "i") == "private:i"
    # Releases up to 0.28 draw a secret seed for every algorithm.
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


# ---- what is served


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


HEADS = {"block_size": 16, "num_kv_heads": 2, "head_size": 16, "dtype": torch.float32}
FULL = FullAttentionSpec(**HEADS)
MLA = MLAAttentionSpec(**HEADS | {"num_kv_heads": 1})
WINDOW = SlidingWindowSpec(**HEADS, sliding_window=64)
MAMBA = MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,))


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([group(FULL)], ""),
        ([group(MLA)], ""),
        ([group(FULL, FULL, dataclasses.replace(FULL, head_size=32))], ""),
        ([], "0 cache groups"),
        ([group(FULL), group(WINDOW)], "2 cache groups"),
        ([group(WINDOW)], "kind SlidingWindowSpec"),
        ([group(MAMBA)], "kind MambaSpec"),
        ([group(dataclasses.replace(FULL, sliding_window=64))], "window of attention"),
        ([group(dataclasses.replace(FULL, attention_chunk_size=64))], "window of attention"),
        ([group(dataclasses.replace(FULL, non_causal=True))], "look ahead"),
        ([group(FULL, FULL, dataclasses.replace(FULL, sliding_window=64))], "window of attention"),
        ([dataclasses.replace(group(FULL), host_resident=True)], "not one that a connector"),
        ([dataclasses.replace(group(FULL), enable_kv_transfer=False)], "not one that a connector"),
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
        (lambda c: setattr(c, "speculative_config", object()), "speculative decoding"),
        (lambda c: setattr(c.model_config, "enable_sleep_mode", True), "sleep mode"),
        (
            lambda c: setattr(c.cache_config, "calculate_kv_scales", True),
            "scales that each process",
        ),
    ],
)
def test_configurations(made, change, words):
    config, kv_config = made
    # A shallow copy of each part, for vLLM validates what it copies in depth.
    config = copy.copy(config)
    for part in ("parallel_config", "model_config", "cache_config"):
        object.__setattr__(config, part, copy.copy(getattr(config, part)))
    view = _Loose(config)
    change(view)
    assert words in unsupported(view, kv_config)


class _Loose:
    """Takes any attribute, where vLLM's configuration checks its types."""

    def __init__(self, wrapped: Any) -> None:
        object.__setattr__(self, "_wrapped", wrapped)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._wrapped, name)
        if name.endswith("_config") and value is not None:
            value = _Loose(value)
            object.__setattr__(self, name, value)
        return value


def test_layers_that_share_the_kv_of_others_are_refused(made):
    _, kv_config = made
    tensors = FakeModel(kv_config).tensors
    tensors["model.layers.9.attn"] = next(iter(tensors.values()))
    with pytest.raises(Unservable, match="share the KV of others"):
        read_geometry(kv_config, tensors)


def test_hash_units_that_do_not_divide_a_block_are_refused(configs):
    config, kv_config = configs
    kv_config.hash_block_size = 5
    with pytest.raises(Unservable, match="hashes every 5 tokens do not fit blocks of 16"):
        hash_unit(config, kv_config)
