"""The identity of an adapter's (LoRA's) weights, so that their content names its blocks.

vLLM's block hash has the adapter's name and path. That is enough for a cache that ends with the
process; this cache outlives it and is shared, while adapters are trained again in place. So the
keys of an adapter's blocks are made of vLLM's hash and a digest of the adapter's files.

The digest must be of the weights that the workers hold, not of what lies in the directory later.
Workers read the files when an adapter is loaded, and again whenever it was evicted from their own
cache. So the files' stamps are taken before the first load and must be the same ever after: then
every load, at any time, read the same bytes. When they change, the weights behind blocks of this
name are unknown, also in vLLM's own cache, and this engine no longer caches the adapter. It is
cached again when it is loaded from another path or by another engine.

The files of an adapter that vLLM downloads from the hub do not exist before its first load. Their
stamps are taken right after it, provided that the hub's cache then holds one snapshot alone: the
snapshot that every worker has read.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import os
import queue
import threading
import time
import weakref
from pathlib import Path
from typing import Any

from pegaflow.weights import hub
from pegaflow.weights.digests import DigestCache, FileChanged, Stamp, hash_file, stamp
from pegaflow.weights.files import UnknownWeights

log = logging.getLogger("vllm.pegaflow")

#: The files of an adapter's directory that vLLM's releases read.
_FILES = (
    "adapter_config.json",
    *(
        f"{name}.{suffix}"
        for name in ("adapter_model", "new_embeddings")
        for suffix in ("safetensors", "bin", "pt")
    ),
)
#: The kernel stamps files in ticks: a file that changed this recently may change again undetected.
#: Where stamps have whole seconds only, the file system counts in seconds.
_TICK_NS = 20_000_000
_COARSE_TICK_NS = 2_000_000_000
#: The time that a step waits for a check of an adapter's files. A disk that hangs stops these
#: checks, and with them saves and loads of adapters, but no engine.
LOOK_PATIENCE_S = 0.1


@dataclasses.dataclass(frozen=True)
class _File:
    """One version of a file that an adapter consists of."""

    name: str
    path: Path  #: Resolved: without links.
    stamp: Stamp


class NotDownloaded(UnknownWeights):
    """An adapter of the hub that is not completely in the hub's cache."""


class AdapterFiles:
    """The files of an adapter, as they were at one moment. Immutable."""

    def __init__(self, path: str) -> None:
        """
        Args:
            path: ``lora_path`` of the request, as vLLM resolves it.

        Raises:
            OSError: there is no adapter.
            NotDownloaded: it is not in the cache of the hub.
            UnknownWeights: vLLM reads it from unknown files.
        """
        directory, found, self.repository = _resolve(path)
        for name in _FILES:
            try:
                real = Path(os.path.realpath(directory / name))
                found.append(_File(name, real, stamp(real)))
            except FileNotFoundError:
                continue  # an adapter has only some of them; the weights are checked below
        self.files = tuple(found)
        if not any(file.name.startswith("adapter_model.") for file in found):
            kind = FileNotFoundError if self.repository is None else NotDownloaded
            raise kind(f"{directory} has no adapter_model file")

    def is_stable(self, now_ns: int) -> bool:
        """Whether a change after ``now_ns`` would give a file another stamp."""
        for file in self.files:
            changed = file.stamp.changed_ns
            tick = _COARSE_TICK_NS if changed % 1_000_000_000 == 0 else _TICK_NS
            if not changed + tick < now_ns:
                return False
        return True

    def digest(self, cache: DigestCache) -> bytes:
        """The digest of all bytes of all files, which it reads.

        Raises:
            OSError: a file cannot be read.
            FileChanged: a file has another version.
        """
        digests = [(file.name, _file_digest(file, cache)) for file in self.files]
        return hashlib.sha256(json.dumps(digests).encode()).digest()


def _file_digest(file: _File, cache: DigestCache) -> str:
    digest = hub.blob_digest(file.path) or cache.get(file.path, file.stamp)
    if digest is None:
        digest = hash_file(file.path)
        if stamp(file.path) == file.stamp:
            cache.put(file.path, file.stamp, digest)
    if stamp(file.path) != file.stamp:
        raise FileChanged(f"{file.path} was changed")
    return digest


