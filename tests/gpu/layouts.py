"""The layouts in which vLLM hands over a KV cache, as tensors, saved and loaded by the connector's
own parser of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from tests.gpu.scenarios import Place

BLOCKS, LAYERS, TOKENS, HEADS, HEAD = 96, 4, 16, 8, 128


def _nhd(torch: Any, device: str, dtype: Any) -> list[Any]:
    """The V2 runner's default: K and V packed, one allocation for each layer, not contiguous."""
    return [
        torch.zeros((BLOCKS, TOKENS, HEADS, 2 * HEAD), dtype=dtype, device=device).transpose(1, 2)
        for _ in range(LAYERS)
    ]


def _hnd(torch: Any, device: str, dtype: Any) -> list[Any]:
    return [
        torch.zeros((BLOCKS, HEADS, TOKENS, 2 * HEAD), dtype=dtype, device=device)
        for _ in range(LAYERS)
    ]


def _apart(torch: Any, device: str, dtype: Any) -> list[Any]:
    """K and V one after the other, each with all blocks."""
    return [
        torch.zeros((2, BLOCKS, TOKENS, HEADS, HEAD), dtype=dtype, device=device)
        for _ in range(LAYERS)
    ]


def _mla(torch: Any, device: str, dtype: Any) -> list[Any]:
    return [torch.zeros((BLOCKS, TOKENS, 576), dtype=dtype, device=device) for _ in range(LAYERS)]


def _block_outermost(torch: Any, device: str, dtype: Any) -> list[Any]:
    """All layers of a block together in one allocation, as from 0.29 on."""
    whole = torch.zeros((BLOCKS, LAYERS, TOKENS, HEADS, 2 * HEAD), dtype=dtype, device=device)
    return [whole[:, layer] for layer in range(LAYERS)]


def _padded(torch: Any, device: str, dtype: Any) -> list[Any]:
    size = TOKENS * HEADS * 2 * HEAD
    return [
        torch.zeros((BLOCKS, size + 512), dtype=dtype, device=device)[:, :size].unflatten(
            1, (TOKENS, HEADS, 2 * HEAD)
        )
        for _ in range(LAYERS)
    ]


def _kernel_blocks(torch: Any, device: str, dtype: Any) -> list[Any]:
    """Kernel blocks of half a manager's block, K and V apart."""
    shape = (2, 2 * BLOCKS, TOKENS // 2, HEADS, HEAD)
    return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(LAYERS)]


LAYOUTS: Mapping[str, tuple[Callable[..., list[Any]], str]] = {
    "NHD, K and V packed, bf16": (_nhd, "bfloat16"),
    "HND, K and V packed, fp16": (_hnd, "float16"),
    "NHD, K and V packed, fp8": (_nhd, "float8_e4m3fn"),
    "K and V apart, bf16": (_apart, "bfloat16"),
    "MLA, bf16": (_mla, "bfloat16"),
    "MLA, fp8 bytes": (_mla, "uint8"),
    "all layers of a block together, bf16": (_block_outermost, "bfloat16"),
    "padded pages, bf16": (_padded, "bfloat16"),
    "two kernel blocks in a block, bf16": (_kernel_blocks, "bfloat16"),
}


def layouts(place: Place) -> str:
    """Random bytes in every layout, saved, overwritten, loaded into other blocks, compared."""
    with place.server(16 * BLOCKS) as server:
        process = place.process()
        for number, name in enumerate(LAYOUTS):
            process.call_function("tests.gpu.layouts:round_trip", str(server.socket), number,
                                  place.devices[0], place.seed + number)  # fmt: skip
            del name
    return "; ".join(LAYOUTS)


def round_trip(socket: str, number: int, device: str, seed: int) -> None:
    """Runs in the engine's process."""
    import torch

    from pegaflow import _native
    from pegaflow.engine.layout import geometry
    from tests.gpu.engine import PATIENCE_S, PATIENT, block_keys

    make, kind = list(LAYOUTS.values())[number]
    tensors = make(torch, device, getattr(torch, kind))
    names = [f"layer{i}" for i in range(LAYERS)]
    page = tensors[0].numel() // BLOCKS * tensors[0].element_size()
    specs = dict.fromkeys(names, SimpleNamespace(page_size_bytes=page))
    where = geometry(dict(zip(names, tensors, strict=True)), names, specs, BLOCKS)
    # By bytes, also for types that PyTorch does not compare; the block comes first.
    views = [tensor.view(torch.uint8) for tensor in tensors]
    if views[0].shape[0] == 2:
        views = [view.transpose(0, 1) for view in views]
    ratio = views[0].shape[0] // BLOCKS
    views = [view.unflatten(0, (BLOCKS, ratio)) for view in views]
    generator = torch.Generator(device=device).manual_seed(seed)
    for view in views:
        view.random_(0, 256, generator=generator)
    saved = [view.clone() for view in views]
    on_gpu = device.startswith("cuda")
    copies = _native.CudaDevice(where.device_index) if on_gpu else _native.HostDevice(1)
    mover = _native.Mover(
        socket, f"layout{number}", copies, where.segments, BLOCKS, [("layout", str(number))],
        **PATIENT,
    )  # fmt: skip
    session = _native.CacheSession(socket, f"layout{number}", **PATIENT)
    assert mover.wait_ready(PATIENCE_S) and session.wait_ready(PATIENCE_S), mover.status()
    chance = random.Random(seed)
    source, target = (chance.sample(range(BLOCKS), BLOCKS) for _ in range(2))
    keys = block_keys(f"layout{number}", range(BLOCKS))
    queue = torch.cuda.current_stream(device).cuda_stream if on_gpu else 0
    mover.save(_native.random_id(), 1, keys, 32, source, queue)
    done = _job(mover)
    assert done.blocks == BLOCKS, done.error
    for view in views:
        view.zero_()
    if on_gpu:
        torch.cuda.synchronize(device)
    found, complete, token, *_ = session.take(session.claim(keys, 32), PATIENCE_S)
    assert complete and found == BLOCKS, found
    mover.load(2, token, 0, target)
    done = _job(mover)
    assert done.blocks == BLOCKS, done.error
    for view, bytes_of in zip(views, saved, strict=True):
        assert torch.equal(view[target], bytes_of[source]), f"{make.__name__} {kind}"
        assert not torch.equal(view[target], bytes_of[target])  # otherwise this compares nothing
    session.close()
    mover.close()


def _job(mover: Any) -> Any:
    import select

    while not (finished := mover.take_finished()):
        assert select.select([mover.finished_fd()], [], [], 60)[0], "a job was not reported"
    return finished[0]
