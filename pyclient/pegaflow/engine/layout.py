"""From an engine's KV tensors to the segments of a page.

A segment is a piece of every block: block ``b`` has ``size`` bytes at ``address + b * stride``.
Everything is derived from storage pointers and strides. Shapes are not trusted: the same shape has
half a dozen orders in memory, padded or not, and kernels may split a manager's block into several.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

#: With more pieces a gather by pieces is too slow; no layout of vLLM has nearly as many.
MAX_SEGMENTS = 16_384


class LayoutError(Exception):
    """Tensors with an unsupported layout; the text names them and the reason."""


class TooManyPieces(LayoutError):
    """A block lies in more than MAX_SEGMENTS pieces."""

    def __init__(self, pieces: str, where: str = "a block") -> None:
        self.detail = f"lies in {pieces} pieces of memory, more than {MAX_SEGMENTS:,}"
        super().__init__(f"{where} {self.detail}")


class Segment(NamedTuple):
    address: int
    stride: int
    size: int


@dataclasses.dataclass(frozen=True)
class Geometry:
    """The places of the blocks of one rank."""

    segments: tuple[Segment, ...]  #: In the page's order, neighbors merged.
    layers: tuple[str, ...]  #: In the page's order, aliases left out.
    block_count: int
    #: The order of a block's bytes, for each layer; equal texts in equal order mean equal pages.
    arrangements: tuple[str, ...]
    device: str  #: torch's device type.
    device_index: int = 0  #: Among this process's visible devices of that type.

    @property
    def page_bytes(self) -> int:
        return sum(segment.size for segment in self.segments)


def geometry(
    kv_caches: Mapping[str, Any],
    layers: Sequence[str],
    specs: Mapping[str, Any],
    block_count: int,
    cells: int = 1,
) -> Geometry:
    """Derives the geometry of ``layers`` from the tensors that vLLM registers.

    ``specs`` has the spec of each layer, whose page size the tensor must agree with. With several
    ``cells`` a block is cut into as many equal runs of KV heads, its second dimension: the page has
    one cell after the other, each with equally many segments, and ``arrangements`` are those of a
    cell.

    Raises:
        LayoutError: a tensor is missing, is not a tensor, or does not fit its spec or its cells.
    """
    if missing := [layer for layer in layers if layer not in kv_caches]:
        raise LayoutError(f"layers without a KV tensor: {', '.join(missing)}")
    tensors = {layer: kv_caches[layer] for layer in layers}
    for layer, tensor in tensors.items():
        if not hasattr(tensor, "untyped_storage"):
            raise LayoutError(f"the KV cache of {layer} is a {type(tensor).__name__}")
    devices = {(tensor.device.type, tensor.device.index or 0) for tensor in tensors.values()}
    if len(devices) != 1:
        names = ", ".join(f"{kind}:{index}" for kind, index in sorted(devices))
        raise LayoutError(f"the KV cache lies on {names or 'no device'}")
    ((device, device_index),) = devices

    segments: list[Segment] = []
    for cell in range(cells):
        parts = {
            layer: _heads_of(layer, tensor, specs[layer], cell, cells)
            for layer, tensor in tensors.items()
        }
        pieces: list[Segment] = []
        kept: list[str] = []
        arrangements: list[str] = []
        for layer in _page_order(parts):
            cut = _cut(layer, parts[layer], block_count)
            _check_page_bytes(layer, cut.pieces, specs[layer], cells)
            if set(cut.pieces) & set(pieces):
                continue  # another name for memory that is already in the page
            kept.append(layer)
            pieces += cut.pieces
            arrangements.append(cut.arrangement)
        segments += _merge(pieces)
    if len(segments) > MAX_SEGMENTS:
        raise TooManyPieces(f"{len(segments):,}")
    return Geometry(
        tuple(segments),
        tuple(kept),
        block_count,
        tuple(arrangements),
        device,
        device_index,
    )


def _heads_of(layer: str, tensor: Any, spec: Any, cell: int, cells: int) -> Any:
    """The part of a layer's tensor that has the heads of a cell."""
    if cells == 1:
        return tensor
    heads, shape = spec.num_kv_heads, list(tensor.shape)
    if len(shape) != 4 or shape[1] != heads or heads % cells != 0:
        raise LayoutError(
            f"{layer}: a tensor of shape {shape} cannot be cut into {cells} cells of {heads} heads"
        )
    return tensor.narrow(1, cell * heads // cells, heads // cells)


def _page_order(tensors: Mapping[str, Any]) -> list[str]:
    """Layers in the order of memory if they share one allocation, else in vLLM's order.

    Both orders are the same in every engine of a namespace. The first lets neighbors merge, down
    to one segment for layouts that keep all layers of a block together.
    """
    if len({tensor.untyped_storage().data_ptr() for tensor in tensors.values()}) == 1:
        return sorted(tensors, key=lambda layer: tensors[layer].data_ptr())
    return list(tensors)


class _Cut(NamedTuple):
    pieces: list[Segment]
    arrangement: str


def _cut(layer: str, tensor: Any, block_count: int) -> _Cut:
    """Cuts one layer's blocks into runs of adjacent bytes."""
    shape, strides = list(tensor.shape), list(tensor.stride())
    item = tensor.element_size()
    block_dim = _block_dim(layer, shape, block_count)
    ratio = shape[block_dim] // block_count
    block_stride = strides[block_dim] * item * ratio
    # The dimensions inside a block, as (stride in bytes, extent); kernel blocks are one of them.
    inside = [
        (stride * item, extent)
        for dim, (stride, extent) in enumerate(zip(strides, shape, strict=True))
        if dim != block_dim and extent > 1
    ]
    if ratio > 1:
        inside.append((strides[block_dim] * item, ratio))
    inside.sort(reverse=True)

    run = item
    while inside and inside[-1][0] == run:
        run *= inside.pop()[1]
    if inside and inside[-1][0] < run:
        raise LayoutError(f"{layer}: elements of shape {shape} overlap at strides {strides}")
    offsets = [0]
    for stride, extent in inside:
        if len(offsets) * extent > MAX_SEGMENTS:
            pieces = math.prod(extent for _, extent in inside)
            raise TooManyPieces(f"{pieces:,}", f"{layer}: a block")
        offsets = [offset + i * stride for offset in offsets for i in range(extent)]

    storage = tensor.untyped_storage()
    base = tensor.data_ptr()
    end = base + (block_count - 1) * block_stride + offsets[-1] + run
    if end > storage.data_ptr() + storage.nbytes():
        raise LayoutError(
            f"{layer}: shape {shape} at strides {strides} leaves its storage of "
            f"{storage.nbytes()} bytes"
        )
    if block_stride < run and block_count > 1:
        raise LayoutError(f"{layer}: blocks of {run} bytes overlap at a stride of {block_stride}")
    order = sorted(
        (d for d in range(len(shape)) if d != block_dim and shape[d] > 1),
        key=lambda dim: -strides[dim],
    )
    dims = ",".join(f"{dim}:{shape[dim]}" for dim in order)
    kernel_blocks = f"{ratio}x " if ratio > 1 else ""
    return _Cut(
        [Segment(base + offset, block_stride, run) for offset in offsets],
        f"{tensor.dtype}[{kernel_blocks}{dims}]",
    )


def _block_dim(layer: str, shape: Sequence[int], block_count: int) -> int:
    """Blocks come first; only old layouts put K and V before them."""
    if shape and shape[0] % block_count == 0 and shape[0] > 0:
        return 0
    if len(shape) > 1 and shape[0] == 2 and shape[1] % block_count == 0:
        return 1
    raise LayoutError(f"{layer}: no dimension of shape {list(shape)} counts {block_count} blocks")


def content_bytes(spec: Any) -> int:
    """The bytes of a layer's block, without padding behind it."""
    for field in ("unpadded_page_size_bytes", "real_page_size_bytes"):
        if (size := getattr(spec, field, None)) is not None:
            return size
    size = spec.page_size_bytes
    return size


def _check_page_bytes(layer: str, pieces: Sequence[Segment], spec: Any, cells: int) -> None:
    found, expected = sum(piece.size for piece in pieces) * cells, content_bytes(spec)
    if found != expected:
        raise LayoutError(f"{layer}: a block has {found} bytes, its spec says {expected}")


def _merge(pieces: Sequence[Segment]) -> list[Segment]:
    """Joins neighbors in the page that are neighbors in memory, at the same stride."""
    merged: list[Segment] = []
    for piece in pieces:
        last = merged[-1] if merged else None
        if last and last.stride == piece.stride and last.address + last.size == piece.address:
            merged[-1] = last._replace(size=last.size + piece.size)
        else:
            merged.append(piece)
    return merged
