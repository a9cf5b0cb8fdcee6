"""Results of saves and loads."""

from __future__ import annotations

import dataclasses
from typing import Any

from pegaflow import _native

#: The exception for each code of pegaflow::Errc.
ERRORS: dict[str, type[_native.PegaFlowError]] = {
    "invalid_argument": _native.InvalidArgument,
    "busy": _native.Busy,
    "out_of_capacity": _native.OutOfCapacity,
    "gone": _native.Gone,
    "timeout": _native.Timeout,
    "cancelled": _native.Cancelled,
    "peer_lost": _native.PeerLost,
    "refused": _native.Refused,
    "corrupt": _native.Corrupt,
    "io": _native.IoError,
    "internal": _native.Internal,
}


@dataclasses.dataclass(frozen=True)
class Saved:
    """Every block was saved, skipped, or failed."""

    blocks: int = 0  #: Saved: every engine in the same namespace finds them.
    skipped: int = 0  #: Cached, being saved by another engine, or without room.
    bytes: int = 0  #: Copied.
    error: str | None = None  #: Why the others failed; None when none did.


@dataclasses.dataclass(frozen=True)
class Loaded:
    """The first ``blocks`` blocks are whole; the contents of the others must not be used.

    After load_ranges(), all blocks of all ranges are whole, or, with an error, none may be used.
    """

    blocks: int = 0
    bytes: int = 0  #: Copied.
    error: str | None = None  #: Why found blocks were not loaded; None when nothing failed.


def saved(done: Any) -> Saved:
    return Saved(done.blocks, done.skipped, done.bytes, done.error)


def loaded(done: Any) -> Loaded:
    return Loaded(done.blocks, done.bytes, done.error)


def loaded_ranges(done: Any) -> Loaded:
    return Loaded(0 if done.error else done.blocks, done.bytes, done.error)


def raise_for(done: Any) -> None:
    """Raises the error of a finished job, if it has one."""
    if done.error is not None:
        raise ERRORS.get(done.error_code, _native.PegaFlowError)(done.error)
