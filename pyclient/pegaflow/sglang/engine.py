"""What this process knows about its SGLang, and reports to the server that it is not served."""

from __future__ import annotations

import logging
from typing import Any

from pegaflow import _native
from pegaflow.engine.config import ConfigError, socket_path
from pegaflow.sglang import settings
from pegaflow.sglang.identity import Ranks

log = logging.getLogger("sglang.pegaflow")

#: No call waits for a notice: a server that starts later receives it within this time.
_RECONNECT_S = 5.0


def build() -> str:
    """Program and versions, for the server's log and /instances."""
    import sglang

    return f"pegaflow {_native.__version__}, sglang {getattr(sglang, '__version__', 'unknown')}"


def server_args() -> Any:
    """SGLang's options in this process, None before they are set."""
    try:
        from sglang.srt.runtime_context import get_server_args as stated  # 0.5.20 and later
    except ImportError:
        from sglang.srt.server_args import get_global_server_args as stated
    try:
        return stated()
    except (RuntimeError, ValueError):
        return None


def decline(extra: Any, instance: str, kind: str, reason: str, rank: int) -> Any:
    """A connection that reports until it is closed that an engine is not served; None without one.

    Args:
        extra: SGLang's extra configuration, which may be invalid.
        kind: One of the reasons of ``_native.DeclineNotice``.
    """
    try:
        try:
            read = settings.read(extra)
        except ConfigError:
            # The server can receive the report if its address is valid.
            read = settings.read(settings.address_only(extra))
        return _native.DeclineNotice(
            socket_path(read),
            instance,
            build(),
            side="worker",
            rank=rank,
            reason=kind,
            detail=reason,
            reconnect_interval=_RECONNECT_S,
        )
    except (ConfigError, _native.PegaFlowError) as error:
        log.debug("pegaflow: the notice for the server was not sent: %s", error)
        return None


def ranks_of(params: Any) -> Ranks:
    """The place of this process, for a linker.

    Args:
        params: SGLang's ``CacheInitParams``.
    """
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()

    def known(name: str, default: int) -> int:
        try:
            return int(getattr(parallel, name))
        except (AttributeError, RuntimeError, TypeError, ValueError):
            return default  # not set in a process without ranks

    kvcache = params.token_to_kv_pool_allocator.get_kvcache()
    full = getattr(kvcache, "full_kv_pool", kvcache)
    return Ranks(
        tp_rank=known("attn_tp_rank", known("tp_rank", 0)),
        tp_size=known("attn_tp_size", known("tp_size", 1)),
        pp_rank=int(getattr(params, "pp_rank", 0) or 0),
        pp_size=int(getattr(params, "pp_size", 1) or 1),
        cp_rank=int(getattr(params, "attn_cp_rank", 0) or 0),
        cp_size=int(getattr(params, "attn_cp_size", 1) or 1),
        dp_rank=known("attn_dp_rank", 0),
        agreeing=known("tp_size", 2) * int(getattr(params, "attn_cp_size", 1) or 1),
        is_mla=type(full).__name__.startswith("MLA"),
    )
