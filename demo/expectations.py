"""The number of blocks that a prompt must load, computed without asking the programs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

#: Shorter hits are not offered to the engine: a single block costs more to load than to compute.
MIN_OFFERED_BLOCKS = 2


def full_blocks(tokens: int, block_tokens: int) -> int:
    """Blocks that this many tokens fill. Only full blocks have keys, so only those are stored."""
    return tokens // block_tokens


def local_hit_blocks(prompt_tokens: int, block_tokens: int) -> int:
    """Blocks that vLLM takes from its own cache when all of the prompt is in it.

    vLLM leaves at least one token to compute, because that is where the next token comes from: on
    the block grid it therefore leaves out the whole last block.
    """
    return full_blocks(prompt_tokens - 1, block_tokens)


def offered_blocks(
    prompt_tokens: int, block_tokens: int, stored_blocks: int, local_blocks: int = 0
) -> int:
    """Blocks that the connector must offer, and load, for a prompt.

    On the block grid that is the whole prompt: of a load vLLM computes only the last token again.

    Args:
        stored_blocks: Leading blocks of this prompt that are in the pool.
        local_blocks: Leading blocks that vLLM's own cache has; these are not loaded.
    """
    reachable = min(full_blocks(prompt_tokens, block_tokens), stored_blocks)
    missing = reachable - local_blocks
    return missing if missing >= MIN_OFFERED_BLOCKS else 0


@dataclasses.dataclass(frozen=True)
class Layers:
    """Layers of a model that remember the same part of a prompt."""

    name: str  #: "full", "window", "chunk" or "state".
    block_tokens: int
    #: Window: tokens that are read, the current one included. Chunk: its length.
    reach: int = 0
    copies: int = 1  #: Groups of such layers in the engine; they are saved as one.

    def blocks_for(self, tokens: int) -> set[int]:
        """Numbers of the blocks that an engine needs to compute the token at ``tokens``."""
        if self.name == "state":
            return {tokens // self.block_tokens - 1} if tokens else set()
        oldest = {
            "full": 0,
            "window": max(0, tokens - (self.reach - 1)),
            "chunk": tokens - tokens % self.reach if self.reach else 0,
        }[self.name]
        return {token // self.block_tokens for token in range(oldest, tokens)}


#: The layers of tools/vllm-cpu/make_hybrid.py's models in vLLM's CPU build, with --block-size 32.
#: vLLM chooses the blocks of states.
MODEL_LAYERS: dict[str, tuple[Layers, ...]] = {
    "gemma3": (Layers("full", 32), Layers("window", 32, 128, copies=2)),
    "gpt-oss": (Layers("full", 32), Layers("window", 32, 128)),
    "mistral-window": (Layers("window", 32, 128),),
    "qwen3-next": (Layers("full", 256), Layers("state", 256, copies=3)),
    "granite": (Layers("full", 256), Layers("state", 256, copies=3)),
}


#: The layers of the models of --draft; those of the draft model are in the same group.
DRAFTED_LAYERS = (Layers("full", 32),)


@dataclasses.dataclass(frozen=True)
class Expected:
    """What one request must load and add to the cache, by the name of the layers."""

    loaded_tokens: int
    loaded_blocks: dict[str, int]
    stored_blocks: dict[str, int]


class ExpectedCache:
    """The contents of the cache, computed from the requests alone.

    For one request after another, each of which finds vLLM's own cache empty, and a cache that has
    room for all of them. Blocks are named by the tokens up to their end.
    """

    def __init__(
        self,
        layers: Sequence[Layers],
        interval: int,
        least_tokens: int = 0,
        *,
        last_block_is_proof: bool = False,
    ) -> None:
        """
        Args:
            interval: The value of pegaflow.window_interval.
            least_tokens: Shorter hits are not loaded.
            last_block_is_proof: The last cached block of a prompt is not loaded, as with a draft
                model whose KV depends on the next token.
        """
        self._layers = tuple(layers)
        self._grid = math.lcm(*(one.block_tokens for one in layers))
        self._interval = math.ceil(interval / self._grid) * self._grid
        self._least = least_tokens
        self._proof = self._grid if last_block_is_proof else 0
        self._only_full = all(one.name == "full" for one in layers)
        self._has_states = any(one.name == "state" for one in layers)
        self._stored: dict[str, set[tuple[int, ...]]] = {one.name: set() for one in layers}

    def blocks(self) -> dict[str, int]:
        """The number of blocks of each name."""
        return {name: len(stored) for name, stored in self._stored.items()}

    def ask(self, prompt: Sequence[int], answer: Sequence[int]) -> Expected:
        """A request with its prompt and its answer's tokens."""
        prompt = tuple(prompt)
        hit = self._hit(prompt)
        before = self.blocks()
        # The answer's last token is sampled and not computed.
        self._store(prompt, (prompt + tuple(answer))[: len(prompt) + len(answer) - 1], hit)
        return Expected(
            loaded_tokens=hit,
            loaded_blocks={one.name: len(one.blocks_for(hit)) for one in self._layers},
            stored_blocks={name: count - before[name] for name, count in self.blocks().items()},
        )

    def _hit(self, prompt: tuple[int, ...]) -> int:
        """The longest prefix that all layers can continue from."""
        # A token is left to compute: beside full attention it needs more than is loaded.
        longest = len(prompt) if self._only_full else len(prompt) - 1
        for tokens in range(longest - longest % self._grid, 0, -self._grid):
            if tokens - self._proof < max(1, self._least):
                return 0
            if all(
                self._name(one, prompt, number) in self._stored[one.name]
                for one in self._layers
                for number in one.blocks_for(tokens)
            ):
                return tokens - self._proof
        return 0

    def _name(self, one: Layers, tokens: tuple[int, ...], number: int) -> tuple[int, ...]:
        return tokens[: (number + 1) * one.block_tokens]

    def _store(self, prompt: tuple[int, ...], written: tuple[int, ...], hit: int) -> None:
        for one in self._layers:
            numbers: set[int] = set()
            if one.name == "full":
                numbers = set(range(len(written) // one.block_tokens))
            elif one.name == "state":
                # vLLM keeps the state from which the same prompt would continue.
                boundary = (len(prompt) - 1) // self._grid * self._grid
                if boundary > hit:
                    numbers = one.blocks_for(boundary)
            else:
                numbers = self._windows(one, len(prompt), len(written), hit)
            self._stored[one.name] |= {self._name(one, written, number) for number in numbers}

    def _windows(self, one: Layers, prompt: int, written: int, hit: int) -> set[int]:
        """Blocks of a window, or of a chunk, in front of the boundaries behind the hit."""
        ends = {(prompt - 1) // self._grid * self._grid, prompt // self._grid * self._grid}
        if self._interval and not self._has_states:
            ends.update(range(0, written + 1, self._interval))
        numbers = set().union(*(one.blocks_for(end) for end in ends if hit < end <= written))
        # Those of a boundary that the answer has not reached are saved as far as they go.
        numbers |= {
            number
            for end in ends
            if end > written
            for number in one.blocks_for(end)
            if hit < (number + 1) * one.block_tokens <= written
        }
        last = written // self._grid * self._grid
        if not self._has_states and last > hit:
            # At the end of the request vLLM has only what the next token would need.
            numbers |= one.blocks_for(last) & one.blocks_for(written)
        return numbers
