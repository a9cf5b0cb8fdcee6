"""Adds ``--load-format pegaflow_seeded`` to vLLM: weights whose answers hang on the KV cache.

With vLLM's own `dummy` weights attention is uniform and its output vanishes beside the residual
stream, so a wrong KV block changes no token. Here activations stay near one through all layers and
attention is peaked, so answers after a cold prefill and after a KV load can be compared.
"""

import zlib

import torch
from torch import nn

#: Standard deviation of attention scores. 3 gives the best of 10K keys about a tenth of the weight.
_SCORE_STD = 3.0


def _fill(name: str, parameter: nn.Parameter, query_rows: int, rank: int, ranks: int) -> None:
    """``query_rows``: of this rank. Its shard differs from those of other ranks."""
    generator = torch.Generator(device=parameter.device)
    generator.manual_seed(zlib.crc32((f"{name}/{rank}" if rank else name).encode()))
    data = parameter.data
    if "norm" in name:
        # q_norm and k_norm undo the scale of their projections, so they carry it instead.
        data.fill_(_SCORE_STD**0.5 if "q_norm" in name or "k_norm" in name else 1.0)
        return
    if data.dim() < 2:
        data.zero_()
        return
    data.normal_(generator=generator)
    if "embed_tokens" in name:
        return
    cut_inputs = "o_proj" in name or "down_proj" in name  # whose shares are added up
    data.mul_((data.shape[-1] * (ranks if cut_inputs else 1)) ** -0.5)
    if "qkv_proj" in name:
        query_and_key_rows = data.shape[0] - (data.shape[0] - query_rows) // 2
        data[:query_and_key_rows].mul_(_SCORE_STD**0.5)


def register() -> None:
    """Entry point of the group vllm.general_plugins; vLLM calls it in each of its processes."""
    from vllm.distributed import (
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
    )
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    @register_model_loader("pegaflow_seeded")
    class SeededLoader(BaseModelLoader):
        def download_model(self, model_config) -> None:
            pass

        @torch.no_grad()
        def load_weights(self, model: nn.Module, model_config) -> None:
            rank = get_tensor_model_parallel_rank()
            ranks = get_tensor_model_parallel_world_size()
            heads = model_config.hf_text_config
            query_rows = heads.num_attention_heads * heads.head_dim // ranks
            for name, parameter in model.named_parameters():
                _fill(name, parameter, query_rows, rank, ranks)
