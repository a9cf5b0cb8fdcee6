"""The keys of a request's blocks, and which of them can be trusted.

The key of a block is vLLM's chained hash at the *end* of the block, or, for requests with an
adapter, made of that hash and of the adapter's files (adapters.py), and of the engine's view, if
its weights may have changed (view.py). It names the block only if it was computed over exactly the
tokens in it. So this module checks: a request whose hashes do not fit its tokens is not cached. A
wrong key would give a request another conversation's KV, and the hit rate would look healthy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pegaflow.engine.kinds import BlockKinds, BlockRange
from pegaflow.engine.view import salted

if TYPE_CHECKING:
    from pegaflow.vllm.adapters import Adapters

#: The wire's limit.
MAX_KEY_BYTES = 32


class KeyChain:
    """The keys of one request, by block index. Bound to the scheduler's thread.

    ``hash_unit`` tokens lie between two hashes, ``block_size`` in a block; a block's key is the
    last hash inside it, with an adapter's digest where the request has an adapter.
    """

    __slots__ = (
        "_request",
        "_block_size",
        "_unit",
        "_scale",
        "_trusted",
        "_broken",
        "_made",
        "adapters",
        "adapter",
        "salt",
        "key_bytes",
    )

    def __init__(
        self,
        request: Any,
        block_size: int,
        hash_unit: int,
        adapters: Adapters | None = None,
        salt: bytes = b"",
    ) -> None:
        """``adapters``: the engine's; None only if no request has one. ``salt``: that of the
        engine's view.
        """
        self._request = request
        self.salt = salt
        self.adapters = adapters
        self.adapter = adapters.of(request) if adapters is not None else None
        #: Keys that are not vLLM's hashes, by block, with the hash from which each was made.
        self._made: dict[int, tuple[bytes, bytes]] = {}
        self._block_size = block_size
        self._unit = hash_unit
        self._scale = block_size // hash_unit
        #: Hashes from this index on include a token that was removed; None: all are good.
        self._trusted: int | None = None
        self._broken = ""
        self.key_bytes = 0

    @property
    def broken(self) -> str:
        """Why the request cannot be cached; empty while it can."""
        return self._broken

    @property
    def doubt(self) -> str:
        """Why no block has a key, as the metric's label; empty if the prompt may have some."""
        if self._broken:
            return "uncacheable"
        return "" if self._adapter_is_known() else "adapter"

    def _adapter_is_known(self) -> bool:
        return self.adapter is None or self.adapters.is_known(self.adapter)

    def usable_blocks(self) -> int:
        """How many leading blocks have a key that can be trusted now.

        Reads the request each time: it grows while it generates, and another connector may remove
        its last prompt token after vLLM hashed it. That leaves one hash too many, which is
        tolerated, but neither that hash nor any that follows from it is used again.
        """
        if self._broken or not self._adapter_is_known():
            return 0
        hashes = self._request.block_hashes
        fit = self._request.num_tokens // self._unit
        extra = len(hashes) - fit
        if extra != 0 and not self._explain(extra, fit):
            return 0
        if not hashes:
            return 0
        if not self.key_bytes:
            self.key_bytes = len(hashes[0])
            if not 0 < self.key_bytes <= MAX_KEY_BYTES:
                self._broken = f"a block hash has {self.key_bytes} bytes"
                return 0
        trusted = fit if self._trusted is None else min(fit, self._trusted)
        return trusted // self._scale

    def _explain(self, extra: int, fit: int) -> bool:
        if extra == 1:
            self._trusted = fit if self._trusted is None else min(self._trusted, fit)
            return True
        # After a stale hash was detected, vLLM's own count stays one ahead or catches up.
        self._broken = f"{fit + extra} block hashes for {self._request.num_tokens} tokens"
        return False

    def key(self, block: int) -> bytes:
        """The key of one block below usable_blocks()."""
        return self._key(block, self.hash(block))

    def keys(self, first: int, last: int) -> list[bytes]:
        """The keys of blocks ``first`` to ``last`` - 1, all below usable_blocks()."""
        hashes = self.hashes(first, last)
        if self._keys_are_hashes():
            return hashes
        return [self._key(first + i, block_hash) for i, block_hash in enumerate(hashes)]

    def hash(self, block: int) -> bytes:
        """vLLM's hash of the block, used in its own cache and in KV events."""
        return self._request.block_hashes[(block + 1) * self._scale - 1]

    def hashes(self, first: int, last: int) -> list[bytes]:
        start = (first + 1) * self._scale - 1
        return list(self._request.block_hashes[start : last * self._scale : self._scale])

    def _key(self, block: int, block_hash: bytes) -> bytes:
        if self._keys_are_hashes():
            return block_hash
        made = self._made.get(block)
        if made is None or made[0] != block_hash:
            key = block_hash if self.adapter is None else self.adapter.key(block_hash)
            made = self._made[block] = (block_hash, salted(self.salt, key))
        return made[1]

    def _keys_are_hashes(self) -> bool:
        return self.adapter is None and not self.salt


class KindKeys:
    """The keys of one request's blocks of several kinds. Bound to the scheduler's thread.

    One chain in hash units names the blocks of all kinds; each block has the key of the unit that
    it ends with. A kind's number is no part of a key: it is the server that keeps kinds apart.
    """

    __slots__ = ("chain", "_kinds")

    def __init__(self, chain: KeyChain, kinds: BlockKinds) -> None:
        """``chain``: that of the units; its blocks are units."""
        self.chain = chain
        self._kinds = kinds

    def usable_units(self) -> int:
        """How many leading units have a key that can be trusted now."""
        return self.chain.usable_blocks()

    def units(self, count: int) -> list[bytes]:
        """The keys of the first ``count`` units, at most usable_units()."""
        return self.chain.keys(0, count)

    def key(self, kind: int, block: int) -> bytes:
        """The key of one block, whose units are all usable."""
        return self.chain.key(self._kinds.unit_of(self._kinds.kinds[kind], block))

    def keys(self, kind: int, blocks: BlockRange) -> list[bytes]:
        return [self.key(kind, block) for block in blocks.numbers()]

    def hash(self, kind: int, block: int) -> bytes:
        """vLLM's hash of the block, in each of the kind's groups."""
        return self.chain.hash(self._kinds.unit_of(self._kinds.kinds[kind], block))

    def of_kind(self, kind: int) -> KeysOfKind:
        return KeysOfKind(self, kind)


class KeysOfKind:
    """The keys of one kind's blocks, with the calls of a KeyChain."""

    __slots__ = ("_keys", "_kind")

    def __init__(self, keys: KindKeys, kind: int) -> None:
        self._keys = keys
        self._kind = kind

    def keys(self, first: int, last: int) -> list[bytes]:
        return [self._keys.key(self._kind, block) for block in range(first, last)]

    def hash(self, block: int) -> bytes:
        return self._keys.hash(self._kind, block)

    def hashes(self, first: int, last: int) -> list[bytes]:
        return [self.hash(block) for block in range(first, last)]