def _resolve(path: str) -> tuple[Path, list[_File], Path | None]:
    """The directory that vLLM reads, the files that determine it, and the repository in the hub's
    cache, if it belongs to one.
    """
    directory = Path(os.path.expanduser(path))  # Path's own raises without a home directory
    if directory.is_absolute() or directory.exists():
        return directory.absolute(), [], None
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        raise UnknownWeights(f"{path} is a repository of ModelScope, whose cache is not read")
    if not hub.is_repository(path):
        raise FileNotFoundError(f"{path} is neither a directory nor a repository")
    repository = hub.repository(path)
    try:
        snapshot = hub.snapshot(repository)
        ref = hub.ref(repository, "main")
        return snapshot, [_File("ref", ref, stamp(ref))], repository
    except (OSError, UnknownWeights) as error:
        raise NotDownloaded(str(error)) from None


class Adapter:
    """One name and path, during the life of an engine. Bound to the scheduler's thread."""

    def __init__(self, name: str, path: str) -> None:
        self.name = name
        self.path = path
        self.ids: set[int] = set()  #: Under which the engine loaded it.
        self.files: AdapterFiles | None = None
        self.is_downloading = False  #: During its first load, by vLLM.
        self.interpretation: Any = None  #: The request's other settings for reading the files.
        self.digest = b""  #: Empty: unknown.
        self.refused = ""  #: Why this engine never caches its requests.
        self.looked_at = -1  #: The round in which its files were checked last.

    def key(self, block_hash: bytes) -> bytes:
        """The key of the block with vLLM's ``block_hash``, of the same length."""
        digest = hashlib.sha256(b"pegaflow adapter 1\0" + self.digest + block_hash).digest()
        return digest[: len(block_hash)]

    def has_its_files(self) -> bool:
        """Checks whether the files are those of its load. In any thread."""
        try:
            return self.files is None or AdapterFiles(self.path).files == self.files.files
        except (OSError, UnknownWeights):
            return False

    def refuse_changed(self) -> None:
        self.refuse(
            "its files have changed since it was loaded; load it from a new path, "
            "or restart the engine"
        )

    def refuse(self, reason: str) -> None:
        if not self.refused:
            self.refused = reason
            self.digest = b""
            log.warning(
                "pegaflow: this engine does not cache requests of adapter %s (%s): %s",
                self.name,
                self.path,
                reason,
            )


