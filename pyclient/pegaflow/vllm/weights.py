"""The factor ``weights``: one id for equal weights, a private name while the id is unknown.

The id is made of SHA-256 digests of whole files (``pegaflow.weights``). Digests that take long are
made in the background for later starts: a running engine keeps its namespace.

And the factor ``processor``, for the small files beside the weights that configure how images,
audio and video become the model's input.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pegaflow.vllm import drafts
from pegaflow.weights import hub
from pegaflow.weights.digests import DigestCache
from pegaflow.weights.files import FORMATS, UnknownWeights, weight_files
from pegaflow.weights.identity import WeightFile, digest_of, identify, look_at
from pegaflow.weights.paths import switched

log = logging.getLogger("vllm.pegaflow")

#: At most this much is hashed while the engine starts: 1 s with SHA instructions, 3 s without.
AT_START_BYTES = 1 << 30

_FIX = "name the weights with pegaflow.weights_id"

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
        return f"its weights are pushed into it while it runs: {_FIX}"
    if reason := _of_unknown_files(vllm_config):
        return reason
    draft = drafts.as_model(vllm_config)
    reason = _of_unknown_files(draft) if draft is not None else ""
    return f"the draft model: {reason}" if reason else ""


def _of_unknown_files(vllm_config: Any) -> str:
    model = vllm_config.model_config
    load_format = _load_format(vllm_config)
    if load_format == "dummy":
        return f"with load format dummy the later weights are unknown: {_FIX}"
    if load_format not in FORMATS:
        return f"load format {load_format} does not read files that can be identified: {_FIX}"
    for source in (getattr(model, "model_weights", ""), model.model):
        if "://" in str(source):
            return f"{source} is in an object store: {_FIX}"
    if getattr(model, "model_weights", ""):
        return f"its weights come from {model.model_weights}, apart from the model: {_FIX}"
    hf_config = model.hf_config
    others = [getattr(hf_config, name, None) for name in ("text_model_id", "audio_model_id")]
    if any(others) or "MoonshotKimiaForCausalLM" in (getattr(hf_config, "architectures", 0) or ()):
        return f"it loads weights from more than its own directory: {_FIX}"
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
    core = _EngineCore.of(vllm_config.parallel_config)
    try:
        chosen = _choose(vllm_config)
        files = look_at(chosen.files)
        since = core.started_ns
        if reason := chosen.moved(since) or _changed(files, since) or _switched(chosen.path, since):
            return _private(vllm_config, instance, core, reason)
        cache = DigestCache()
        if reason := _too_long(files, cache, core.digests_before_ns):
            if vllm_config.parallel_config.rank == 0:
                _hash_in_background(str(vllm_config.model_config.model), files, cache)
            return _private(vllm_config, instance, core, reason)
        made = identify(files, cache)
        # Once more: a file that was replaced since vLLM read it has another stamp, and is young.
        again = _choose(vllm_config)
        if reason := _changed(look_at(again.files), since) or _switched(again.path, since):
            return _private(vllm_config, instance, core, reason)
        return made
    except (UnknownWeights, OSError) as error:
        raise UnknownWeights(f"{error}: {_FIX}") from None


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
    core = _EngineCore.of(vllm_config.parallel_config)
    try:
        names = [name for name in _OF_THE_PROCESSOR if (directory / name).exists()]
        files = look_at([directory / name for name in names])
        reason = _changed(files, core.started_ns)
        reason = reason or _switched(path if is_local else None, core.started_ns)
        cache = DigestCache()
        digests = [(name, digest_of(file, cache)) for name, file in zip(names, files, strict=True)]
    except (UnknownWeights, OSError) as error:
        reason = str(error)
    if reason:
        if vllm_config.parallel_config.rank == 0:
            log.warning("pegaflow: this engine shares no blocks with others: %s", reason)
        return f"private:{instance}:{core.name}"
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest() if digests else ""


@dataclasses.dataclass(frozen=True)
class _Chosen:
    """The files that vLLM has loaded."""

    files: Sequence[Path]
    ref: Path | None = None  #: The ref of the hub's cache, if it alone determines the snapshot.
    path: Path | None = None  #: The model's path, if it is not a repository of the hub.

    def moved(self, since_ns: int) -> str:
        """Why another snapshot may have been loaded than the one that the ref names now."""
        if self.ref is None or self.ref.stat().st_mtime_ns <= since_ns:
            return ""
        snapshots = self.files[0].parent.parent
        if len(list(snapshots.iterdir())) < 2:
            return ""  # the ref is new because this start has fetched the model
        return f"{self.ref} was moved to another commit while the engine started"


def _choose(vllm_config: Any) -> _Chosen:
    """
    Raises:
        UnknownWeights: they are not in vLLM's place.
    """
    model = vllm_config.model_config
    load_format = _load_format(vllm_config)
    path = Path(model.model)
    if path.exists():
        return _Chosen(weight_files(path, load_format), path=path)
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        raise UnknownWeights(f"{model.model} is of ModelScope")
    if not hub.is_repository(str(model.model)):
        raise UnknownWeights(f"{model.model} is neither a path nor a repository of the hub")
    cache = getattr(vllm_config.load_config, "download_dir", None)
    repository = hub.repository(str(model.model), Path(cache) if cache else _hub_cache())
    revision = _revision(model, repository)
    files = weight_files(hub.snapshot(repository, revision), load_format, of_hub=True)
    named = hub.is_commit(revision)
    return _Chosen(files, None if named else hub.ref(repository, revision))


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


def _changed(files: Sequence[WeightFile], since_ns: int) -> str:
    """The file that may have been loaded with other bytes than it has now."""
    for file in files:
        # A blob is named by its content; the engine may just have fetched it.
        if not file.blob and file.stamp.changed_ns > since_ns:
            if file.stamp.changed_ns > time.time_ns():
                return f"the time of {file.path} is in the future; `touch` it before the start"
            return f"{file.path} was changed while the engine started"
    return ""


def _switched(path: Path | None, since_ns: int) -> str:
    """Why a model's path may have led to other files when vLLM read them."""
    reason = switched(path, since_ns) if path is not None else ""
    return f"{reason} while the engine started" if reason else ""


