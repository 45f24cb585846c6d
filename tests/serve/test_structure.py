"""Structured output and enforced tool calls, asked for with the official client in each of the ways there are."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

import openai
import pydantic
import pytest
from serving import NAME, WAIT, ServerThread

SCHEMA = {"type": "object", "properties": {"kind": {"enum": ["cat", "dog"]}, "legs": {"enum": [2, 4]}},
          "required": ["kind", "legs"], "additionalProperties": False}
TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("feed", "walk")]


@pytest.fixture(scope="module")
def client(server: ServerThread) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", timeout=WAIT, max_retries=0)


def ask(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(**{"model": NAME, "messages": [{"role": "user", "content": "an animal"}],
                                             "max_tokens": 200, "seed": 5} | more)


@pytest.mark.parametrize("way", [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA, "strict": True}}},
    {"extra_body": {"guided_json": SCHEMA}}, {"extra_body": {"guided_json": json.dumps(SCHEMA)}},
    {"extra_body": {"structured_outputs": {"json": SCHEMA}}},
], ids=["response_format", "guided_json", "guided_json text", "structured_outputs"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_holds(client: openai.OpenAI, way: dict[str, Any], stream: bool) -> None:
    if stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in ask(client, stream=True, **way))
    else:
        text = ask(client, **way).choices[0].message.content
    told = json.loads(text)
    assert told["kind"] in ("cat", "dog") and told["legs"] in (2, 4) and len(told) == 2


def test_other_forms(client: openai.OpenAI) -> None:
    for body, form in (({"guided_regex": "[ab]{3}x"}, "[ab]{3}x"), ({"guided_choice": ["yes", "no"]}, "yes|no"),
                       ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
                       ({"structured_outputs": {"regex": "[0-9]{2}"}}, "[0-9]{2}"),
                       ({"guided_grammar": 'start: "a" "b"~2'}, "abb")):
        choice = ask(client, extra_body=body).choices[0]
        assert re.fullmatch(form, choice.message.content), body
        assert choice.finish_reason == "stop"
    begun = ask(client, response_format={"type": "json_object"}).choices[0].message.content
    assert begun.lstrip().startswith("{")
    assert ask(client, response_format={"type": "text"}).choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_tool_choices_are_enforced(client: openai.OpenAI, stream: bool) -> None:
    for wish, names in (("required", {"feed", "walk"}), ({"type": "function", "function": {"name": "walk"}}, {"walk"})):
        more = {"tools": TOOLS, "tool_choice": wish, "parallel_tool_calls": False, "max_tokens": 400}
        if stream:
            chunks = list(ask(client, stream=True, **more))
            deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
            name, arguments = deltas[0].function.name, "".join(call.function.arguments for call in deltas)
            assert chunks[-1].choices[0].finish_reason == "tool_calls"
        else:
            choice = ask(client, **more).choices[0]
            assert choice.finish_reason == "tool_calls" and choice.message.content is None
            name, arguments = (choice.message.tool_calls[0].function.name,
                               choice.message.tool_calls[0].function.arguments)
        assert name in names
        assert json.loads(arguments)["kind"] in ("cat", "dog")


@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_form_fails_its_request_alone(client: openai.OpenAI, stream: bool) -> None:
    """With a status, also where it would have been streamed."""
    exploding = {"type": "object", "properties": {f"p{n}": {"type": "boolean"} for n in range(600)}}
    for body in ({"guided_json": exploding}, {"guided_regex": "("},
                 {"guided_grammar": "start: nothing"}, {"guided_json": {"type": "nonsense"}},
                 {"guided_choice": []}):
        with pytest.raises(openai.BadRequestError) as problem:
            ask(client, extra_body=body, stream=stream)
        assert problem.value.param, body
    assert ask(client, max_tokens=2).choices[0].message.content


def test_strict_schemas_refuse_what_others_ignore(client: openai.OpenAI) -> None:
    unique = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "minItems": 1, "maxItems": 2}
    for strict in (None, False, True):  # which client libraries send with whatever they make of a class
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": unique, "strict": strict}}
        assert set(json.loads(ask(client, response_format=form).choices[0].message.content)) <= {1, 2}
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {
        "type": "object", "properties": {"x": unique}}}}
    assert ask(client, tools=[tool], tool_choice="required", max_tokens=1).choices
    for more in ({"response_format": form}, {"tools": [tool], "tool_choice": "required"}):
        with pytest.raises(openai.BadRequestError, match="uniqueItems cannot be enforced"):
            ask(client, **more, extra_body={"strict_schema": True})
    broken = {"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}
    with pytest.raises(openai.BadRequestError, match="these tools") as problem:
        ask(client, tools=[broken], tool_choice="required")
    assert problem.value.param == "tools"


class Chosen(pydantic.BaseModel):
    numbers: Annotated[set[Literal[1, 2]], pydantic.Field(min_length=1, max_length=2)]


def test_a_class_with_a_set_is_parsed(client: openai.OpenAI) -> None:
    """Whose schema the library sends as a strict one."""
    said = client.chat.completions.parse(model=NAME, messages=[{"role": "user", "content": "some"}], max_tokens=200,
                                         seed=5, response_format=Chosen)
    assert said.choices[0].message.parsed.numbers <= {1, 2}


def test_responses_are_as_strict_and_name_what_they_were_asked(client: openai.OpenAI) -> None:
    unique = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    for schema, reason in ((unique, "uniqueItems cannot be enforced"), ({"type": "nonsense"}, "Invalid type")):
        form: Any = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match=f"text.format cannot be used.*{reason}") as problem:
                client.responses.create(model=NAME, input="x", text={"format": form}, stream=stream,
                                        extra_body={"strict_schema": True})
            assert problem.value.param == "text.format"


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_tools_that_are_nested_too_deeply_break_nothing(client: openai.OpenAI, choice: Any) -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(400):
        schema = {"anyOf": [schema]}
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": schema}}
    with pytest.raises(openai.BadRequestError) as problem:
        ask(client, tools=[tool], tool_choice=choice)
    assert problem.value.param in ("tools", "messages")
