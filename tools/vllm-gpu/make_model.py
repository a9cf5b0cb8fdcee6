#!/usr/bin/env python3
"""Writes a model directory that needs no download: a config and a word-level tokenizer, no weights.

The shapes are those of real models, so prefill, decode and KV cache cost the same. Weights come
from `--load-format pegaflow_seeded` (plugin/) or vLLM's own `--load-format dummy`.

Usage: make_model.py DIR [--shape NAME]      (--help lists them)
"""

import argparse
import json
import pathlib

from tokenizers import Tokenizer, models, pre_tokenizers

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"

_COMMON = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}

SHAPES = {
    # 128 KiB of KV a token in bf16; 2 MiB for a block of 16 tokens.
    "llama-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "mlp_bias": False,
    },
    # 144 KiB of KV a token in bf16.
    "qwen3-8b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
    },
    # Starts faster: for tests of behavior, not of speed. 64 KiB of KV a token.
    "llama-1b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 32000,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "mlp_bias": False,
    },
    # Windows of 1,024 tokens in 29 of 34 layers, as Gemma 3 4B, with as many bytes of KV a token; a
    # smaller vocabulary, and heads of 128 instead of 256.
    "gemma3-4b": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "query_pre_attn_scalar": 128,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 1024,
        "layer_types": [FULL if (i + 1) % 6 == 0 else SLIDING for i in range(34)],
        "vocab_size": 32000,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
    },
    # Windows of 128 tokens in every other layer and experts, as gpt-oss-20b; bfloat16 weights and a
    # smaller vocabulary.
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "layer_types": [SLIDING, FULL] * 12,
        "attention_bias": True,
        "vocab_size": 32000,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "swiglu_limit": 7.0,
    },
    # A window of 4,096 tokens in all layers, as Mistral 7B v0.1.
    "mistral-7b-window": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "sliding_window": 4096,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    },
    # Gated delta nets in three of four layers, as Qwen3-Next; 12 of its 48 layers, 16 of its 512
    # experts, and heads of 128 instead of 256 with as many bytes of KV a token.
    "qwen3-next-12": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_hidden_layers": 12,
        "layer_types": [FULL if (i + 1) % 4 == 0 else LINEAR for i in range(12)],
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "partial_rotary_factor": 0.25,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_value_head_dim": 128,
        "linear_num_value_heads": 32,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "vocab_size": 32000,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000000.0,
    },
    # Mamba 2 in nine of ten layers, as Granite 4.0 H Micro; 20 of its 40 layers, and heads of 128
    # instead of 64 with as many bytes of KV a token.
    "granite-4-h-20": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "shared_intermediate_size": 8192,
        "num_hidden_layers": 20,
        "layer_types": ["attention" if i % 10 == 5 else "mamba" for i in range(20)],
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "mamba_n_heads": 64,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 256,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "position_embedding_type": "rope",
        "attention_multiplier": 128**-0.5,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "vocab_size": 32000,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    },
    # Chunked attention in three of four layers, as Llama 4; 8 of its 48 layers, no experts, and
    # chunks of 1,024 tokens instead of 8,192. vLLM needs --no-disable-hybrid-kv-cache-manager.
    "llama-4-8": {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_hidden_layers": 8,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_chunk_size": 1024,
        "no_rope_layers": [0 if (i + 1) % 4 == 0 else 1 for i in range(8)],
        "use_qk_norm": True,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        # More than there are layers: none has experts.
        "interleave_moe_layer_step": 9,
        "vocab_size": 32000,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
    },
    # Multi-head latent attention, as DeepSeek V2 Lite, without experts; 16 of its 27 layers.
    "deepseek-v2-16": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 16,
        "first_k_dense_replace": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "vocab_size": 32000,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
    },
}


def write_model(directory: pathlib.Path, shape: str) -> None:
    config = _COMMON | SHAPES[shape]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    words = special + [f"t{i}" for i in range(len(special), config["vocab_size"])]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": "</s>",
                "pad_token": "<pad>",
                "unk_token": "<unk>",
                "model_max_length": config["max_position_embeddings"],
            }
        )
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    arguments = parser.parse_args()
    write_model(arguments.directory, arguments.shape)
    print(arguments.directory)
