"""The directories and links on a path, and whether they may have changed since a time."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

#: The kernel's limit of links on a path.
_MOST_LINKS = 40


def passed(path: Path) -> Iterator[Path]:
    """The directories and links that the kernel passes on the way to a file or directory, and the
    file itself at the end; each by a path without links before its last part.

    Raises:
        OSError: there is no such file, or a loop of links.
    """
    at = Path("/")
    todo = list(reversed((Path.cwd() / path).parts[1:]))
    links = 0
    while todo:
        part = todo.pop()
        if part == "..":
            at = at.parent
            continue
        place = at / part
        yield place
        if not stat.S_ISLNK(os.lstat(place).st_mode):
            at = place
            continue
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target = Path(os.readlink(place))
        at = Path("/") if target.is_absolute() else at
        todo += reversed(target.parts[1:] if target.is_absolute() else target.parts)


def switched(path: Path, since_ns: int) -> str:
    """Why a path may have led to another file at some time after ``since_ns``; empty if it has not.

    For example a replaced link, or a directory that took the name of another one. The contents of
    the file are not considered.

    Raises:
        OSError: there is no such file.
    """
    places = list(passed(path))
    for place in places:
        status = os.lstat(place)
        if stat.S_ISREG(status.st_mode) or status.st_ctime_ns <= since_ns:
            continue
        # A new entry changes both times of a directory, a new name the change time only. Entries
        # come and go above a model; in its own directory either is a reason to doubt.
        gained_an_entry = stat.S_ISDIR(status.st_mode) and status.st_ctime_ns == status.st_mtime_ns
        if place == places[-1] or not gained_an_entry:
            return f"{place} was replaced or changed"
    return ""
