"""The name of an earlier integration, in its spelling; configurations may still have it."""

from __future__ import annotations

from pegaflow.sglang.hicache import PegaHiCache

PeagflowRadixCache = PegaHiCache
__all__ = ["PeagflowRadixCache"]
