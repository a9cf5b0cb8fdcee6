"""The rank of a worker in its engine, and the share of each block that it holds.

Workers are numbered as in vLLM within one engine core: pipeline stage after stage, the
tensor-parallel ranks of each together. Ranks that hold the same bytes are one *shard*: the lowest
of them saves it, all of them load it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from pegaflow.vllm import drafts


@dataclasses.dataclass(frozen=True)
class Place:
    """One worker among those of its engine core."""

    rank: int
    ranks: int
    shard: int
    shards: int
    saves: bool  #: The lowest rank of its shard.
    #: The consecutive shards that it holds, from ``shard`` on, if tensor-parallel sizes share
    #: blocks (grid.py); 0: one.
    cells: int = 0


def place(vllm_config: Any, kv_cache_config: Any, cells: int = 0) -> Place:
    """The place of the worker whose configuration this is. ``cells``: see Place."""
    parallel = vllm_config.parallel_config
    tensor, same = parallel.tensor_parallel_size, replicas(vllm_config, kv_cache_config)
    stage, within = divmod(parallel.rank, tensor)
    each = cells or 1
    return Place(
        rank=parallel.rank,
        ranks=parallel.world_size,
        shard=(stage * (tensor // same) + within // same) * each,
        shards=parallel.pipeline_parallel_size * (tensor // same) * each,
        saves=within % same == 0,
        cells=cells,
    )


def replicas(vllm_config: Any, kv_cache_config: Any) -> int:
    """The number of consecutive tensor-parallel ranks that hold the same bytes.

    In doubt 1: then the same bytes are stored several times, and each rank loads its own.
    """
    tensor = vllm_config.parallel_config.tensor_parallel_size
    stated = getattr(kv_cache_config, "kv_tp_replicas", None)
    if tensor == 1 or (stated or 1) > 1:
        return stated or 1
    if len(kv_cache_config.kv_cache_groups) != 1:
        return 1  # in doubt: their layers may be replicated differently
    (group,) = kv_cache_config.kv_cache_groups
    by_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    specs = list(by_layer.values()) if by_layer else [group.kv_cache_spec]
    if all(type(spec).__name__ == "MLAAttentionSpec" for spec in specs):
        # Releases before kv_tp_replicas have the whole latent on each rank; later ones report it.
        return tensor if stated is None else 1
    same = _replicas(vllm_config.model_config, tensor)
    if any(getattr(spec, "num_kv_heads", 0) != 1 for spec in specs):  # states have none
        return 1
    draft = drafts.model_config(vllm_config) if drafts.have_kv(vllm_config) else None
    # Ranks hold the same bytes if they do so in both models.
    return same if draft is None else math.gcd(same, _replicas(draft, tensor))


def _replicas(model: Any, tensor: int) -> int:
    heads = kv_heads(model)
    return tensor // min(heads, tensor) if heads and tensor % heads == 0 else 1


def kv_heads(model: Any) -> int:
    """KV heads of every layer; 0 if the configuration does not have it as one plain number."""
    config = getattr(model, "hf_text_config", model.hf_config)
    values = config.to_dict() if hasattr(config, "to_dict") else vars(config)
    names = {
        name
        for name in values
        if "kv_heads" in name or "key_value_heads" in name or "head_kv" in name
    }
    # Other names, and this list, belong to models whose layers differ.
    if names != {"num_key_value_heads"} or "block_configs" in values:
        return 0
    heads = values["num_key_value_heads"]
    return heads if type(heads) is int and heads == model.get_total_num_kv_heads() else 0


def stages(vllm_config: Any) -> str:
    """The layers of the pipeline's stages, equal on all of its ranks."""
    from vllm.distributed.utils import get_pp_indices

    layers = vllm_config.model_config.get_total_num_hidden_layers()
    size = vllm_config.parallel_config.pipeline_parallel_size
    bounds = [get_pp_indices(layers, stage, size) for stage in range(size)]
    return "stages:" + ",".join(f"{first}-{end - 1}" for first, end in bounds)


def spread(vllm_config: Any) -> str:
    """Why the ranks of this engine core are not all on this node; empty if they are.

    A block is complete only with all its shards, and a server has those of its own node.
    """
    parallel = vllm_config.parallel_config
    if parallel.world_size == 1:
        return ""
    nodes = getattr(parallel, "nnodes_within_dp", getattr(parallel, "nnodes", 1))
    if nodes > 1:
        return f"its {parallel.world_size} ranks are spread over {nodes} nodes"
    backend = parallel.distributed_executor_backend
    if backend != "mp":
        name = backend if isinstance(backend, str) else getattr(backend, "__name__", str(backend))
        return (
            f"the executor {name} does not report whether its {parallel.world_size} ranks are all "
            "on this node; --distributed-executor-backend mp does"
        )
    return ""
