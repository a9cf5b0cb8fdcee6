"""Requests completions of a vLLM server, streamed, over plain HTTP."""

from __future__ import annotations

import dataclasses
import http.client
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.support.vllm_server import MODEL_NAME


class RequestFailed(RuntimeError):
    """A request had no response, an error, or too short an answer."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """The answer to a prompt, and its latency."""

    tokens: tuple[int, ...]
    #: Natural logarithm of the first token's probability.
    first_logprob: float
    #: Seconds from sending the request to the first event that carries a token.
    ttft_s: float
    total_s: float
    #: The same of each token, and of the most probable ones at its place if these were requested.
    logprobs: tuple[float, ...] = ()
    alternatives: tuple[Mapping[int, float], ...] = ()
    #: Tokens of the prompt that the engine took from a cache; 0 unless they were requested.
    cached_tokens: int = 0

    def after(self, tokens: int) -> Answer:
        """The answer without its first ``tokens`` tokens, of which it has more."""
        return dataclasses.replace(
            self,
            tokens=self.tokens[tokens:],
            first_logprob=self.logprobs[tokens],
            logprobs=self.logprobs[tokens:],
            alternatives=self.alternatives[tokens:],
        )


def completion_body(prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
    """A greedy, streamed request for exactly this many tokens."""
    return {
        "model": MODEL_NAME,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
        "stream": True,
        "return_token_ids": True,
    }


def complete(
    address: str,
    prompt: Sequence[int],
    max_tokens: int = 32,
    timeout_s: float = 300.0,
    *,
    alternatives: int = 0,
    with_usage: bool = False,
) -> Answer:
    """Answer a prompt given as token ids, greedily, with exactly ``max_tokens`` tokens.

    Args:
        address: HOST:PORT of the vLLM server.
        timeout_s: Seconds for which the connection may be silent.
        alternatives: The number of most probable tokens to report for each place; 0: none.
        with_usage: Requests the cached tokens, for engines with --enable-prompt-tokens-details.

    Raises:
        RequestFailed: the server is gone, answered with an error, or with too few tokens.
    """
    request = completion_body(prompt, max_tokens)
    if alternatives:
        request |= {"logprobs": alternatives, "return_tokens_as_token_ids": True}
    if with_usage:
        request["stream_options"] = {"include_usage": True}
    cached_tokens = 0
    tokens: list[int] = []
    logprobs: list[float] = []
    others: list[dict[int, float]] = []
    ttft_s = 0.0
    start = time.monotonic()
    try:
        for event in _answer(address, request, timeout_s):
            cached_tokens = max(cached_tokens, _cached_tokens(event))
            if not event["choices"]:
                continue  # The last event has the usage alone.
            choice = event["choices"][0]
            new_tokens = choice["token_ids"]
            if new_tokens and not tokens:
                # Status and headers arrive long before anything is computed: the first event with a
                # token counts.
                ttft_s = time.monotonic() - start
            if new_tokens:
                logprobs += choice["logprobs"]["token_logprobs"]
                if alternatives:
                    others += map(_by_token, choice["logprobs"]["top_logprobs"])
            tokens += new_tokens
    except (OSError, http.client.HTTPException) as error:
        raise RequestFailed(f"{address}: {error!r} after {len(tokens)} tokens") from error
    if len(tokens) != max_tokens:
        raise RequestFailed(f"{len(tokens)} tokens instead of {max_tokens}")
    total_s = time.monotonic() - start
    seen = (tuple(logprobs), tuple(others), cached_tokens)
    return Answer(tuple(tokens), logprobs[0], ttft_s, total_s, *seen)


def _cached_tokens(event: Mapping[str, Any]) -> int:
    details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
    return details.get("cached_tokens", 0)


def _by_token(logprobs: Mapping[str, float]) -> dict[int, float]:
    """vLLM's names of tokens are ``token_id:5`` with return_tokens_as_token_ids."""
    return {int(name.removeprefix("token_id:")): value for name, value in logprobs.items()}


@dataclasses.dataclass(frozen=True)
class TextAnswer:
    """The answer to a request for text only."""

    text: str
    #: prompt_tokens, completion_tokens and total_tokens.
    usage: dict[str, int]


def complete_text(
    address: str, prompt: Sequence[int], max_tokens: int = 32, timeout_s: float = 300.0
) -> TextAnswer:
    """Answer a prompt as ``complete`` does, without token ids and log-probabilities.

    Raises:
        RequestFailed: the server is gone, or answered with an error.
    """
    request = completion_body(prompt, max_tokens)
    del request["logprobs"], request["return_token_ids"]
    request["stream_options"] = {"include_usage": True}
    text, usage = "", {}
    try:
        for event in _answer(address, request, timeout_s):
            text += "".join(choice["text"] for choice in event["choices"])
            usage = event.get("usage") or usage
    except (OSError, http.client.HTTPException) as error:
        raise RequestFailed(f"{address}: {error!r} after {len(text)} characters") from error
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    return TextAnswer(text, {name: usage.get(name, 0) for name in names})


def _answer(address: str, request: dict[str, Any], timeout_s: float) -> Iterator[dict[str, Any]]:
    """The events of a completion, as they arrive.

    Raises:
        RequestFailed: the server answered with an error, before or in the stream.
        OSError, http.client.HTTPException: it is gone.
    """
    connection = http.client.HTTPConnection(address, timeout=timeout_s)
    try:
        connection.request(
            "POST", "/v1/completions", json.dumps(request), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        if response.status != 200:
            raise RequestFailed(f"status {response.status}: {response.read()[:500]!r}")
        for event in _events(response):
            if "error" in event:
                raise RequestFailed(f"error in the stream: {event['error']}")
            yield event
    finally:
        connection.close()


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events, until its [DONE]."""
    for line in response:
        if not line.startswith(b"data: "):
            continue
        data = line.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            # Read to the end of the response, a chunk later: a client that closes before it counts
            # as one that left in the middle.
            response.read()
            return
        yield json.loads(data)
    raise RequestFailed("the stream ended without [DONE]")


def post(address: str, path: str, timeout_s: float = 60.0) -> tuple[int, Any]:
    """POST without a body; returns status and the JSON answer, None where it is empty.

    Raises:
        RequestFailed: the server is gone or its answer is not JSON.
    """
    return _call("POST", address, path, timeout_s)


def get(address: str, path: str, timeout_s: float = 60.0) -> tuple[int, Any]:
    """The same for GET."""
    return _call("GET", address, path, timeout_s)


def _call(method: str, address: str, path: str, timeout_s: float) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(address, timeout=timeout_s)
    try:
        connection.request(method, path, headers={"Content-Length": "0"})
        response = connection.getresponse()
        body = response.read()
        return response.status, json.loads(body) if body else None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise RequestFailed(f"{method} {address}{path}: {error!r}") from error
    finally:
        connection.close()
