"""Snapshots in the local cache of the Hugging Face Hub. Nothing here uses the network.

A snapshot is a directory ``models--ORG--NAME/snapshots/COMMIT`` of links to ``blobs/``. A blob is
named by its content: large files by their SHA-256, the others by their Git object id.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from pegaflow.weights.files import UnknownWeights

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def cache_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """The directory of huggingface_hub's cache."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if value := environ.get(name):
            return _expanded(value)
    if home := environ.get("HF_HOME"):
        return _expanded(home) / "hub"
    return _expanded(environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface" / "hub"


def _expanded(path: str) -> Path:
    # Path.expanduser() raises if the user has no home.
    return Path(os.path.expanduser(os.path.expandvars(path)))


def is_repository(name: str) -> bool:
    """Whether ``name`` has the form of a repository's id: NAME or ORG/NAME."""
    return re.fullmatch(r"[\w][\w.-]*(/[\w][\w.-]*)?", name) is not None


def repository(name: str, cache: Path | None = None) -> Path:
    """The directory of a repository in the cache, which may not exist."""
    return (cache or cache_directory()) / f"models--{name.replace('/', '--')}"


def is_commit(revision: str) -> bool:
    return _COMMIT.fullmatch(revision) is not None


def ref(repository: Path, revision: str) -> Path:
    """The file that holds the commit of a branch or tag."""
    return repository / "refs" / revision


def snapshot(repository: Path, revision: str = "main") -> Path:
    """The snapshot of a commit, a branch or a tag.

    Raises:
        UnknownWeights: it is not in the cache.
    """
    commit = revision
    if not is_commit(revision):
        try:
            commit = ref(repository, revision).read_text().strip()
        except OSError as error:
            raise UnknownWeights(
                f"{repository} has no revision {revision}: {error.strerror}"
            ) from None
    made = repository / "snapshots" / commit
    if not is_commit(commit) or not os.path.isdir(made):
        raise UnknownWeights(f"{repository} has no snapshot of {revision}")
    return made


def snapshot_count(repository: Path) -> int:
    """The number of a repository's snapshots in the cache."""
    try:
        return len(os.listdir(repository / "snapshots"))
    except OSError:
        return 0


def in_cache(file: Path) -> bool:
    """Whether a resolved path is a blob of the cache: named by its content, never written again."""
    return (
        file.parent.name == "blobs"
        and file.parent.parent.name.startswith("models--")
        and re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", file.name) is not None
    )


def blob_digest(file: Path) -> str | None:
    """The SHA-256 that names a blob of the cache; None for other files."""
    return file.name if in_cache(file) and _SHA256.fullmatch(file.name) else None
