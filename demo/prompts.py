"""The prompts: random tokens from one seed, lengths on and off the block grid."""

from __future__ import annotations

import dataclasses
import random

BLOCK_TOKENS = 32

# The first ids are the tokenizer's special tokens.
_FIRST_TOKEN = 3


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt with a name for the reader."""

    name: str
    tokens: tuple[int, ...]
    #: Leading tokens that are those of an earlier prompt of the set.
    shared_tokens: int = 0
    #: Asked (and so stored) before the reload. Otherwise only its shared prefix can be loaded.
    asked_before: bool = True

    def __len__(self) -> int:
        return len(self.tokens)


class PromptMaker:
    """Draws prompts; the same seed gives the same prompts in the same order."""

    def __init__(self, seed: int, vocabulary: int) -> None:
        self._random = random.Random(seed)
        self._vocabulary = vocabulary

    def tokens(self, count: int) -> tuple[int, ...]:
        """``count`` tokens that are in no cache."""
        return tuple(self._random.randrange(_FIRST_TOKEN, self._vocabulary) for _ in range(count))

    def prompt_set(self) -> list[Prompt]:
        """The prompts of the demo. Those off the grid end in the middle of a block."""
        prompts = [
            Prompt("500", self.tokens(500)),
            Prompt("512, on the grid", self.tokens(512)),
            Prompt("1000", self.tokens(1000)),
            Prompt("1024, on the grid", self.tokens(1024)),
            Prompt("3000", self.tokens(3000)),
            Prompt("3008, on the grid", self.tokens(3008)),
        ]
        half, whole = prompts[1].tokens, prompts[3].tokens[: 24 * BLOCK_TOKENS]
        prompts += [
            Prompt("1000, prefix of another", half + self.tokens(1000 - len(half)), len(half)),
            Prompt(
                "1000, only its prefix stored",
                whole + self.tokens(1000 - len(whole)),
                len(whole),
                asked_before=False,
            ),
        ]
        return prompts
