"""Nothing of ours may raise into vLLM: an exception there ends the engine and all its requests."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

log = logging.getLogger("vllm.pegaflow")


def hook(neutral: Callable[[], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a method that vLLM calls.

    A failure in it is a mistake of ours. It is logged with its traceback and counted, and
    ``retire()`` takes the cache off; requests go on. The call is then made again on what is left,
    which answers what must be answered: vLLM waits for loads that it was promised, and our
    references keep GPU blocks from it. Should that fail too, vLLM gets ``neutral()``, each time,
    and the log gets it once.
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
