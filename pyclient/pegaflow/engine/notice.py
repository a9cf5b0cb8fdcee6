"""Reports to the server that an engine is configured to use the cache and does not.

The server shows it in /instances, in its metrics and to ``pegaflow doctor`` while the connection
lives. Without a server the notice waits for one without logging.
"""

from __future__ import annotations

import logging
from typing import Any

from pegaflow.engine.config import OPTIONS, ConfigError, read_settings, socket_path

log = logging.getLogger("vllm.pegaflow")

#: No call waits for a notice: a server that starts later receives it within this time.
RECONNECT_INTERVAL_S = 5.0


def report(
    extra: dict[str, Any], instance: str, build: str, side: str, reason: str, detail: str, rank: int
) -> Any:
    """A connection that reports it until it is closed; None if there can be none.

    Args:
        extra: vLLM's ``kv_connector_extra_config``.
        side: "scheduler" or "worker"; ``rank`` is the worker's.
        reason: One of the reasons of ``_native.DeclineNotice``.
    """
    from pegaflow import _native

    try:
        try:
            settings = read_settings(extra)
        except ConfigError:
            # The server can receive the report about an invalid option if its address is valid.
            address = {option.key for option in OPTIONS if option.name in ("host", "port")}
            settings = read_settings({key: extra[key] for key in address & extra.keys()})
        return _native.DeclineNotice(
            socket_path(settings),
            instance,
            build,
            side=side,
            rank=rank,
            reason=reason,
            detail=detail,
            reconnect_interval=RECONNECT_INTERVAL_S,
        )
    except (ConfigError, _native.PegaFlowError) as error:
        log.debug("pegaflow: the notice for the server was not sent: %s", error)
        return None
