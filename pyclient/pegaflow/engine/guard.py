"""Keeps exceptions from reaching vLLM, where they would end the engine and all its requests."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

log = logging.getLogger("vllm.pegaflow")


def hook(neutral: Callable[[], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a method that vLLM calls.

    A failure in it is a bug of PegaFlow. It is logged with its traceback and counted, and
    ``retire()`` disables the cache; requests continue. The call is then repeated on the disabled
    side, which completes the pending work: vLLM waits for loads that were promised, and references
    to GPU blocks must be released. If that fails too, each such call returns ``neutral()`` to vLLM,
    and the failure is logged once.
    """

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        name = method.__name__

        @functools.wraps(method)
        def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
            for last_try in (False, True):
                try:
                    return method(self, *args, **kwargs)
                except Exception as error:
                    if not self.retire(name, error) or last_try:
                        break
            return neutral()

        return guarded

    return decorate
