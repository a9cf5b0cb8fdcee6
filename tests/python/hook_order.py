"""A connector that observes when vLLM writes the KV of a layer: before the layer's hook, or later.

Each step appends one line of JSON to the file that ``FILE_ENV`` names.
"""

import json
import os
from typing import Any

import torch

from pegaflow.connector import PegaKVConnector
from pegaflow.vllm.computed import layers_with_hooks

FILE_ENV = "PEGA_TEST_HOOK_ORDER"


class HookOrder(PegaKVConnector):
    """PegaFlow's connector, which also keeps a copy of each layer's KV at its hook."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        self._kv_caches = kv_caches
        self._at_hooks: list[tuple[str, torch.Tensor]] = []
        self._at_begin: dict[str, torch.Tensor] = {}

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._at_hooks = []
        self._at_begin = {name: kv.clone() for name, kv in self._kv_caches.items()}

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        super().save_kv_layer(layer_name, kv_layer, attn_metadata)
        self._at_hooks.append((layer_name, self._kv_caches[layer_name].clone()))

    def wait_for_save(self) -> None:
        super().wait_for_save()
        line = {
            "layers": sorted(self._kv_caches),
            "watched": sorted(layers_with_hooks(self._vllm_config, self._kv_caches)),
            "hooks": [name for name, _ in self._at_hooks],
            "written": [
                name for name, kv in self._kv_caches.items() if _differ(kv, self._at_begin[name])
            ],
            "written_after_hook": [
                name for name, kv in self._at_hooks if _differ(kv, self._kv_caches[name])
            ],
        }
        with open(os.environ[FILE_ENV], "a") as file:
            print(json.dumps(line), file=file)


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    return not torch.equal(one.view(torch.uint8), other.view(torch.uint8))
