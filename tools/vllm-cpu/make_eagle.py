#!/usr/bin/env python3
"""Write a tiny model and an EAGLE draft that predicts it: DIR/target and DIR/draft.

usage: make_eagle.py DIR [--seed N]

A draft of random weights predicts nothing, so faults in its KV would show in no figure. This pair
is constructed: the draft's only layer is the target's first one, and it reads tokens only, not the
target's hidden states. The target's second layer adds little to the first one's output, so most
drafts are accepted. Queries are large, so that attention singles out a few tokens: a draft with
another token's KV predicts something else.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import make_model  # noqa: E402

#: The factor of queries, and of what a layer's attention adds to its input.
SHARPNESS, ATTENTION = 4.0, 3.0
#: The factor of what the second layer adds.
SECOND_LAYER = 0.1


def shape(seed: int) -> argparse.Namespace:
    return argparse.Namespace(
        seed=seed,
        layers=2,
        hidden=256,
        heads=8,
        kv_heads=4,
        head_dim=32,
        vocab=2048,
        max_len=8192,
        dtype="float32",
        score_std=1,
    )


def make_target(out: Path, seed: int) -> dict[str, Any]:
    """Returns the weights."""
    import torch
    from safetensors.torch import load_file, save_file

    a = shape(seed)
    out.mkdir(parents=True)
    make_model.make_config(out, a)
    make_model.make_tokenizer(out, a.vocab)
    make_model.make_weights(out, a)
    weights = load_file(out / "model.safetensors")
    # A draft's first layer has no norm before attention. Rows of norm 1 make the target's norm
    # change nothing.
    rows = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = rows / rows.square().mean(1, keepdim=True).sqrt()
    for name, tensor in weights.items():
        if ".q_proj." in name:
            tensor *= SHARPNESS
        if ".o_proj." in name:
            tensor *= ATTENTION
        if ".layers.1." in name and (".o_proj." in name or ".down_proj." in name):
            tensor *= SECOND_LAYER
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return weights


def make_draft(out: Path, target: Path, weights: dict[str, Any]) -> None:
    import torch
    from safetensors.torch import save_file

    out.mkdir()
    config = json.loads((target / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}, indent=1))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(target / name, out / name)
    hidden = config["hidden_size"]
    first = "model.layers.0."
    draft = {
        "layers.0." + name.removeprefix(first): tensor.clone()
        for name, tensor in weights.items()
        if name.startswith(first) and "input_layernorm" not in name
    }
    # Of the next token's embedding and the hidden state of this one, the embedding.
    draft["fc.weight"] = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), dim=1)
    save_file(draft, out / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dir", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    weights = make_target(a.dir / "target", a.seed)
    make_draft(a.dir / "draft", a.dir / "target", weights)


if __name__ == "__main__":
    main()
