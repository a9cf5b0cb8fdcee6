"""SHA-256 digests of whole files, kept on disk so that each file is read once.

The directory is ``PEGAFLOW_CACHE_DIR``, else ``pegaflow`` in ``XDG_CACHE_HOME`` or ~/.cache. It may
be deleted at any time, and several processes may use it at once: an entry is a file of its own,
written elsewhere and renamed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

_CHUNK_BYTES = 4 << 20
_VERSION = 1
#: A file that changed more recently could change again without another time stamp.
_STILL_NS = 2_000_000_000


class FileChanged(Exception):
    """A file was replaced or written to while it was read."""


@dataclasses.dataclass(frozen=True)
class Stamp:
    """Attributes that change with a file. The change time cannot be set back, as mtime can."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int

    @property
    def changed_ns(self) -> int:
        return max(self.mtime_ns, self.ctime_ns)

    @property
    def may_be_made_up(self) -> bool:
        """Whether the file may belong to a reproducible image.

        A reproducible one (squashfs, EROFS) has one time in whole seconds in all its files, as both
        times, and small inodes: another image at the same place has equal stamps.
        """
        return self.ctime_ns == self.mtime_ns and self.ctime_ns % 1_000_000_000 == 0


def stamp(path: Path) -> Stamp:
    """
    Raises:
        OSError: the file is missing, unreadable, or not a regular file.
    """
    return _stamp(os.stat(path), path)


def _stamp(status: os.stat_result, path: Path) -> Stamp:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"{path} is not a regular file")
    return Stamp(
        status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev
    )


def cache_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """The directory of the digests; an impossible one if the user has no home."""
    own = environ.get("PEGAFLOW_CACHE_DIR")
    cache = environ.get("XDG_CACHE_HOME") or "~/.cache"
    # Not Path.expanduser(), which raises then.
    made = os.path.expanduser(own or os.path.join(cache, "pegaflow"))
    return Path("/dev/null/pegaflow" if made.startswith("~") else made)


def hash_file(path: Path, on_bytes: Callable[[int], None] = lambda count: None) -> str:
    """The SHA-256 of a file, in hexadecimal. Uses at most one core and releases the GIL.

    Args:
        path: The file.
        on_bytes: Called with the size of each piece that was read.

    Raises:
        OSError: it cannot be read.
        FileChanged: it changed meanwhile.
    """
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        before = _stamp(os.fstat(file.fileno()), path)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        piece = memoryview(bytearray(_CHUNK_BYTES))
        while count := file.readinto(piece):
            digest.update(piece[:count])
            on_bytes(count)
        after = _stamp(os.fstat(file.fileno()), path)
    if not before == after == stamp(path):
        raise FileChanged(f"{path} was changed while it was read")
    return digest.hexdigest()


class DigestCache:
    """Digests by path and stamp. Thread-safe and safe between processes.

    An entry that cannot be read or written only costs one more hash.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = (directory or cache_directory()) / "weights"

    def get(self, path: Path, stamp: Stamp, recorded_before_ns: int | None = None) -> str | None:
        """The digest of the file at a resolved path, if it was hashed with this stamp.

        Args:
            path: Resolved: without links.
            stamp: The file's current stamp.
            recorded_before_ns: Ignores younger entries; see identity.py.
        """
        if stamp.may_be_made_up:
            return None
        try:
            entry = json.loads(self._entry(path).read_text())
            expected = {"version": _VERSION, "path": str(path), **dataclasses.asdict(stamp)}
            digest, recorded = entry.pop("sha256"), entry.pop("recorded_ns")
            if entry != expected or len(digest) != 64 or not int(digest, 16) >= 0:
                return None
            if recorded_before_ns is not None and recorded > recorded_before_ns:
                return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None  # absent, or damaged: the file is hashed again
        return digest

    def put(self, path: Path, stamp: Stamp, digest: str) -> bool:
        """Stores a digest; False if it cannot be written, or the stamp cannot be trusted."""
        now = time.time_ns()
        if now - stamp.changed_ns < _STILL_NS or stamp.may_be_made_up:
            return False
        entry = {
            "version": _VERSION,
            "path": str(path),
            **dataclasses.asdict(stamp),
            "sha256": digest,
            "recorded_ns": now,
        }
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.directory, delete=False) as file:
                try:
                    json.dump(entry, file)
                    file.flush()
                    os.replace(file.name, self._entry(path))
                except BaseException:
                    os.unlink(file.name)
                    raise
        except OSError:
            return False
        return True

    @contextlib.contextmanager
    def hashing(self, path: Path) -> Iterator[None]:
        """Held while a file is hashed, so that two processes do not read it at the same time."""
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = self._entry(path).with_suffix(".lock").open("w")
        except OSError:
            yield  # without a directory each process hashes for itself
            return
        with lock:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _entry(self, path: Path) -> Path:
        return self.directory / (hashlib.sha256(os.fsencode(path)).hexdigest() + ".json")
