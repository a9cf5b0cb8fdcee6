"""Which claimed blocks go where, for a model with several kinds of blocks. Without state.

The server claims exactly the blocks that a prefix of n tokens needs. vLLM then allocates blocks for
them, position by position, and leaves out (as block 0) those that it does not need. Here the two
are compared: a load writes into each block what belongs there, or does not happen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pegaflow.engine.kinds import BlockKind, BlockKinds, BlockRange, KindRule


class LoadRefused(Exception):
    """The blocks of an allocation cannot be loaded; the text is the label of a metric."""


class ClaimedRange(NamedTuple):
    """Blocks of one kind in the answer to a claim."""

    kind: int
    first: int
    count: int


class LoadRange(NamedTuple):
    """Claimed blocks of one kind, and vLLM's blocks for them."""

    kind: int
    first: int  #: Number of the first block in the prompt.
    count: int
    blocks: tuple[int, ...]  #: Those of all members for one block, then for the next one.


def units_to_ask(
    kinds: BlockKinds, prompt_tokens: int, usable_units: int, most_units: int = 1 << 31
) -> int:
    """The number of leading units whose keys are sent, so that the answer can be offered.

    ``most_units`` is the most that one question can have.
    """
    hashed = kinds.aligned(min(usable_units, most_units) * kinds.unit_tokens)
    return min(hashed, kinds.longest_hit(prompt_tokens)) // kinds.unit_tokens


def offered_tokens(
    kinds: BlockKinds,
    restorable_units: int,
    ranges: Sequence[ClaimedRange],
    local_tokens: int,
    prompt_tokens: int,
) -> int:
    """The tokens beyond ``local_tokens`` that a claim's answer brings; 0 if it brings none.

    vLLM's own hit may have changed since the claim.
    """
    tokens = restorable_units * kinds.unit_tokens
    fits = tokens == kinds.aligned(tokens) and tokens <= kinds.longest_hit(prompt_tokens)
    if not fits or tokens <= local_tokens or local_tokens != kinds.aligned(local_tokens):
        return 0
    claimed = _by_kind(kinds, ranges)
    for index, kind in enumerate(kinds.kinds):
        if not _covers(claimed[index], _missing(kind, tokens, local_tokens)):
            return 0
    return tokens - local_tokens


def pair(
    kinds: BlockKinds,
    ranges: Sequence[ClaimedRange],
    tables: Sequence[Sequence[int]],
    local_tokens: int,
    external_tokens: int,
) -> list[LoadRange]:
    """The blocks to load, after vLLM has allocated ``external_tokens`` behind its own hit.

    ``tables`` are all of the request's blocks, of each of vLLM's groups. If vLLM has accepted fewer
    tokens than were offered, the rules are applied to those: a part of the claim is loaded.

    Blocks of vLLM's own hit are never written: other requests may be reading them.

    Raises:
        LoadRefused: vLLM has kept other blocks than the rules say ("allocation"), or the claim has
            not all of them ("not_claimed").
    """
    tokens = local_tokens + external_tokens
    if tokens != kinds.aligned(tokens):
        raise LoadRefused("allocation")
    claimed = _by_kind(kinds, ranges)
    loads = []
    for index, kind in enumerate(kinds.kinds):
        for group in kind.members:
            _check_table(kind, tables[group], tokens, local_tokens)
        missing = _missing(kind, tokens, local_tokens)
        if not _covers(claimed[index], missing):
            raise LoadRefused("not_claimed")
        if missing.count:
            ids = tuple(tables[group][n] for n in missing.numbers() for group in kind.members)
            loads.append(LoadRange(index, missing.first, missing.count, ids))
    written = [block for load in loads for block in load.blocks]
    if len(set(written)) != len(written):
        raise LoadRefused("allocation")
    return loads


def _missing(kind: BlockKind, tokens: int, local_tokens: int) -> BlockRange:
    """The needed blocks that are not in vLLM's own hit."""
    needed = kind.needed(tokens)
    first = min(max(needed.first, local_tokens // kind.block_tokens), needed.end)
    return BlockRange(first, needed.end - first)


def _by_kind(kinds: BlockKinds, ranges: Sequence[ClaimedRange]) -> list[BlockRange]:
    found = [BlockRange(0, 0) for _ in kinds.kinds]
    for one in ranges:
        if one.kind < len(found):
            found[one.kind] = BlockRange(one.first, one.count)
    return found


def _covers(claimed: BlockRange, wanted: BlockRange) -> bool:
    inside = claimed.first <= wanted.first and wanted.end <= claimed.end
    return wanted.count == 0 or inside


def _check_table(kind: BlockKind, table: Sequence[int], tokens: int, local_tokens: int) -> None:
    """
    Raises:
        LoadRefused: it has a block where the rule needs none, or none where it needs one.
    """
    needed = kind.needed(tokens)
    if len(table) < needed.end or any(table[: needed.first]):
        raise LoadRefused("allocation")
    # What vLLM's own hit has of a window is what vLLM needs of it.
    own = 0 if kind.rule == KindRule.PREFIX else local_tokens // kind.block_tokens
    if 0 in table[max(needed.first, own) : needed.end]:
        raise LoadRefused("allocation")
