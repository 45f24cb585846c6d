"""OpenAI's own: chats, responses, texts, embeddings."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel

openai = pytest.importorskip("openai", reason="`make clients` installs it")
MODEL = "tiny"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
              "additionalProperties": False}
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
FLAT: Any = {"type": "function", "name": "get_weather", "parameters": PARAMETERS}


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture
def client(server: str) -> Any:
    return openai.OpenAI(base_url=f"{server}/v1", api_key="unused", max_retries=0)


def say(text: str) -> Any:
    return [{"role": "user", "content": f"Say: {text}"}]


def test_chats(client: Any) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    answer = client.chat.completions.create(model=MODEL, messages=say("Hello, Zoë."))
    assert answer.choices[0].message.content == "Hello, Zoë." and answer.choices[0].finish_reason == "stop"
    chunks = list(client.chat.completions.create(model=MODEL, messages=say("Grüße 🙂"), stream=True,
                                                 stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Grüße 🙂"
    assert chunks[-1].usage.completion_tokens == len("Grüße 🙂".encode()) + 1


def test_tools(client: Any) -> None:
    asked: Any = {"model": MODEL, "messages": say(CALL), "tools": [TOOL]}
    message = client.chat.completions.create(**asked).choices[0].message
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Oslo"}
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    further = [*asked["messages"], message.model_dump(exclude_none=True), result]
    assert client.chat.completions.create(**asked | {"messages": further}).choices[0].message.content == "It is sunny."
    with client.chat.completions.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.done" in kinds and final.finish_reason == "tool_calls"
    assert json.loads(final.message.tool_calls[0].function.arguments) == {"city": "Oslo"}


def test_structure(client: Any) -> None:
    asked: Any = {"model": MODEL, "messages": say('{"name":"Ann","age":7}'), "response_format": Person}
    assert client.chat.completions.parse(**asked).choices[0].message.parsed == Person(name="Ann", age=7)
    with client.chat.completions.stream(**asked) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == Person(name="Ann", age=7)


def test_responses(client: Any) -> None:
    first = client.responses.create(model=MODEL, input="Say: Hello.", reasoning={"effort": "low"})
    assert first.output_text == "Hello." and client.responses.retrieve(first.id).output_text == "Hello."
    second = client.responses.create(model=MODEL, input="Say: Again.", previous_response_id=first.id)
    assert second.output_text == "Again." and second.usage.input_tokens > first.usage.input_tokens
    with client.responses.stream(model=MODEL, input="Say: Hello.") as stream:
        events = list(stream)
        assert stream.get_final_response().output_text == "Hello."
    assert [event.sequence_number for event in events if event.type != "keepalive"] == list(range(len(events)))
    parsed = client.responses.parse(model=MODEL, input='Say: {"name":"Ann","age":7}', text_format=Person)
    assert parsed.output_parsed == Person(name="Ann", age=7)
    with client.responses.stream(model=MODEL, input='Say: {"name":"Ann","age":7}', text_format=Person) as stream:
        assert stream.get_final_response().output_parsed == Person(name="Ann", age=7)


def test_tools_of_responses(client: Any) -> None:
    first = client.responses.create(model=MODEL, input=f"Say: {CALL}", tools=[FLAT])
    call = first.output[-1]
    assert call.type == "function_call" and json.loads(call.arguments) == {"city": "Oslo"}
    result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    further = client.responses.create(model=MODEL, input=result, previous_response_id=first.id, tools=[FLAT])
    assert further.output_text == "It is sunny."
    with client.responses.stream(model=MODEL, input=f"Say: {CALL}", tools=[FLAT]) as stream:
        last = stream.get_final_response().output[-1]
    assert last.type == "function_call" and json.loads(last.arguments) == {"city": "Oslo"}


def test_texts_and_errors(client: Any) -> None:
    assert client.completions.create(model=MODEL, prompt="Say: Hi|>", max_tokens=9).choices[0].text == "Hi"
    chunks = client.completions.create(model=MODEL, prompt="Say: Grüße 🙂|>", max_tokens=20, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Grüße 🙂"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=say("Hi"))


def test_embeddings(client: Any) -> None:
    both = client.embeddings.create(model=MODEL, input=["The sea", "The sky"])  # it asks for base64
    floats = client.embeddings.create(model=MODEL, input="The sky", encoding_format="float").data[0].embedding
    assert both.data[1].embedding == floats != both.data[0].embedding and both.usage.prompt_tokens == 14
    assert abs(sum(value * value for value in floats) - 1) < 1e-5