class _Looks:
    """Checks the files of loaded adapters, in a thread of its own, one after another.

    Bound to the scheduler's thread, which waits for ``patience_s`` at most each time that the disk
    hangs, and not at all until it responds again.
    """

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self._work: queue.SimpleQueue[Adapter | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[Adapter, bool]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_out = False  # a check is pending: its result was not taken

    def are_same(self, adapter: Adapter) -> bool:
        """Whether a check that began after this call has found the files of the adapter's load.

        Rejects each adapter whose files have changed.
        """
        if self._is_out and not self._take(0):
            return False
        if adapter.refused:
            return False  # rejected by the check whose result was just taken
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pegaflow-looks", daemon=True)
            self._thread.start()
        self._is_out = True
        self._work.put(adapter)
        return self._take(self.patience_s) and not adapter.refused

    def close(self) -> None:
        self._work.put(None)

    def _take(self, timeout_s: float) -> bool:
        try:
            adapter, same = self._results.get(timeout=timeout_s)
        except queue.Empty:
            return False
        self._is_out = False
        if not same:
            adapter.refuse_changed()
        return True

    def _run(self) -> None:
        while (adapter := self._work.get()) is not None:
            self._results.put((adapter, adapter.has_its_files()))


class Adapters:
    """The adapters of an engine. Bound to the scheduler's thread, except for two threads of its
    own: one reads files for their digests, one checks files while requests run.

    The scheduler's thread itself checks an adapter's files only when the engine loads them, for
    which it waits in any case.
    """

    def __init__(self, salt: str = "", *, cache: DigestCache | None = None) -> None:
        """``salt``: the parts of the engine's configuration that change an adapter's weights."""
        self._salt = salt
        self._cache = cache or DigestCache()
        self._adapters: dict[tuple[str, str], Adapter] = {}
        self._round = 0
        self._work: queue.SimpleQueue[tuple[Adapter, AdapterFiles] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[Adapter, bytes, str]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.looks = _Looks(LOOK_PATIENCE_S)
        self._is_watching = watch_loads(self)

    def look_again(self) -> None:
        """Begins a round: later calls concern KV computed by now, so files are checked again."""
        self._round += 1

    def of(self, request: Any) -> Adapter | None:
        """The adapter of a request; None for the base model."""
        lora = getattr(request, "lora_request", None)
        if lora is None:
            return None
        adapter = self._find(lora)
        if not adapter.refused:
            for other in self._others(adapter, lora.lora_int_id):
                # The workers have only one of them.
                other.refuse("another adapter has its id")
                adapter.refuse("another adapter has its id")
            adapter.ids.add(lora.lora_int_id)
            self.is_known(adapter)
        return adapter

    def is_known(self, adapter: Adapter) -> bool:
        """Whether its digest identifies all weights that the engine has loaded for it so far.

        False also while its files cannot be read: nothing may be saved or loaded until then.
        """
        while not self._results.empty():
            done, digest, reason = self._results.get()
            if reason:
                done.refuse(reason)
            elif not done.refused:
                stated = f"{self._salt}\0{done.interpretation}\0".encode()
                done.digest = hashlib.sha256(stated + digest).digest()
        if adapter.refused or adapter.files is None:
            return False
        if adapter.looked_at != self._round and self.looks.are_same(adapter):
            adapter.looked_at = self._round
        return bool(adapter.digest) and adapter.looked_at == self._round

    def loading(self, lora: Any) -> None:
        """The engine is about to load an adapter, for the first time or again."""
        adapter = self._find(lora, is_load=True)
        for other in self._others(adapter, lora.lora_int_id):
            # Its running requests continue with the weights of the new one, if that is loaded.
            other.refuse("another adapter was loaded in its place")
            other.ids.discard(lora.lora_int_id)
            if not getattr(lora, "load_inplace", False):
                adapter.refuse("another one has its id")
        adapter.ids.add(lora.lora_int_id)
        self._look(adapter)

    def loaded(self, lora: Any) -> None:
        """The engine has read the files, or failed to."""
        adapter = self._find(lora)
        if adapter.is_downloading:
            self._begin_downloaded(adapter)
        else:
            self._look(adapter)

    def give_up(self) -> None:
        """Notes a missed load: the weights of every adapter are unknown."""
        self._is_watching = False
        for adapter in self._adapters.values():
            adapter.refuse("a load of adapters was missed")

    def close(self) -> None:
        self._work.put(None)
        self.looks.close()

    def _find(self, lora: Any, *, is_load: bool = False) -> Adapter:
        place = _place(lora)
        adapter = self._adapters.get(place)
        stated = (
            getattr(lora, "tensorizer_config_dict", None),
            bool(getattr(lora, "is_3d_lora_weight", False)),
        )
        if adapter is None:
            adapter = self._adapters[place] = Adapter(*place)
            adapter.interpretation = stated
            if not self._is_watching:
                adapter.refuse("this vLLM does not report when it loads adapters")
            elif stated[0]:
                adapter.refuse("a tensorizer reads it from another place")
            else:
                self._begin(adapter, is_load)
        elif adapter.interpretation != stated:
            adapter.refuse("its files were loaded in two ways")
        return adapter

    def _others(self, adapter: Adapter, number: int) -> list[Adapter]:
        """The other adapters that the engine loaded under the same id."""
        return [
            other
            for other in self._adapters.values()
            if other is not adapter and number in other.ids
        ]

    def _begin(self, adapter: Adapter, is_load: bool) -> None:
        try:
            files = AdapterFiles(adapter.path)
        except NotDownloaded as error:
            if is_load:
                adapter.is_downloading = True
            else:
                adapter.refuse(str(error))
        except (OSError, UnknownWeights) as error:
            adapter.refuse(str(error))
        else:
            if is_load and files.repository is not None and not files.is_stable(time.time_ns()):
                adapter.is_downloading = True  # another engine is downloading it
            else:
                self._take(adapter, files)

    def _begin_downloaded(self, adapter: Adapter) -> None:
        """Starts on an adapter whose files were not in the hub's cache before its first load.

        Each worker has read the snapshot that main named when it loaded the adapter. If the cache
        holds only one snapshot, all have read that one; a branch that moves later is detected.
        """
        adapter.is_downloading = False
        try:
            files = AdapterFiles(adapter.path)
        except (OSError, UnknownWeights):
            # The load has failed. The next one starts over.
            del self._adapters[(adapter.name, adapter.path)]
            return
        if files.repository is None or hub.snapshot_count(files.repository) != 1:
            adapter.refuse("its hub branch moved while it was loaded; restart the engine")
            return
        if not files.is_stable(time.time_ns()):
            time.sleep(_TICK_NS / 1e9)  # short compared with the download
        self._take(adapter, files)

    def _take(self, adapter: Adapter, files: AdapterFiles) -> None:
        """Queues the digest of the files that the engine loads, or has loaded."""
        if adapter.refused:
            return
        adapter.files = files
        now = time.time_ns()
        if not files.is_stable(now):
            if any(file.stamp.changed_ns > now for file in files.files):
                adapter.refuse(
                    "the times of its files are in the future; `touch` a copy of them and load that"
                )
            else:
                adapter.refuse(
                    "its files were written while it was loaded; load it from a new path"
                )
            return
        adapter.looked_at = self._round
        if self._thread is None:
            self._thread = threading.Thread(
                target=_read,
                args=(self._work, self._results, self._cache),
                name="pegaflow-adapters",
                daemon=True,
            )
            self._thread.start()
        self._work.put((adapter, adapter.files))

    def _look(self, adapter: Adapter) -> None:
        adapter.looked_at = self._round
        if not adapter.refused and not adapter.has_its_files():
            adapter.refuse_changed()

    def wait(self, lora: Any, timeout_s: float) -> bool:
        """Starts on an adapter before its first request and waits; whether it is known."""
        adapter = self._find(lora)
        deadline = time.monotonic() + timeout_s
        while not self.is_known(adapter) and not adapter.refused:
            try:
                self._results.put(self._results.get(timeout=max(0, deadline - time.monotonic())))
            except queue.Empty:
                break
        return bool(adapter.digest)


def _place(lora: Any) -> tuple[str, str]:
    return str(lora.lora_name), str(lora.lora_path)


def _read(work: Any, results: Any, cache: DigestCache) -> None:
    """The thread that reads files."""
    while (job := work.get()) is not None:
        adapter, files = job
        try:
            results.put((adapter, files.digest(cache), ""))
        except (OSError, FileChanged) as error:
            results.put((adapter, b"", str(error)))


# ---- notification of the engine's loads

_watching: weakref.WeakSet[Adapters] = weakref.WeakSet()


def watch_loads(adapters: Adapters) -> bool:
    """Informs ``adapters`` of each load that a client requests; whether this vLLM allows it.

    vLLM informs a connector of requests only. An adapter that is loaded ahead of its first request,
    or in place of another one, is read in ``EngineCore.add_lora``, in the scheduler's thread.
    """
    try:
        from vllm.v1.engine.core import EngineCore
    except ImportError:
        return False
    original = getattr(EngineCore, "add_lora", None)
    if original is None:
        return False
    _watching.add(adapters)
    if getattr(original, "pegaflow_watches", False):
        return True

    @functools.wraps(original)
    def add_lora(self: Any, lora_request: Any, *args: Any, **kwargs: Any) -> Any:
        _note("loading", lora_request)
        try:
            return original(self, lora_request, *args, **kwargs)
        finally:
            _note("loaded", lora_request)

    add_lora.pegaflow_watches = True  # type: ignore[attr-defined]
    EngineCore.add_lora = add_lora
    return True


def _note(what: str, lora_request: Any) -> None:
    for adapters in list(_watching):
        try:
            getattr(adapters, what)(lora_request)
        except Exception:
            # vLLM must load its adapter in any case; without the note it is not cached.
            log.exception("pegaflow: adapters are no longer cached")
            adapters.give_up()


def salt(vllm_config: Any) -> str:
    """The parts of an engine's configuration that change the weights of its adapters."""
    lora = getattr(vllm_config, "lora_config", None)
    stated = [str(getattr(lora, "lora_dtype", ""))]
    for name in _OPTIONS:
        # Absent if it is not given, so that the keys of all other engines stay unchanged.
        if value := getattr(lora, name, None):
            stated.append(f"{name}={sorted(value) if isinstance(value, list) else value}")
    return "; ".join(stated)


#: vLLM's options that select an adapter's modules, or determine how its files are read.
_OPTIONS = (
    "target_modules",
    "enable_tower_connector_lora",
    "enable_mixed_moe_lora_format",
    "enable_moe_shared_loras",
)
