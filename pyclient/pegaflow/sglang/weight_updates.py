"""Notices that SGLang replaces the weights of a running engine.

The namespace identifies the weights with which an engine was started. SGLang informs neither a
storage backend nor a linker of new weights, so the methods that load them are wrapped, once per
process.
"""

from __future__ import annotations

import functools
import importlib
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

log = logging.getLogger("sglang.pegaflow")

#: (module, class) by release, the newest first.
_PLACES = (
    ("sglang.srt.managers.scheduler_components.weight_updater", "SchedulerWeightUpdaterManager"),
    (
        "sglang.srt.managers.scheduler_update_weights_mixin",
        "SchedulerUpdateWeightsMixin",
    ),
)
_PREFIXES = ("update_weights_from_", "load_weights_", "begin_weight_update")

_lock = threading.Lock()
_listeners: weakref.WeakSet[Any] = weakref.WeakSet()
_is_watching = False


def watch(listener: Any) -> bool:
    """Calls ``listener.weights_replaced()`` before SGLang replaces weights in this process.

    Args:
        listener: Held weakly.

    Returns:
        False if this release of SGLang has no known place where it does.
    """
    global _is_watching
    with _lock:
        _listeners.add(listener)
        if not _is_watching:
            _is_watching = _wrap_all()
        return _is_watching


def _wrap_all() -> bool:
    for module_name, class_name in _PLACES:
        try:
            owner = getattr(importlib.import_module(module_name), class_name)
        except (ImportError, AttributeError):
            continue  # another release
        names = [name for name in vars(owner) if name.startswith(_PREFIXES)]
        for name in names:
            setattr(owner, name, _wrapped(getattr(owner, name)))
        return bool(names)
    return False


def _wrapped(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def replacing(*args: Any, **kwargs: Any) -> Any:
        with _lock:
            listeners = list(_listeners)
        for listener in listeners:
            listener.weights_replaced()
        return method(*args, **kwargs)

    return replacing
