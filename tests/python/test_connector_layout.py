"""Segments computed from tensors: in each of vLLM's layouts all of a block, and nothing else."""

import ctypes
import itertools
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from pegaflow.engine import config
from pegaflow.engine.layout import Geometry, LayoutError, Segment, geometry
from pegaflow.vllm import build

BLOCKS, LAYERS = 5, 3
NAMES = [f"model.layers.{i}.attn" for i in range(LAYERS)]
LAYOUTS = [layout.name for layout in KVCacheLayout]


def full_spec(**changes: Any) -> FullAttentionSpec:
    fields = {"block_size": 32, "num_kv_heads": 4, "head_size": 8, "dtype": torch.float32}
    return FullAttentionSpec(**fields | changes)


def make_caches(
    spec: Any, layout: KVCacheLayout, kernel_block_size: int | None = None, lead: int = 0
) -> dict[str, torch.Tensor]:
    """One allocation for all layers, divided by vLLM's own code."""
    strides = compute_layout_strides(spec, BLOCKS, LAYERS, layout)
    size = LAYERS * BLOCKS * spec.page_size_bytes
    raw = torch.zeros(lead + size, dtype=torch.int8)
    place = KVCacheTensor(
        size=size, layers=NAMES, layer_stride=strides[0], block_stride=strides[1], offset=lead
    )
    views = create_kv_cache_views(raw, spec, BLOCKS, layout, place, kernel_block_size)
    return dict(zip(NAMES, views, strict=True))


def gather(where: Geometry, block: int) -> bytes:
    return b"".join(
        ctypes.string_at(address + block * stride, size) for address, stride, size in where.segments
    )


def scatter(where: Geometry, block: int, page: bytes) -> None:
    at = 0
    for address, stride, size in where.segments:
        ctypes.memmove(address + block * stride, page[at : at + size], size)
        at += size


def block_of(cache: torch.Tensor, block: int) -> torch.Tensor:
    ratio = cache.shape[0] // BLOCKS
    return cache[block * ratio : (block + 1) * ratio]


def fill(caches: dict[str, torch.Tensor]) -> None:
    """Every element of every layer gets a value of its own."""
    numbers = itertools.count(1)
    for cache in caches.values():
        for block in range(BLOCKS):
            part = block_of(cache, block)
            start = next(numbers) * 1_000_000
            values = torch.arange(start, start + part.numel(), dtype=torch.int64)
            part.copy_(values.reshape(part.shape).to(part.dtype))


def check_copy(caches: dict[str, torch.Tensor], where: Geometry) -> None:
    """Moving a page from one block to another copies all of it and changes no other block."""
    fill(caches)
    before = {name: cache.clone() for name, cache in caches.items()}
    source, target = 1, 3

    page = gather(where, source)
    assert len(page) == where.page_bytes
    scatter(where, target, page)

    for name, cache in caches.items():
        for block in range(BLOCKS):
            expected = block_of(before[name], source if block == target else block)
            assert torch.equal(block_of(cache, block), expected), (name, block)


def specs(spec: Any) -> dict[str, Any]:
    return dict.fromkeys(NAMES, spec)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_page_is_all_of_a_block_in_each_layout(layout):
    spec = full_spec()
    caches = make_caches(spec, KVCacheLayout[layout])

    where = geometry(caches, NAMES, specs(spec), BLOCKS)

    assert where.page_bytes == LAYERS * spec.page_size_bytes
    assert where.layers == tuple(NAMES)
    assert where.block_count == BLOCKS
    assert where.device == "cpu"
    pieces = {"LHBNC": LAYERS * 4, "BLHNC": 1, "BLNHC": 1}.get(layout, LAYERS)
    if layout != "BHLNC":  # its layers are neighbors only within a head
        assert len(where.segments) == pieces
    check_copy(caches, where)


def test_different_layouts_have_different_arrangements():
    spec = full_spec()
    texts = {
        layout: geometry(
            make_caches(spec, KVCacheLayout[layout]), NAMES, specs(spec), BLOCKS
        ).arrangements
        for layout in ("LBHNC", "LBNHC")
    }
    assert texts["LBHNC"] != texts["LBNHC"]


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
@pytest.mark.parametrize("kernel_block", [8, 16])
def test_kernel_blocks_smaller_than_a_block_are_parts_of_it(layout, kernel_block):
    spec = full_spec()
    caches = make_caches(spec, KVCacheLayout[layout], kernel_block)
    assert caches[NAMES[0]].shape[0] == BLOCKS * 32 // kernel_block

    where = geometry(caches, NAMES, specs(spec), BLOCKS)

    assert len(where.segments) == LAYERS
    check_copy(caches, where)
    whole = geometry(make_caches(spec, KVCacheLayout[layout]), NAMES, specs(spec), BLOCKS)
    assert where.arrangements != whole.arrangements


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
def test_padding_behind_a_page_is_not_copied(layout):
    plain = full_spec()
    spec = full_spec(page_size_padded=plain.page_size_bytes + 512)
    caches = make_caches(spec, KVCacheLayout[layout])

    where = geometry(caches, NAMES, specs(spec), BLOCKS)

    assert where.page_bytes == LAYERS * plain.page_size_bytes
    assert len(where.segments) == LAYERS
    check_copy(caches, where)


def test_an_allocation_may_begin_with_other_data():
    spec = full_spec()
    caches = make_caches(spec, KVCacheLayout.LBHNC, lead=4096)

    where = geometry(caches, NAMES, specs(spec), BLOCKS)

    storage = caches[NAMES[0]].untyped_storage().data_ptr()
    assert where.segments[0].address == storage + 4096
    check_copy(caches, where)


