"""The factors of the namespace for which a rank needs to know those of the other ranks.

All ranks of an engine register with one list of factors. Most of them follow from vLLM's
configuration, which is equal on all ranks. The scales of a quantized KV cache, and the formats of
the layers of other pipeline stages, do not.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Sequence
from typing import Any

from pegaflow.engine.kinds import BlockKinds
from pegaflow.engine.layout import Geometry
from pegaflow.vllm import kv_scales, namespace, ranks
from pegaflow.vllm.exchange import Exchange, NoExchange
from pegaflow.vllm.grid import Grid
from pegaflow.vllm.kinds import specs_by_layer

log = logging.getLogger("vllm.pegaflow")


class NoAgreement(Exception):
    """The ranks have no common list of factors; the text has the reason and the fix."""


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Equal on all ranks of an engine."""

    scales: namespace.Factors = dataclasses.field(default_factory=list)
    #: By kind of blocks, those of all pipeline stages; empty with one stage, or if unknown.
    formats: Sequence[namespace.Formats] = ()


def reach(
    vllm_config: Any,
    kv_cache_config: Any,
    kinds: BlockKinds | None,
    places: Sequence[Geometry],
    grid: Grid | None,
    exchange: Exchange,
) -> Agreement:
    """What the ranks agree on. Called on all of them, with the places of their cache groups.

    Raises:
        NoAgreement: the scales of a quantized KV cache are unknown.
    """
    parallel = vllm_config.parallel_config
    stages, tensor = parallel.pipeline_parallel_size, parallel.tensor_parallel_size
    quantized = kv_scales.is_quantized(vllm_config)
    own, problem = _own_scales(vllm_config, kv_cache_config, places)
    if stages * tensor == 1:
        if problem:
            raise NoAgreement(problem)
        return Agreement(_scales_factor([own], 1, 1))
    if not quantized and stages == 1:
        _check_unquantized(own, problem)
        return Agreement()
    formats = namespace.stage_formats(kv_cache_config, kinds, places, grid)
    text = json.dumps({"scales": own, "problem": problem, "formats": formats})
    try:
        texts = [json.loads(one) for one in exchange.texts(text)]
    except NoExchange as error:
        if quantized:
            raise NoAgreement(
                f"the KV scales of the engine's {stages * tensor} ranks are not comparable: "
                f"{error}; restart it, or use --kv-cache-dtype bfloat16"
            ) from None
        _check_unquantized(own, problem)
        # Stages of equal formats need no exchange, and the server refuses others by name.
        log.info("pegaflow: the KV formats of the pipeline's stages are not compared: %s", error)
        return Agreement()
    if problem := next((one["problem"] for one in texts if one["problem"]), ""):
        raise NoAgreement(problem)
    same = ranks.replicas(vllm_config, kv_cache_config)
    by_rank = [[namespace.Formats(*kind) for kind in one["formats"]] for one in texts]
    return Agreement(
        _scales_factor([one["scales"] for one in texts], tensor, same),
        namespace.joined(by_rank) if stages > 1 else (),
    )


def _own_scales(
    vllm_config: Any, kv_cache_config: Any, places: Sequence[Geometry]
) -> tuple[kv_scales.Scales, str]:
    """The scales of this rank, or why they are unknown."""
    specs = {
        layer: spec
        for group in kv_cache_config.kv_cache_groups
        for layer, spec in specs_by_layer(group).items()
    }
    try:
        return kv_scales.read(vllm_config, specs, places), ""
    except kv_scales.UnknownScales as error:
        return {}, str(error)


def _scales_factor(
    by_rank: Sequence[kv_scales.Scales], tensor: int, replicas: int
) -> namespace.Factors:
    try:
        return kv_scales.factor(by_rank, tensor, replicas)
    except kv_scales.UnknownScales as error:
        raise NoAgreement(str(error)) from None


def _check_unquantized(own: kv_scales.Scales, problem: str) -> None:
    """Ranks exchange scales only where vLLM's configuration quantizes KV, which all of them see."""
    if problem:
        raise NoAgreement(problem)
    if _scales_factor([own], 1, 1):
        raise NoAgreement(
            f"{min(own)} has KV scales, although --kv-cache-dtype does not quantize KV, so other "
            "ranks may have others; set --kv-cache-dtype fp8"
        )
