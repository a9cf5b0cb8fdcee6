"""Checks the answer to a loaded prompt."""

from __future__ import annotations

from demo.client import Answer

#: Computed in one go or from a local hit, the first log-probability differs by up to 2.4e-6 in
#: float32, without any load; one wrong block of 31 shifts it by 6e-4 or more (both measured).
COMPUTED_TOLERANCE = 1e-4

#: A load of a whole prompt leaves vLLM one token to compute, a local hit the last block: rounding
#: differs by some 1e-6 (measured), although the same bytes are read.
WHOLE_PROMPT_TOLERANCE = 1e-5

#: In bfloat16, for each token under teacher forcing. A run with right states was 0 off; a state of
#: zeros shifts one by 0.3 and 0.6 after 120 and 220 further tokens of the prompt (both
#: measured with qwen3-next).
BFLOAT16_BOUND = 0.1


def differences(
    answer: Answer, local_hit: Answer | None, baseline: Answer, *, whole_prompt: bool = False
) -> list[str]:
    """The errors in ``answer``; an empty list if it is right.

    Args:
        local_hit: The same prompt answered from the same engine's own cache. The same bytes give
            the same result, so this must be equal to the last bit.
        baseline: The same prompt answered by a vLLM that has no connector.
        whole_prompt: All of the prompt was loaded, so that vLLM computed less than for the local
            hit: the log-probability may differ in its last bits.
    """
    found = []
    if local_hit is not None:
        if answer.tokens != local_hit.tokens:
            found.append(f"tokens differ from the local hit {_first(answer, local_hit)}")
        shift = answer.first_logprob - local_hit.first_logprob
        if abs(shift) > (WHOLE_PROMPT_TOLERANCE if whole_prompt else 0.0):
            found.append(f"the first log-probability is {shift:+.2e} off the local hit")
    found += computed_differences(answer, baseline)
    return found


def computed_differences(answer: Answer, baseline: Answer) -> list[str]:
    """The same against another engine, as far as ``answer`` goes (it may be shorter)."""
    found = []
    if answer.tokens != baseline.tokens[: len(answer.tokens)]:
        found.append(f"tokens differ from vLLM without the connector {_first(answer, baseline)}")
    shift = answer.first_logprob - baseline.first_logprob
    if abs(shift) > COMPUTED_TOLERANCE:
        found.append(f"the first log-probability is {shift:+.2e} off vLLM without the connector")
    return found


def forced_differences(
    answer: Answer, baseline: Answer, bound: float
) -> tuple[list[str], int | None]:
    """The errors in ``answer`` as far as it has the tokens of ``baseline``.

    For types of little precision, in which two tokens may be equally probable. Each token's
    log-probability must be within ``bound`` of that in ``baseline``. Also returns the place of the
    first other token, if there is one: the baseline's token has to be as probable there, and the
    answer after it follows another text.
    """
    found = []
    for place, token in enumerate(baseline.tokens[: len(answer.tokens)]):
        expected = baseline.logprobs[place]
        logprob = answer.alternatives[place].get(token)
        if logprob is None:
            found.append(
                f"token {token} of vLLM without the connector is not among the "
                f"{len(answer.alternatives[place])} most probable at place {place + 1}"
            )
            return found, place
        if abs(logprob - expected) > bound:
            found.append(
                f"the log-probability of token {place + 1} is {logprob - expected:+.2e} off vLLM "
                "without the connector"
            )
        if answer.tokens[place] != token:
            return found, place
    return found, None


def largest_shift(answer: Answer, baseline: Answer) -> float:
    """The largest distance between log-probabilities of tokens that both answers have in common,
    up to the first other token.
    """
    largest = 0.0
    pairs = zip(answer.tokens, baseline.tokens, strict=False)
    for place, (token, other) in enumerate(pairs):
        if token != other:
            break
        largest = max(largest, abs(answer.logprobs[place] - baseline.logprobs[place]))
    return largest


def _first(answer: Answer, other: Answer) -> str:
    place = next(
        i for i, (a, b) in enumerate(zip(answer.tokens, other.tokens, strict=False)) if a != b
    )
    return f"from number {place + 1} on ({answer.tokens[place]}, not {other.tokens[place]})"
