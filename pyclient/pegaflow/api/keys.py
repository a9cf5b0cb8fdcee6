"""Keys of blocks: each names a block's tokens and everything before them."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from pegaflow import _native


def token_keys(tokens: Sequence[int], block_size: int, salt: bytes = b"") -> list[bytes]:
    """One key for each whole block of ``tokens``, in order; a partial block has none.

    The key of a block is the SHA-256 of the key before it and the block's tokens, as signed 64-bit
    little-endian numbers; the first block follows the SHA-256 of ``salt``. So equal keys mean equal
    tokens from the prompt's beginning on.

    Args:
        tokens: Token ids of a prompt, from its first token on.
        block_size: Tokens per block.
        salt: Separates keys that must not be shared, for example those of tenants.

    Raises:
        ValueError: ``block_size`` is not positive.
    """
    if block_size < 1:
        raise ValueError(f"blocks of {block_size} tokens")
    key = hashlib.sha256(salt).digest()
    keys = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        block = [int(token) for token in tokens[start : start + block_size]]
        key = hashlib.sha256(key + struct.pack(f"<{block_size}q", *block)).digest()
        keys.append(key)
    return keys


def pack(keys: Sequence[bytes]) -> tuple[bytes, int]:
    """Keys back to back, and the bytes of each.

    Raises:
        ValueError: they differ in length, a key has none or more than 32 bytes, or there are more
            than one call takes.
    """
    if len(keys) > _native.MAX_KEYS:
        raise ValueError(f"{len(keys)} keys in one call; {_native.MAX_KEYS} are possible")
    if not keys:
        return b"", 32
    size = len(keys[0])
    if not 1 <= size <= 32:
        raise ValueError(f"a key of {size} bytes; 1 to 32 are possible")
    for i, key in enumerate(keys):
        if len(key) != size:
            raise ValueError(f"keys[{i}] has {len(key)} bytes and keys[0] has {size}")
    return b"".join(keys), size
