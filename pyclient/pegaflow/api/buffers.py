"""The places of blocks in an engine's arrays, from addresses and strides."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from pegaflow.api.arguments import shown, whole

#: The limit of pieces that a block has in one array; beyond it, a copy is mostly overhead.
MAX_PIECES = 4096


class LayoutError(ValueError):
    """An array cannot be cached with its layout in memory; the text names it and the reason."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """The places of blocks in some arrays, which it keeps alive."""

    segments: tuple[tuple[int, int, int], ...]  #: (address, bytes to the next block, bytes) each.
    block_count: int
    description: str  #: The format of a block; blocks are interchangeable where it is equal.
    arrays: tuple[Any, ...]

    @property
    def block_bytes(self) -> int:
        return sum(size for _, _, size in self.segments)


def layout(arrays: Iterable[Any], block_axis: int | Sequence[int] = 0) -> Layout:
    """The layout of a KV cache.

    Args:
        arrays: NumPy arrays, or others with ``__array_interface__``: often one per layer, or one
            for keys and one for values. They must not move while the cache is open.
        block_axis: The axis along which blocks are numbered, for all arrays or one for each.

    Raises:
        LayoutError: an array has no such axis, another number of blocks, is read-only, does not
            hold plain numbers, or its blocks overlap or are in too many pieces.
    """
    kept = arrays_of(arrays)
    if not kept:
        raise LayoutError("no arrays")
    axes = _axes(block_axis, len(kept))
    if len(axes) != len(kept):
        raise LayoutError(f"{len(axes)} block axes for {len(kept)} arrays")
    segments: list[tuple[int, int, int]] = []
    parts: list[str] = []
    counts: list[int] = []
    for number, (array, axis) in enumerate(zip(kept, axes, strict=True)):
        pieces, count, part = _read(f"arrays[{number}]", array, axis)
        segments += pieces
        counts.append(count)
        parts.append(part)
    for number, count in enumerate(counts):
        if count != counts[0]:
            raise LayoutError(f"arrays[{number}] has {count} blocks and arrays[0] has {counts[0]}")
    return Layout(tuple(segments), counts[0], ";".join(parts), kept)


def arrays_of(arrays: Any) -> tuple[Any, ...]:
    """
    Raises:
        LayoutError: it cannot be iterated.
    """
    try:
        return tuple(arrays)
    except TypeError:
        raise LayoutError(
            f"arrays={shown(arrays)} is not a list of arrays, such as one for each layer"
        ) from None


def _axes(block_axis: Any, arrays: int) -> list[int]:
    """
    Raises:
        LayoutError: an axis is not a whole number.
    """
    one = not hasattr(block_axis, "__len__")
    given = [block_axis] * arrays if one else list(block_axis)
    try:
        return [whole("block_axis", axis, -64, 63) for axis in given]
    except ValueError as error:
        raise LayoutError(str(error)) from None


def _read(name: str, array: Any, axis: int) -> tuple[list[tuple[int, int, int]], int, str]:
    """The pieces of one array's blocks, the number of blocks, and their format."""
    interface = getattr(array, "__array_interface__", None)
    if interface is None:
        raise LayoutError(f"{name} is a {type(array).__name__}, not an array in host memory")
    data = interface.get("data")
    if not isinstance(data, tuple):
        raise LayoutError(f"{name} does not state the address of its memory")
    address, read_only = data
    shape, kind = interface["shape"], interface["typestr"]
    item_bytes = int(kind[2:]) if kind[1:2] in "biufcV" and kind[2:].isdigit() else 0
    if not item_bytes:
        raise LayoutError(f"{name} holds {kind}, not plain numbers")
    if read_only:
        raise LayoutError(f"{name} is read-only, and a load writes into it")
    if not -len(shape) <= axis < len(shape):
        raise LayoutError(f"{name} has {len(shape)} dimensions and no axis {axis}")
    if 0 in shape:
        raise LayoutError(f"{name} of shape {tuple(shape)} is empty")
    axis %= len(shape)
    strides = interface.get("strides") or _packed_strides(shape, item_bytes)
    count, block_stride = shape[axis], strides[axis]
    others = [
        (stride, length)
        for i, (stride, length) in enumerate(zip(strides, shape, strict=True))
        if i != axis and length != 1
    ]
    if any(stride <= 0 for stride, _ in others) or (count > 1 and block_stride <= 0):
        raise LayoutError(f"{name} has strides {tuple(strides)}: reversed or repeated data")
    _refuse_overlap(name, strides, shape, item_bytes)

    # From the smallest stride on, dimensions that join without a gap are one piece.
    outer = sorted(others)
    size = item_bytes
    while outer and outer[0][0] == size:
        size *= outer.pop(0)[1]
    outer.reverse()
    pieces = math.prod(length for _, length in outer)
    if pieces > MAX_PIECES:
        raise LayoutError(
            f"{name}: a block is in {pieces} pieces of {size} bytes, {MAX_PIECES} are possible; "
            f"number blocks along an outer axis than {axis} of shape {tuple(shape)}"
        )
    steps = [[stride * i for i in range(length)] for stride, length in outer]
    segments = [
        (address + sum(offsets), block_stride if count > 1 else size, size)
        for offsets in itertools.product(*steps)
    ]
    block_shape = [length for i, length in enumerate(shape) if i != axis]
    # The order of a block's bytes, not the distance to the next block.
    order = sorted(range(len(block_shape)), key=lambda i: -_without(strides, axis)[i])
    return segments, count, f"{kind}{block_shape}{order}".replace(" ", "")


def _without(values: Sequence[int], axis: int) -> list[int]:
    return [value for i, value in enumerate(values) if i != axis]


def _packed_strides(shape: Sequence[int], item_bytes: int) -> list[int]:
    strides = []
    for length in reversed(shape):
        strides.append(item_bytes)
        item_bytes *= length
    return strides[::-1]


def _refuse_overlap(
    name: str, strides: Sequence[int], shape: Sequence[int], item_bytes: int
) -> None:
    reach = item_bytes
    for stride, length in sorted(zip(strides, shape, strict=True)):
        if length == 1:
            continue
        if stride < reach:
            raise LayoutError(f"{name} has strides {tuple(strides)}: its elements overlap")
        reach = stride * (length - 1) + reach
