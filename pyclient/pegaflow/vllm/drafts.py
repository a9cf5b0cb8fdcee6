"""Speculative decoding: which draft methods are served, and what their KV requires.

A draft model's layers are layers of the engine's cache group, so a block holds their KV beside the
target's. Two things are different there:

- The draft KV of a token is computed from the *next* token as well. It is final when that token is,
  and the last token of a block needs the first one of the next block. vLLM's own cache therefore
  matches one block more than it uses; so does PegaFlow.
- The draft model runs after the target, in some releases after the connector's save of the step.
"""

from __future__ import annotations

import types
from typing import Any

#: Drafts that are derived from the text: no model, no KV.
WITHOUT_KV = ("ngram", "ngram_gpu", "suffix")
#: Draft models that continue the target's hidden states.
WITH_KV = ("eagle", "eagle3", "mtp")


def refusal(vllm_config: Any) -> str:
    """Why this engine's drafts are not served, as a text; empty if they are, or there are none."""
    speculative = _speculative(vllm_config)
    if speculative is None:
        return ""
    method = _method(speculative)
    if method not in WITHOUT_KV + WITH_KV:
        served = ", ".join(WITHOUT_KV + WITH_KV)
        return f"speculative decoding by {method} is not supported yet; supported are {served}"
    if method in WITHOUT_KV:
        if model_config(vllm_config) is not None:
            return f"speculative decoding by {method} with a draft model is not supported yet"
        return ""
    return _unserved(vllm_config, speculative)


def _unserved(vllm_config: Any, speculative: Any) -> str:
    """Why the KV of this draft model is not served."""
    modules = getattr(speculative, "use_multi_module_mtp", None)
    if modules is not None and modules():
        # Each module's KV depends on one more of the tokens that follow.
        return "drafts by several MTP modules are not supported yet"
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        return "draft models with pipeline parallelism are not supported yet"
    draft = getattr(speculative, "draft_model_config", None)
    longest = vllm_config.model_config.max_model_len
    own = getattr(draft, "max_model_len", None) or longest
    if own < longest:
        return (
            f"the draft model serves {own} tokens and the model {longest}: vLLM computes no drafts "
            "for a batch with a longer request; set max_model_len of --speculative-config to the "
            "model's"
        )
    return ""


def have_kv(vllm_config: Any) -> bool:
    """Whether blocks hold the KV of a draft model."""
    speculative = _speculative(vllm_config)
    return speculative is not None and _method(speculative) in WITH_KV


def last_block_is_proof(vllm_config: Any) -> bool:
    """Whether a block is usable only if the next one is known, as in vLLM's own cache."""
    if not have_kv(vllm_config):
        return False
    speculative = _speculative(vllm_config)
    return not getattr(speculative, "disable_eagle_block_drop", False)


def method(vllm_config: Any) -> str:
    """The name of the method; empty if blocks hold no KV of drafts."""
    return _method(_speculative(vllm_config)) if have_kv(vllm_config) else ""


def model_config(vllm_config: Any) -> Any:
    """The configuration of a draft model with files of its own; None if there is none."""
    speculative = _speculative(vllm_config)
    # vLLM puts the target's own configuration where a method needs its vocabulary, and an MTP
    # module is in the target's files.
    draft = getattr(speculative, "draft_model_config", None)
    target = getattr(speculative, "target_model_config", None) or vllm_config.model_config
    if draft is None or getattr(speculative, "draft_load_config", None) is not None:
        return draft
    same = (
        getattr(draft, "model", None) == getattr(target, "model", None)
        and getattr(draft, "revision", None) == getattr(target, "revision", None)
        and getattr(draft, "quantization", None) == getattr(target, "quantization", None)
    )
    return None if same else draft


def kv_dtype(vllm_config: Any) -> str:
    """The option for the KV of the draft's layers; empty if it is the model's."""
    speculative = _speculative(vllm_config)
    return str(getattr(speculative, "kv_cache_dtype", None) or "")


def steps_without_drafts(vllm_config: Any) -> int | None:
    """The number of tokens from which on one request makes vLLM compute no drafts for its whole
    batch; None if blocks hold no KV of drafts.
    """
    if not have_kv(vllm_config):
        return None
    drafted: int = _speculative(vllm_config).num_speculative_tokens
    return int(vllm_config.model_config.max_model_len) - drafted


def as_model(vllm_config: Any) -> Any:
    """The fields of ``vllm_config`` that say how weights are loaded, for the draft model's; None if
    it has no files of its own.
    """
    draft = model_config(vllm_config)
    if draft is None:
        return None
    speculative = _speculative(vllm_config)
    own = getattr(speculative, "draft_load_config", None)
    return types.SimpleNamespace(
        model_config=draft,
        load_config=own or vllm_config.load_config,
        parallel_config=vllm_config.parallel_config,
    )


def _speculative(vllm_config: Any) -> Any:
    return getattr(vllm_config, "speculative_config", None)


def _method(speculative: Any) -> str:
    return str(getattr(speculative, "method", None))
