"""The scales of a quantized KV cache, as a factor of the namespace.

The bytes of an fp8 cache mean something only together with their layer's scales. These are in the
checkpoint, whose files the weights id names, but not every release of vLLM reads them for every
model: some compute with 1.0 instead. So the engine's own layers are asked. Scales for each token
and head are no concern here: they are in the blocks.

A rank has the scales of its own layers and heads, and all ranks need one factor. So they exchange
their scales (exchange.py), and the factor is made of those of the whole model: by layer, and by KV
head where heads differ. It does not depend on the number of ranks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pegaflow.engine.layout import Geometry
from pegaflow.vllm import drafts
from pegaflow.vllm.namespace import Factors

#: The scales' names in vLLM's attention layers. Those of queries and probabilities change no byte
#: of their own layer, but what deeper layers compute.
_OF_BYTES = ("_k_scale", "_v_scale")
_SCALES = (*_OF_BYTES, "_q_scale", "_prob_scale")
#: The beginnings of a layer's arrangement (layout.Geometry) whose elements need no scale.
_UNSCALED = ("torch.float16", "torch.bfloat16", "torch.float32")
#: Values of --kv-cache-dtype without scales.
_UNQUANTIZED = ("", "auto", "float16", "bfloat16", "float32", "half", "float")

#: The scales of one rank: by layer, the number of its KV heads and the values of each scale.
Scales = dict[str, dict[str, Any]]


class UnknownScales(Exception):
    """The scales of this engine cannot be determined; the text has the reason and the fix."""


def is_quantized(vllm_config: Any) -> bool:
    """Whether the engine is configured to quantize KV: equal on all of its ranks."""
    stated = str(getattr(vllm_config.cache_config, "cache_dtype", ""))
    return stated not in _UNQUANTIZED or drafts.kv_dtype(vllm_config) not in _UNQUANTIZED


def read(vllm_config: Any, specs: Mapping[str, Any], places: Sequence[Geometry]) -> Scales:
    """The scales with which this worker computes. Called once the model is loaded.

    ``specs`` are those of the layers, ``places`` those of the cache groups.

    Raises:
        UnknownScales: vLLM does not show the scales of a quantized layer, or in a shape that does
            not fit its heads.
    """
    compilation = getattr(vllm_config, "compilation_config", None)
    known = getattr(compilation, "static_forward_context", None) or {}
    found: Scales = {}
    for place in places:
        for layer, arrangement in zip(place.layers, place.arrangements, strict=True):
            if arrangement.startswith(_UNSCALED):
                continue
            module, spec = known.get(layer), specs.get(layer)
            if not hasattr(module, "_k_scale"):
                # Recurrent states and index keys have none: they are no quantized keys and values.
                if getattr(spec, "kv_quant_mode", 0):
                    raise UnknownScales(
                        f"the KV scales of {layer} are unknown: this vLLM does not show them; use "
                        "--kv-cache-dtype bfloat16"
                    )
                continue
            heads = max(1, getattr(spec, "num_kv_heads", 0) or 1)
            values = {
                name: _by_head(layer, name, getattr(module, name, None), heads) for name in _SCALES
            }
            found[layer] = {"heads": heads, **values}
    return found


def _by_head(layer: str, name: str, tensor: Any, heads: int) -> list[float]:
    """The values of one scale, as many for each KV head."""
    values = [1.0] if tensor is None else tensor.detach().float().flatten().tolist()
    if len(values) == 1:
        return values * heads
    if not values or len(values) % heads:
        raise UnknownScales(
            f"{layer} has {len(values)} values of {name.strip('_')} for {heads} KV heads; use "
            "--kv-cache-dtype bfloat16"
        )
    return values


def factor(by_rank: Sequence[Scales], tensor: int, replicas: int) -> Factors:
    """The factor of the scales of all ranks, in their order; empty if all of them are 1.0.

    ``replicas``: the consecutive ranks of a stage that hold the same bytes (ranks.py).

    Raises:
        UnknownScales: ranks that hold the same bytes compute with different scales, or a layer is
            on other ranks than those of a stage.
    """
    holders: dict[str, list[int]] = {}
    for rank, scales in enumerate(by_rank):
        for layer in scales:
            holders.setdefault(layer, []).append(rank)
    of_model: dict[str, dict[str, list[float]]] = {}
    for layer, held_by in holders.items():
        stage = held_by[0] // tensor
        if held_by != list(range(stage * tensor, (stage + 1) * tensor)):
            raise UnknownScales(
                f"rank {held_by[0]} has scales of {layer}, and another rank of its pipeline stage "
                "has none; use --kv-cache-dtype bfloat16"
            )
        for name in _SCALES:
            values = _of_model(
                layer, name, [by_rank[rank][layer][name] for rank in held_by], replicas
            )
            if set(values) == {1.0}:
                continue
            # One scale for all heads, however many there are.
            one = values[:1] if len(set(values)) == 1 else values
            of_model.setdefault(layer, {})[name] = one
    if not of_model:
        return []
    text = json.dumps(of_model, sort_keys=True)
    return [("kv_scales", hashlib.sha256(text.encode()).hexdigest())]


def _of_model(layer: str, name: str, parts: Sequence[list[float]], replicas: int) -> list[float]:
    """The values of one scale for all heads of the model, of those of the ranks of a stage."""
    firsts = [parts[rank - rank % replicas] for rank in range(len(parts))]
    if list(parts) == firsts:
        parts = parts[::replicas]
    elif name in _OF_BYTES:
        raise UnknownScales(
            f"ranks that hold the same KV heads of {layer} compute with different values of "
            f"{name.strip('_')}; use --kv-cache-dtype bfloat16"
        )
    return [value for part in parts for value in part]
