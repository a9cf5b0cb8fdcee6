"""The cells of a block, if engines of several tensor-parallel sizes share their blocks.

``pegaflow.tp_sizes`` lists the sizes. A block is cut by KV heads into the *grid*: so many cells
that each rank of each size holds a run of whole cells. A cell is a shard of the server's, so what
one size saves, every other size finds. With more ranks than heads several ranks hold the same cell,
and an MLA latent, which every rank holds, is one cell.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from pegaflow.engine.layout import content_bytes
from pegaflow.vllm import drafts, ranks
from pegaflow.vllm.kinds import layer_specs

#: Without a gap behind a cell, those of a rank are one run of the pool (kSlotAlignment).
CELL_ALIGNMENT = 4096


class NoGrid(Exception):
    """This engine cannot share blocks as configured.

    ``kind`` is the reason's name in the server's metrics.
    """

    def __init__(self, text: str, kind: str = "configuration") -> None:
        super().__init__(text)
        self.kind = kind


@dataclasses.dataclass(frozen=True)
class Grid:
    """The cells of one pipeline stage."""

    cells: int
    own: int  #: Of one rank of this engine.
    replicas: int  #: Consecutive ranks with the same cells.
    heads: int  #: KV heads of a cell; 0 for an MLA latent.
    #: The option, for texts.
    stated: str = dataclasses.field(default="pegaflow.tp_sizes", compare=False)


def read_grid(vllm_config: Any, kv_cache_config: Any, sizes: Sequence[int]) -> Grid | None:
    """The grid of an engine that the support check has found supported; None without ``sizes``.

    Equal in its scheduler and workers.

    Raises:
        NoGrid: a size does not fit the model, or the model's blocks cannot be cut.
    """
    if not sizes:
        return None
    own = vllm_config.parallel_config.tensor_parallel_size
    stated = "pegaflow.tp_sizes=" + ",".join(map(str, sizes))
    if own not in sizes:
        raise NoGrid(f"{stated} does not contain the size of this engine, {own}")
    groups = kv_cache_config.kv_cache_groups
    specs = layer_specs(groups[0])
    names = {type(spec).__name__ for group in groups for spec in layer_specs(group)}
    if len(groups) != 1 or not names <= {"FullAttentionSpec", "MLAAttentionSpec"}:
        raise NoGrid(
            f"{stated}: tensor-parallel sizes cannot share the blocks of models with windows, "
            f"chunks, states or several cache groups yet ({', '.join(sorted(names))})",
            "model",
        )
    if drafts.have_kv(vllm_config):
        raise NoGrid(
            f"{stated}: tensor-parallel sizes cannot share blocks that have KV of the drafts of "
            f"{drafts.method(vllm_config)} yet",
            "model",
        )
    same = ranks.replicas(vllm_config, kv_cache_config)
    if names == {"MLAAttentionSpec"}:
        if same != own:
            raise NoGrid(
                f"{stated}: the ranks of this engine hold parts of the MLA latent", "model"
            )
        return Grid(cells=1, own=1, replicas=own, heads=0, stated=stated)
    heads = ranks.kv_heads(vllm_config.model_config)
    if not heads or any(spec.num_kv_heads != max(1, heads // own) for spec in specs):
        raise NoGrid(f"{stated}: the layers of this model do not all have the same heads", "model")
    for size in sizes:
        if heads % size != 0 and size % heads != 0:
            raise NoGrid(
                f"{stated}: {size} neither divides the {heads} KV heads of this model nor is a "
                "multiple of them; remove it"
            )
    grid = math.lcm(*(min(size, heads) for size in sizes))
    if same != max(1, own // heads):
        raise NoGrid(f"{stated}: it is uncertain which ranks hold the same heads", "model")
    made = Grid(
        cells=grid,
        own=max(1, grid // own),
        replicas=same,
        heads=heads // grid,
        stated=stated,
    )
    _check_bytes(kv_cache_config, made, stated)
    return made


def _check_bytes(kv_cache_config: Any, grid: Grid, stated: str) -> None:
    """
    Raises:
        NoGrid: cells would have gaps, or the tensors do not show where a head is.
    """
    if grid.cells == 1:
        return
    if getattr(kv_cache_config, "kv_cache_layout", None) is None:
        raise NoGrid(f"{stated} needs vLLM 0.29 or later, which names its KV layouts", "engine")
    (group,) = kv_cache_config.kv_cache_groups
    specs = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    each = specs.values() if specs else [group.kv_cache_spec] * len(group.layer_names)
    cell_bytes = sum(map(content_bytes, each)) // grid.own
    if cell_bytes % CELL_ALIGNMENT != 0:
        raise NoGrid(
            f"{stated}: one of {grid.cells} cells of a block has {cell_bytes:,} bytes, which is no "
            f"multiple of {CELL_ALIGNMENT:,}; set a larger --block-size or fewer sizes"
        )
