"""Adds ``--load-format pegaflow_seeded`` to vLLM: weights whose answers hang on the KV cache.

In SGLang ``--load-format dummy`` makes the same weights.

With vLLM's own `dummy` weights attention is uniform and its output vanishes beside the residual
stream, so a wrong KV block changes no token. Here activations stay near one through all layers and
attention is peaked, so answers after a cold prefill and after a KV load can be compared.
"""

import math
import zlib
from typing import Any, NamedTuple

import torch
from torch import nn

#: Standard deviation of attention scores. 3 gives the best of 10K keys about a tenth of the weight.
_SCORE_STD = 3.0
#: Logarithm of the rate at which layers with states forget, and the step of a token: a state keeps
#: 0.997 of its content at each token. With the zeros of other vectors it would be forgotten after a
#: few tokens, and no answer would show a wrong state.
_STATE_DECAY_LOG = -6.0
_STATE_STEP = 1.0


class _Model(NamedTuple):
    query_rows: int  #: Of this rank.
    rank: int  #: Its shard differs from those of other ranks.
    ranks: int
    norm_adds: float  #: The normalizations add this to their weights.
    scaled_embeddings: bool  #: They are multiplied by the root of their width.


def _of_states(name: str) -> float | None:
    """The value of all elements, if these are of a layer with states."""
    match name.rpartition(".")[2]:
        case "A_log":
            return _STATE_DECAY_LOG
        case "A":  # Mamba 2 keeps it so
            return -math.exp(_STATE_DECAY_LOG)
        case "dt_bias":
            return _STATE_STEP
        case "D":
            return 1.0
    return None


def _fill(name: str, parameter: nn.Parameter, model: _Model) -> None:
    generator = torch.Generator(device=parameter.device)
    generator.manual_seed(zlib.crc32((f"{name}/{model.rank}" if model.rank else name).encode()))
    data = parameter.data
    if (state := _of_states(name)) is not None:
        data.fill_(state)
        return
    if "norm" in name:
        # q_norm and k_norm undo the scale of their projections, so they carry it instead.
        scores = "q_norm" in name or "k_norm" in name
        data.fill_((_SCORE_STD**0.5 if scores else 1.0) - model.norm_adds)
        return
    if data.dim() < 2 or "bias" in name:
        data.zero_()
        return
    data.normal_(generator=generator)
    if "embed_tokens" in name and not model.scaled_embeddings:
        return
    cut_inputs = "o_proj" in name or "down_proj" in name  # whose shares are added up
    data.mul_((data.shape[-1] * (model.ranks if cut_inputs else 1)) ** -0.5)
    if name.endswith(("q_proj.weight", "q_b_proj.weight")):  # latent attention
        data.mul_(_SCORE_STD)
    if "qkv_proj" in name:
        query_and_key_rows = data.shape[0] - (data.shape[0] - model.query_rows) // 2
        data[:query_and_key_rows].mul_(_SCORE_STD**0.5)


def _fill_all(model: nn.Module, config: Any, rank: int, ranks: int) -> None:
    gemma = config.model_type.startswith("gemma")
    shape = _Model(
        query_rows=config.num_attention_heads * getattr(config, "head_dim", 0) // ranks,
        rank=rank,
        ranks=ranks,
        norm_adds=1.0 if gemma or config.model_type == "qwen3_next" else 0.0,
        scaled_embeddings=gemma,
    )
    # The normalization of a state adds nothing to its weights.
    state = shape._replace(norm_adds=0.0)
    for name, parameter in model.named_parameters():
        _fill(name, parameter, state if "linear_attn" in name else shape)


def register_sglang() -> None:
    """Entry point of the group sglang.srt.plugins: ``--load-format dummy`` makes these weights."""
    from sglang.srt.model_loader import loader
    from sglang.srt.runtime_context import get_parallel

    @torch.no_grad()
    def seeded(model: nn.Module, *args: Any, **kwargs: Any) -> None:
        config = getattr(model.config, "text_config", model.config)
        parallel = get_parallel()
        _fill_all(model, config, parallel.tp_rank, parallel.tp_size)

    loader.initialize_dummy_weights = seeded


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
            config = model_config.hf_text_config
            ranks = get_tensor_model_parallel_world_size()
            _fill_all(model, config, get_tensor_model_parallel_rank(), ranks)
