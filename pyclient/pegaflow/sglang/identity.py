"""The namespace of an SGLang engine's pages: all that must be equal for two engines to share them.

The keys are SGLang's own: a SHA-256 chain over the tokens of each page, with the adapter's id and
the cache salt in it. SGLang hashes otherwise than vLLM, so the factor ``engine`` is in each list.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pegaflow.engine import loaded_weights
from pegaflow.engine.loaded_weights import FIX, Chosen, EngineCore
from pegaflow.weights import hub
from pegaflow.weights.files import FORMATS, UnknownWeights, weight_files

VERSION = "1"
Factors = list[tuple[str, str]]

#: Options of SGLang that change the KV of equal tokens, or its bytes, beside weights and layout.
_OPTIONS = (
    "dtype",
    "quantization",
    "quantization_param_path",
    "kv_cache_dtype",
    "json_model_override_args",
    "model_impl",
    "model_loader_extra_config",
    "context_length",
    "mamba_ssm_dtype",
    "enable_int8_mamba_checkpoint",
)
_OF_THE_DRAFT = (
    "speculative_algorithm",
    "speculative_num_steps",
    "speculative_draft_model_quantization",
)


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The place of a process in its engine."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    dp_rank: int = 0
    agreeing: int = 1  #: Ranks that take the longest prefix that all of them can restore.
    is_mla: bool = False  #: All tensor-parallel ranks have equal KV.

    @property
    def number(self) -> int:
        """Unique in an engine."""
        of_stage = self.pp_rank * self.cp_size + self.cp_rank
        return (self.dp_rank * self.pp_size * self.cp_size + of_stage) * self.tp_size + self.tp_rank

    @property
    def is_writer(self) -> bool:
        """Whether it saves pages that all tensor-parallel ranks have."""
        return not self.is_mla or self.tp_rank == 0

    def shard(self, replicated: bool) -> str:
        """The share of a page that this rank has."""
        tp = "all" if replicated else f"{self.tp_rank}"
        return (
            f"tp {tp} of {self.tp_size}, pp {self.pp_rank} of {self.pp_size}, "
            f"cp {self.cp_rank} of {self.cp_size}"
        )


class Refused(Exception):
    """An engine that runs without the cache: ``kind`` is a reason of ``_native.DeclineNotice``."""

    def __init__(self, text: str, kind: str) -> None:
        super().__init__(text)
        self.kind = kind


def of_pool(engine: Factors, pool: str, meaning: str, ranks: Ranks, replicated: bool) -> Factors:
    """The list of one pool.

    Args:
        engine: That of ``of_engine()``.
        pool: SGLang's name of the pool, as "kv".
        meaning: Of its pages' bytes (``geometry``).
        replicated: All tensor-parallel ranks have the same pages of it.
    """
    shard = ranks.shard(replicated)
    return [*engine, ("layout", meaning), ("layers", f"{pool}: {shard}")]


def of_engine(args: Any, weights_id: str, instance: str, ranks: Ranks) -> Factors:
    """The factors that all pools have in common.

    Args:
        args: SGLang's ``ServerArgs``.
        weights_id: ``pegaflow.weights_id``, or "".

    Raises:
        Refused: the weights cannot be identified, or are replaced while the engine runs.
    """
    several = ranks.tp_size * ranks.pp_size * ranks.cp_size > 1
    core = EngineCore.of(SimpleNamespace(world_size=2 if several else 1))
    config = _config(args)
    listed = [
        ("pegaflow.namespace", f"sglang {VERSION}"),
        ("engine", "sglang"),
        ("weights", _weights(args, weights_id, instance, core, ranks)),
        ("architecture", ",".join(config.get("architectures") or ())),
        ("config", hashlib.sha256(_canonical(config).encode()).hexdigest() if config else ""),
        ("options", _canonical({name: _text(getattr(args, name, None)) for name in _OPTIONS})),
    ]
    if getattr(args, "speculative_algorithm", None):
        draft = {name: _text(getattr(args, name, None)) for name in _OF_THE_DRAFT}
        listed.append(("draft", _canonical(draft)))
        if getattr(args, "speculative_draft_model_path", None) and not weights_id:
            listed.append(("draft_weights", _draft_weights(args, instance, core, ranks)))
    return listed


def _weights(args: Any, configured: str, instance: str, core: EngineCore, ranks: Ranks) -> str:
    """
    Raises:
        Refused: they have no id.
    """
    if configured:
        return f"named:{configured}"
    engine = loaded_weights.Engine(str(args.model_path), instance, core, ranks.number == 0)
    if getattr(args, "enable_lora", None) or getattr(args, "lora_paths", None):
        # SGLang names an adapter by its name and path, not by its content.
        reason = "adapters are named by their paths, so their content is unknown"
        return loaded_weights.private(engine, reason)
    load_format = _text(getattr(args, "load_format", None)) or "auto"
    return _id_of(args.model_path, getattr(args, "revision", None), load_format, args, engine)


def _draft_weights(args: Any, instance: str, core: EngineCore, ranks: Ranks) -> str:
    model = args.speculative_draft_model_path
    engine = loaded_weights.Engine(str(model), instance, core, ranks.number == 0)
    load_format = _text(getattr(args, "speculative_draft_load_format", None)) or "auto"
    revision = getattr(args, "speculative_draft_model_revision", None)
    return _id_of(model, revision, load_format, args, engine)


def _id_of(
    model: Any, revision: Any, load_format: str, args: Any, engine: loaded_weights.Engine
) -> str:
    if load_format == "dummy":
        raise Refused(f"with load format dummy the later weights are unknown: {FIX}", "weights")
    if load_format not in FORMATS:
        raise Refused(
            f"load format {load_format} does not read files that can be identified: {FIX}",
            "weights",
        )
    if getattr(args, "custom_weight_loader", None) or "://" in str(model):
        raise Refused(f"{model} is not read from files of this machine: {FIX}", "weights")
    try:
        return loaded_weights.weights_id(
            lambda: _choose(str(model), revision, load_format, args), engine
        )
    except UnknownWeights as error:
        raise Refused(str(error), "weights") from None


def _choose(model: str, revision: Any, load_format: str, args: Any) -> Chosen:
    """
    Raises:
        UnknownWeights: the files are not in SGLang's places.
    """
    path = Path(model)
    if path.exists():
        return Chosen(weight_files(path, load_format), path=path)
    if os.environ.get("SGLANG_USE_MODELSCOPE", "").lower() in ("1", "true"):
        raise UnknownWeights(f"{model} is of ModelScope")
    if not hub.is_repository(model):
        raise UnknownWeights(f"{model} is neither a path nor a repository of the hub")
    cache = getattr(args, "download_dir", None)
    repository = hub.repository(model, Path(cache) if cache else _hub_cache())
    named = str(revision or "main")
    files = weight_files(hub.snapshot(repository, named), load_format, of_hub=True)
    return Chosen(files, None if hub.is_commit(named) else hub.ref(repository, named))


def _hub_cache() -> Path:
    try:
        from huggingface_hub import constants
    except ImportError:
        return hub.cache_directory()
    return Path(constants.HF_HUB_CACHE)


#: Fields about the directory and the library that wrote it, not about the model.
_NOT_OF_THE_MODEL = ("_name_or_path", "name_or_path", "transformers_version", "_commit_hash")


def _config(args: Any) -> Mapping[str, Any]:
    """The model's configuration file without its path; empty if there is none."""
    path = Path(str(args.model_path))
    if not path.exists() and hub.is_repository(str(args.model_path)):
        cache = getattr(args, "download_dir", None)
        repository = hub.repository(str(path), Path(cache) if cache else _hub_cache())
        try:
            path = hub.snapshot(repository, str(getattr(args, "revision", None) or "main"))
        except UnknownWeights:
            return {}  # the weights then have no id either, or a stated one
    try:
        config = json.loads((path / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return {key: value for key, value in config.items() if key not in _NOT_OF_THE_MODEL}


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, Mapping | Sequence) and not isinstance(value, str):
        return _canonical(value)
    return str(getattr(value, "value", value))


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str, separators=(",", ":"))
