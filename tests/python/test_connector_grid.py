"""Cells of blocks that tensor-parallel sizes share: their bytes, names and refusals. No server."""

import ctypes
import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheTensor,
    SlidingWindowSpec,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from pegaflow.engine import layout
from pegaflow.engine.config import ConfigError, read_settings
from pegaflow.engine.layout import LayoutError, geometry
from pegaflow.vllm import namespace, ranks
from pegaflow.vllm.build import (
    SchedulerOff,
    Unservable,
    WorkerOff,
    hash_unit,
    read_geometry,
    scheduler_side,
    worker_side,
)
from pegaflow.vllm.grid import Grid, NoGrid, read_grid
from tests.python.fake_model import FakeModel
from tests.python.harness import kv_cache_configs, model_directory, vllm_config
from tests.python.heads_model import FIELDS

BLOCKS, LAYERS, TOKENS, CONTENT = 3, 2, 4, 6
NAMES = [f"model.layers.{i}.attn" for i in range(LAYERS)]
LAYOUTS = [layout.name for layout in KVCacheLayout]


# ---- the bytes of cells


def canonical(heads: int) -> np.ndarray:
    """A model's KV, [block, layer, head, token, content], of different numbers."""
    shape = (BLOCKS, LAYERS, heads, TOKENS, CONTENT)
    return np.arange(math.prod(shape), dtype=np.float32).reshape(shape)


def rank_pages(model: np.ndarray, size: int, rank: int, own: int, layout: str) -> list[list[bytes]]:
    """By block, the pages of a rank's cells as the mover copies them out of vLLM's tensors."""
    heads = model.shape[2]
    held = max(1, heads // size)
    first = rank * heads // size
    spec = FullAttentionSpec(
        block_size=TOKENS, num_kv_heads=held, head_size=CONTENT // 2, dtype=torch.float32
    )
    strides = compute_layout_strides(spec, BLOCKS, LAYERS, KVCacheLayout[layout])
    size_bytes = LAYERS * BLOCKS * spec.page_size_bytes
    place = KVCacheTensor(
        size=size_bytes, layers=NAMES, layer_stride=strides[0], block_stride=strides[1]
    )
    raw = torch.zeros(size_bytes, dtype=torch.int8)
    views = create_kv_cache_views(raw, spec, BLOCKS, KVCacheLayout[layout], place)
    for layer, view in enumerate(views):
        view.copy_(torch.from_numpy(model[:, layer, first : first + held].copy()))
    tensors = dict(zip(NAMES, views, strict=True))
    where = geometry(tensors, NAMES, dict.fromkeys(NAMES, spec), BLOCKS, own)
    assert len(where.segments) % own == 0
    each = len(where.segments) // own
    cells = [where.segments[i * each : (i + 1) * each] for i in range(own)]
    return [
        [
            b"".join(ctypes.string_at(at + block * stride, size) for at, stride, size in cell)
            for cell in cells
        ]
        for block in range(BLOCKS)
    ]


def cut_by_numpy(model: np.ndarray, grid: int, layout: str) -> list[list[bytes]]:
    """By block, the page of each cell: layer by layer, in the order of the layout."""
    order = [i - 2 for i in KVCacheLayout[layout].stride_order if i >= 2]  # of heads and tokens
    per_cell = model.shape[2] // grid
    return [
        [
            b"".join(
                model[block, layer, cell * per_cell : (cell + 1) * per_cell]
                .transpose(order)
                .tobytes()
                for layer in range(LAYERS)
            )
            for cell in range(grid)
        ]
        for block in range(BLOCKS)
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [4, 8, 12])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_cells_of_each_size_are_those_that_numpy_cuts(layout, heads, size):
    model, grid = canonical(heads), 4
    expected = cut_by_numpy(model, grid, layout)
    own = grid // size
    for rank in range(size):
        pages = rank_pages(model, size, rank, own, layout)
        for block in range(BLOCKS):
            assert pages[block] == expected[block][rank * own : (rank + 1) * own]


def test_ranks_beyond_the_heads_hold_the_cell_of_their_head():
    model = canonical(2)
    expected = cut_by_numpy(model, 2, "LBHNC")
    for rank in range(4):
        assert rank_pages(model, 4, rank, 1, "LBHNC")[1] == expected[1][rank // 2 : rank // 2 + 1]


@pytest.mark.parametrize("shape", [(BLOCKS, 2, TOKENS, 4, 3), (BLOCKS, TOKENS, 4, CONTENT)])
def test_a_tensor_whose_second_dimension_is_not_the_heads_is_refused(shape):
    spec = FullAttentionSpec(block_size=TOKENS, num_kv_heads=6, head_size=3, dtype=torch.float32)
    with pytest.raises(LayoutError, match="cannot be cut into 2 cells of 6 heads"):
        geometry({"x": torch.zeros(shape)}, ["x"], {"x": spec}, BLOCKS, 2)


# ---- ranks and namespaces


def configs(heads: int = 4, mla: bool = False, **changes: Any) -> list[tuple[Any, Any]]:
    """For each rank both of its configurations."""
    fields = {"model": model_directory(**FIELDS[heads]), "distributed_executor_backend": "mp"}
    made = []
    for number in range(
        changes.get("tensor_parallel_size", 1) * changes.get("pipeline_parallel_size", 1)
    ):
        own = vllm_config("unix:/nowhere.sock", **fields, **changes)
        own.parallel_config.rank = number
        made.append((own, kv_cache_configs(own, 80, mla)[number]))
    return made


def places(made: list[tuple[Any, Any]], sizes: tuple[int, ...]) -> list[tuple[int, int, bool]]:
    """The first shard of each rank, the number of its shards, and whether it saves them."""
    shown = []
    for one in made:
        grid = read_grid(*one, sizes)
        assert grid is not None
        place = ranks.place(*one, grid.own)
        assert place.shards == grid.cells * one[0].parallel_config.pipeline_parallel_size
        shown.append((place.shard, place.cells, place.saves))
    return shown


def test_without_the_option_there_is_no_grid():
    (one,) = configs()
    assert read_grid(*one, ()) is None
    assert ranks.place(*one).cells == 0


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (1, [(0, 4, True)]),
        (2, [(0, 2, True), (2, 2, True)]),
        (4, [(0, 1, True), (1, 1, True), (2, 1, True), (3, 1, True)]),
    ],
)
def test_each_rank_has_a_run_of_cells(size, expected):
    assert places(configs(tensor_parallel_size=size), (1, 2, 4)) == expected


