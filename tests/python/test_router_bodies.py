"""vLLM's own request models accept the router's requests to prefill engines."""

from __future__ import annotations

import asyncio
import json
import pathlib
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "support"))

from router_process import Router
from streaming_engine import StreamingEngine
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

LONG = "eins zwei drei " * 200  # Beyond --min-prefill-tokens.
MESSAGES = [{"role": "user", "content": LONG}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "t", "parameters": SCHEMA}}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}

CHAT = {"model": "m", "messages": MESSAGES, "max_completion_tokens": 90}
COMPLETION = {"model": "m", "prompt": LONG, "max_tokens": 90}
ANTHROPIC = {"model": "m", "messages": MESSAGES, "max_tokens": 9000}
ANTHROPIC_TOOLS = {"tools": [{"name": "t", "input_schema": SCHEMA}]}

BODIES: list[tuple[str, type, dict[str, Any]]] = [
    ("/v1/chat/completions", ChatCompletionRequest, CHAT | more)
    for more in (
        STREAMED | {"n": 3, "min_tokens": 20},
        {"logprobs": True, "top_logprobs": 5},
        {"logprobs": True, "logprob_token_ids": [1, 2]},
        {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "t"}}},
        {"response_format": {"type": "json_object"}, "thinking_token_budget": 50},
        {"thinking": {"type": "enabled", "budget_tokens": 2000}},
    )
]
BODIES += [
    ("/v1/completions", CompletionRequest, COMPLETION | more)
    for more in (
        STREAMED | {"n": 3, "min_tokens": 20},
        {"logprobs": 3, "logprob_token_ids": [1, 2]},
        {"echo": True, "suffix": None},
    )
]
BODIES += [
    ("/v1/messages", AnthropicMessagesRequest, ANTHROPIC | more)
    for more in (
        {"stream": True},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"thinking": {"budget_tokens": 8000, "type": "enabled"}, "stream": True},
        {"thinking": {"type": "disabled"}},
        ANTHROPIC_TOOLS | {"tool_choice": {"type": "any"}},
    )
]


def sent_to_prefill(
    bodies: list[tuple[str, dict[str, Any]]], *options: str, headers: str = ""
) -> list[dict[str, Any] | None]:
    """The body that a real router sends to its prefill engine for each; None: none."""

    async def ask() -> list[dict[str, Any] | None]:
        p, d = await StreamingEngine().start(), await StreamingEngine().start()
        router = await Router.start("--prefill", p.url, "--decode", d.url, *options)
        sent: list[dict[str, Any] | None] = []
        try:
            for path, body in bodies:
                p.requests.clear()
                assert (await router.post(path, body, headers)).status == 200
                sent.append(p.requests[0].json if p.requests else None)
        finally:
            await router.stop()
            await p.stop()
            await d.stop()
        return sent

    return asyncio.run(ask())


def test_vllm_accepts_every_body_for_a_prefill_engine() -> None:
    bodies = sent_to_prefill([(path, body) for path, _, body in BODIES])
    for (path, model, original), body in zip(BODIES, bodies, strict=True):
        # The models modify the values that they validate.
        model.model_validate(json.loads(json.dumps(original)))
        assert body is not None, (path, original)
        request = model.model_validate(json.loads(json.dumps(body)))
        assert request.max_tokens == 1 and not request.stream, (path, body)


def test_thinking_does_not_change_the_prompt_of_the_prefill() -> None:
    # The members that the router removes change vLLM's request in its budget only.
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    thinking = {"thinking": {"type": "enabled", "budget_tokens": 2000}}
    (body,) = sent_to_prefill([("/v1/messages", ANTHROPIC | thinking)])
    assert body is not None and "thinking" not in body

    def converted(body: dict[str, Any]) -> dict[str, Any]:
        request = AnthropicMessagesRequest.model_validate(json.loads(json.dumps(body)))
        chat = AnthropicServingMessages.to_chat_completion_request(request)
        return chat.model_dump(exclude_none=True)

    with_thinking, without = converted(ANTHROPIC | thinking), converted(ANTHROPIC)
    assert with_thinking.pop("thinking_token_budget") == 2000
    for each in (with_thinking, without):
        each.pop("request_id", None)  # Random in each request.
    assert with_thinking == without


def test_a_named_tool_of_messages_has_no_separate_prefill() -> None:
    choice = {"tool_choice": {"type": "tool", "name": "t"}}
    assert sent_to_prefill([("/v1/messages", ANTHROPIC | ANTHROPIC_TOOLS | choice)]) == [None]


def test_vllm_accepts_the_salt_of_a_tenant(tmp_path: pathlib.Path) -> None:
    (tmp_path / "keys").write_text("ann k-ann\n")
    clients = {"cache_salt": "not for vLLM: @ / \\"}
    salts = set()
    for more in ({}, clients):
        bodies = sent_to_prefill(
            [(path, body | more) for path, _, body in BODIES],
            "--api-keys-file", str(tmp_path / "keys"),
            headers="x-api-key: k-ann\r\n",
        )  # fmt: skip
        for (_, model, _), body in zip(BODIES, bodies, strict=True):
            assert body is not None
            salts.add(model.model_validate(json.loads(json.dumps(body))).cache_salt)
    assert len(salts) == 2 and None not in salts
