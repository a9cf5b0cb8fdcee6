"""Several kinds of blocks: windows, chunks and recurrent states beside full attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from pegaflow.api.arguments import listed, shown, whole
from pegaflow.api.buffers import Layout, LayoutError, layout

#: The server's limit.
MAX_KINDS = 16
MAX_TOKENS = 1 << 30
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


def check_kinds(kinds: Sequence[Kind], unit_tokens: int, alignment_tokens: int) -> None:
    """
    Raises:
        ValueError: a kind is of another class, or its rule or a size is invalid.
    """
    if len(kinds) > MAX_KINDS:
        raise ValueError(f"{len(kinds)} kinds of blocks; 1 to {MAX_KINDS} are possible")
    whole("unit_tokens", unit_tokens, 1, MAX_TOKENS)
    whole("alignment_tokens", alignment_tokens, 1, MAX_TOKENS)
    for number, kind in enumerate(kinds):
        name = f"kinds[{number}]"
        if not isinstance(kind, Kind):
            raise ValueError(f"{name}={shown(kind)} is not a Kind")
        choices = ", ".join(RULES)
        if not isinstance(kind.rule, str) or kind.rule not in RULES:
            raise ValueError(f"{name}: rule {shown(kind.rule)} is not one of {choices}")
        if kind.rule == "prefix" and number:
            raise ValueError(f"{name}: the kind of rule prefix is the first, and there is only one")
        block = whole(f"{name}: block_tokens", kind.block_tokens, 1, MAX_TOKENS)
        if block % unit_tokens:
            raise ValueError(
                f"{name}: block_tokens={block} is no multiple of unit_tokens={unit_tokens}"
            )
        if alignment_tokens % block:
            raise ValueError(
                f"{name}: alignment_tokens={alignment_tokens} is no multiple of "
                f"block_tokens={block}"
            )
        _check_tokens(name, kind, block)
        if not listed(f"{name}: members", kind.members, "lists of arrays"):
            raise ValueError(f"{name}: members is empty; a kind has one or more cache groups")


def _check_tokens(name: str, kind: Kind, block: int) -> None:
    """
    Raises:
        ValueError: the window or the chunk is invalid, or stated for another rule.
    """
    tokens = whole(f"{name}: tokens", kind.tokens, 0, MAX_TOKENS)
    if kind.rule in ("prefix", "state"):
        if tokens:
            raise ValueError(f"{name}: tokens={tokens} with the rule {kind.rule}, which has none")
    elif not tokens:
        raise ValueError(f"{name}: tokens=0 with the rule {kind.rule}, which needs a length")
    elif kind.rule == "chunk" and tokens % block:
        raise ValueError(f"{name}: tokens={tokens} is no multiple of block_tokens={block}")


def kind_layouts(kinds: Sequence[Kind]) -> list[list[Layout]]:
    """The layouts of the members of each kind.

    Raises:
        LayoutError: an array cannot be cached as it lies.
    """
    layouts = []
    for number, kind in enumerate(kinds):
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
