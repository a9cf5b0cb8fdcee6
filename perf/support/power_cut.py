"""A power cut for the file of a disk whose writes tests/support/unflushed_writes.cpp recorded."""

from __future__ import annotations

import dataclasses
import random
import struct
from pathlib import Path

SECTOR = 4096
_RECORD = struct.Struct("<4Q")
_WRITE, _FLUSH = 1, 2


@dataclasses.dataclass(frozen=True)
class Write:
    """The bytes that a write replaced."""

    offset: int
    former: bytes


def unflushed(log: bytes) -> list[Write]:
    """The writes that no flush has made durable, in their order."""
    writes: dict[int, Write] = {}
    at = 0
    while at + _RECORD.size <= len(log):
        kind, sequence, offset, size = _RECORD.unpack_from(log, at)
        content = log[at + _RECORD.size : at + _RECORD.size + size]
        if len(content) < size:
            break  # The process was killed in the middle of the record, before its write.
        at += _RECORD.size + size
        if kind == _WRITE:
            writes[sequence] = Write(offset, content)
        elif kind == _FLUSH:
            pending = set(struct.unpack(f"<{size // 8}Q", content))
            writes = {
                number: write
                for number, write in writes.items()
                if number > sequence or number in pending
            }
        else:
            raise ValueError(f"a record of kind {kind} at byte {at}")
    return [writes[number] for number in sorted(writes)]


def cut(file: Path, log: Path, chance: random.Random) -> tuple[int, int]:
    """Takes back each sector that was not flushed with a probability of a half.

    The process that wrote has ended. Returns the sectors that were not flushed, and the lost ones.
    """
    open_sectors = lost = 0
    with file.open("r+b") as opened:
        for write in reversed(unflushed(log.read_bytes())):
            for begin in range(0, len(write.former), SECTOR):
                open_sectors += 1
                if chance.random() < 0.5:
                    lost += 1
                    opened.seek(write.offset + begin)
                    opened.write(write.former[begin : begin + SECTOR])
    return open_sectors, lost
