"""The canonical list that names a namespace: engines whose lists are equal share blocks.

Everything that changes a byte of the KV cache, or the meaning of a key, is a factor. What does not
change them is left out on purpose: data-parallel rank, instance, path, host, engine version.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from pegaflow.connector import ranks

Factors = list[tuple[str, str]]

#: Raised when the meaning of a factor changes, so that old and new engines do not meet.
VERSION = "1"

_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_EDGE_BYTES = 64 * 1024
#: Formats whose loaders read files of the model's directory.
_FILE_FORMATS = ("auto", "hf", "safetensors", "pt", "mistral", "gguf", "fastsafetensors", "npcache")


class UnknownWeights(Exception):
    """Nothing tells which weights these are; the text says what to do."""


def weights_id(vllm_config: Any, configured: str) -> str:
    """Names the weights: as configured, else the hub commit, else a hash over their files.

    Raises:
        UnknownWeights: none of these is there.
    """
    if configured:
        return f"named:{configured}"
    model_config = vllm_config.model_config
    load_format = str(getattr(vllm_config.load_config, "load_format", "auto"))
    if load_format == "dummy":
        # vLLM fills dummy weights from a seed of its own, shape by shape.
        return f"dummy:{model_config.seed}:{_digest(_config_json(model_config))}"
    if load_format not in _FILE_FORMATS:
        raise UnknownWeights(
            f"load format {load_format} does not tell which weights it loads: "
            "name them with pegaflow.weights_id"
        )
    for path in (model_config.model, getattr(model_config, "model_weights", "")):
        if match := re.search(r"/snapshots/([0-9a-f]{40})(?:/|$)", str(path)):
            return f"commit:{match[1]}"
    if commit := getattr(model_config.hf_config, "_commit_hash", None):
        return f"commit:{commit}"
    return "files:" + hash_weight_files(weight_files(Path(model_config.model)))


def weight_files(model: Path) -> list[Path]:
    """The files with weights of a local model.

    Raises:
        UnknownWeights: there are none.
    """
    if model.is_file():
        return [model]
    files = sorted(file for file in model.glob("*") if file.suffix in _WEIGHT_FILES)
    if not files:
        raise UnknownWeights(
            f"{model} has no weight files and names no hub commit: "
            "name the weights with pegaflow.weights_id"
        )
    return files


def hash_weight_files(files: Iterable[Path]) -> str:
    """A digest over name, size, first and last 64 KiB of each file.

    The header of a safetensors file (names, shapes) is in the first part. Reading it all would take
    minutes for a large model; fine-tuned weights differ from the first tensor on.
    """
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda file: file.name):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_EDGE_BYTES))
            stream.seek(max(0, size - _EDGE_BYTES))
            digest.update(stream.read(_EDGE_BYTES))
    return digest.hexdigest()


def hash_fingerprint(algorithm: str, instance: str) -> str:
    """The hash that every chain of this engine begins with (vLLM's NONE_HASH).

    Engines whose chains begin differently never find each other's keys, and with a hash that is
    not collision resistant they must not even try: vLLM draws a secret seed for each process then,
    and the fingerprint is the instance's own.
    """
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    hash_fn: Callable[[Any], bytes] = get_hash_fn_by_name(algorithm)
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is None:
        resolve = getattr(kv_cache_utils, "resolve_none_hash_seed", None)  # 0.29 and later
        if resolve is None or resolve(hash_fn) != (seed := resolve(hash_fn)):
            return f"private:{instance}"
    return hash_fn(seed).hex()


def spec_factor(spec: Any) -> str:
    """What the bytes of one layer's pages mean.

    A list of ours, not the dataclass: a field that a later release adds with a default must not
    change the namespace.
    """
    fields = (
        "block_size",
        "num_kv_heads",
        "head_size",
        "head_size_v",
        "dtype",
        "num_head_slots",
        "state_content_bytes",
        "tokens_per_state",
        "page_size_padded",
        "cache_dtype_str",
    )
    values = [f"{name}={getattr(spec, name, None)}" for name in fields]
    return f"{type(spec).__name__}({', '.join(values)})"


def factors(
    vllm_config: Any,
    kv_cache_config: Any,
    *,
    weights: str,
    instance: str,
    hash_unit: int,
    layers: Sequence[str],
    arrangement: str,
) -> Factors:
    """The list, in its fixed order.

    ``layers`` are the names in the page's order, ``arrangement`` says how the bytes of a block lie
    (layout.Geometry); both come from the registered tensors.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel = vllm_config.parallel_config
    (group,) = kv_cache_config.kv_cache_groups
    specs = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    spec_texts = (
        sorted({spec_factor(spec) for spec in specs.values()})
        if specs
        else [spec_factor(group.kv_cache_spec)]
    )
    algorithm = str(cache.prefix_caching_hash_algo)
    stages = ranks.stages(vllm_config) if parallel.pipeline_parallel_size > 1 else ""
    return [
        ("pegaflow.namespace", VERSION),
        ("weights", weights),
        ("architecture", ",".join(getattr(model.hf_config, "architectures", None) or ())),
        ("dtype", str(model.dtype)),
        ("quantization", str(model.quantization)),
        ("overrides", _overrides(model)),
        ("rope", _rope(model)),
        ("kv_dtype", str(cache.cache_dtype)),
        ("layout", f"{getattr(kv_cache_config, 'kv_cache_layout', None)}; {arrangement}"),
        ("block_tokens", str(group.kv_cache_spec.block_size)),
        ("hash_unit_tokens", str(hash_unit)),
        ("hash_algorithm", algorithm),
        ("hash_fingerprint", hash_fingerprint(algorithm, instance)),
        ("group", "; ".join(spec_texts)),
        # All ranks of an instance have one list, though each stage has layers of its own.
        ("layers", ",".join(layers) if parallel.pipeline_parallel_size == 1 else stages),
        ("tp", str(parallel.tensor_parallel_size)),
        ("pp", str(parallel.pipeline_parallel_size)),
        ("dcp", str(getattr(parallel, "decode_context_parallel_size", 1))),
        ("pcp", str(getattr(parallel, "prefill_context_parallel_size", 1))),
        ("replicas", str(ranks.replicas(vllm_config, kv_cache_config))),
    ]


def _overrides(model: Any) -> str:
    """--hf-overrides, which change the model without changing its files."""
    overrides = getattr(model, "hf_overrides", None) or {}
    if callable(overrides):
        return f"callable:{overrides.__module__}.{overrides.__qualname__}"
    return _canonical(overrides)


def _rope(model: Any) -> str:
    """Position embeddings are in K. Some kinds depend on the longest sequence that is served."""
    config = getattr(model, "hf_text_config", model.hf_config)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    text = _canonical(rope)
    if any(kind in text for kind in ("longrope", "dynamic", '"su"')):
        text += f"; max_model_len={model.max_model_len}"
    return text


def _config_json(model: Any) -> str:
    to_dict = getattr(model.hf_config, "to_dict", None)
    config = to_dict() if to_dict else vars(model.hf_config)
    # Neither the directory nor the library that wrote it belongs to the model.
    return _canonical({k: v for k, v in config.items() if k not in _NOT_OF_THE_MODEL})


_NOT_OF_THE_MODEL = ("_name_or_path", "name_or_path", "transformers_version", "_commit_hash")


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str, separators=(",", ":"))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
