"""One id for the weights that a running engine has loaded; a private name while it is unknown.

The id is made of SHA-256 digests of whole files (``pegaflow.weights``). Digests that take long are
made in the background for later starts: a running engine keeps its namespace.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pegaflow.weights.digests import DigestCache
from pegaflow.weights.files import UnknownWeights
from pegaflow.weights.identity import WeightFile, digest_of, identify, look_at
from pegaflow.weights.paths import switched

log = logging.getLogger("vllm.pegaflow")

#: At most this much is hashed while the engine starts: 1 s with SHA instructions, 3 s without.
AT_START_BYTES = 1 << 30

#: The end of each text about weights that have no id.
FIX = "name the weights with pegaflow.weights_id"


@dataclasses.dataclass(frozen=True)
class Chosen:
    """The files that the engine has loaded."""

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


@dataclasses.dataclass(frozen=True)
class Engine:
    """The engine that asks."""

    model: str  #: As `pegaflow weights-id` takes it.
    instance: str
    core: EngineCore
    is_first: bool = True  #: Of its ranks: it alone logs, and hashes in the background.


def weights_id(choose: Callable[[], Chosen], engine: Engine) -> str:
    """The id of the files that the engine has loaded, if their digests are known or quickly
    computed; else a name that no other engine has, and one line in the log.

    Args:
        choose: Names the files; called again at the end.

    Raises:
        UnknownWeights: the weights cannot be identified; the text names the fix.
    """
    since = engine.core.started_ns
    try:
        chosen = choose()
        files = look_at(chosen.files)
        if reason := chosen.moved(since) or changed(files, since) or moved(chosen.path, since):
            return private(engine, reason)
        cache = DigestCache()
        if reason := _too_long(files, cache, engine.core.digests_before_ns):
            if engine.is_first:
                _hash_in_background(engine.model, files, cache)
            return private(engine, reason)
        made = identify(files, cache)
        # Once more: a file that was replaced since the engine read it has another stamp, and is
        # young.
        again = choose()
        if reason := changed(look_at(again.files), since) or moved(again.path, since):
            return private(engine, reason)
        return made
    except (UnknownWeights, OSError) as error:
        raise UnknownWeights(f"{error}: {FIX}") from None


def changed(files: Sequence[WeightFile], since_ns: int) -> str:
    """The file that may have been loaded with other bytes than it has now."""
    for file in files:
        # A blob is named by its content; the engine may just have fetched it.
        if not file.blob and file.stamp.changed_ns > since_ns:
            if file.stamp.changed_ns > time.time_ns():
                return f"the time of {file.path} is in the future; `touch` it before the start"
            return f"{file.path} was changed while the engine started"
    return ""


def moved(path: Path | None, since_ns: int) -> str:
    """Why a model's path may have led to other files when the engine read them."""
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


def private(engine: Engine, reason: str) -> str:
    """A name that no other engine has; the first rank logs the reason."""
    if engine.is_first:
        log.warning(
            "pegaflow: this engine shares no blocks with others, nor with itself after a restart, "
            "because its weights have no id yet: %s. To share them, run `pegaflow weights-id %s` "
            "before it starts",
            reason,
            engine.model,
        )
    return f"private:{engine.instance}:{engine.core.name}"


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
                FIX,
            )

    threading.Thread(target=run, name="pega-weights", daemon=True).start()


@dataclasses.dataclass(frozen=True)
class EngineCore:
    """The process whose workers must agree: the parent of several ranks, or a single rank
    itself.
    """

    name: str  #: Unique among all processes and machines.
    started_ns: int  #: By the clock of file stamps.
    #: Younger digests may have been written between two ranks. None: there is one rank.
    digests_before_ns: int | None

    @classmethod
    def of(cls, parallel: Any) -> EngineCore:
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
