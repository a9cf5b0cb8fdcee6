"""The kinds of blocks that a model has, and which blocks of each kind a prefix needs.

The rules are those of the server (``engine/kinds/block_kinds.h``); tests compare both with vLLM's.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import NamedTuple

#: The wire's limit.
MAX_KINDS = 16


class KindRule(enum.IntEnum):
    """Which blocks an engine needs to continue after n tokens. The numbers are the wire's."""

    PREFIX = 0  #: Full attention, MLA: all blocks of [0, n).
    TRAILING = 1  #: Sliding windows: the blocks that cover [n - tokens, n).
    CHUNK = 2  #: Chunked attention: the blocks of [c, n), c the last multiple of tokens up to n.
    STATE = 3  #: Recurrent states: the one block that ends at n.

    @property
    def label(self) -> str:
        """The label `kind` of metrics and events."""
        return ("full", "window", "chunk", "state")[self]


class BlockRange(NamedTuple):
    """Consecutive blocks of a prompt, by their number from its beginning."""

    first: int
    count: int

    @property
    def end(self) -> int:
        return self.first + self.count

    def numbers(self) -> range:
        return range(self.first, self.end)


@dataclasses.dataclass(frozen=True)
class BlockKind:
    """Blocks of equal rule and size."""

    rule: KindRule
    tokens: int  #: The window without the next token, or the chunk; otherwise 0.
    block_tokens: int
    #: The engine's cache groups whose pages form one page of this kind, in the page's order.
    members: tuple[int, ...] = (0,)

    def needed(self, tokens: int) -> BlockRange:
        """The blocks that a prefix of ``tokens`` needs."""
        end = tokens // self.block_tokens
        first = 0
        if self.rule == KindRule.TRAILING:
            first = max(0, tokens - self.tokens) // self.block_tokens
        elif self.rule == KindRule.CHUNK:
            first = tokens // self.tokens * self.tokens // self.block_tokens
        elif self.rule == KindRule.STATE:
            first = max(0, end - 1)
        return BlockRange(first, end - first)

    def wanted(self, tokens: int, local_tokens: int) -> BlockRange:
        """The blocks that the cache claims for a prefix of ``tokens``, of which the engine has
        ``local_tokens`` itself.

        Other kinds than the prefix are claimed whole: the engine's own are those of another
        boundary.
        """
        blocks = self.needed(tokens)
        if self.rule != KindRule.PREFIX:
            return blocks
        first = min(local_tokens // self.block_tokens, blocks.end)
        return BlockRange(first, blocks.end - first)


@dataclasses.dataclass(frozen=True)
class BlockKinds:
    """The kinds of one namespace. Immutable."""

    kinds: tuple[BlockKind, ...]  #: The prefix kind is the first, if there is one.
    unit_tokens: int  #: Tokens between two hashes of a prompt.
    alignment_tokens: int  #: An engine continues only after a multiple of this many tokens.

    @property
    def is_plain(self) -> bool:
        """One group of full attention: nothing but its blocks in a row is needed."""
        return (
            len(self.kinds) == 1
            and self.kinds[0].rule == KindRule.PREFIX
            and len(self.kinds[0].members) == 1
        )

    @property
    def groups(self) -> int:
        """The number of the engine's cache groups that are served."""
        return sum(len(kind.members) for kind in self.kinds)

    @property
    def leaves_a_token(self) -> bool:
        """Whether the last token of a prompt cannot be loaded.

        vLLM computes it again after a full hit. Its own window or chunk may begin one block
        earlier than that of the next token, and a state has already consumed it.
        """
        return any(kind.rule != KindRule.PREFIX for kind in self.kinds)

    def aligned(self, tokens: int) -> int:
        return tokens // self.alignment_tokens * self.alignment_tokens

    def longest_hit(self, prompt_tokens: int) -> int:
        """The longest prefix of a prompt that may be loaded."""
        return self.aligned(prompt_tokens - 1 if self.leaves_a_token else prompt_tokens)

    def unit_of(self, kind: BlockKind, block: int) -> int:
        """The position of a block's key among the keys of the prompt's units."""
        return (block + 1) * (kind.block_tokens // self.unit_tokens) - 1

    def problem(self) -> str:
        """Why the server would refuse them; empty if it would not."""
        if not 1 <= len(self.kinds) <= MAX_KINDS:
            return f"{len(self.kinds)} kinds of blocks; 1 to {MAX_KINDS} are supported"
        for kind in self.kinds:
            if reason := self._problem_of(kind):
                return reason
        return ""

    def _problem_of(self, kind: BlockKind) -> str:
        block = kind.block_tokens
        if block <= 0 or block % self.unit_tokens != 0:
            return f"hashes every {self.unit_tokens} tokens do not fit blocks of {block}"
        if self.alignment_tokens % block != 0:
            return f"an alignment of {self.alignment_tokens} tokens does not fit blocks of {block}"
        if kind.rule == KindRule.TRAILING and kind.tokens <= 0:
            return "a sliding window of 1 token has no past"
        if kind.rule == KindRule.CHUNK:
            if kind.tokens <= 0 or kind.tokens % block != 0:
                return f"attention chunks of {kind.tokens} tokens do not fit blocks of {block}"
            if block != self.alignment_tokens:
                return (
                    "chunked attention beside blocks of another size is not supported: "
                    f"{block} and {self.alignment_tokens} tokens"
                )
        return ""
