"""The blocks that an engine uses: those that were computed with its current weights.

The namespace identifies the weights with which an engine was started. Weights may be replaced while
it runs, and vLLM does not inform a connector of that. So the engine leaves its first blocks as soon
as its weights may have changed, and from then on works in another view of the namespace: a salt
that is part of the key of each block.
"""

from __future__ import annotations

import hashlib
import secrets

_SALT_BYTES = 16


def salted(salt: bytes, key: bytes) -> bytes:
    """The key, as long as ``key``, of a block in the view that has ``salt``."""
    if not salt:
        return key
    return hashlib.sha256(b"pegaflow view 1\0" + salt + key).digest()[: len(key)]


class View:
    """The view that one engine works in. Bound to the scheduler's thread.

    There are three kinds: the namespace itself, without a salt; one for each ``weight_version``,
    which engines with equal namespaces share; and private ones, whose salt is random.

    A ``pegaflow.weights_id`` is the operator's statement, so a version or an explicit reset ends a
    private view. An id made of files never fits the engine again once its weights may differ.
    """

    def __init__(self, named: bool) -> None:
        """``named``: the operator has set ``pegaflow.weights_id``."""
        self.salt = b""
        self.is_private = False
        self._named = named
        self._version: str | None = None  # vLLM's, once one was set
        self._is_new = True  # no block was computed in it
        self._holds_kv = False

    def computed(self) -> None:
        """The engine computes KV, or loads some."""
        self._is_new = False
        self._holds_kv = True

    def emptied(self) -> None:
        """vLLM has emptied its own cache, and no request holds KV."""
        self._holds_kv = False

    def leave(self) -> bool:
        """The weights may differ from here on; whether that makes it another view."""
        if self.is_private and self._is_new:
            return False
        self._enter(secrets.token_bytes(_SALT_BYTES), private=True)
        return True

    def set_version(self, version: str) -> bool:
        """The operator has named the current weights; whether that makes it another view.

        The view of that version is entered once vLLM holds no KV of other weights: at once, or with
        the next reset.
        """
        left = self.leave()
        self._version = version
        return self._enter_shared() or left

    def reset(self) -> bool:
        """No block that was saved so far is found in any view; whether it is another view now."""
        return self.is_private and self._enter_shared()

    def _enter_shared(self) -> bool:
        if not self._named or self._holds_kv:
            return False
        if self._version is None:
            self._enter(b"", private=False)
        else:
            text = b"pegaflow weight version 1\0" + self._version.encode()
            self._enter(hashlib.sha256(text).digest()[:_SALT_BYTES], private=False)
        return True

    def _enter(self, salt: bytes, private: bool) -> None:
        self.salt = salt
        self.is_private = private
        self._is_new = True

    def __str__(self) -> str:
        if self.is_private:
            return "only its own blocks"
        if self._version is None:
            return "the blocks of its namespace"
        return f"the blocks of weight version {self._version!r}"