def test_of_ranks_with_the_same_head_the_lowest_saves_its_cell():
    made = configs(heads=2, tensor_parallel_size=4)
    assert places(made, (1, 2, 4)) == [(0, 1, True), (0, 1, False), (1, 1, True), (1, 1, False)]


def test_an_mla_latent_is_one_cell_of_all_ranks():
    made = configs(mla=True, tensor_parallel_size=4)
    assert places(made, (1, 2, 4)) == [(0, 1, rank == 0) for rank in range(4)]


def test_each_stage_has_cells_of_its_own():
    made = configs(tensor_parallel_size=2, pipeline_parallel_size=2)
    assert places(made, (2, 4)) == [(0, 2, True), (2, 2, True), (4, 2, True), (6, 2, True)]


def factors(one: tuple[Any, Any], sizes: tuple[int, ...]) -> namespace.Factors:
    config, kv_config = one
    grid = read_grid(config, kv_config, sizes)
    where = read_geometry(kv_config, FakeModel(kv_config).tensors, grid)
    return namespace.factors(
        config,
        kv_config,
        weights="named:x",
        instance="x",
        hash_unit=hash_unit(config, kv_config),
        layers=where.layers,
        arrangements=where.arrangements,
        grid=grid,
    )


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("mla", [False, True])
@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC"])
def test_all_ranks_of_all_sizes_have_one_list_of_factors(heads, mla, layout):
    lists = [
        factors(one, (1, 2, 4))
        for size in (1, 2, 4)
        for one in configs(heads, mla, tensor_parallel_size=size, layout=layout)
    ]
    assert all(one == lists[0] for one in lists)
    assert ("tp", f"grid of {1 if mla else heads}") in lists[0]


