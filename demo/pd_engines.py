"""What the two engines of --pd run: on the CPU, or with --direct on GPUs."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from demo.device import LANES, engine_environments
from demo.stage import SMALL, SMALL_POOL_SIZE
from tests.support.vllm_server import ModelShape

#: The prefill engine computes longer prompts in chunks of this size, each of which is saved.
CHUNK_TOKENS = 512
#: Both engines run a small model.
KV_CACHE_BYTES = 1 << 29
#: On a GPU: FlashAttention's shape and type. Saves have to last longer than a question to the
#: server, or all blocks come from the pool: of chunks of 256 KiB none but one was read directly
#: (measured on an H200). These are 128 MiB, which take 2.4 ms at the speed of PCIe 5.
SMALL_ON_GPU = ModelShape(
    layers=32, hidden=512, heads=8, kv_heads=8, head_dim=128, dtype="bfloat16", score_std=3
)
GPU_CHUNK_TOKENS = 1024
#: Its chunks take some tenths of a second: an engine can be killed in the middle.
GPU_LONG_TOKENS = 8000
GPU_MAX_MODEL_LEN = 8192
#: Four of the longest prompts; a tenth of it may wait for saves.
GPU_KV_CACHE_BYTES = 4 << 30
GPU_POOL_SIZE = "4gb"
#: One engine uses about 6 GiB: both find room on one GPU, beside other programs.
GPU_ARGUMENTS = ("--gpu-memory-utilization", "0.1", "--attention-backend", "FLASH_ATTN")
#: In vLLM's batch-invariant mode the values of a token do not depend on the chunk that it is
#: computed in. Otherwise bfloat16 rounds the answer of an engine that loads a prompt differently
#: from that of one that computes it, and no comparison is exact.
GPU_ENVIRONMENT = {
    "VLLM_BATCH_INVARIANT": "1",
    # It would be compiled at the first request, which needs nvcc. Greedy answers need no sampler.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


@dataclasses.dataclass(frozen=True)
class Engines:
    """What the engines of --pd run, which depends on the device."""

    #: Of demo.device.LANES.
    device: str = "cpu"
    shape: ModelShape = SMALL
    chunk_tokens: int = CHUNK_TOKENS
    #: Of prompts of several chunks, and of the one that is sent before the server is killed.
    long_tokens: int = 3000
    last_tokens: int = 2000
    max_model_len: int = 4096
    kv_cache_bytes: int = KV_CACHE_BYTES
    pool_size: str = SMALL_POOL_SIZE
    arguments: Sequence[str] = ()
    python: Path | None = None
    prefill_env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    decode_env: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def lane(self) -> str:
        return LANES[self.device]

    @classmethod
    def on_gpus(cls, gpus: Sequence[str]) -> Engines:
        """The prefill engine on the first, the decode engine on the second if there is one."""
        prefill, decode = engine_environments(gpus)
        return cls(
            device="cuda",
            shape=SMALL_ON_GPU,
            chunk_tokens=GPU_CHUNK_TOKENS,
            long_tokens=GPU_LONG_TOKENS,
            last_tokens=GPU_LONG_TOKENS,
            max_model_len=GPU_MAX_MODEL_LEN,
            kv_cache_bytes=GPU_KV_CACHE_BYTES,
            pool_size=GPU_POOL_SIZE,
            arguments=GPU_ARGUMENTS,
            python=Path(sys.executable),
            prefill_env=GPU_ENVIRONMENT | prefill,
            decode_env=GPU_ENVIRONMENT | decode,
        )
