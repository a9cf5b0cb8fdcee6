"""The places of pages in SGLang's pools, as its own pools report them.

A pool states the pieces of some pages (``get_page_buffer_meta``). The pieces of three pages give
the distance from one page to the next, which has to be the same for all pages.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, cast

import numpy as np
import torch

#: The limit of pieces of one page; beyond it, a copy is mostly overhead.
MAX_PIECES = 4096

#: Attributes of a pool that give its bytes their meaning.
_MEANING = (
    "layout",
    "dtype",
    "layer_num",
    "start_layer",
    "end_layer",
    "head_num",
    "head_dim",
    "v_head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "kv_cache_dim",
    "num_mamba_layers",
    "temporal_state_shape",
    "temporal_dtype",
    "conv_state_shapes",
    "conv_dtype",
    "storage_format_tag",
)


class LayoutError(ValueError):
    """The pages of a pool cannot be cached where they lie; the text has the reason."""


@dataclasses.dataclass(frozen=True)
class Geometry:
    """The places of a pool's pages."""

    segments: tuple[tuple[int, int, int], ...]  #: (address, bytes to the next page, bytes) each.
    pages: int
    slots: int  #: Of a page: SGLang numbers slots, not pages.
    meaning: str  #: Pages are interchangeable where it is equal.

    def numbers(self, slots: torch.Tensor, count: int) -> list[int]:
        """The numbers of ``count`` pages, of the slots of all of them.

        Raises:
            LayoutError: there are more or fewer slots, or they are not those of whole pages.
        """
        # NumPy: PyTorch's threads cost more than the work on a few thousand numbers.
        flat = slots.detach().to(device="cpu", dtype=torch.int64).numpy().reshape(-1)
        if flat.size != count * self.slots:
            raise LayoutError(f"{flat.size} slots for {count} pages of {self.slots}")
        if not count:
            return []
        rows = flat.reshape(count, self.slots)
        first = rows[:, 0]
        if np.any(first % self.slots) or np.any(rows != first[:, None] + np.arange(self.slots)):
            raise LayoutError("the slots are not those of whole pages")
        numbers = first // self.slots
        if int(numbers.min()) < 0 or int(numbers.max()) >= self.pages:
            raise LayoutError(f"a page is not one of the pool's {self.pages}")
        return cast("list[int]", numbers.tolist())


def of_host_pool(pool: Any) -> Geometry:
    """The pages of one of HiCache's host pools.

    Raises:
        LayoutError: the pool's pages are not at equal distances, or are in too many pieces.
    """
    slots = int(getattr(pool, "page_size", 1) or 1)
    pages = int(getattr(pool, "size", 0)) // slots
    name = type(pool).__name__
    if pages < 1:
        raise LayoutError(f"{name} has no page")
    if pages == 1:
        raise LayoutError(f"{name} has a single page; --hicache-size is too small")
    try:
        first, second, last = (_pieces(pool, page, slots) for page in (0, 1, pages - 1))
    except (AssertionError, AttributeError, NotImplementedError, ValueError) as error:
        raise LayoutError(
            f"{name} with the layout {getattr(pool, 'layout', 'unknown')} does not state where its "
            f"pages are: {error or type(error).__name__}; start SGLang with "
            "--hicache-mem-layout page_first"
        ) from None
    segments = []
    for one, two, end in itertools.zip_longest(first, second, last):
        if one is None or two is None or end is None or not one[1] == two[1] == end[1]:
            raise LayoutError(f"the pages of {name} are of different sizes")
        stride = two[0] - one[0]
        if stride < one[1] or end[0] != one[0] + (pages - 1) * stride:
            raise LayoutError(f"the pages of {name} are not at equal distances")
        segments.append((one[0], stride, one[1]))
    joined = _joined(segments)
    if len(joined) > MAX_PIECES:
        raise LayoutError(
            f"a page of {name} is in {len(joined)} pieces, {MAX_PIECES} are possible; start SGLang "
            "with --hicache-mem-layout page_first"
        )
    return Geometry(tuple(joined), pages, slots, _meaning(pool, slots, segments))


def _pieces(pool: Any, page: int, slots: int) -> list[tuple[int, int]]:
    """(address, bytes) of each piece of one page."""
    addresses, sizes = pool.get_page_buffer_meta(torch.arange(page * slots, (page + 1) * slots))
    return [(int(a), int(s)) for a, s in zip(addresses, sizes, strict=True)]


def _joined(segments: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Neighbors without a gap are one piece."""
    joined = segments[:1]
    for address, stride, size in segments[1:]:
        before = joined[-1]
        if before[0] + before[2] == address and before[1] == stride:
            joined[-1] = (before[0], stride, before[2] + size)
        else:
            joined.append((address, stride, size))
    return joined


def _meaning(pool: Any, slots: int, segments: list[tuple[int, int, int]]) -> str:
    stated = [
        f"{name}={getattr(pool, name)}"
        for name in _MEANING
        if getattr(pool, name, None) is not None
    ]
    sizes = [size for _, _, size in segments]
    runs = [f"{len(list(run))}x{size}" for size, run in itertools.groupby(sizes)]
    return f"{type(pool).__name__} page={slots} {' '.join(stated)} pieces={'+'.join(runs)}"
