"""What the server answers has the shapes that OpenAI publishes, field by field."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai_shapes as shapes
import pytest
from calling import TOKENIZER, WEATHER, calling_engine
from serving import WAIT, ServerThread, events, served

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
SAID = f"<think>\nWhere?\n</think>\n\nLet me look.\n{CALL}\n{CALL}\x00"
MESSAGES = [{"role": "user", "content": "hello"}]
SCORED: Any = {"messages": MESSAGES, "max_tokens": 3, "seed": 7, "logprobs": True, "top_logprobs": 2}
TOOLED: Any = {"temperature": 0, "stop_token_ids": TOKENIZER.encode("\x00")}
TOOL = {"type": "function"} | WEATHER["function"]
WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def http(server: ServerThread) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{server.url}/v1", timeout=WAIT) as client:
        yield client


@pytest.fixture(scope="module")
def caller() -> Iterator[httpx.Client]:
    """Of a model that thinks, talks and calls tools."""
    with served(calling_engine(SAID, "<think>")) as url, httpx.Client(base_url=f"{url}/v1", timeout=WAIT) as client:
        yield client


def checked(value: Any, schema: Any) -> Any:
    jsonschema.Draft202012Validator(schema).validate(value)
    return value


def post(client: httpx.Client, path: str, schema: Any, status: int = 200, **body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == status, answer.text
    return checked(answer.json(), schema)


def stream(client: httpx.Client, path: str, schema: Any, **body: Any) -> list[Any]:
    with client.stream("POST", path, json=body) as response:
        assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
        return [checked(chunk, schema) for chunk in events(response)]


def test_the_shapes_are_schemas() -> None:
    for schema in (shapes.CHAT, shapes.CHUNK, shapes.COMPLETION, shapes.COMPLETION_CHUNK, shapes.RESPONSE, shapes.ERROR,
                   shapes.MODELS, shapes.EMBEDDINGS, *shapes.EVENTS.values()):
        jsonschema.Draft202012Validator.check_schema(schema)


def test_chats(http: httpx.Client, caller: httpx.Client) -> None:
    told = post(http, "/chat/completions", shapes.CHAT, n=2, **SCORED)
    assert len(told["choices"]) == 2 and told["choices"][0]["logprobs"]["content"] and told["usage"]
    chunks = stream(http, "/chat/completions", shapes.CHUNK, **SCORED, **WITH_USAGE)
    assert [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]][-1] == "length"
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] and len({chunk["id"] for chunk in chunks}) == 1
    called: Any = TOOLED | {"messages": MESSAGES, "tools": [WEATHER]}
    choice = post(caller, "/chat/completions", shapes.CHAT, **called)["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and len(choice["message"]["tool_calls"]) == 2
    chunks = stream(caller, "/chat/completions", shapes.CHUNK, **called, stream=True)
    assert {call["index"] for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())} == {0, 1}


def test_texts(http: httpx.Client) -> None:
    asked: Any = {"prompt": ["Once", "The sea"], "max_tokens": 3, "seed": 7, "logprobs": 2}
    told = post(http, "/completions", shapes.COMPLETION, **asked, echo=True)
    assert [choice["index"] for choice in told["choices"]] == [0, 1] and told["choices"][0]["logprobs"]
    chunks = stream(http, "/completions", shapes.COMPLETION_CHUNK, **asked, **WITH_USAGE)
    assert {choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]} == {None, "length"}


def test_responses(http: httpx.Client, caller: httpx.Client) -> None:
    told = post(http, "/responses", shapes.RESPONSE, input="hello", max_output_tokens=3, seed=7)
    assert told["status"] == "incomplete" and told["incomplete_details"] and told["usage"]
    assert checked(http.get(f"/responses/{told['id']}").json(), shapes.RESPONSE)["output"] == told["output"]
    for choice in ("auto", "required", {"type": "function", "name": "get_weather"}):
        told = post(caller, "/responses", shapes.RESPONSE, input="hello", tools=[TOOL], tool_choice=choice, **TOOLED)
        assert "function_call" in [item["type"] for item in told["output"]]


def test_events_of_responses(http: httpx.Client, caller: httpx.Client) -> None:
    seen = set()
    for client, more in ((http, {"max_output_tokens": 3}), (caller, TOOLED | {"tools": [TOOL]})):
        body = client.post("/responses", json={"input": "hello", "stream": True} | more).text
        for place, block in enumerate(body.strip().split("\n\n")):
            name, data = block.split("\n")
            event = json.loads(data.removeprefix("data: "))
            assert name == f"event: {event['type']}" and event["sequence_number"] == place
            checked(event, shapes.EVENTS[event["type"]])
            seen.add(event["type"])
    assert seen == set(shapes.EVENTS)


def test_models_embeddings_and_errors(http: httpx.Client) -> None:
    models = checked(http.get("/models").json(), shapes.MODELS)
    checked(http.get(f"/models/{models['data'][0]['id']}").json(), shapes.MODEL)
    for form, kind in (("float", list), ("base64", str)):
        told = post(http, "/embeddings", shapes.EMBEDDINGS, input=["a", "b"], encoding_format=form)
        assert [type(one["embedding"]) for one in told["data"]] == [kind, kind]
    for path in ("/chat/completions", "/completions", "/responses", "/embeddings"):
        post(http, path, shapes.ERROR, 400)
    checked(http.get("/nothing").json(), shapes.ERROR)


def required(value: Any, schema: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the fields are that a value must have by its schema, alternatives aside."""
    if isinstance(value, list):
        for place, one in enumerate(value):
            yield from required(one, schema.get("items", {}), (*path, place))
    elif isinstance(value, dict):
        yield from ((*path, name) for name in schema.get("required", ()))
        for name, one in value.items():
            yield from required(one, schema.get("properties", {}).get(name, {}), (*path, name))


