"""Keys of blocks: each names a block's tokens and everything before them."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from pegaflow import _native
from pegaflow.api.arguments import MAX_KEY_BYTES, key_list, listed, shown, whole


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
        ValueError: ``block_size`` is not positive, a token is not a whole number of 64 bits, or
            ``salt`` is not bytes.
    """
    block_size = whole("block_size", block_size, 1, 1 << 30)
    if not isinstance(salt, bytes | bytearray | memoryview):
        raise ValueError(f"salt={shown(salt)} is not bytes")
    tokens = listed("tokens", tokens, "whole numbers")
    key = hashlib.sha256(salt).digest()
    keys = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        block = tokens[start : start + block_size]
        try:
            packed = struct.pack(f"<{block_size}q", *block)
        except struct.error:  # not a number that Python takes for an index, or too large
            for place, token in enumerate(block, start):
                whole(f"tokens[{place}]", token, -(1 << 63), (1 << 63) - 1)
            raise
        key = hashlib.sha256(key + packed).digest()
        keys.append(key)
    return keys


def pack(keys: Sequence[bytes]) -> tuple[bytes, int]:
    """Keys back to back, and the bytes of each.

    Raises:
        ValueError: as key_list().
    """
    made = key_list(keys, _native.MAX_KEYS)
    return b"".join(made), len(made[0]) if made else MAX_KEY_BYTES
