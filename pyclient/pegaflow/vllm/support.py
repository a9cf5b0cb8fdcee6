"""The supported configurations. Any other runs as plain vLLM, without saves or loads."""

from __future__ import annotations

from typing import Any

from pegaflow.vllm import ranks

#: One group of exactly these: every token keeps its slot, and a block's bytes depend only on the
#: tokens up to its end, also if vLLM's hybrid manager is off and a layer with a window keeps all
#: tokens. Their subclasses recycle slots or hold other data, so the exact names count.
_SERVED_SPECS = ("FullAttentionSpec", "MLAAttentionSpec")
#: Without the hybrid manager vLLM keeps all tokens of these, so that all layers are one group.
_PROMOTED_SPECS = ("SlidingWindowSpec", "ChunkedLocalAttentionSpec")
#: Drafts that are derived from the text: no model, no KV, no cache group.
_DRAFTS_WITHOUT_KV = ("ngram", "ngram_gpu", "suffix")


def unsupported(vllm_config: Any, kv_cache_config: Any) -> str:
    """Why this engine cannot use the cache, as a text; empty if it can.

    Both roles call it with their own copy of the configuration and get the same result.
    """
    return _parallelism(vllm_config) or _model(vllm_config) or _groups(kv_cache_config)


def kind_of_refusal(vllm_config: Any, kv_cache_config: Any) -> str:
    """The kind of that reason in the server's metrics: "engine", "model" or "weights".

    The last if the engine and its model are supported.
    """
    if _parallelism(vllm_config):
        return "engine"
    return "model" if unsupported(vllm_config, kv_cache_config) else "weights"


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
    if reason := _drafts(vllm_config):
        return reason
    if reason := _images(vllm_config):
        return reason
    if getattr(model, "is_encoder_decoder", False):
        return "encoder-decoder models have cross attention, which is not supported"
    if getattr(model, "is_diffusion", False):
        return "diffusion models rewrite their blocks"
    if getattr(model, "enable_sleep_mode", False):
        return "sleep mode frees the KV cache's memory while it is in use; it is not supported yet"
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        return "KV scales that each process calculates for itself make its blocks private"
    return ""


def _drafts(vllm_config: Any) -> str:
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is None:
        return ""
    method = str(getattr(speculative, "method", None))
    if method not in _DRAFTS_WITHOUT_KV:
        served = ", ".join(_DRAFTS_WITHOUT_KV)
        return f"speculative decoding by {method} is not supported yet; supported are {served}"
    # vLLM puts the target's own configuration where these methods need its vocabulary.
    draft = getattr(speculative, "draft_model_config", None)
    target = getattr(speculative, "target_model_config", None)
    if draft is not None and getattr(draft, "model", None) != getattr(target, "model", None):
        return f"speculative decoding by {method} with a draft model is not supported yet"
    return ""


def _images(vllm_config: Any) -> str:
    """vLLM numbers images instead of hashing them if it needs no hash itself."""
    multimodal = getattr(vllm_config.model_config, "multimodal_config", None)
    if multimodal is None:
        return ""
    if (
        getattr(multimodal, "mm_processor_cache_gb", None) == 0
        and not vllm_config.cache_config.enable_prefix_caching
    ):
        return (
            "with --mm-processor-cache-gb 0 and prefix caching off vLLM does not hash images, so "
            "blocks with images have no name; set either of them"
        )
    return ""


def _groups(kv_cache_config: Any) -> str:
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = sorted({type(spec).__name__ for group in groups for spec in _specs(group)})
        reason = f"{len(groups)} cache groups ({', '.join(kinds) or 'none'}) are not supported yet"
        could_be_one = set(kinds) <= {*_SERVED_SPECS, *_PROMOTED_SPECS}
        if could_be_one and set(kinds) & set(_SERVED_SPECS):
            return (
                f"{reason}; --disable-hybrid-kv-cache-manager makes them one, for which windows "
                "need as much GPU memory as full attention"
            )
        return f"{reason}, one is"
    (group,) = groups
    if getattr(group, "is_eagle_group", False):
        return "layers of a draft model are not supported yet"
    if getattr(group, "host_resident", False) or not getattr(group, "enable_kv_transfer", True):
        return "a connector may not transfer the cache group"
    for spec in _specs(group):
        if reason := _spec(spec):
            return reason
    return ""


def _specs(group: Any) -> list[Any]:
    by_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return list(by_layer.values()) if by_layer else [group.kv_cache_spec]


def _spec(spec: Any) -> str:
    kind = type(spec).__name__
    if kind not in _SERVED_SPECS:
        return f"layers of kind {kind} are not supported yet"
    if getattr(spec, "non_causal", False):
        return "layers that look ahead have different KV for the same prefix"
    if getattr(spec, "prefix_replay_tokens", 0):
        return "layers that recompute a window after each hit are not supported yet"
    return ""
