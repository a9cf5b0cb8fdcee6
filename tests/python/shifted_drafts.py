"""A planted mistake: the connector, but the draft KV of a loaded block is that of other tokens."""

from typing import Any

import torch

from pegaflow.vllm import PegaKVConnector
from tests.python.vllm_cases import BLOCK


class ShiftedDrafts(PegaKVConnector):
    """Shifts the values of the last layer, the draft's, by one token inside of each loaded block.

    The keys stay: pairs of keys and values that move together change no attention.
    """

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        number = {name: int(name.split(".")[2]) for name in kv_caches}
        self._drafts = kv_caches[max(kv_caches, key=number.__getitem__)]
        self._loading: dict[str, list[int]] = {}

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for order in getattr(self._connector_metadata, "loads", ()):
            self._loading[order.request_id] = list(order.blocks)
        super().start_load_kv(forward_context, **kwargs)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, received = super().get_finished(finished_req_ids)
        if received and torch.cuda.is_available():
            torch.cuda.synchronize()  # A load is reported before its last copy ends.
        for request_id in received or ():
            for block in self._loading.pop(request_id):
                self._shift(block)
        return sent, received

    def _shift(self, block: int) -> None:
        tensor = self._drafts
        if tensor.shape[0] == 2:  # all of K in front of all of V
            values = tensor[1, block]
        else:  # K and V of a token one behind the other
            values = tensor[block][..., tensor.shape[-1] // 2 :]
        values.copy_(torch.roll(values, 1, dims=values.shape.index(BLOCK)))
