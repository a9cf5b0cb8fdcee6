"""The factor ``weights``: one id for equal weights, a private name while the id is unknown.

The id is made of SHA-256 digests of whole files (``pegaflow.weights``). Digests that take long are
made in the background for later starts: a running engine keeps its namespace.

And the factor ``processor``, for the small files beside the weights that configure how images,
audio and video become the model's input.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

from pegaflow.engine import loaded_weights
from pegaflow.engine.loaded_weights import FIX, Chosen, EngineCore, changed, moved
from pegaflow.vllm import drafts
from pegaflow.weights import hub
from pegaflow.weights.digests import DigestCache
from pegaflow.weights.files import FORMATS, UnknownWeights, weight_files
from pegaflow.weights.identity import digest_of, look_at

log = logging.getLogger("vllm.pegaflow")

#: The files that transformers reads, and those of mistral_common with more than a vocabulary.
_OF_THE_PROCESSOR = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "tekken.json",
)


def refusal(vllm_config: Any, configured: str) -> str:
    """Why the weights of this engine have no id, as a text; empty if they have or may have one.

    Depends only on the configuration, so that all ranks and the scheduler agree.
    """
    if configured:
        return ""
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        return f"its weights are pushed into it while it runs: {FIX}"
    if reason := _of_unknown_files(vllm_config):
        return reason
    draft = drafts.as_model(vllm_config)
    reason = _of_unknown_files(draft) if draft is not None else ""
    return f"the draft model: {reason}" if reason else ""


def _of_unknown_files(vllm_config: Any) -> str:
    model = vllm_config.model_config
    load_format = _load_format(vllm_config)
    if load_format == "dummy":
        return f"with load format dummy the later weights are unknown: {FIX}"
    if load_format not in FORMATS:
        return f"load format {load_format} does not read files that can be identified: {FIX}"
    for source in (getattr(model, "model_weights", ""), model.model):
        if "://" in str(source):
            return f"{source} is in an object store: {FIX}"
    if getattr(model, "model_weights", ""):
        return f"its weights come from {model.model_weights}, apart from the model: {FIX}"
    hf_config = model.hf_config
    others = [getattr(hf_config, name, None) for name in ("text_model_id", "audio_model_id")]
    if any(others) or "MoonshotKimiaForCausalLM" in (getattr(hf_config, "architectures", 0) or ()):
        return f"it loads weights from more than its own directory: {FIX}"
    return ""


def weights_id(vllm_config: Any, configured: str, instance: str) -> str:
    """The name of the weights in the namespace; equal names mean equal weights.

    The id of the files that vLLM has loaded, if their digests are known or quickly computed; else a
    name that no other engine has, and one line in the log. All ranks get the same result.

    Args:
        vllm_config: vLLM's configuration, in a worker that has loaded its weights.
        configured: ``pegaflow.weights_id``; takes precedence if it is not empty.
        instance: This engine's name.

    Raises:
        UnknownWeights: the weights cannot be identified; the text names the fix.
    """
    if configured:
        return f"named:{configured}"
    if reason := refusal(vllm_config, configured):
        raise UnknownWeights(reason)
    parallel = vllm_config.parallel_config
    engine = loaded_weights.Engine(
        str(vllm_config.model_config.model),
        instance,
        EngineCore.of(parallel),
        is_first=parallel.rank == 0,
    )
    return loaded_weights.weights_id(lambda: _choose(vllm_config), engine)


def draft_weights_id(vllm_config: Any, configured: str, instance: str) -> str:
    """The same for a draft model with files of its own; empty without one, and with a configured
    id, which names both models.
    """
    draft = drafts.as_model(vllm_config)
    return "" if draft is None or configured else weights_id(draft, "", instance)


def processor_id(vllm_config: Any, instance: str) -> str:
    """A digest of a multimodal model's processor configuration; empty for text models.

    It is in none of vLLM's hashes, although equal images become different input if a file was
    changed. Empty also if the files are missing or cannot be found, as with ModelScope.
    """
    model = vllm_config.model_config
    if getattr(model, "multimodal_config", None) is None:
        return ""
    path = Path(model.model)
    is_local = path.exists()
    if is_local:
        directory = path if path.is_dir() else path.parent
    else:
        # Not in the load configuration's download_dir, which is for the weights only.
        repository = hub.repository(str(model.model), _hub_cache())
        try:
            directory = hub.snapshot(repository, _revision(model, repository))
        except UnknownWeights:
            return ""
    core = EngineCore.of(vllm_config.parallel_config)
    try:
        names = [name for name in _OF_THE_PROCESSOR if (directory / name).exists()]
        files = look_at([directory / name for name in names])
        reason = changed(files, core.started_ns)
        reason = reason or moved(path if is_local else None, core.started_ns)
        cache = DigestCache()
        digests = [(name, digest_of(file, cache)) for name, file in zip(names, files, strict=True)]
    except (UnknownWeights, OSError) as error:
        reason = str(error)
    if reason:
        if vllm_config.parallel_config.rank == 0:
            log.warning("pegaflow: this engine shares no blocks with others: %s", reason)
        return f"private:{instance}:{core.name}"
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest() if digests else ""


def _choose(vllm_config: Any) -> Chosen:
    """
    Raises:
        UnknownWeights: they are not in vLLM's place.
    """
    model = vllm_config.model_config
    load_format = _load_format(vllm_config)
    path = Path(model.model)
    if path.exists():
        return Chosen(weight_files(path, load_format), path=path)
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        raise UnknownWeights(f"{model.model} is of ModelScope")
    if not hub.is_repository(str(model.model)):
        raise UnknownWeights(f"{model.model} is neither a path nor a repository of the hub")
    cache = getattr(vllm_config.load_config, "download_dir", None)
    repository = hub.repository(str(model.model), Path(cache) if cache else _hub_cache())
    revision = _revision(model, repository)
    files = weight_files(hub.snapshot(repository, revision), load_format, of_hub=True)
    named = hub.is_commit(revision)
    return Chosen(files, None if named else hub.ref(repository, revision))


def _revision(model: Any, repository: Path) -> str:
    """The commit that vLLM has loaded, else the configured branch or tag."""
    revision = model.revision
    if resolved := getattr(revision, "resolved", None):  # vLLM 0.32 and later
        return str(resolved)
    # The commit of the configuration's repository, which may be another one. Gone in transformers
    # 5.19.
    commit = getattr(model.hf_config, "_commit_hash", None)
    elsewhere = getattr(model, "hf_config_path", None) not in (None, model.model)
    if commit and not elsewhere and (repository / "snapshots" / commit).is_dir():
        return str(commit)
    return str(revision or "main")


def _hub_cache() -> Path:
    try:
        from huggingface_hub import constants
    except ImportError:
        return hub.cache_directory()
    return Path(constants.HF_HUB_CACHE)


def _load_format(vllm_config: Any) -> str:
    load_format = getattr(vllm_config.load_config, "load_format", "auto")
    return str(getattr(load_format, "value", load_format))
