"""A change to vLLM without which its CPU build cannot serve models with Mamba 2 layers.

vLLM's scan on a CPU returns no states inside of a chunk, and so cannot keep them there: its engine
ends in the first prompt. With this change states are kept at the ends of chunks only, as for other
layers with states.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

#: In one sentence, for those who see results that rest on it.
STATEMENT = (
    "MambaMixer2.get_kv_cache_spec of vLLM is replaced: the CPU build cannot keep states inside of "
    "a chunk"
)


def patch() -> None:
    """Makes the change in this process."""
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    original = MambaMixer2.get_kv_cache_spec

    def get_kv_cache_spec(self: Any, vllm_config: Any) -> Any:
        spec = original(self, vllm_config)
        return dataclasses.replace(
            spec, num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None
        )

    MambaMixer2.get_kv_cache_spec = get_kv_cache_spec


def plugin(directory: Path) -> list[Path]:
    """Creates a plugin that vLLM loads in each of its processes; returns the PYTHONPATH for it."""
    package = directory / "granite_on_cpu-1.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: granite-on-cpu\nVersion: 1\n")
    (package / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\ngranite_on_cpu = {__name__}:patch\n"
    )
    return [directory, Path(__file__).resolve().parents[2]]