def test_a_grid_has_a_namespace_of_its_own():
    (one,) = configs()
    lists = [factors(one, sizes) for sizes in ((), (1,), (1, 2), (1, 4), (1, 2, 4))]
    assert lists[3] == lists[4], "the cells are the same"
    for i, first in enumerate(lists[:4]):
        assert first not in lists[i + 1 : 4]


# ---- configurations that cannot be served


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("", ()), ("4,1, 2", (1, 2, 4)), ("2,2", (2,)), ([1, 8], (1, 8)), (2, (2,))],
)
def test_sizes_are_read(text, sizes):
    assert read_settings({"pegaflow.tp_sizes": text}, {}).tp_sizes == sizes


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "1,two",
            "pegaflow.tp_sizes='1,two' is not a list of whole numbers between 1 and 1024, such as "
            "1,2,4",
        ),
        ("1,,2", "pegaflow.tp_sizes='1,,2' is not a list of whole numbers"),
        ("1_0", "pegaflow.tp_sizes='1_0' is not a list of whole numbers"),
        ({"1": 2}, "is not a list of whole numbers"),
        ([[1], 2], "is not a list of whole numbers"),
        ("1;2", "is not a list of whole numbers"),
        ([1, 2.5], "is not a list of whole numbers"),
        (True, "is not a list of whole numbers"),
        (None, "is not a list of whole numbers"),
        ("0,2", "pegaflow.tp_sizes='0,2' is not a list of whole numbers between 1 and 1024"),
        ("2,-4", "between 1 and 1024"),
        ("2048", "between 1 and 1024"),
    ],
)
def test_an_invalid_list_of_sizes_is_refused_by_name(text, error):
    with pytest.raises(ConfigError) as refused:
        read_settings({"pegaflow.tp_sizes": text}, {})
    assert error in str(refused.value)


def refusal(one: tuple[Any, Any], *sizes: int) -> NoGrid:
    with pytest.raises(NoGrid) as refused:
        read_grid(*one, sizes)
    return refused.value


def test_a_list_without_the_engines_own_size_is_refused():
    error = refusal(configs(tensor_parallel_size=2)[1], 1, 4)
    assert str(error) == "pegaflow.tp_sizes=1,4 does not contain the size of this engine, 2"
    assert error.kind == "configuration"


@pytest.mark.parametrize("sizes", [(1, 3), (1, 6)])
def test_a_size_that_does_not_fit_the_heads_is_refused(sizes):
    (one,) = configs()
    error = refusal(one, *sizes)
    assert f"{sizes[1]} neither divides the 4 KV heads of this model nor is a multiple" in str(
        error
    )
    assert error.kind == "configuration"


def test_cells_that_are_no_whole_slots_are_refused():
    made = vllm_config("unix:/nowhere.sock")  # 2 heads of 16 elements
    error = refusal((made, kv_cache_configs(made, 80)[0]), 1, 2)
    assert "one of 2 cells of a block has 6,144 bytes, which is no multiple of 4,096" in str(error)


def test_a_release_that_does_not_name_its_layouts_is_refused():
    (one,) = configs()
    one[1].kv_cache_layout = None
    error = refusal(one, 1, 2)
    assert "needs vLLM 0.29 or later" in str(error)
    assert error.kind == "engine"


