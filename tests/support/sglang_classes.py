"""SGLang's cache classes, mostly without a GPU: import this module before ``sglang``.

``tools/sglang/install.sh`` has put SGLang's Python files into build/sglang, without its kernels and
without packages that its cache does not use. Those are empty modules here; and the copies between
"device" and host pools, which are kernels of a GPU in SGLang, are indexed assignments.

With ``PEGA_SGLANG_DEVICE=cuda`` the installed SGLang is used as it is, with its pools on the GPU.

Importing takes ten seconds or more, so tests import this once, in the process that forks engines.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import torch

DEVICE = os.environ.get("PEGA_SGLANG_DEVICE", "cpu")
DIRECTORY = Path(__file__).resolve().parents[2] / "build" / "sglang"
#: Packages that SGLang imports and its cache does not use.
_UNUSED = (
    "datasets",
    "torchvision",
    "torchvision.io",
    "torchvision.transforms",
    "torchvision.transforms.functional",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
)


def missing() -> str:
    """Why there are no classes; empty if there are."""
    if DEVICE != "cpu":
        return "" if importlib.util.find_spec("sglang") else "no SGLang is installed"
    if (DIRECTORY / ".sglang").exists():
        return ""
    return "no SGLang in build/sglang: './dev test python/sglang' installs it, from pypi.org"


class _Unused(types.ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _to_host(
    src_ptrs: list[torch.Tensor],
    dst_ptrs: list[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Layers of slots into pages of layers: keys of all layers, then values of all layers."""
    layers = len(src_ptrs) // len(dst_ptrs)
    for number, source in enumerate(src_ptrs):
        target = dst_ptrs[number // layers]
        pages = dst_indices[::page_size] // page_size
        rows = source[src_indices].view(len(pages), page_size, *source.shape[1:])
        target[pages, number % layers] = rows


def _to_device(
    src_ptrs: list[torch.Tensor],
    dst_ptrs: list[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """One layer of pages into slots."""
    pages = src_indices[::page_size] // page_size
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[pages, layer_id].reshape(-1, *target.shape[1:])


def _prepare() -> None:
    # SGLang writes its settings below the home directory otherwise.
    os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", "/tmp")
    os.environ.setdefault("SGLANG_DISABLE_CONSOLIDATED_WARNING", "1")
    warnings.filterwarnings("ignore", category=UserWarning)
    if DEVICE == "cpu":
        _prepare_without_gpu()
    elif importlib.util.find_spec("datasets") is None:
        sys.modules["datasets"] = _Unused("datasets")  # for benchmarks only
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
    from sglang.test.kits.unified_radix_cache import fixtures

    # The one of engines; that of the fixtures numbers slots without regard to pages.
    fixtures.TokenToKVPoolAllocator = lambda **options: PagedTokenToKVPoolAllocator(
        page_size=options["kvcache"].page_size, **options
    )
    fixtures.get_device = lambda *_: DEVICE


def _prepare_without_gpu() -> None:
    sys.path.insert(1, str(DIRECTORY))
    import sglang  # noqa: F401 - it looks for torchvision itself, so the stand-ins come later

    for name in _UNUSED:
        sys.modules[name] = _Unused(name)
    from sglang.srt.mem_cache.pool_host import base, common, mha

    # It refuses any pool while less than 10 GiB of the machine's memory is available.
    assert base.HICACHE_HOST_MEMORY_RESERVE_BYTES
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
    common._cuda_host_register = lambda *_: None  # there is no GPU for which to lock memory
    common._cuda_host_unregister = lambda *_: None
    mha.transfer_kv_all_layer_direct_lf_pf = _to_host
    mha.transfer_kv_per_layer_direct_pf_lf = _to_device


if not missing():
    _prepare()
