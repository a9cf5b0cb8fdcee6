"""Calls to vLLM's engine core of which vLLM does not inform a connector.

vLLM requests the same reset of a connector's cache for an operator and when it pauses or sleeps;
and weights are replaced by calls that only workers receive. All of them go through methods of
``EngineCore``, in the scheduler's thread. These are wrapped once per process. In a release with
other methods no call is detected, every reset counts as an operator's request, and the connector
discards more than necessary.

A new request goes through such a method too, in the thread that receives it. A step that sleeps
ends then; in a release without the method it ends some milliseconds later.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from pegaflow.vllm import sleep

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
    def request_arrives(self) -> None: ...


_lock = threading.Lock()  # of the listeners
_listeners: weakref.WeakSet[Any] = weakref.WeakSet()
_resets = threading.local()
#: Engine cores that go to sleep and keep their weights, until vLLM has emptied their caches.
_falling_asleep: weakref.WeakSet[Any] = weakref.WeakSet()
#: Those that sleep, until all of their memory is back.
_asleep: weakref.WeakSet[Any] = weakref.WeakSet()


def watch(listener: Listener) -> None:
    """Informs ``listener`` of calls from now on, until it is collected or unwatched."""
    try:
        from vllm.v1.engine.core import EngineCore
    except ImportError:
        return
    with _lock:
        _listeners.add(listener)
    _wrap(EngineCore, "_reset_caches", _inside_local_reset)
    _wrap(EngineCore, "collective_rpc", _before_workers_are_called)
    _wrap(EngineCore, "set_weight_version", _before_version_is_set)
    _wrap(EngineCore, "preprocess_add_request", _before_request_is_queued)
    _wrap(EngineCore, "sleep", _around_sleep)
    _wrap(EngineCore, "wake_up", _around_wake_up)


def unwatch(listener: Listener) -> None:
    with _lock:
        _listeners.discard(listener)


def is_local_reset() -> bool:
    """Whether this thread is in one of vLLM's internal resets, to pause or to sleep.

    An explicit request goes to ``EngineCore.reset_prefix_cache`` without it.
    """
    return getattr(_resets, "depth", 0) > 0


def keeps_weights() -> bool:
    """Whether that reset is for a sleep from which the weights come back as they are."""
    return getattr(_resets, "keeps_weights", False)


def _wrap(core: Any, name: str, call: Callable[..., Any]) -> None:
    original = getattr(core, name, None)
    if original is None or getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return call(self, functools.partial(original, self), *args, **kwargs)

    setattr(wrapper, _MARK, True)
    setattr(core, name, wrapper)


def _inside_local_reset(core: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # A second one, of a pause during the sleep, is no longer the sleep's.
    keeps = core in _falling_asleep
    _falling_asleep.discard(core)
    _asleep.discard(core)
    before = getattr(_resets, "depth", 0), keeps_weights()
    _resets.depth, _resets.keeps_weights = before[0] + 1, keeps
    try:
        result = original(*args, **kwargs)
    finally:
        _resets.depth, _resets.keeps_weights = before
    if keeps:
        _asleep.add(core)
    return result


def _around_sleep(core: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    level = args[0] if args else kwargs.get("level", 1)
    # After a pause by anyone else the weights may differ already.
    paused = core.is_scheduler_paused() and core not in _asleep
    if level == 1 and not paused and sleep.weights_stay(core):
        _falling_asleep.add(core)
    pending = None
    try:
        pending = original(*args, **kwargs)
    finally:
        if not isinstance(pending, Future):
            _falling_asleep.discard(core)
    if isinstance(pending, Future):  # vLLM waits for requests, and empties its caches then
        pending.add_done_callback(lambda ended: _falling_asleep.discard(core))
    return pending


def _around_wake_up(core: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = original(*args, **kwargs)
    if core in _asleep:
        _asleep.discard(core)
        if core.model_executor.is_sleeping:
            # Trainers wake the weights first, to replace them.
            _tell(lambda listener: listener.weights_may_change("a wake-up in parts"))
    return result


def _before_workers_are_called(
    core: Any, original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    method = args[0] if args else kwargs.get("method")
    if not isinstance(method, str) or method not in _HARMLESS:
        name = method if isinstance(method, str) else getattr(method, "__name__", "a function")
        _tell(lambda listener: listener.weights_may_change(name))
    return original(*args, **kwargs)


def _before_version_is_set(
    core: Any, original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    version = args[0] if args else kwargs.get("weight_version")
    if isinstance(version, str) and len(_listeners) == 1:
        _tell(lambda listener: listener.set_weight_version(version))
    else:  # with several engines in one process, it could be any of them
        _tell(lambda listener: listener.weights_may_change("set_weight_version"))
    return original(*args, **kwargs)


def _before_request_is_queued(
    core: Any, original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    made = original(*args, **kwargs)
    _tell(lambda listener: listener.request_arrives())
    return made


def _tell(what: Callable[[Any], None]) -> None:
    # Listeners raise nothing: vLLM must execute the call in any case.
    with _lock:
        listeners = list(_listeners)
    for listener in listeners:
        what(listener)
