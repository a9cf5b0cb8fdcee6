"""PegaFlow inside SGLang: docs/sglang.md has the flags for each release.

``PegaHiCache`` is a storage backend of HiCache, ``PegaLinker`` an external linker of its tree.
"""

from __future__ import annotations

from typing import Any

__all__ = ["PegaHiCache", "PegaLinker"]


def __getattr__(name: str) -> Any:
    # Each needs a part of SGLang that some releases do not have.
    if name == "PegaHiCache":
        from pegaflow.sglang.hicache import PegaHiCache

        return PegaHiCache
    if name == "PegaLinker":
        from pegaflow.sglang.linker import PegaLinker

        return PegaLinker
    raise AttributeError(f"pegaflow.sglang has no {name}")
