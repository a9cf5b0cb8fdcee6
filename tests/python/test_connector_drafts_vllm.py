"""Speculation by n-grams in a real vLLM: rejected drafts are never saved.

Suffix decoding is not tested: arctic-inference has no wheel, and its source needs torch's headers.
"""

import json
from pathlib import Path
from typing import Any

from tests.python.vllm_cases import BLOCK, SMALL, ask, call, serve
from tests.support.vllm_server import MODEL_NAME, PegaServer, VllmServer, ensure_model

ANSWER = 100


def drafts(vllm: VllmServer) -> tuple[float, float]:
    """The numbers of drafted tokens and of accepted ones."""
    metrics = vllm.metrics()
    return (
        metrics.total("vllm:spec_decode_num_draft_tokens_total"),
        metrics.total("vllm:spec_decode_num_accepted_tokens_total"),
    )


def compute(vllm: VllmServer, tokens: list[int], length: int) -> list[int]:
    """The answer to a prompt whose blocks no cache has: they have a salt of their own."""
    body = {"model": MODEL_NAME, "prompt": tokens, "max_tokens": length, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True, "cache_salt": f"of {len(tokens)}"}
    return call(vllm, "/v1/completions", body)["choices"][0]["token_ids"]


def test_drafts_change_no_block(own_pega: PegaServer, short_path: Path, prompt: Any) -> None:
    """In one engine: what another one loads is the subject of connector_vllm."""
    speculation = {"method": "ngram", "num_speculative_tokens": 4}
    speculation |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    arguments = ("--speculative-config", json.dumps(speculation))

    with serve(ensure_model(SMALL), short_path / "a", own_pega, *arguments) as vllm:
        # Text that repeats itself, from which drafts are made, and text that does not.
        for tokens in (prompt(40) * 4, prompt(170)):
            answer, loaded = ask(vllm, tokens, ANSWER)
            assert loaded == 0
            # The answer's blocks were saved while it was drafted. Its last token is no input.
            longer = tokens + answer
            cached = (len(longer) - 1) // BLOCK * BLOCK
            assert ask(vllm, longer, 8) == (compute(vllm, longer, 8), cached)
        drafted, accepted = drafts(vllm)
        assert 0 < accepted < drafted
