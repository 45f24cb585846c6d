"""Ollama's own."""

from __future__ import annotations

import json
from typing import Any

import pytest

ollama = pytest.importorskip("ollama", reason="`make clients` installs it")
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def get_weather(city: str) -> str:
    """The weather somewhere.

    Args:
        city: Where.
    """
    return "sunny"


@pytest.fixture
def client(server: str) -> Any:
    return ollama.Client(host=server)


def say(text: str) -> Any:
    return {"model": "tiny", "messages": [{"role": "user", "content": f"Say: {text}"}]}


def test_chats_and_texts(client: Any) -> None:
    assert client.chat(**say("Hello, Zoë.")).message.content == "Hello, Zoë."
    assert "".join(part.message.content for part in client.chat(**say("Grüße 🙂"), stream=True)) == "Grüße 🙂"
    assert client.generate(model="tiny", prompt="Say: Hi", think=False).response == "Hi"
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    assert json.loads(client.chat(**say('{"age":7}'), format=schema).message.content) == {"age": 7}
    streamed = client.chat(**say('{"age":7}'), format=schema, stream=True)
    assert json.loads("".join(part.message.content for part in streamed)) == {"age": 7}


def test_tools(client: Any) -> None:
    asked = say(CALL)
    message = client.chat(**asked, tools=[get_weather]).message
    assert (message.tool_calls[0].function.name, message.tool_calls[0].function.arguments) == (
        "get_weather", {"city": "Oslo"})
    result = {"role": "tool", "tool_name": "get_weather", "content": "sunny"}
    further = client.chat(model="tiny", messages=[*asked["messages"], message, result], tools=[get_weather])
    assert further.message.content == "It is sunny."
    streamed = [call for part in client.chat(**asked, tools=[get_weather], stream=True)
                for call in part.message.tool_calls or ()]
    assert [call.function.arguments for call in streamed] == [{"city": "Oslo"}]


def test_what_there_is(client: Any) -> None:
    assert [model.model for model in client.list().models] == ["tiny"]
    assert [model.model for model in client.ps().models] == ["tiny"]
    assert "tools" in client.show("tiny").capabilities
    sea, sky = client.embed(model="tiny", input=["The sea", "The sky"]).embeddings
    assert sea != sky == client.embed(model="tiny", input="The sky").embeddings[0]
    with pytest.raises(ollama.ResponseError):
        client.chat(model="other", messages=say("Hi")["messages"])
