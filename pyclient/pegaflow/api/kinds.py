"""Several kinds of blocks: windows, chunks and recurrent states beside full attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from pegaflow.api.buffers import Layout, LayoutError, layout

#: The rules by their numbers on the wire.
RULES = ("prefix", "trailing", "chunk", "state")


@dataclasses.dataclass(frozen=True)
class Kind:
    """Blocks of equal rule and size.

    ``rule`` states which blocks an engine needs to continue after n tokens: "prefix" all of
    [0, n), "trailing" those that cover [n - tokens, n), "chunk" those from the last multiple of
    ``tokens`` up to n, "state" the one that ends at n.
    """

    rule: str
    block_tokens: int
    #: The arrays of each cache group of this kind; a group has block numbers of its own. Groups may
    #: share arrays if no block is used by two of them.
    members: Sequence[Iterable[Any]]
    tokens: int = 0  #: The window without the next token, or the chunk; otherwise 0.
    #: Along which blocks are numbered, for all arrays or one for each array of a member.
    block_axis: int | Sequence[int] = 0


class KindRange(NamedTuple):
    """Consecutive blocks of one kind, by their number from the prompt's beginning."""

    kind: int
    first: int
    count: int


class LoadRange(NamedTuple):
    """Claimed blocks, and the engine's blocks for them."""

    kind: int
    first: int
    count: int
    blocks: Sequence[int]  #: Those of all members for the first block, then for the next one.


@dataclasses.dataclass(frozen=True)
class Claim:
    """What a prompt can be restored from; held until unclaim()."""

    units: int = 0  #: The length that can be restored; 0: nothing beyond the engine's own units.
    ranges: tuple[KindRange, ...] = ()  #: All blocks that it needs, and no others.
    token: bytes = b""
    error: str | None = None  #: Why nothing was claimed; None for a miss.


def kind_layouts(kinds: Sequence[Kind]) -> list[list[Layout]]:
    """The layouts of the members of each kind.

    Raises:
        LayoutError: an array cannot be cached as it lies.
        ValueError: a rule is unknown.
    """
    layouts = []
    for number, kind in enumerate(kinds):
        if kind.rule not in RULES:
            raise ValueError(
                f"kinds[{number}]: rule {kind.rule!r} is not one of {', '.join(RULES)}"
            )
        try:
            layouts.append([layout(arrays, kind.block_axis) for arrays in kind.members])
        except LayoutError as error:
            raise LayoutError(f"kinds[{number}]: {error}") from None
    return layouts


def description(kinds: Sequence[Kind], layouts: Sequence[Sequence[Layout]]) -> str:
    """The format of the blocks of all kinds; blocks are interchangeable where it is equal."""
    return " || ".join(
        f"{kind.rule} {kind.tokens} {kind.block_tokens}: "
        + " | ".join(member.description for member in members)
        for kind, members in zip(kinds, layouts, strict=True)
    )


def native_kinds(kinds: Sequence[Kind], layouts: Sequence[Sequence[Layout]]) -> list[Any]:
    """The kinds as the native module takes them."""
    return [
        (
            RULES.index(kind.rule),
            kind.tokens,
            kind.block_tokens,
            [(member.segments, member.block_count) for member in members],
        )
        for kind, members in zip(kinds, layouts, strict=True)
    ]
