"""vLLM's sleep mode: the engines that are served in it, and the sleeps that keep their weights.

A sleep unmaps the memory of the KV cache and of the weights. At level 1 the weights wait in host
memory and come back as they were, at level 2 they are gone and must be loaded again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pegaflow.vllm.device import device_type

#: vLLM's device types on which a real vLLM slept and woke with this connector, and answered as one
#: without. Elsewhere sleep mode needs `pegaflow.untested=true`.
VERIFIED: frozenset[str] = frozenset({"cuda"})

#: Executors whose workers are of vLLM alone; others, or another program's, may share their process
#: with a trainer.
_OWN_EXECUTORS = ("UniProcExecutor", "MultiprocExecutor")


def problem(vllm_config: Any, serves_untested: Callable[[Any], bool]) -> str:
    """Why an engine with sleep mode cannot use the cache; empty if it can, and without sleep mode.

    ``serves_untested``: whether the operator wants what was not tested on this device.
    """
    model = vllm_config.model_config
    if not getattr(model, "enable_sleep_mode", False):
        return ""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    if not hasattr(KVConnectorBase_V1, "unregister_kv_caches"):
        return (
            "this vLLM does not inform connectors before its sleep mode unmaps the KV cache; 0.33 "
            "and later do"
        )
    if (backend := getattr(model, "sleep_mode_backend", "cumem")) != "cumem":
        return f"sleep mode with the backend {backend} is not supported, with cumem it is"
    if device_type(vllm_config) in VERIFIED or serves_untested(vllm_config):
        return ""
    return "sleep mode is not verified on this device yet; pegaflow.untested=true serves it"


def weights_stay(core: Any) -> bool:
    """Whether nothing but calls of this engine core can replace the weights of its workers.

    Not so where the engine core or a worker shares its process with other programs: a trainer
    there writes the weights while the engine sleeps, and vLLM does not learn of it.
    """
    vllm_config = getattr(core, "vllm_config", None)
    parallel = getattr(vllm_config, "parallel_config", None)
    executor = type(getattr(core, "model_executor", None))
    return (
        any(base.__name__ == "EngineCoreProc" for base in type(core).__mro__)
        and executor.__name__ in _OWN_EXECUTORS
        and executor.__module__.startswith("vllm.")
        and str(getattr(parallel, "worker_cls", "")).startswith("vllm.")
        and not getattr(parallel, "worker_extension_cls", "")
    )
