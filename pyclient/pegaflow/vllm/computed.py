"""The point of a step on the GPU's stream behind which all its KV is written.

Other engines may read the blocks of a step out of this engine's GPU from an event on. Recorded at
the end of a step, the event lies behind the last layer's MLP, the logits and the sampling, which
write no KV. vLLM calls a hook of the connector after each attention op that it runs outside of a
CUDA graph. In the hook of the last layer all layers have queued their KV, and an event that is
recorded there comes earlier. The save itself waits for the end of the step: its copies would slow
the rest of it.

The event is used only if each layer's hook has run once in the step, on one thread and one stream,
that of the save. A hook that is missing or repeated means that a CUDA graph or another part of the
batch may write KV later. Then the event is recorded at the end of the step.

This holds for layers whose KV is written before or in their op, which is certain for the classes of
LAYERS in each release that the project has read (0.26 and 0.32).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from pegaflow import _native
from pegaflow.vllm import drafts

#: The classes of layers that write no KV after their hook, and not on another stream. Both pass the
#: result of the op that writes KV to the attention op, behind which the hook runs. Subclasses are
#: not among them: some have an op of their own.
LAYERS = (
    "vllm.model_executor.layers.attention.attention.Attention",
    "vllm.model_executor.layers.attention.mla_attention.MLAAttention",
)


def _is_known(layer: Any) -> bool:
    of = type(layer)
    # HiSparse keeps the blocks of its layers elsewhere and copies them on streams of its own.
    mirrored = getattr(layer, "hisparse_cache", None) is not None
    return f"{of.__module__}.{of.__qualname__}" in LAYERS and not mirrored


def layers_with_hooks(vllm_config: Any, layers: Iterable[str]) -> frozenset[str]:
    """The layers of the KV cache, if the hook of each one follows its KV; else none.

    Called once the model is loaded. ``layers`` are those of the only cache group. The layers of a
    draft model run after the sampling, several times in a step.
    """
    compilation = getattr(vllm_config, "compilation_config", None)
    known = getattr(compilation, "static_forward_context", None) or {}
    names = frozenset(layers)
    if drafts.have_kv(vllm_config) or not all(_is_known(known.get(name)) for name in names):
        return frozenset()
    return names


class Computed:
    """Records the event in the last layer's hook. Bound to the thread that runs the steps."""

    def __init__(
        self, layers: frozenset[str], queue: Callable[[], int], record: Callable[[int], int]
    ) -> None:
        """
        Args:
            layers: Their hooks are awaited; none: no event is ever recorded.
            queue: The GPU's stream to which vLLM now adds work.
            record: Records an event on that stream.
        """
        self._layers = layers
        self._current = queue
        self._record = record
        self._plan: Any = None  # of the step; None: no hook counts
        self._left: set[str] = set()  # the layers whose hook has not run
        self._thread = 0
        self._queue: int | None = None  # of the hooks so far
        self._event: int | None = None

    def begin(self, plan: Any) -> bool:
        """A step begins that has something to save. Whether layer() should be called in it."""
        self.clear()
        if not self._layers:
            return False
        self._plan = plan
        self._left = set(self._layers)
        self._thread = threading.get_ident()
        return True

    def clear(self) -> None:
        """The step is over, or its event is not to be used."""
        self._plan = self._queue = self._event = None

    def layer(self, name: str, attn_metadata: Any) -> None:
        """The hook of a layer."""
        if self._plan is None:
            return
        queue = self._current()
        if self._queue is None:
            self._queue = queue
        if (
            name not in self._left  # unknown or repeated; after the last layer: any
            or attn_metadata is None
            or queue != self._queue
            or threading.get_ident() != self._thread
        ):
            self.clear()
            return
        self._left.discard(name)
        if not self._left:
            try:
                self._event = self._record(queue)
            except _native.PegaFlowError:
                self.clear()  # the device is broken: the save reports it

    def event(self, plan: Any) -> int | None:
        """The event for saves of this step; None: they record one at its end."""
        if self._event is None or plan is not self._plan or self._current() != self._queue:
            return None
        return self._event
