"""The supported configurations. Any other runs as plain vLLM, without saves or loads."""

from __future__ import annotations

from typing import Any

from pegaflow.engine.config import ConfigError, read_settings
from pegaflow.engine.kinds import BlockKinds
from pegaflow.vllm import drafts, ranks, sleep
from pegaflow.vllm.device import device_type
from pegaflow.vllm.kinds import UnservedGroups, layer_specs, read_kinds, spec_problem

#: Whether several cache groups, windows, chunks and states are served.
SERVES_KINDS = True

#: What was compared with an engine without a connector, by vLLM's device type: the labels of the
#: kinds (KindRule.label) that a model has, in alphabetical order. Other models on such a device
#: need `pegaflow.untested=true`. One group of full attention is served everywhere.
VERIFIED: dict[str, frozenset[tuple[str, ...]]] = {
    "cuda": frozenset({("full", "window"), ("window",), ("chunk", "full"), ("full", "state")}),
    "cpu": frozenset({("full", "window"), ("window",), ("full", "state")}),
}

#: One group of exactly these: every token keeps its slot, and a block's bytes depend only on the
#: tokens up to its end, also if vLLM's hybrid manager is off and a layer with a window keeps all
#: tokens. Their subclasses recycle slots or hold other data, so the exact names count.
_SERVED_SPECS = ("FullAttentionSpec", "MLAAttentionSpec")
#: Without the hybrid manager vLLM keeps all tokens of these, so that all layers are one group.
_PROMOTED_SPECS = ("SlidingWindowSpec", "ChunkedLocalAttentionSpec")


def unsupported(vllm_config: Any, kv_cache_config: Any) -> str:
    """Why this engine cannot use the cache, as a text; empty if it can.

    Both roles call it with their own copy of the configuration and get the same result.
    """
    reason = _parallelism(vllm_config) or _model(vllm_config)
    if reason or not SERVES_KINDS or is_one_of_full_attention(kv_cache_config):
        return reason or _groups(kv_cache_config, drafts.have_kv(vllm_config))
    return _kinds(vllm_config, kv_cache_config)


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
    if reason := drafts.refusal(vllm_config):
        return reason
    if reason := _images(vllm_config):
        return reason
    if getattr(model, "is_encoder_decoder", False):
        return "encoder-decoder models have cross attention, which is not supported"
    if getattr(model, "is_diffusion", False):
        return "diffusion models rewrite their blocks"
    if reason := sleep.problem(vllm_config, _serves_untested):
        return reason
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        return (
            "with --calculate-kv-scales each process calculates KV scales from its first request, "
            "so its blocks mean nothing to another; remove the option, and use a checkpoint that "
            "has k_scale and v_scale"
        )
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


def is_one_of_full_attention(kv_cache_config: Any) -> bool:
    """Whether the model has one cache group, of which every token keeps its slot."""
    groups = kv_cache_config.kv_cache_groups
    return len(groups) == 1 and all(
        type(spec).__name__ in _SERVED_SPECS for spec in layer_specs(groups[0])
    )


def _kinds(vllm_config: Any, kv_cache_config: Any) -> str:
    """The same for several cache groups, windows, chunks and states."""
    try:
        kinds = read_kinds(kv_cache_config, vllm_config.cache_config)
    except UnservedGroups as error:
        return str(error)
    if not vllm_config.cache_config.enable_prefix_caching:
        return "several cache groups, windows and states need vLLM's prefix caching"
    if drafts.have_kv(vllm_config):
        method = drafts.method(vllm_config)
        return f"speculative decoding by {method} beside windows or states is not supported yet"
    reason = _release() or _verified(vllm_config, kv_cache_config, kinds)
    return reason + _could_be_one(kv_cache_config) if reason else ""


def _release() -> str:
    """A failed load of one group is reported by its blocks. With several groups that ends the
    engine, and the blocks of a window are no prefix, so the whole request must be reported.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    if hasattr(KVConnectorBase_V1, "get_transfer_results"):
        return ""
    return (
        "this vLLM cannot report a failed load of several cache groups or of windows; 0.30 and "
        "later can"
    )


def _verified(vllm_config: Any, kv_cache_config: Any, kinds: BlockKinds) -> str:
    labels = tuple(sorted({kind.rule.label for kind in kinds.kinds}))
    device = device_type(vllm_config)
    what = f"cache groups of kinds {', '.join(labels)}"
    if labels in VERIFIED.get(device, ()):
        if device == "cpu" or "state" not in labels or not _has_latents(kv_cache_config):
            return ""
        what = "states beside MLA"
    if _serves_untested(vllm_config):
        return ""
    return (
        f"models with {what} are not verified on this device yet; pegaflow.untested=true serves "
        "them"
    )


def _has_latents(kv_cache_config: Any) -> bool:
    """Whether a layer is of MLA. Beside states, as in Kimi K3, none was run on a GPU; vLLM's CPU
    build has no such model.
    """
    return any(
        type(spec).__name__ == "MLAAttentionSpec"
        for group in kv_cache_config.kv_cache_groups
        for spec in layer_specs(group)
    )


def _serves_untested(vllm_config: Any) -> bool:
    """Whether the operator wants what was not tested on this device."""
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    try:
        return read_settings(getattr(transfer, "kv_connector_extra_config", None) or {}).untested
    except ConfigError:
        return True  # it is reported as such


def _could_be_one(kv_cache_config: Any) -> str:
    """Advice, if vLLM can make the groups one of full attention."""
    names = {
        type(spec).__name__
        for group in kv_cache_config.kv_cache_groups
        for spec in layer_specs(group)
    }
    if names <= {*_SERVED_SPECS, *_PROMOTED_SPECS} and names & set(_SERVED_SPECS):
        return (
            "; --disable-hybrid-kv-cache-manager makes them one, for which windows "
            "need as much GPU memory as full attention"
        )
    return ""


def _groups(kv_cache_config: Any, drafts_have_kv: bool) -> str:
    """Why the cache groups are not one of full attention; empty if they are."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = sorted({type(spec).__name__ for group in groups for spec in layer_specs(group)})
        reason = f"{len(groups)} cache groups ({', '.join(kinds) or 'none'}) are not supported yet"
        return reason + (_could_be_one(kv_cache_config) or ", one is")
    (group,) = groups
    if getattr(group, "is_eagle_group", False) and not drafts_have_kv:
        return "layers of a draft model are not supported yet"
    if getattr(group, "host_resident", False) or not getattr(group, "enable_kv_transfer", True):
        return "a connector may not transfer the cache group"
    for spec in layer_specs(group):
        kind = type(spec).__name__
        if kind not in _SERVED_SPECS:
            return f"layers of kind {kind} are not supported yet"
        if reason := spec_problem(spec):
            return reason
    return ""