def test_a_block_in_too_many_pieces_is_refused_with_the_sizes_and_the_fix(monkeypatch):
    """Where tokens come before heads, a cell has a piece for each layer and token."""
    monkeypatch.setattr(layout, "MAX_SEGMENTS", 191)
    ((config, kv_config),) = configs(layout="LBNHC")
    tensors = FakeModel(kv_config).tensors
    grid = read_grid(config, kv_config, (1, 2, 4))
    layers = len(kv_config.kv_cache_groups[0].layer_names)
    tokens = kv_config.kv_cache_groups[0].kv_cache_spec.block_size
    assert layers * tokens * 4 == 192
    with pytest.raises(Unservable) as refused:
        read_geometry(kv_config, tensors, grid)
    assert str(refused.value) == (
        "pegaflow.tp_sizes=1,2,4 cuts a block into 4 cells on each rank, so it lies in 192 pieces "
        "of memory, more than 191; set VLLM_KV_CACHE_LAYOUT=HND, fewer sizes or a smaller "
        "--block-size"
    )
    assert refused.value.kind == "configuration"
    ((_, by_heads),) = configs(layout="LBHNC")
    assert len(read_geometry(by_heads, FakeModel(by_heads).tensors, grid).segments) == layers * 4


def test_stages_with_different_formats_have_one_list_of_factors():
    """The stages of an engine whose first layers are not quantized, for example."""
    made = configs(pipeline_parallel_size=2)
    (group,) = made[1][1].kv_cache_groups
    group.kv_cache_spec = dataclasses.replace(group.kv_cache_spec, dtype=torch.float16)
    shown = []
    for config, kv_config in made:
        where = read_geometry(kv_config, FakeModel(kv_config).tensors)
        more = {
            "weights": "named:x",
            "instance": "x",
            "hash_unit": hash_unit(config, kv_config),
            "layers": where.layers,
            "arrangements": where.arrangements,
        }
        shown.append((config, kv_config, more, where))
    alone = [namespace.factors(config, kv_config, **more) for config, kv_config, more, _ in shown]
    differing = [one[0] for one, other in zip(*alone, strict=True) if one != other]
    assert differing == ["layout", "group"]

    formats = namespace.joined(
        [
            namespace.stage_formats(kv_config, None, [where], None)
            for _, kv_config, _, where in shown
        ]
    )
    lists = [
        namespace.factors(config, kv_config, **more, formats=formats)
        for config, kv_config, more, _ in shown
    ]
    assert lists[0] == lists[1] and lists[0] not in alone
    text = dict(lists[0])["group"]
    assert "torch.float16" in text and "torch.float32" in text


def test_windows_are_refused_by_name():
    (one,) = configs()
    (group,) = one[1].kv_cache_groups
    spec = group.kv_cache_spec
    group.kv_cache_spec = SlidingWindowSpec(
        block_size=spec.block_size,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        dtype=spec.dtype,
        sliding_window=64,
    )
    error = refusal(one, 1, 2)
    assert "windows, chunks, states or several cache groups yet (SlidingWindowSpec)" in str(error)
    assert error.kind == "model"


def test_layers_with_other_heads_are_refused():
    (one,) = configs()
    one[0].model_config.hf_text_config.num_global_key_value_heads = 1
    assert "do not all have the same heads" in str(refusal(one, 1, 2))


def test_an_mla_latent_in_parts_is_refused():
    one = configs(mla=True, tensor_parallel_size=2)[0]
    one[1].kv_tp_replicas = 1
    assert "hold parts of the MLA latent" in str(refusal(one, 1, 2))


def test_drafts_are_refused(monkeypatch):
    (one,) = configs()
    monkeypatch.setattr("pegaflow.vllm.grid.drafts.have_kv", lambda _: True)
    monkeypatch.setattr("pegaflow.vllm.grid.drafts.method", lambda _: "eagle")
    assert "KV of the drafts of eagle" in str(refusal(one, 1, 2))


def test_both_sides_of_a_refused_engine_run_without_the_cache(caplog):
    ((config, kv_config),) = configs(extra={"pegaflow.tp_sizes": "2,4"})
    scheduler = scheduler_side(config, kv_config)
    assert isinstance(scheduler, SchedulerOff)
    assert isinstance(worker_side(config, kv_config), WorkerOff)
    assert "pegaflow.tp_sizes=2,4 does not contain the size of this engine, 1" in caplog.text


def test_the_grid_of_a_served_engine():
    (one,) = configs(heads=4)
    assert read_grid(*one, (1, 2)) == Grid(cells=2, own=2, replicas=1, heads=2)
