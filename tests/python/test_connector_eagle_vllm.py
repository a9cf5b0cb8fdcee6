"""EAGLE drafts in a real vLLM: answers, loaded blocks, and how many drafts are accepted.

The draft predicts its target (tools/vllm-cpu/make_eagle.py), so wrong draft KV shows in the number
of accepted drafts. It never shows in an answer: the target decides each token.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from tests.python.vllm_cases import BLOCK, PATIENT, ask, call, forget, hits, serve
from tests.support.vllm_server import MODEL_NAME, PegaServer, VllmServer, ensure_eagle

PROMPTS, ANSWER = 12, 40


@dataclasses.dataclass
class Round:
    """All prompts once."""

    answers: list[list[int]]
    loaded: list[float]  #: Tokens, for each prompt.
    acceptance: float  #: Accepted drafts of all.


def play(vllm: VllmServer, prompts: list[list[int]], *, keep: bool = False) -> Round:
    """``keep``: vLLM's own cache is used."""
    before = _drafts(vllm)
    made = Round([], [], 0.0)
    for tokens in prompts:
        answer, loaded = _ask_again(vllm, tokens) if keep else ask(vllm, tokens, ANSWER)
        made.answers.append(answer)
        made.loaded.append(loaded)
    drafted, accepted = (now - then for now, then in zip(_drafts(vllm), before, strict=True))
    made.acceptance = accepted / drafted
    return made


def _drafts(vllm: VllmServer) -> tuple[float, float]:
    """The numbers of drafted tokens and of accepted ones."""
    metrics = vllm.metrics()
    return (
        metrics.total("vllm:spec_decode_num_draft_tokens_total"),
        metrics.total("vllm:spec_decode_num_accepted_tokens_total"),
    )


def _ask_again(vllm: VllmServer, tokens: list[int]) -> tuple[list[int], float]:
    before = hits(vllm)
    body = {"model": MODEL_NAME, "prompt": tokens, "max_tokens": ANSWER, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    answer = call(vllm, "/v1/completions", body)["choices"][0]["token_ids"]
    return answer, hits(vllm) - before


def usable(cached_tokens: int) -> int:
    """The tokens of a prompt's beginning of that length that may be loaded: its last block only
    proves the one before.
    """
    return (cached_tokens // BLOCK - 1) * BLOCK


def test_reloaded_drafts_are_accepted_like_those_of_a_gpu_hit(
    own_pega: PegaServer, short_path: Path, prompt: Any
) -> None:
    models = ensure_eagle()
    speculation = {"method": "eagle", "model": str(models / "draft"), "num_speculative_tokens": 3}
    arguments = ("--speculative-config", json.dumps(speculation))
    prompts = [prompt(200 + 17 * number) for number in range(PROMPTS)]
    turns = [prompt(40) for _ in prompts]

    with serve(models / "target", short_path / "plain", None, *arguments) as vllm:
        reference = play(vllm, prompts)
        gpu_hit = play(vllm, prompts, keep=True)
        later = [
            [*tokens, *answer, *turn]
            for tokens, answer, turn in zip(prompts, reference.answers, turns, strict=True)
        ]
        later_reference = play(vllm, later)
    assert gpu_hit.answers == reference.answers
    assert gpu_hit.acceptance > 0.6, "else wrong draft KV would not show"

    with serve(models / "target", short_path / "a", own_pega, *arguments) as vllm:
        cold = play(vllm, prompts)
        forget(vllm)  # The last prompt's blocks are saved when it has ended.
    assert cold.answers == reference.answers
    assert cold.loaded == [0] * PROMPTS

    mistake = {
        "kv_connector": "ShiftedDrafts",
        "kv_role": "kv_both",
        "kv_connector_module_path": "tests.python.shifted_drafts",
        "kv_connector_extra_config": PATIENT | {"pegaflow.host": own_pega.address},
    }
    # The last token of an answer is no input of the model.
    cached = [usable(len(tokens) + ANSWER - 1) for tokens in prompts]
    of_prompt = [usable(len(tokens)) for tokens in prompts]
    with serve(models / "target", short_path / "b", own_pega, *arguments) as vllm:
        reload = play(vllm, prompts)
        assert reload.answers == reference.answers
        assert reload.loaded == of_prompt
        assert reload.acceptance >= 0.99 * gpu_hit.acceptance, (reload, gpu_hit)
        turn = play(vllm, later)
        assert turn.answers == later_reference.answers
        assert turn.loaded == cached
        assert turn.acceptance >= 0.99 * later_reference.acceptance, (turn, later_reference)

    with serve(models / "target", short_path / "c", own_pega, *arguments, transfer=mistake) as vllm:
        wrong = play(vllm, prompts)
        assert wrong.answers == reference.answers
        assert wrong.loaded == of_prompt
        assert wrong.acceptance < 0.9 * gpu_hit.acceptance, (wrong, gpu_hit)
    print(f"acceptance: GPU hit {gpu_hit.acceptance:.3f}, reload {reload.acceptance:.3f}")
    print(f"with draft KV that is shifted by a token: {wrong.acceptance:.3f}")
