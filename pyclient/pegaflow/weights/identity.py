"""One id for a model's weights, from the SHA-256 of each of their files.

Names and paths do not count: a local directory, a snapshot of the hub's cache and a copy of either
have one id if the bytes of their files are equal, in loading order.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from pegaflow.weights import hub
from pegaflow.weights.digests import DigestCache, FileChanged, Stamp, hash_file, stamp
from pegaflow.weights.files import UnknownWeights


@dataclasses.dataclass(frozen=True)
class WeightFile:
    """A file with weights, with its stamp at that time."""

    path: Path  #: Resolved: links may change without a trace.
    stamp: Stamp
    blob: bool  #: Named by its content in the hub's cache.

    def digest(self, cache: DigestCache, recorded_before_ns: int | None = None) -> str | None:
        """Its digest, if that is known without reading the file."""
        return hub.blob_digest(self.path) or cache.get(self.path, self.stamp, recorded_before_ns)


def look_at(files: Sequence[Path]) -> list[WeightFile]:
    """
    Raises:
        UnknownWeights: a file is missing, unreadable, not a regular file, or a loop of links.
    """
    made = []
    for file in files:
        try:
            path = file.resolve(strict=True)
            made.append(WeightFile(path, stamp(path), hub.in_cache(path)))
        except (OSError, RuntimeError) as error:  # RuntimeError: a loop, before Python 3.13
            raise UnknownWeights(f"{file} cannot be read: {error}") from None
    return made


def combine(files: Sequence[WeightFile], digests: Sequence[str]) -> str:
    """The id. The digests are those of the files, in their order."""
    text = "".join(
        f"{digest} {file.stamp.size}\n" for file, digest in zip(files, digests, strict=True)
    )
    return "sha256:" + hashlib.sha256(b"pegaflow weights 1\n" + text.encode()).hexdigest()


def digest_of(
    file: WeightFile, cache: DigestCache, on_bytes: Callable[[int], None] = lambda count: None
) -> str:
    """The digest of one file, which is read if it is not known.

    Raises:
        UnknownWeights: it cannot be read, or has changed since its stamp was taken.
    """
    if digest := file.digest(cache):
        return digest
    with cache.hashing(file.path):
        if digest := file.digest(cache):
            return digest  # another process has hashed it meanwhile
        try:
            digest = hash_file(file.path, on_bytes)
            if stamp(file.path) != file.stamp:
                raise FileChanged(f"{file.path} was changed")
        except (OSError, FileChanged) as error:
            raise UnknownWeights(f"{file.path} cannot be hashed: {error}") from None
        cache.put(file.path, file.stamp, digest)
        return digest


def identify(
    files: Sequence[WeightFile],
    cache: DigestCache,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> str:
    """The id of these files; those without a known digest are read.

    Raises:
        UnknownWeights: a file cannot be read, or has changed since its stamp was taken.
    """
    made = combine(files, [digest_of(file, cache, on_bytes) for file in files])
    for before, after in zip(files, look_at([file.path for file in files]), strict=True):
        if before != after:
            raise UnknownWeights(f"{before.path} was changed while the weights were identified")
    return made
