"""The places of pages in SGLang's device pools, as kinds of blocks.

Full attention is the prefix of a prompt; windows are the pages that end at a length, and a
recurrent state is the one slot for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from pegaflow.sglang.geometry import MAX_PIECES, Geometry, LayoutError

#: The rules by their numbers on the wire: ``pegaflow.api.kinds.RULES``.
PREFIX, TRAILING, STATE = 0, 1, 3

_MHA, _MLA = "MHATokenToKVPool", "MLATokenToKVPool"


@dataclasses.dataclass(frozen=True)
class PoolKind:
    """The pages of one pool."""

    pool: str  #: SGLang's name: "kv", "swa" or "mamba".
    rule: int
    tokens: int  #: Of a window, rounded up to whole pages; otherwise 0.
    geometry: Geometry


def kinds_of(params: Any, components: set[Any]) -> list[PoolKind]:
    """The kinds of an engine's pools, full attention first.

    Args:
        params: SGLang's ``CacheInitParams``.
        components: Those of its tree.

    Raises:
        LayoutError: a pool cannot be cached as it lies; the text has the reason.
    """
    names = {component.name for component in components}
    page = params.page_size
    kvcache = params.token_to_kv_pool_allocator.get_kvcache()
    full = getattr(kvcache, "full_kv_pool", kvcache)
    found = [PoolKind("kv", PREFIX, 0, _attention(full, page))]
    if "SWA" in names:
        window = params.sliding_window_size
        pages = (window + page - 1) // page
        geometry = _attention(kvcache.swa_kv_pool, page)
        found.append(PoolKind("swa", TRAILING, pages * page, geometry))
    if "MAMBA" in names:
        found.append(PoolKind("mamba", STATE, 0, _states(params.req_to_token_pool)))
    if unknown := names - {"FULL", "SWA", "MAMBA"}:
        raise LayoutError(f"the tree has the components {', '.join(sorted(unknown))}")
    for name in ("mtp_draft_device_pools", "sidecar_draft_device_pools"):
        if getattr(params, name, ()):
            raise LayoutError("draft models with KV of their own are not served by the linker")
    return found


def device_of(params: Any) -> torch.device:
    """The device of the pools."""
    kvcache = params.token_to_kv_pool_allocator.get_kvcache()
    full = getattr(kvcache, "full_kv_pool", kvcache)
    return _buffers(full)[0].device


def _buffers(pool: Any) -> list[torch.Tensor]:
    name = type(pool).__name__
    if name == _MHA:
        return [*pool.k_buffer, *pool.v_buffer]
    if name == _MLA:
        return list(pool.kv_buffer)
    raise LayoutError(f"a device pool of class {name} is not served by the linker")


def _attention(pool: Any, page: int) -> Geometry:
    """Pages of ``page`` rows in each buffer of a pool."""
    if getattr(pool, "layer_shard_enabled", False):
        raise LayoutError("layers of a pool are divided among ranks")
    buffers = _buffers(pool)
    segments, counts = [], set()
    for buffer in buffers:
        row = buffer[0].numel() * buffer.element_size()
        if not buffer.is_contiguous():
            raise LayoutError(f"a buffer of {type(pool).__name__} has gaps between its rows")
        segments.append((buffer.data_ptr(), page * row, page * row))
        counts.add(buffer.shape[0] // page)
    meaning = _meaning(pool, buffers, f"page={page}")
    return _made(segments, counts, page, meaning)


def _states(requests: Any) -> Geometry:
    """Slots of states: the part of each layer and of each of its tensors."""
    if getattr(requests, "mamba_ckpt_pool", None) is not None or any(
        getattr(getattr(requests, name, None), "enabled", False)
        for name in ("short_conv_pool", "ngram_pool")
    ):
        raise LayoutError("int8 checkpoints and side states are not served by the linker")
    cache = requests.mamba_pool.mamba_cache
    tensors = [one for one in (cache.temporal, *cache.conv) if one.numel()]
    rows = [layer for tensor in tensors for layer in tensor.unbind(0)]
    segments, counts = [], set()
    for row in rows:
        size = row[0].numel() * row.element_size()
        if not row[0].is_contiguous():
            raise LayoutError("a state has gaps")
        segments.append((row.data_ptr(), row.stride(0) * row.element_size(), size))
        counts.add(row.shape[0])
    return _made(segments, counts, 1, _meaning(requests.mamba_pool, rows, "state"))


def _made(
    segments: Sequence[tuple[int, int, int]], counts: set[int], slots: int, meaning: str
) -> Geometry:
    if len(counts) != 1 or not counts.copy().pop():
        raise LayoutError(f"the buffers of a pool have {sorted(counts)} pages")
    if len(segments) > MAX_PIECES:
        raise LayoutError(f"a page is in {len(segments)} pieces, {MAX_PIECES} are possible")
    return Geometry(tuple(segments), counts.pop(), slots, meaning)


def _meaning(pool: Any, buffers: Sequence[torch.Tensor], text: str) -> str:
    shapes: dict[str, int] = {}
    for buffer in buffers:
        shape = f"{tuple(buffer.shape[1:])} {buffer.dtype}".replace(" ", "")
        shapes[shape] = shapes.get(shape, 0) + 1
    rows = "+".join(f"{count}x{shape}" for shape, count in shapes.items())
    layers = f"from {getattr(pool, 'start_layer', 0)}"
    return f"{type(pool).__name__} {text} layers {layers} {rows}"
