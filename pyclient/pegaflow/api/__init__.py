"""The cache for an engine of your own: save, look up and load blocks of NumPy arrays.

``Cache`` waits, ``AsyncCache`` is for asyncio. docs/python_api.md describes their use, and
examples/engine.py is an engine with a cache.
"""

from pegaflow.api.aio import AsyncCache
from pegaflow.api.buffers import Layout, LayoutError
from pegaflow.api.cache import Cache
from pegaflow.api.keys import token_keys
from pegaflow.api.kinds import Claim, Kind, KindRange, LoadRange
from pegaflow.api.results import Loaded, Saved

__all__ = [
    "AsyncCache",
    "Cache",
    "Claim",
    "Kind",
    "KindRange",
    "Layout",
    "LayoutError",
    "LoadRange",
    "Loaded",
    "Saved",
    "token_keys",
]
