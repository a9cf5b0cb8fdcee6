#!/usr/bin/env python3
"""An inference engine in NumPy that keeps its KV cache in PegaFlow.

A small transformer with random weights (rotary attention, two layers) generates from a prompt that
it computes token by token, with its keys and values in numbered blocks, as paged attention has
them. A second engine of its own, with empty arrays, then loads the prompt's blocks instead of
computing them, and its logits are the same to the last bit.

    pegaflow-server --pool-size 64mb &
    python examples/engine.py            # --endpoint unix:/path/to.sock for another server
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from pegaflow.api import Cache, token_keys

VOCABULARY, WIDTH, HEADS, LAYERS = 512, 128, 4, 2
HEAD = WIDTH // HEADS
BLOCK_TOKENS, BLOCKS = 16, 64
SEED = 7


class Model:
    """Weights, and one forward pass of one token over the KV of those before it."""

    def __init__(self) -> None:
        random = np.random.default_rng(SEED)

        def weights(*shape: int) -> np.ndarray:
            return (random.standard_normal(shape) / np.sqrt(shape[-2])).astype(np.float32)

        self.embedding = weights(VOCABULARY, WIDTH)
        self.head = weights(WIDTH, VOCABULARY)
        self.qkv = weights(LAYERS, WIDTH, 3 * WIDTH)
        self.out = weights(LAYERS, WIDTH, WIDTH)
        self.up = weights(LAYERS, WIDTH, 4 * WIDTH)
        self.down = weights(LAYERS, 4 * WIDTH, WIDTH)

    @staticmethod
    def rotate(x: np.ndarray, position: int) -> np.ndarray:
        angles = position / 10_000 ** (np.arange(HEAD // 2) / (HEAD // 2))
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        left, right = x[:, : HEAD // 2], x[:, HEAD // 2 :]
        return np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=1)

    def forward(self, token: int, position: int, kv: np.ndarray, table: list[int]) -> np.ndarray:
        """Logits after ``token``. Writes its keys and values into the block of its position."""
        x = self.embedding[token]
        block, offset = table[position // BLOCK_TOKENS], position % BLOCK_TOKENS
        for layer in range(LAYERS):
            query, key, value = (normed(x) @ self.qkv[layer]).reshape(3, HEADS, HEAD)
            kv[layer, 0, block, offset] = self.rotate(key, position)
            kv[layer, 1, block, offset] = value
            keys, values = (
                kv[layer, part, table].reshape(-1, HEADS, HEAD)[: position + 1] for part in (0, 1)
            )
            scores = np.einsum("hd,thd->ht", self.rotate(query, position), keys) / np.sqrt(HEAD)
            share = np.exp(scores - scores.max(axis=1, keepdims=True))
            share /= share.sum(axis=1, keepdims=True)
            x = x + np.einsum("ht,thd->hd", share, values).reshape(WIDTH) @ self.out[layer]
            x = x + np.maximum(normed(x) @ self.up[layer], 0) @ self.down[layer]
        return normed(x) @ self.head


def normed(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x) + 1e-6)


class Engine:
    """One sequence at a time, in blocks of a KV array that the cache reads and writes."""

    def __init__(self, endpoint: str | None = None, **deadlines: float) -> None:
        self.model = Model()
        # (layer, key or value, block, token, head, number): blocks are numbered along axis 2.
        shape = (LAYERS, 2, BLOCKS, BLOCK_TOKENS, HEADS, HEAD)
        self.kv = np.zeros(shape, dtype=np.float32)
        self.cache = Cache(
            [self.kv],
            block_axis=2,
            factors={"model": f"example-{SEED}", "block_tokens": str(BLOCK_TOKENS)},
            endpoint=endpoint,
            **deadlines,
        )

    def generate(self, prompt: list[int], count: int) -> tuple[list[int], np.ndarray, int]:
        """The generated tokens, the logits after the prompt, and how many tokens were loaded."""
        needed = -(-(len(prompt) + count) // BLOCK_TOKENS)
        table = list(np.random.default_rng().permutation(BLOCKS)[:needed])
        # The last token is computed in any case: its logits are wanted, and logits are not cached.
        keys = token_keys(prompt[:-1], BLOCK_TOKENS)
        found = self.cache.load(keys, table[: len(keys)])
        loaded = found.blocks * BLOCK_TOKENS
        for position in range(loaded, len(prompt)):
            logits = self.model.forward(prompt[position], position, self.kv, table)
        self.cache.save(keys[found.blocks :], table[found.blocks : len(keys)])
        after_prompt, tokens = logits, []
        while len(tokens) < count:
            tokens.append(int(np.argmax(logits)))
            position = len(prompt) + len(tokens) - 1
            logits = self.model.forward(tokens[-1], position, self.kv, table)
        return tokens, after_prompt, loaded


def main() -> int:
    parser = argparse.ArgumentParser(description="A NumPy engine that reuses prefixes.")
    parser.add_argument("--endpoint", help="HOST:PORT or unix:PATH of the server")
    parser.add_argument("--prompt-tokens", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1, help="of the prompt")
    parser.add_argument("--patience", type=float, help="seconds that the cache may take each time")
    options = parser.parse_args()
    patience = options.patience
    names = ("lookup_deadline", "open_deadline", "reserve_deadline", "load_patience")
    deadlines = {} if patience is None else dict.fromkeys(names, patience)
    random = np.random.default_rng(options.seed)
    prompt = [int(token) for token in random.integers(0, VOCABULARY, options.prompt_tokens)]
    results = []
    for name in ("first engine", "second engine"):
        engine = Engine(options.endpoint, **deadlines)
        with engine.cache as cache:
            if not cache.wait_ready(patience or 5):
                print("no cache:", cache.status()["mover"]["detail"])
            begin = time.perf_counter()
            results.append(engine.generate(prompt, 8))
            took = time.perf_counter() - begin
        tokens, _, loaded = results[-1]
        print(f"{name}: {loaded} of {len(prompt)} tokens loaded, {took:.3f} s, tokens {tokens}")
    same = np.array_equal(results[0][1], results[1][1]) and results[0][0] == results[1][0]
    print("the logits are", "equal" if same else "DIFFERENT")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
