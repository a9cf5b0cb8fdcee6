"""Whether the memory behind the addresses of a KV cache stays as long as the engine runs.

Engines of a direct group map the memory of a GPU. Where it consists of several allocations, as
PyTorch's expandable segments and vLLM's cumem allocator make it, they map these: what an allocator
later puts at the same addresses, they would not see.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

log = logging.getLogger("pegaflow")

#: Of the pool without a custom allocator, in PyTorch's description of its memory.
_OWN_POOL = (0, 0)


def keeps_allocations(vllm_config: Any, device: str, addresses: Iterable[int]) -> bool:
    """Whether allocations of a GPU at ``addresses``, one of each tensor, are known to stay there.

    That is so for expandable segments in use of PyTorch's allocator, and for memory of vLLM's
    without sleep mode. Others, as elastic KV caches, are unknown here. Memory of cudaMalloc has one
    allocation, of which this says nothing.
    """
    if device != "cuda":
        return True
    model = vllm_config.model_config
    if getattr(model, "enable_cumem_allocator", False):
        return not getattr(model, "enable_sleep_mode", False)
    import torch

    try:
        snapshot = torch.cuda.memory_snapshot()
    except RuntimeError as error:
        # Allocators that replace PyTorch's have none.
        log.info("pegaflow: PyTorch does not describe the memory of its allocator: %s", error)
        return False
    segments = [
        (segment["address"], segment["address"] + segment["total_size"])
        for segment in snapshot
        if segment.get("is_expandable")
        and tuple(segment.get("segment_pool_id", _OWN_POOL)) == _OWN_POOL
    ]
    return all(any(begin <= address < end for begin, end in segments) for address in addresses)