def _too_long(files: Sequence[WeightFile], cache: DigestCache, before_ns: int | None) -> str:
    unknown = [file for file in files if file.digest(cache, before_ns) is None]
    size = sum(file.stamp.size for file in unknown)
    if size <= AT_START_BYTES:
        return ""
    return (
        f"the digests of {len(unknown)} of its {len(files)} files ({size / 1e9:.1f} GB) are missing"
    )


def _private(vllm_config: Any, instance: str, core: _EngineCore, reason: str) -> str:
    if vllm_config.parallel_config.rank == 0:
        log.warning(
            "pegaflow: this engine shares no blocks with others, nor with itself after a restart, "
            "because its weights have no id yet: %s. To share them, run `pegaflow weights-id %s` "
            "before it starts",
            reason,
            vllm_config.model_config.model,
        )
    return f"private:{instance}:{core.name}"


def _hash_in_background(model: str, files: Sequence[WeightFile], cache: DigestCache) -> None:
    def run() -> None:
        # Only for this thread: on Linux, nice is per thread.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        try:
            for file in files:
                digest_of(file, cache)
            known = all(file.digest(cache) for file in files)
        except UnknownWeights as error:
            log.warning("pegaflow: no id for the weights of %s: %s", model, error)
            return
        if known:
            log.info("pegaflow: the weights of %s have an id, from the next start on", model)
        else:
            log.warning(
                "pegaflow: the digests of %s are not stored: %s cannot be written, or the times of "
                "the files are one whole second, as in reproducible images: %s",
                model,
                cache.directory,
                _FIX,
            )

    threading.Thread(target=run, name="pega-weights", daemon=True).start()


@dataclasses.dataclass(frozen=True)
class _EngineCore:
    """The process whose workers must agree: the parent of several ranks, or a single rank
    itself.
    """

    name: str  #: Unique among all processes and machines.
    started_ns: int  #: By the clock of file stamps.
    #: Younger digests may have been written between two ranks. None: there is one rank.
    digests_before_ns: int | None

    @classmethod
    def of(cls, parallel: Any) -> _EngineCore:
        several = parallel.world_size > 1
        pid = os.getppid() if several else os.getpid()
        # The name of the program, in parentheses, may contain blanks.
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        age_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - ticks * 10**9 // os.sysconf(
            "SC_CLK_TCK"
        )
        started_ns = time.time_ns() - age_ns
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        pids = os.stat("/proc/self/ns/pid").st_ino
        text = f"{boot} {pids} {pid} {ticks}"
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
        return cls(name, started_ns, started_ns if several else None)
