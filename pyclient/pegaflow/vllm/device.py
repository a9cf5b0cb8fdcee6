"""The device of a vLLM engine."""

from __future__ import annotations

from typing import Any


def device_type(vllm_config: Any) -> str:
    """The kind of device, "cpu" or "cuda"; releases that do not say run on GPUs."""
    device_config = getattr(vllm_config, "device_config", None)
    return getattr(device_config, "device_type", "cuda")
