"""EAGLE drafts in a real vLLM: answers, loaded blocks, and how many drafts are accepted.

The draft predicts its target (tools/vllm-cpu/make_eagle.py), so wrong draft KV shows in the number
of accepted drafts. It never shows in an answer: the target decides each token.
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.python.vllm_cases import BLOCK, PATIENT, ask, call, forget, hits, serve
from tests.support.vllm_server import MODEL_NAME, PegaServer, VllmServer, ensure_eagle

PROMPTS, ANSWER = int(os.environ.get("PEGA_EAGLE_PROMPTS", "12")), 40
#: The least acceptance after a reload, as a share of a GPU hit's. A dozen prompts have some 1,000
#: drafts, of which rounding may turn a few.
LEAST = 0.99 if PROMPTS >= 500 else 0.95


@dataclasses.dataclass
class Round:
    """All prompts once."""

    answers: list[list[int]] = dataclasses.field(default_factory=list)
    loaded: list[float] = dataclasses.field(default_factory=list)  #: Tokens, for each prompt.
    drafted: float = 0.0
    accepted: float = 0.0

    @property
    def acceptance(self) -> float:
        """Accepted drafts of all."""
        return self.accepted / self.drafted

    def ask(self, vllm: VllmServer, tokens: list[int], *, keep: bool = False) -> None:
        """One more prompt. ``keep``: vLLM's own cache is used."""
        before = _drafts(vllm)
        answer, loaded = _ask_again(vllm, tokens) if keep else ask(vllm, tokens, ANSWER)
        after = _drafts(vllm)
        self.answers.append(answer)
        self.loaded.append(loaded)
        self.drafted += after[0] - before[0]
        self.accepted += after[1] - before[1]


def play(vllm: VllmServer, prompts: list[list[int]]) -> Round:
    made = Round()
    for tokens in prompts:
        made.ask(vllm, tokens)
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


@pytest.mark.pool_size(f"{64 + 3 * PROMPTS}mb")
def test_reloaded_drafts_are_accepted_like_those_of_a_gpu_hit(
    own_pega: PegaServer, short_path: Path, prompt: Any
) -> None:
    models = ensure_eagle()
    speculation = {"method": "eagle", "model": str(models / "draft"), "num_speculative_tokens": 3}
    arguments = ("--speculative-config", json.dumps(speculation))
    prompts = [prompt(200 + 17 * (number % 30)) for number in range(PROMPTS)]
    turns = [prompt(40) for _ in prompts]

    with serve(models / "target", short_path / "plain", None, *arguments) as vllm:
        reference, gpu_hit = Round(), Round()
        for tokens in prompts:
            reference.ask(vllm, tokens)
            gpu_hit.ask(vllm, tokens, keep=True)
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
        assert reload.acceptance >= LEAST * gpu_hit.acceptance, (reload, gpu_hit)
        turn = play(vllm, later)
        assert turn.answers == later_reference.answers
        assert turn.loaded == cached
        assert turn.acceptance >= LEAST * later_reference.acceptance, (turn, later_reference)

    with serve(models / "target", short_path / "c", own_pega, *arguments, transfer=mistake) as vllm:
        wrong = play(vllm, prompts)
        assert wrong.answers == reference.answers
        assert wrong.loaded == of_prompt
        assert wrong.acceptance < 0.9 * gpu_hit.acceptance, (wrong, gpu_hit)
    print(
        f"acceptance in {PROMPTS} prompts: reload {reload.acceptance:.4f}, GPU hit "
        f"{gpu_hit.acceptance:.4f}, plain {reference.acceptance:.4f}, draft KV shifted by a token "
        f"{wrong.acceptance:.4f}; reload / GPU hit {reload.acceptance / gpu_hit.acceptance:.4f}"
    )
