"""LiteLLM, by each protocol that it speaks to a server like this one."""

from __future__ import annotations

import json
from typing import Any

import pytest

litellm = pytest.importorskip("litellm", reason="`make clients` installs it")
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}


@pytest.fixture(params=["openai/tiny", "hosted_vllm/tiny", "anthropic/tiny", "ollama_chat/tiny"])
def where(server: str, request: pytest.FixtureRequest) -> Any:
    base = f"{server}/v1" if request.param.startswith(("openai", "hosted")) else server
    return {"model": request.param, "api_base": base, "api_key": "unused", "num_retries": 0}


def say(text: str) -> Any:
    return {"messages": [{"role": "user", "content": f"Say: {text}"}], "max_tokens": 200}


def test_answers(where: Any) -> None:
    assert litellm.completion(**where, **say("Hello, Zoë.")).choices[0].message.content == "Hello, Zoë."
    chunks = litellm.completion(**where, **say("Grüße 🙂"), stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Grüße 🙂"


def test_tools(where: Any) -> None:
    call = litellm.completion(**where, **say(CALL), tools=[TOOL]).choices[0].message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Oslo"})
    chunks = list(litellm.completion(**where, **say(CALL), tools=[TOOL], stream=True))
    whole = litellm.stream_chunk_builder(chunks).choices[0]
    assert [(call.function.name, json.loads(call.function.arguments)) for call in whole.message.tool_calls] == [
        ("get_weather", {"city": "Oslo"})]
    assert whole.finish_reason == "tool_calls"