def damaged(whole: Any, way: tuple[Any, ...], *wrong: Any) -> Any:
    """A copy whose field there is wrong, or is gone."""
    copied = copy.deepcopy(whole)
    holder = copied
    for step in way[:-1]:
        holder = holder[step]
    del holder[way[-1]]
    for value in wrong:
        holder[way[-1]] = value
    return copied


@pytest.mark.parametrize(("path", "schema", "body", "least"), [
    ("/chat/completions", shapes.CHAT, SCORED, 12),
    ("/completions", shapes.COMPLETION, {"prompt": "a", "max_tokens": 3}, 9),
    ("/responses", shapes.RESPONSE, {"input": "a", "max_output_tokens": 3}, 14),
    ("/embeddings", shapes.EMBEDDINGS, {"input": "a"}, 8), ("/embeddings", shapes.ERROR, {}, 5)])
def test_an_answer_that_lacks_a_field_is_found(http: httpx.Client, path: str, schema: Any, body: Any,
                                               least: int) -> None:
    whole = checked(http.post(path, json=body).json(), schema)
    places = list(required(whole, schema))
    assert len(places) >= least
    for way in places:
        with pytest.raises(jsonschema.ValidationError):
            checked(damaged(whole, way), schema)


def test_an_answer_of_wrong_words_is_found(http: httpx.Client) -> None:
    whole = post(http, "/chat/completions", shapes.CHAT, **SCORED)
    for *way, wrong in (("object", "chat.completion.chunk"), ("choices", 0, "finish_reason", "eos"), ("created", 1.5),
                        ("choices", 0, "finish_reason", None), ("choices", 0, "message", "role", "user"),
                        ("choices", []), ("usage", "total_tokens", "3"), ("choices", 0, "logprobs", "content", {})):
        with pytest.raises(jsonschema.ValidationError):
            checked(damaged(whole, tuple(way), wrong), shapes.CHAT)
