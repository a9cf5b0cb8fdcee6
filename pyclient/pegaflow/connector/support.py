"""What the connector serves. Anything else runs as plain vLLM: nothing saved, nothing loaded."""

from __future__ import annotations

from typing import Any

from pegaflow.connector import ranks

#: One group of exactly these: every token has its slot for good, and a block's bytes depend on the
#: tokens up to its end only. Their subclasses recycle slots or hold other things, so names count.
_SERVED_SPECS = ("FullAttentionSpec", "MLAAttentionSpec")


def unsupported(vllm_config: Any, kv_cache_config: Any) -> str:
    """Why this engine cannot use the cache, for a person; empty if it can.

    Both roles ask with their own copy of the configuration and come to the same answer.
    """
    return _parallelism(vllm_config) or _model(vllm_config) or _groups(kv_cache_config)


def _parallelism(vllm_config: Any) -> str:
    parallel = vllm_config.parallel_config
    for field, name in (
        ("decode_context_parallel_size", "decode context parallelism"),
        ("prefill_context_parallel_size", "prefill context parallelism"),
    ):
        if (size := getattr(parallel, field, 1)) != 1:
            return f"{name} of {size} is not supported yet"
    return ranks.spread(vllm_config)


def _model(vllm_config: Any) -> str:
    model = vllm_config.model_config
    if getattr(vllm_config, "speculative_config", None) is not None:
        return "speculative decoding is not supported yet"
    if getattr(model, "is_encoder_decoder", False):
        return "encoder-decoder models have cross attention, which is not supported"
    if getattr(model, "is_diffusion", False):
        return "diffusion models rewrite their blocks"
    if getattr(model, "enable_sleep_mode", False):
        return "sleep mode takes the KV cache's memory away under us; it is not supported yet"
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        return "KV scales that each process calculates for itself make its blocks its own"
    return ""


def _groups(kv_cache_config: Any) -> str:
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(sorted({type(group.kv_cache_spec).__name__ for group in groups}))
        return f"{len(groups)} cache groups ({kinds or 'none'}) are not supported yet, one is"
    (group,) = groups
    if getattr(group, "host_resident", False) or not getattr(group, "enable_kv_transfer", True):
        return "the cache group is not one that a connector may move"
    specs = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    for spec in specs.values() if specs else (group.kv_cache_spec,):
        if reason := _spec(spec):
            return reason
    return ""


def _spec(spec: Any) -> str:
    kind = type(spec).__name__
    if kind not in _SERVED_SPECS:
        return f"layers of kind {kind} are not supported yet"
    if getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None):
        return "layers with a window of attention are not supported yet"
    if getattr(spec, "non_causal", False):
        return "layers that look ahead have other KV for the same prefix"
    if getattr(spec, "prefix_replay_tokens", 0):
        return "layers that recompute a window after each hit are not supported yet"
    return ""
