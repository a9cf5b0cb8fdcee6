"""Whether other engines may map the allocations of an engine's memory."""

from __future__ import annotations

import types

import pytest
import torch

from pegaflow.vllm.allocator import keeps_allocations

#: As PyTorch describes what it has.
SNAPSHOT = [
    {"address": 0x1000, "total_size": 0x1000, "is_expandable": False, "segment_pool_id": (0, 0)},
    {"address": 0x8000, "total_size": 0x4000, "is_expandable": True, "segment_pool_id": (0, 0)},
    {"address": 0xC000, "total_size": 0x1000, "is_expandable": True, "segment_pool_id": (0, 0)},
    {"address": 0xF000, "total_size": 0x1000, "is_expandable": True, "segment_pool_id": (0, 1)},
]


def config(**model: bool) -> types.SimpleNamespace:
    return types.SimpleNamespace(model_config=types.SimpleNamespace(**model))


@pytest.fixture(autouse=True)
def snapshot(monkeypatch):
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: SNAPSHOT)


@pytest.mark.parametrize("addresses", [[0x8000], [0xBFFF, 0xC000, 0x8000]])
def test_expandable_segments_in_use_stay(addresses):
    assert keeps_allocations(config(), "cuda", addresses)


@pytest.mark.parametrize(
    "addresses",
    [[0x7FFF], [0x8000, 0xD000], [0x1000], [0xF000]],
    ids=["elsewhere", "one elsewhere", "below a plain segment", "of a pool with its allocator"],
)
def test_allocations_of_an_unknown_allocator_may_go(addresses):
    assert not keeps_allocations(config(enable_cumem_allocator=False), "cuda", addresses)


def test_an_allocator_that_pytorch_cannot_describe_is_unknown(monkeypatch):
    def fails():
        raise RuntimeError("cudaMallocAsync does not yet support snapshot")

    monkeypatch.setattr(torch.cuda, "memory_snapshot", fails)
    assert not keeps_allocations(config(), "cuda", [0x8000])


def test_allocations_of_vllms_allocator_stay_without_sleep_mode():
    assert keeps_allocations(config(enable_cumem_allocator=True), "cuda", [0])
    both = config(enable_cumem_allocator=True, enable_sleep_mode=True)
    assert not keeps_allocations(both, "cuda", [0])


def test_ordinary_memory_stays(monkeypatch):
    monkeypatch.delattr(torch.cuda, "memory_snapshot")  # which may start CUDA
    assert keeps_allocations(config(), "cpu", [0])
