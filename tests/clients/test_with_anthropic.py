"""Anthropic's own: messages."""

from __future__ import annotations

from typing import Any

import pytest

anthropic = pytest.importorskip("anthropic", reason="`make clients` installs it")
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TOOL: Any = {"name": "get_weather", "description": "The weather.", "input_schema": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}


@pytest.fixture
def client(server: str) -> Any:
    return anthropic.Anthropic(base_url=server, api_key="unused", max_retries=0)


def asked(text: str, **more: Any) -> Any:
    return {"model": "tiny", "max_tokens": 200, "messages": [{"role": "user", "content": f"Say: {text}"}]} | more


def test_messages(client: Any) -> None:
    message = client.messages.create(**asked("Hello, Zoë.", system="Be kind."))
    assert message.content[0].text == "Hello, Zoë." and message.stop_reason == "end_turn"
    with client.messages.stream(**asked("Grüße 🙂")) as stream:
        assert "".join(stream.text_stream) == "Grüße 🙂"
        final = stream.get_final_message()
    assert final.content[0].text == "Grüße 🙂" and final.usage.output_tokens == len("Grüße 🙂".encode()) + 1
    counted = client.messages.count_tokens(model="tiny", messages=asked("Hi")["messages"])
    assert counted.input_tokens == len("Say: Hi|>")


def test_tools(client: Any) -> None:
    first = client.messages.create(**asked(CALL, tools=[TOOL]))
    use = first.content[-1]
    assert (first.stop_reason, use.name, use.input) == ("tool_use", "get_weather", {"city": "Oslo"})
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
    further = [*asked(CALL)["messages"], {"role": "assistant", "content": first.content},
               {"role": "user", "content": [result]}]
    assert client.messages.create(**asked("", tools=[TOOL], messages=further)).content[0].text == "It is sunny."
    with client.messages.stream(**asked(CALL, tools=[TOOL])) as stream:
        assert stream.get_final_message().content[-1].input == {"city": "Oslo"}


def test_errors_are_the_clients_own(client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**asked("Hi", model="claude"))
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(**asked("Hi", max_tokens=0))
