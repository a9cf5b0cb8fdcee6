#!/usr/bin/env python3
"""Write a tiny Llama model directory: config, byte-level tokenizer, random weights.

usage: make_model.py DIR [--seed N] [--no-weights] [--layers 4] [--hidden 256]
                         [--heads 8] [--kv-heads 4] [--head-dim 32]
                         [--vocab 2048] [--max-len 8192] [--dtype float32]
                         [--score-std 1]

The same arguments give the same bytes, so two servers that load two such
directories are the same model.  --no-weights leaves the safetensors file out
(then serve with --load-format dummy).  --score-std is about the standard deviation of the
attention's scores: with 1 it is almost uniform over a long prompt, with 3 it is peaked, so that a
wrong block shows in the answers in spite of bfloat16's rounding.  The tokenizer is a byte-level BPE
trained on made-up words: any text is encodable; ids 0, 1, 2 are </s>, <s>, <pad>.
"""

import argparse
import json
import pathlib
import random
from collections.abc import Iterator

SPECIAL = ["</s>", "<s>", "<pad>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def corpus() -> Iterator[str]:
    """Sentences of made-up words: enough for a BPE of some thousand merges."""
    r = random.Random(0)
    syll = [c + v for c in "b c d f g h k l m n p r s t st tr ch".split() for v in "aeiou"]
    words = ["".join(r.choices(syll, k=r.randint(2, 4))) for _ in range(3000)]
    for _ in range(4000):
        yield " ".join(r.choices(words, k=12)) + "."
    yield "The quick brown fox jumps over the lazy dog. 0123456789\n"


def make_tokenizer(out: pathlib.Path, vocab: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator(
        corpus(),
        trainers.BpeTrainer(
            vocab_size=vocab,
            special_tokens=SPECIAL,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    # every id below VOCAB must decode to a text, because the model samples all of them
    assert tok.get_vocab_size() == vocab, f"the corpus gives {tok.get_vocab_size()} tokens only"
    tok.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": "</s>",
                "pad_token": "<pad>",
                "clean_up_tokenization_spaces": False,
                "chat_template": CHAT_TEMPLATE,
            },
            indent=1,
        )
    )


def make_weights(out: pathlib.Path, a: argparse.Namespace) -> None:
    import torch
    from safetensors.torch import save_file

    g = torch.Generator().manual_seed(a.seed)
    dt = getattr(torch, a.dtype)
    h, ff, q, kv = a.hidden, a.hidden * 3, a.heads * a.head_dim, a.kv_heads * a.head_dim
    shapes = {"model.embed_tokens.weight": (a.vocab, h), "lm_head.weight": (a.vocab, h)}
    for i in range(a.layers):
        p = f"model.layers.{i}."
        shapes |= {
            p + "self_attn.q_proj.weight": (q, h),
            p + "self_attn.k_proj.weight": (kv, h),
            p + "self_attn.v_proj.weight": (kv, h),
            p + "self_attn.o_proj.weight": (h, q),
            p + "mlp.gate_proj.weight": (ff, h),
            p + "mlp.up_proj.weight": (ff, h),
            p + "mlp.down_proj.weight": (h, ff),
        }
    # 1/sqrt(fan_in), embeddings at 1: the attention then really depends on the prompt
    w = {
        n: (torch.randn(s, generator=g) * (1.0 if "embed" in n else s[1] ** -0.5)).to(dt)
        for n, s in shapes.items()
    }
    for i in range(a.layers):
        if a.score_std != 1:
            w[f"model.layers.{i}.self_attn.q_proj.weight"] *= a.score_std
        for n in ("input_layernorm", "post_attention_layernorm"):
            w[f"model.layers.{i}.{n}.weight"] = torch.ones(h, dtype=dt)
    w["model.norm.weight"] = torch.ones(h, dtype=dt)
    save_file(w, out / "model.safetensors", metadata={"format": "pt"})


def make_config(out: pathlib.Path, a: argparse.Namespace) -> None:
    (out / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "hidden_size": a.hidden,
                "intermediate_size": a.hidden * 3,
                "num_hidden_layers": a.layers,
                "num_attention_heads": a.heads,
                "num_key_value_heads": a.kv_heads,
                "head_dim": a.head_dim,
                "vocab_size": a.vocab,
                "max_position_embeddings": a.max_len,
                "rms_norm_eps": 1e-5,
                "rope_theta": 10000.0,
                "hidden_act": "silu",
                "tie_word_embeddings": False,
                "attention_bias": False,
                "mlp_bias": False,
                "bos_token_id": 1,
                "eos_token_id": 0,
                "pad_token_id": 2,
                "torch_dtype": a.dtype,
            },
            indent=1,
        )
    )
    (out / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, "bos_token_id": 1}))


def main() -> None:
    ap = argparse.ArgumentParser()
    ap.add_argument("dir")
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--no-weights", action="store_true")
    for n, d in (
        ("layers", 4),
        ("hidden", 256),
        ("heads", 8),
        ("kv-heads", 4),
        ("head-dim", 32),
        ("vocab", 2048),
        ("max-len", 8192),
    ):
        ap.add_argument("--" + n, type=int, default=d)
    ap.add_argument("--dtype", default="float32")
    ap.add_argument("--score-std", type=int, default=1)
    a = ap.parse_args()
    out = pathlib.Path(a.dir)
    out.mkdir(parents=True, exist_ok=True)
    make_config(out, a)
    make_tokenizer(out, a.vocab)
    if not a.no_weights:
        make_weights(out, a)


if __name__ == "__main__":
    main()
