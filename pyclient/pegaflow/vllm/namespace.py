"""The canonical list that names a namespace: engines whose lists are equal share blocks.

Everything that changes a byte of the KV cache, or the meaning of a key, is a factor. Everything
else is deliberately left out: data-parallel rank, instance, path, host, engine version.

A factor of a feature that most engines do not use is absent from their lists: additions of a later
release (further kinds of blocks, drafts) leave the lists of all other engines unchanged.
tests/python/test_connector_namespace.py pins the ids of several configurations.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pegaflow.engine.kinds import BlockKinds
from pegaflow.engine.layout import Geometry
from pegaflow.vllm import drafts, ranks
from pegaflow.vllm.grid import Grid
from pegaflow.vllm.kinds import specs_by_layer

Factors = list[tuple[str, str]]

#: Increased when the meaning of a factor changes, so that old and new engines share no blocks.
VERSION = "2"


def hash_fingerprint(algorithm: str, instance: str) -> str:
    """The hash that every chain of this engine begins with (vLLM's NONE_HASH).

    Engines whose chains begin differently never find each other's keys, and with a hash that is not
    collision resistant they must not look for them: vLLM then draws a secret seed for each process,
    and the fingerprint is unique to the instance.
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


def spec_factor(spec: Any, heads: int = 0) -> str:
    """The meaning of the bytes of one layer's pages, or of a cell with that number of KV heads.

    A separate list, not the dataclass, and only values that differ from the default: a field that a
    later release adds with a default must not change the namespace.
    """
    values = [f"block_size={spec.block_size}"]
    for name, default in _SPEC_FIELDS:
        value = getattr(spec, name, default)
        if name == "num_kv_heads" and heads:
            value = heads
        if value is not None and value != default:
            if isinstance(value, enum.Enum):
                value = int(value) if isinstance(value, enum.IntEnum) else value.name
            values.append(f"{name}={value}")
    return f"{type(spec).__name__}({', '.join(values)})"


#: A spec's fields beside the block size, and the value for which each is left out of the factor.
_SPEC_FIELDS = (
    ("num_kv_heads", None),
    ("head_size", None),
    ("head_size_v", None),
    ("dtype", None),
    ("kv_quant_mode", 0),
    ("num_head_slots", None),
    ("state_content_bytes", None),
    ("tokens_per_state", 1),
    ("page_size_padded", None),
    ("cache_dtype_str", None),
    # They do not change the places of bytes, but what deeper layers compute from them.
    ("sliding_window", None),
    ("extra_retained_tokens", 0),
    ("attention_chunk_size", None),
    # States. The size of one follows from these; padding behind it is not saved.
    ("shapes", None),
    ("dtypes", None),
    ("mamba_type", None),
    ("mamba_cache_mode", None),
    ("tp_replicated", False),
)


class Formats(NamedTuple):
    """The formats of the layers of one kind of blocks, in the page's order."""

    arrangements: Sequence[str]  #: The order of their bytes (layout.Geometry).
    specs: Sequence[str]


def stage_formats(
    kv_cache_config: Any, kinds: BlockKinds | None, places: Sequence[Geometry], grid: Grid | None
) -> list[Formats]:
    """The formats of each kind of blocks on this rank. ``places`` are those of the cache groups."""
    members = [kind.members for kind in kinds.kinds] if kinds else [(0,)]
    heads = grid.heads if grid else 0
    groups = kv_cache_config.kv_cache_groups
    found = []
    for numbers in members:
        specs = {
            layer: spec
            for number in numbers
            for layer, spec in specs_by_layer(groups[number]).items()
        }
        layers = [layer for number in numbers for layer in places[number].layers]
        arrangements = [text for number in numbers for text in places[number].arrangements]
        found.append(Formats(arrangements, [spec_factor(specs[one], heads) for one in layers]))
    return found


def joined(by_rank: Sequence[Sequence[Formats]]) -> list[Formats]:
    """The formats of each kind on any of the ranks."""
    return [
        Formats(
            [text for rank in of_ranks for text in rank.arrangements],
            [text for rank in of_ranks for text in rank.specs],
        )
        for of_ranks in zip(*by_rank, strict=True)
    ]


def factors(
    vllm_config: Any,
    kv_cache_config: Any,
    *,
    weights: str,
    processor: str = "",
    draft_weights: str = "",
    instance: str,
    hash_unit: int,
    layers: Sequence[str],
    arrangements: Sequence[str],
    grid: Grid | None = None,
    formats: Sequence[Formats] = (),
) -> Factors:
    """The list, in its fixed order, followed by the factors that only some engines have.

    ``weights``, ``processor`` and ``draft_weights`` identify the contents of files (weights.py).
    ``layers`` are the names in the page's order, ``arrangements`` the byte order of each of them
    (layout.Geometry); both come from the registered tensors. With a ``grid`` the list is that of
    its cells, equal for all tensor-parallel sizes. ``formats`` are those of all pipeline stages
    (joined()), if there are several and they are known.
    """
    (group,) = kv_cache_config.kv_cache_groups
    specs = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    heads = grid.heads if grid else 0
    spec_texts = [
        spec_factor(specs[layer] if specs else group.kv_cache_spec, heads) for layer in layers
    ]
    # All ranks of an instance have one list, although each stage has its own layers. The format of
    # each layer follows from the model, its stages and the skipped layers.
    is_staged = vllm_config.parallel_config.pipeline_parallel_size > 1
    by_layer = _each_once if is_staged else _runs
    if is_staged and formats:
        ((arrangements, spec_texts),) = formats
    blocks = {
        "layout": by_layer(arrangements),
        "block_tokens": str(group.kv_cache_spec.block_size),
        "hash_unit_tokens": str(hash_unit),
        "group": by_layer(spec_texts),
        "layers": ranks.stages(vllm_config) if is_staged else ",".join(layers),
    }
    files = Files(weights, processor, draft_weights)
    listed = _listed(vllm_config, kv_cache_config, blocks, files, instance)
    return _of_cells(listed, grid) if grid else listed


def factors_of_kinds(
    vllm_config: Any,
    kv_cache_config: Any,
    kinds: BlockKinds,
    places: Sequence[Geometry],
    *,
    weights: str,
    processor: str = "",
    instance: str,
    formats: Sequence[Formats] = (),
) -> Factors:
    """The same for several kinds, or one of several members. ``places`` are those of the cache
    groups.
    """
    is_staged = vllm_config.parallel_config.pipeline_parallel_size > 1
    by_layer = _each_once if is_staged else _runs
    texts: dict[str, list[str]] = {"layout": [], "block_tokens": [], "group": [], "layers": []}
    page_bytes = []
    own = stage_formats(kv_cache_config, kinds, places, None)
    for number, kind in enumerate(kinds.kinds):
        if not any(places[group].layers for group in kind.members):
            raise ValueError(f"a rank has no layer of kind {kind.rule.label}")
        of_kind = formats[number] if is_staged and formats else own[number]
        texts["layout"].append(by_layer(of_kind.arrangements))
        texts["block_tokens"].append(str(kind.block_tokens))
        texts["group"].append(f"{kind.rule.label} {kind.tokens}: {by_layer(of_kind.specs)}")
        texts["layers"].append("+".join(",".join(places[group].layers) for group in kind.members))
        page_bytes.append("+".join(str(places[group].page_bytes) for group in kind.members))
    blocks = {name: " || ".join(of_kinds) for name, of_kinds in texts.items()}
    blocks["hash_unit_tokens"] = str(kinds.unit_tokens)
    more = [("alignment_tokens", str(kinds.alignment_tokens))]
    if is_staged:
        blocks["layers"] = ranks.stages(vllm_config)
    else:
        more.append(("page_bytes", " || ".join(page_bytes)))
    files = Files(weights, processor)
    return _listed(vllm_config, kv_cache_config, blocks, files, instance) + more


def _of_cells(listed: Factors, grid: Grid) -> Factors:
    """The grid stands for the sizes that it is made for."""
    of_grid = {"tp": f"grid of {grid.cells}", "replicas": "any"}
    return [(name, of_grid.get(name, text)) for name, text in listed]


@dataclasses.dataclass(frozen=True)
class Files:
    """The ids of the contents of files (weights.py)."""

    weights: str
    processor: str = ""
    draft_weights: str = ""


def _listed(
    vllm_config: Any,
    kv_cache_config: Any,
    blocks: Mapping[str, str],
    files: Files,
    instance: str,
) -> Factors:
    """The list, with the given texts about the bytes of blocks."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel = vllm_config.parallel_config
    algorithm = str(cache.prefix_caching_hash_algo)
    is_staged = parallel.pipeline_parallel_size > 1
    layout = getattr(kv_cache_config, "kv_cache_layout", None)
    listed = [
        ("pegaflow.namespace", VERSION),
        ("weights", files.weights),
        ("config", _config(model)),
        ("architecture", ",".join(getattr(model.hf_config, "architectures", None) or ())),
        ("dtype", str(model.dtype)),
        ("quantization", str(model.quantization)),
        ("overrides", _overrides(model)),
        ("rope", _rope(model)),
        ("kv_dtype", str(cache.cache_dtype)),
        ("layout", f"{layout}; {blocks['layout']}"),
        ("block_tokens", blocks["block_tokens"]),
        ("hash_unit_tokens", blocks["hash_unit_tokens"]),
        ("hash_algorithm", algorithm),
        ("hash_fingerprint", hash_fingerprint(algorithm, instance)),
        ("group", blocks["group"]),
        ("layers", blocks["layers"]),
        ("tp", str(parallel.tensor_parallel_size)),
        ("pp", str(parallel.pipeline_parallel_size)),
        ("dcp", str(getattr(parallel, "decode_context_parallel_size", 1))),
        ("pcp", str(getattr(parallel, "prefill_context_parallel_size", 1))),
        ("replicas", str(ranks.replicas(vllm_config, kv_cache_config))),
    ]
    some = [
        ("kv_dtype_skip_layers", _skipped_layers(cache) if is_staged else ""),
        ("quantization_config", _quantization_config(model)),
        ("multimodal", _multimodal(model)),
        ("processor", files.processor),
        *_draft(vllm_config, files.draft_weights),
    ]
    return listed + [(name, text) for name, text in some if text]


def _skipped_layers(cache: Any) -> str:
    return ",".join(map(str, getattr(cache, "kv_cache_dtype_skip_layers", None) or ()))


def _draft(vllm_config: Any, weights: str) -> Factors:
    """The draft model whose KV the blocks hold, too; empty texts without one."""
    model = drafts.model_config(vllm_config)
    return [
        ("draft", drafts.method(vllm_config)),
        ("draft_weights", weights),
        ("draft_config", _config(model, without=_LENGTH) if model is not None else ""),
        ("draft_rope", _rope(model) if model is not None else ""),
        ("draft_quantization", str(model.quantization or "") if model is not None else ""),
        ("draft_kv_dtype", drafts.kv_dtype(vllm_config)),
    ]


def _runs(texts: Sequence[str]) -> str:
    """The texts in their order, equal neighbors counted."""
    runs = [(len(list(run)), text) for text, run in itertools.groupby(texts)]
    return " | ".join(f"{count}x {text}" for count, text in runs)


def _each_once(texts: Sequence[str]) -> str:
    return " | ".join(sorted(set(texts)))


#: The engine's multimodal options that change embeddings and are in no content hash of vLLM's, with
#: their defaults.
_MULTIMODAL_OPTIONS = (
    ("mm_processor_kwargs", None),
    ("media_io_kwargs", None),
    ("video_pruning_rate", None),
    ("video_pruning_method", "evs"),
    ("mm_device_do_normalize", True),
    ("mm_encoder_attn_dtype", None),
    ("mm_encoder_fp8_scale_path", None),
)


def _multimodal(model: Any) -> str:
    """The multimodal options that are not vLLM's defaults; empty if there are none."""
    config = getattr(model, "multimodal_config", None)
    if config is None:
        return ""
    options = {}
    for name, default in _MULTIMODAL_OPTIONS:
        value = getattr(config, name, default)
        if value not in (None, {}, default):
            options[name] = value
    if path := options.get("mm_encoder_fp8_scale_path"):
        options["mm_encoder_fp8_scale_path"] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return _canonical(options) if options else ""


def _quantization_config(model: Any) -> str:
    """--quantization-config: which layers are quantized when they are loaded, and how."""
    stated = getattr(model, "quantization_config", None)
    if stated is None:
        return ""
    return _canonical(dataclasses.asdict(stated) if dataclasses.is_dataclass(stated) else stated)


def _overrides(model: Any) -> str:
    """--hf-overrides, which change the model without changing its files."""
    overrides = getattr(model, "hf_overrides", None) or {}
    if callable(overrides):
        return f"callable:{overrides.__module__}.{overrides.__qualname__}"
    return _canonical(overrides)


def _rope(model: Any) -> str:
    """Position embeddings, which are in K. Some kinds depend on the longest served sequence."""
    config = getattr(model, "hf_text_config", model.hf_config)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    text = _canonical(rope)
    if "rope_theta" not in text and (theta := getattr(config, "rope_theta", None)) is not None:
        text += f"; rope_theta={theta}"  # configurations of transformers 4
    if any(kind in text for kind in ("longrope", "dynamic", '"su"')):
        text += f"; max_model_len={model.max_model_len}"
    return text


#: vLLM sets it to the served length in a draft model's configuration. Where KV depends on it, that
#: is in the factor of position embeddings.
_LENGTH = "max_position_embeddings"


def _config(model: Any, without: str = "") -> str:
    """A digest of the model's configuration as vLLM uses it: norms, experts, activations.

    It may come from another repository than the weights (--hf-config-path). ``without``: a field
    that is left out, also inside of others.
    """
    to_dict = getattr(model.hf_config, "to_dict", None)
    config = to_dict() if to_dict else vars(model.hf_config)
    if without:
        config = _stripped(config, without)
    return hashlib.sha256(_canonical(_of_the_model(config)).encode()).hexdigest()


#: Fields about the directory and the library that wrote it, not about the model.
_NOT_OF_THE_MODEL = ("_name_or_path", "name_or_path", "transformers_version", "_commit_hash")


def _of_the_model(value: Any, inside: Any = "") -> Any:
    """The configuration of the model's computation, without its path."""
    if isinstance(value, dict):
        # The classes of code that comes with a model; transformers prepends the repository, if
        # there is one: ORG/NAME--FILE.CLASS. The code itself is in no digest.
        return {
            str(key): str(one).rpartition("--")[2]
            if inside == "auto_map"
            else _of_the_model(one, key)
            for key, one in value.items()
            if key not in _NOT_OF_THE_MODEL
        }
    if isinstance(value, list | tuple):
        return [_of_the_model(one) for one in value]
    if isinstance(value, set | frozenset):
        return sorted(str(one) for one in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    text = str(value)
    return text if " at 0x" not in text else type(value).__qualname__


def _stripped(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return {key: _stripped(one, name) for key, one in value.items() if key != name}
    return value


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str, separators=(",", ":"))
