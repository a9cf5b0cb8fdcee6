#!/usr/bin/env python3
"""Writes a model directory that needs no download: a config and a word-level tokenizer, no weights.

The shapes are those of real models, so prefill, decode and KV cache cost the same. Weights come
from `--load-format pegaflow_seeded` (plugin/) or vLLM's own `--load-format dummy`.

Usage: make_model.py DIR [--shape llama-8b|qwen3-8b|llama-1b]
"""

import argparse
import json
import pathlib

from tokenizers import Tokenizer, models, pre_tokenizers

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
