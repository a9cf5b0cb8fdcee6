"""The number of blocks that a prompt must load, computed without asking the programs."""

from __future__ import annotations

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
