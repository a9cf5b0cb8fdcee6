"""The correctly spelled name of ``peagflow_radix_cache``."""

from __future__ import annotations

from pegaflow.sglang.hicache import PegaHiCache

PegaflowRadixCache = PegaHiCache
__all__ = ["PegaflowRadixCache"]
