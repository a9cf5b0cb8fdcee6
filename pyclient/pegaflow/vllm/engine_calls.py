"""Calls to vLLM's engine core of which vLLM does not inform a connector.

vLLM requests the same reset of a connector's cache for an operator and when it pauses or sleeps;
and weights are replaced by calls that only workers receive. All of them go through methods of
``EngineCore``, in the scheduler's thread. These are wrapped once per process. In a release with
other methods no call is detected, every reset counts as an operator's request, and the connector
discards more than necessary.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

log = logging.getLogger("vllm.pegaflow")

#: Calls of all workers that leave the weights unchanged. Any other may replace them: those of
#: vLLM's own weight updates do, and methods of a worker extension can do anything.
_HARMLESS = frozenset(
    {
        "compute_weight_checksums",
        "get_model_inspection",
        "init_weight_transfer_engine",
        "release_late_interaction_query_cache",
        "shutdown_weight_transfer_engine",
        "update_max_model_len",
    }
)
_MARK = "pegaflow_watches"


class Listener(Protocol):
    """A connector's scheduler side."""

    def weights_may_change(self, call: str) -> None: ...
    def set_weight_version(self, version: str) -> None: ...


_listeners: weakref.WeakSet[Any] = weakref.WeakSet()
_resets = threading.local()


def watch(listener: Listener) -> None:
    """Informs ``listener`` of calls from now on, until it is collected or unwatched."""
    try:
        from vllm.v1.engine.core import EngineCore
    except ImportError:
        return
    _listeners.add(listener)
    _wrap(EngineCore, "_reset_caches", _inside_local_reset)
    _wrap(EngineCore, "collective_rpc", _before_workers_are_called)
    _wrap(EngineCore, "set_weight_version", _before_version_is_set)


def unwatch(listener: Listener) -> None:
    _listeners.discard(listener)


def is_local_reset() -> bool:
    """Whether this thread is in one of vLLM's internal resets, to pause or to sleep.

    An explicit request goes to ``EngineCore.reset_prefix_cache`` without it.
    """
    return getattr(_resets, "depth", 0) > 0


def _wrap(core: Any, name: str, call: Callable[..., Any]) -> None:
    original = getattr(core, name, None)
    if original is None or getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return call(functools.partial(original, self), *args, **kwargs)

    setattr(wrapper, _MARK, True)
    setattr(core, name, wrapper)


def _inside_local_reset(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    _resets.depth = getattr(_resets, "depth", 0) + 1
    try:
        return original(*args, **kwargs)
    finally:
        _resets.depth -= 1


def _before_workers_are_called(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    method = args[0] if args else kwargs.get("method")
    if not isinstance(method, str) or method not in _HARMLESS:
        name = method if isinstance(method, str) else getattr(method, "__name__", "a function")
        _tell(lambda listener: listener.weights_may_change(name))
    return original(*args, **kwargs)


def _before_version_is_set(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    version = args[0] if args else kwargs.get("weight_version")
    if isinstance(version, str) and len(_listeners) == 1:
        _tell(lambda listener: listener.set_weight_version(version))
    else:  # with several engines in one process, it could be any of them
        _tell(lambda listener: listener.weights_may_change("set_weight_version"))
    return original(*args, **kwargs)


def _tell(what: Callable[[Any], None]) -> None:
    # Listeners raise nothing: vLLM must execute the call in any case.
    for listener in list(_listeners):
        what(listener)
