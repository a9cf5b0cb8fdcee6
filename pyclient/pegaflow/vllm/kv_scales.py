"""The scales of a quantized KV cache, as a factor of the namespace.

The bytes of an fp8 cache mean something only together with their layer's scales. These are in the
checkpoint, whose files the weights id names, but not every release of vLLM reads them for every
model: some compute with 1.0 instead. So the engine's own layers are asked. Scales for each token
and head are no concern here: they are in the blocks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from pegaflow.engine.layout import Geometry
from pegaflow.vllm.namespace import Factors

#: The scales' names in vLLM's attention layers.
_SCALES = ("_k_scale", "_v_scale")
_NONE = [1.0]
#: The beginnings of a layer's arrangement (layout.Geometry) whose elements need no scale.
_UNSCALED = ("torch.float16", "torch.bfloat16", "torch.float32")

#: The text for scales that differ between ranks, whose lists of factors must be equal. The files of
#: the checkpoint determine them.
FROM_CHECKPOINT = "checkpoint"


def factor(vllm_config: Any, places: Sequence[Geometry]) -> Factors:
    """The factor of the scales with which this worker computes; empty if all of them are 1.0.

    Called once the model is loaded. ``places`` are those of the cache groups.
    """
    compilation = getattr(vllm_config, "compilation_config", None)
    known = getattr(compilation, "static_forward_context", None) or {}
    scales = [
        (layer, _scales(known.get(layer)))
        for place in places
        for layer, arrangement in zip(place.layers, place.arrangements, strict=True)
        if not arrangement.startswith(_UNSCALED)
    ]
    all_values = [values for _, pair in scales for values in pair]
    if all(set(values) <= set(_NONE) for values in all_values):
        return []
    parallel = vllm_config.parallel_config
    by_head = any(len(values) > 1 for values in all_values)
    if parallel.pipeline_parallel_size > 1 or (by_head and parallel.tensor_parallel_size > 1):
        return [("kv_scales", FROM_CHECKPOINT)]
    return [("kv_scales", hashlib.sha256(json.dumps(scales).encode()).hexdigest())]


def _scales(layer: Any) -> list[list[float]]:
    """The scales of K and V: one for all heads, or one a head."""
    found = []
    for name in _SCALES:
        tensor = getattr(layer, name, None)
        found.append(_NONE if tensor is None else tensor.detach().float().flatten().tolist())
    return found
