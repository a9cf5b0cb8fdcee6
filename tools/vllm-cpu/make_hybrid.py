#!/usr/bin/env python3
"""Write a tiny model with windows or states: config, tokenizer, random weights.

usage: make_hybrid.py FAMILY DIR [--seed N]

FAMILY is one of those below. Each has 3 to 5 million parameters and starts in seconds on a CPU. The
same arguments give the same weights. The tokenizer is that of make_model.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VOCABULARY = 2048
WINDOW = 128

#: Fields that all families have.
COMMON: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "pad_token_id": 2,
    "torch_dtype": "float32",
}

SLIDING, FULL = "sliding_attention", "full_attention"

#: A_log of layers with states. In Mamba 2 as in gated delta networks a token scales the state by
#: exp(-exp(A_log) * softplus(x + dt_bias)), with x about 1 in size: by 0.997 with these values, so
#: that a state remembers hundreds of tokens. With those of a model at the start of its training it
#: is forgotten after a few, and an answer hardly depends on the state that was loaded.
STATE_DECAY_LOG = -6.0
STATE_STEP_BIAS = 1.0


@dataclasses.dataclass(frozen=True)
class Family:
    """One of transformers' model types, and what its layers are."""

    model_type: str
    layers: int
    fields: Mapping[str, Any]
    dtype: str = "float32"  #: The type that vLLM's CPU build can serve it in.

    def config(self) -> Any:
        from transformers import AutoConfig

        fields = {**COMMON, "num_hidden_layers": self.layers, **self.fields}
        return AutoConfig.for_model(self.model_type, **fields)


FAMILIES = {
    "gemma3": Family(
        "gemma3_text",
        6,
        {
            "head_dim": 64,
            "query_pre_attn_scalar": 64,
            "sliding_window": WINDOW,
            "layer_types": [SLIDING, SLIDING, FULL] * 2,
        },
    ),
    "gpt-oss": Family(
        "gpt_oss",
        4,
        {
            "intermediate_size": 256,
            "head_dim": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "layer_types": [SLIDING, FULL] * 2,
        },
    ),
    "mistral-window": Family("mistral", 4, {"head_dim": 64, "sliding_window": WINDOW}),
    "qwen3-next": Family(
        "qwen3_next",
        4,
        {
            "head_dim": 64,
            "partial_rotary_factor": 0.25,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 64,
            "linear_num_key_heads": 2,
            "linear_value_head_dim": 64,
            "linear_num_value_heads": 4,
            # It needs a layer with experts.
            "mlp_only_layers": [0, 1, 2],
            "decoder_sparse_step": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 128,
        },
        dtype="bfloat16",  # "CPU GDN attention requires BF16"
    ),
    "granite": Family(
        "granitemoehybrid",
        4,
        {
            "layer_types": ["mamba"] * 3 + ["attention"],
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 512,
            "mamba_n_heads": 8,
            "mamba_d_head": 64,
            "mamba_d_state": 64,
            "mamba_n_groups": 1,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_chunk_size": 256,
            "position_embedding_type": "rope",
            "attention_multiplier": 0.125,
            "embedding_multiplier": 1.0,
            "logits_scaling": 1.0,
            "residual_multiplier": 1.0,
        },
    ),
}


def make(family: Family, out: Path, seed: int = 0) -> None:
    """Writes the model's directory."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(family.config(), dtype=torch.float32)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            # Larger than at a start of training, so that each answer depends on all of its prompt.
            if tensor.dim() >= 2 and "conv" not in name:
                scale = 1.0 if "embed" in name else tensor.shape[-1] ** -0.5
                tensor.copy_(torch.randn(tensor.shape, generator=draw) * scale)
            elif name.endswith(".A_log"):
                tensor.fill_(STATE_DECAY_LOG)
            elif name.endswith(".dt_bias"):
                tensor.fill_(STATE_STEP_BIAS)
    model.save_pretrained(out)
    sys.path.insert(0, str(Path(__file__).parent))
    from make_model import make_tokenizer

    make_tokenizer(out, VOCABULARY)


def main() -> None:
    options = argparse.ArgumentParser(usage=(__doc__ or "").split("usage: ")[1].split("\n")[0])
    options.add_argument("family", choices=FAMILIES)
    options.add_argument("directory", type=Path)
    options.add_argument("--seed", type=int, default=0)
    chosen = options.parse_args()
    chosen.directory.mkdir(parents=True, exist_ok=True)
    make(FAMILIES[chosen.family], chosen.directory, chosen.seed)


if __name__ == "__main__":
    main()