def test_latent_caches_of_three_dimensions():
    spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=24, dtype=torch.bfloat16)
    caches = {name: torch.zeros(BLOCKS, 16, 24, dtype=torch.bfloat16) for name in NAMES}

    where = geometry(caches, NAMES, specs(spec), BLOCKS)

    assert [segment.size for segment in where.segments] == [16 * 24 * 2] * LAYERS
    page = gather(where, 1)
    scatter(where, 2, page)
    assert gather(where, 2) == page


def test_old_layouts_with_k_and_v_before_the_blocks():
    spec = full_spec()
    caches = {name: torch.zeros(2, BLOCKS, 32, 4, 8) for name in NAMES}

    where = geometry(caches, NAMES, specs(spec), BLOCKS)

    assert len(where.segments) == 2 * LAYERS
    for name, cache in caches.items():
        cache.copy_(torch.arange(cache.numel()).reshape(cache.shape) + hash(name) % 97)
    before = {name: cache.clone() for name, cache in caches.items()}
    scatter(where, 4, gather(where, 0))
    for name, cache in caches.items():
        assert torch.equal(cache[:, 4], before[name][:, 0])
        assert torch.equal(cache[:, :4], before[name][:, :4])


def test_layers_of_separate_allocations_keep_vllms_order():
    spec = full_spec()
    caches = {name: torch.zeros(BLOCKS, 4, 32, 16) for name in reversed(NAMES)}

    where = geometry(caches, NAMES, specs(spec), BLOCKS)

    assert where.layers == tuple(NAMES)
    assert [s.address for s in where.segments] == [caches[name].data_ptr() for name in NAMES]


def test_another_name_for_the_same_memory_is_ignored():
    spec = full_spec()
    caches = make_caches(spec, KVCacheLayout.LBHNC)
    names = [*NAMES, "model.layers.9.attn"]
    caches["model.layers.9.attn"] = caches[NAMES[1]]

    where = geometry(caches, names, dict.fromkeys(names, spec), BLOCKS)

    assert where.page_bytes == LAYERS * spec.page_size_bytes
    assert len(where.layers) == LAYERS


def test_neighbors_merge_only_at_the_same_stride():
    spec = full_spec()
    where = geometry(make_caches(spec, KVCacheLayout.BLHNC), NAMES, specs(spec), BLOCKS)
    assert where.segments == (
        Segment(where.segments[0].address, LAYERS * spec.page_size_bytes, where.page_bytes),
    )


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda caches: caches.pop(NAMES[1]), "without a KV tensor: model.layers.1.attn"),
        (lambda caches: caches.update({NAMES[0]: [caches[NAMES[0]]]}), "is a list"),
        (
            lambda caches: caches.update({NAMES[0]: torch.zeros(7, 4, 32, 16)}),
            r"no dimension of shape \[7, 4, 32, 16\] counts 5 blocks",
        ),
        (
            lambda caches: caches.update({NAMES[0]: torch.zeros(BLOCKS, 4, 32, 8)}),
            "a block has 4096 bytes, its spec says 8192",
        ),
        (
            lambda caches: caches.update(
                {NAMES[0]: torch.zeros(4096).as_strided((BLOCKS, 4, 32, 16), (0, 512, 16, 1))}
            ),
            "overlap at a stride of 0",
        ),
        (
            lambda caches: caches.update({NAMES[0]: torch.zeros(0, 4, 32, 16)}),
            "no dimension",
        ),
        (
            lambda caches: caches.update({NAMES[0]: torch.zeros(BLOCKS, 4, 32, 16, device="meta")}),
            "lies on cpu:0, meta:0",
        ),
    ],
)
def test_unsupported_tensors_are_rejected(damage, words):
    spec = full_spec()
    caches = make_caches(spec, KVCacheLayout.LBHNC)
    damage(caches)

    with pytest.raises(LayoutError, match=words):
        geometry(caches, NAMES, specs(spec), BLOCKS)


def test_overlapping_elements_are_rejected():
    spec = full_spec()
    caches = make_caches(spec, KVCacheLayout.LBHNC)
    caches[NAMES[0]] = torch.zeros(65536).as_strided((BLOCKS, 4, 32, 16), (2048, 512, 8, 1))

    with pytest.raises(LayoutError, match="overlap"):
        geometry(caches, NAMES, specs(spec), BLOCKS)


def test_a_tensor_that_exceeds_its_storage_is_rejected():
    spec = full_spec()
    caches = make_caches(spec, KVCacheLayout.LBHNC)
    caches[NAMES[0]].untyped_storage().resize_(spec.page_size_bytes)

    with pytest.raises(LayoutError, match=f"leaves its storage of {spec.page_size_bytes} bytes"):
        geometry(caches, NAMES, specs(spec), BLOCKS)


def test_an_engine_whose_gpu_cannot_be_used_runs_without_the_cache():
    settings = config.read_settings({}, {})
    for device, index, why in (("cuda", 99, "the GPU cannot be used"), ("xpu", 0, "on xpu")):
        where = Geometry((), (), 1, "", device, index)
        with pytest.raises(build.Unservable, match=why):
            build._make_device(where, settings)


def test_saves_follow_the_stream_that_is_current_at_their_submission(monkeypatch):
    saved = []

    class Mover:
        page_bytes = 7

        def save(self, *arguments, **_more):
            saved.append(arguments)

    class Stream:
        cuda_stream = 0xABC

    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: Stream if index == 3 else None)
    mover = build._OnStream(Mover(), 3)

    mover.save(b"scheduler", 1, b"key", 3, [5])

    assert saved == [(b"scheduler", 1, b"key", 3, [5], 0xABC)]
    assert mover.page_bytes == 7
