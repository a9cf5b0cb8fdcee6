"""Speculation by n-grams in a real vLLM: rejected drafts are never saved.

Suffix decoding is not tested: arctic-inference has no wheel, and its source needs torch's headers.
"""

import json
from pathlib import Path
from typing import Any

from tests.python.vllm_cases import BLOCK, SMALL, ask, serve
from tests.support.vllm_server import PegaServer, VllmServer, ensure_model

ANSWER = 150


def drafts(vllm: VllmServer) -> tuple[float, float]:
    """The numbers of drafted tokens and of accepted ones."""
    metrics = vllm.metrics()
    return (
        metrics.total("vllm:spec_decode_num_draft_tokens_total"),
        metrics.total("vllm:spec_decode_num_accepted_tokens_total"),
    )


def test_drafts_change_no_answer_and_no_block(
    own_pega: PegaServer, short_path: Path, prompt: Any
) -> None:
    model = ensure_model(SMALL)
    speculation = {"method": "ngram", "num_speculative_tokens": 4}
    speculation |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    arguments = ("--speculative-config", json.dumps(speculation))
    # Text that repeats itself, from which drafts are made, and text that does not.
    tokens = prompt(40) * 8
    others = prompt(300)

    with serve(model, short_path / "plain", None) as vllm:
        answer, _ = ask(vllm, tokens, ANSWER)
        other, _ = ask(vllm, others, ANSWER)
        # Prompts that include the answer, whose blocks were saved while it was drafted.
        further, _ = ask(vllm, tokens + answer, 8)
        other_further, _ = ask(vllm, others + other, 8)

    def check(vllm: VllmServer, prompts: bool) -> None:
        """``prompts``: whether their blocks are cached already."""

        def whole(length: int) -> int:
            return length // BLOCK * BLOCK

        assert ask(vllm, tokens, ANSWER) == (answer, whole(len(tokens)) * prompts)
        assert ask(vllm, others, ANSWER) == (other, whole(len(others)) * prompts)
        # The last token of an answer is not an input of the model.
        there = len(tokens) + ANSWER - 1
        assert ask(vllm, tokens + answer, 8) == (further, whole(there))
        there = len(others) + ANSWER - 1
        assert ask(vllm, others + other, 8) == (other_further, whole(there))

    with serve(model, short_path / "a", own_pega, *arguments) as vllm:
        check(vllm, prompts=False)
        drafted, accepted = drafts(vllm)
        assert 0 < accepted < drafted
    with serve(model, short_path / "b", own_pega, *arguments) as vllm:
        check(vllm, prompts=True)
