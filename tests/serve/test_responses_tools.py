"""/v1/responses: custom tools, tools that are allowed, and what a response was asked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from calling import TOKENIZER, WEATHER, calling_engine
from serving import NAME, WAIT, ServerThread, served

TEXT = 'print("hi")\nlet x = 1'
SCRIPT = '<tool_call>\n{"name": "run", "arguments": {"input": "print(\\"hi\\")\\nlet x = 1"}}\n</tool_call>\x00'
RUN: Any = {"type": "custom", "name": "run", "description": "Runs a program.", "format": {"type": "text"}}
TOOL: Any = {"type": "function"} | WEATHER["function"]


@pytest.fixture(scope="module")
def runner() -> Iterator[openai.OpenAI]:
    """Of a model that calls a custom tool."""
    with served(calling_engine(SCRIPT)) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="unused", timeout=WAIT, max_retries=0)


def run(client: openai.OpenAI, **more: Any) -> Any:
    return client.responses.create(**{
        "model": NAME, "input": "run it", "tools": [RUN], "temperature": 0, "max_output_tokens": 500,
        "extra_body": {"stop_token_ids": TOKENIZER.encode("\x00")}} | more)


@pytest.mark.parametrize("choice", [
    "auto", "required", {"type": "custom", "name": "run"},
    {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "run"}]}])
def test_a_custom_tool_is_called_with_its_text(runner: openai.OpenAI, choice: Any) -> None:
    answer = run(runner, tool_choice=choice, tools=[RUN, TOOL], max_tool_calls=3, truncation="auto",
                 parallel_tool_calls=False)
    [call] = answer.output
    assert (call.type, call.name, call.input) == ("custom_tool_call", "run", TEXT)
    assert answer.truncation == "auto" and answer.tool_choice is not None
    back = run(runner, previous_response_id=answer.id, input=[
        {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}])
    assert back.status in ("completed", "incomplete")
    by_hand = run(runner, input=[{"role": "user", "content": "run it"}, {
        "type": "custom_tool_call", "call_id": "c", "name": "run", "input": TEXT}, {
        "type": "custom_tool_call_output", "call_id": "c", "output": "done"}])
    assert by_hand.usage.input_tokens == back.usage.input_tokens, "the same conversation"


@pytest.mark.parametrize("item", [
    {"type": "function_call_output", "call_id": "call_gone", "output": "x"},
    {"type": "custom_tool_call_output", "call_id": "call_gone", "output": "x"}])
def test_a_result_of_a_call_that_nobody_made_is_refused(server: ServerThread, item: dict[str, Any]) -> None:
    made = {"type": "function_call", "call_id": "call_made", "name": "get_weather", "arguments": "{}"}
    answers = [httpx.post(f"{server.url}/v1/responses", timeout=WAIT, json={
        "model": NAME, "max_output_tokens": 1, "input": [*before, item]}) for before in ([], [made])]
    for answer in answers:
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["type"] == "invalid_request_error" and error["param"] == "input"
        assert "No tool call found" in error["message"] and "call_gone" in error["message"]
    fine = httpx.post(f"{server.url}/v1/responses", timeout=WAIT, json={
        "model": NAME, "max_output_tokens": 1, "input": [made, item | {"call_id": "call_made"}]})
    assert fine.status_code == 200


@pytest.mark.parametrize(("path", "tools"), [
    ("/v1/responses", [TOOL, RUN, TOOL]), ("/v1/responses", [RUN, {"type": "function", "name": "run"}]),
    ("/v1/chat/completions", [WEATHER, WEATHER]), ("/v1/messages", [{"name": "run", "input_schema": {}}] * 2),
    ("/api/chat", [WEATHER, WEATHER])])
@pytest.mark.parametrize("choice", [None, "none"])
def test_two_tools_of_one_name_are_refused(server: ServerThread, path: str, tools: Any, choice: str | None) -> None:
    body = {"model": NAME, "tools": tools, "input": "x"} if path == "/v1/responses" else {
        "model": NAME, "tools": tools, "messages": [{"role": "user", "content": "x"}]}
    if path == "/v1/messages":
        body |= {"max_tokens": 1} | ({} if choice is None else {"tool_choice": {"type": choice}})
    elif path != "/api/chat" and choice is not None:
        body |= {"tool_choice": choice}
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=WAIT)
    assert answer.status_code == 400
    name = "run" if "run" in str(tools[-1]) else WEATHER["function"]["name"]
    assert f"has the name '{name}'" in answer.text and "must be unique" in answer.text


def test_a_custom_tools_text_is_streamed(runner: openai.OpenAI) -> None:
    with runner.responses.stream(model=NAME, input="run it", tools=[RUN], temperature=0, max_output_tokens=500,
                                 extra_body={"stop_token_ids": TOKENIZER.encode("\x00")}) as stream:
        found = list(stream)
    kinds = [event.type for event in found]
    assert kinds.count("response.custom_tool_call_input.done") == 1
    assert "".join(event.delta for event in found if event.type == "response.custom_tool_call_input.delta") == TEXT
    assert not any("function_call" in kind for kind in kinds)
    assert found[-1].response.output[0].input == TEXT  # type: ignore[union-attr]


@pytest.mark.parametrize("choice", [
    {"type": "allowed_tools", "mode": "auto"}, {"type": "allowed_tools", "tools": [1]}, {"type": "custom"},
    {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "nobody"}]}])
def test_a_choice_that_names_nothing_is_refused(runner: openai.OpenAI, choice: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="tool"):
        run(runner, tool_choice=choice)


def test_a_tool_that_is_not_allowed_is_not_called(runner: openai.OpenAI) -> None:
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_weather"}]}
    answer = run(runner, tools=[RUN, TOOL], tool_choice=allowed)
    assert not any(getattr(item, "name", None) == "run" for item in answer.output)


def test_what_a_response_was_asked_can_be_read_again(server: ServerThread) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", timeout=WAIT, max_retries=0)
    first = client.responses.create(model=NAME, input="One.", max_output_tokens=3)
    asked: Any = [{"role": "user", "content": "Two."}, {"role": "user", "content": [
        {"type": "input_text", "text": "Three."}]}]
    second = client.responses.create(model=NAME, input=asked, previous_response_id=first.id, max_output_tokens=3)
    items = client.responses.input_items.list(second.id).data
    assert [item.content[0].text for item in items] == ["Three.", "Two."]  # type: ignore[union-attr]
    assert [item.content[0].text for item in client.responses.input_items.list(first.id)] == [  # type: ignore[union-attr]
        "One."]
    page = client.responses.input_items.list(second.id, order="asc", limit=1)
    assert page.has_more and [item.content[0].text for item in page.data] == ["Two."]  # type: ignore[union-attr]
    assert len([*client.responses.input_items.list(second.id, limit=1)]) == 2, "page by page"
    for query in ("order=up", "limit=0", "limit=x", "after=nobody"):
        refused = httpx.get(f"{server.url}/v1/responses/{second.id}/input_items?{query}")
        assert refused.status_code == 400 and refused.json()["error"]["param"] == query.partition("=")[0]
    assert httpx.get(f"{server.url}/v1/responses/resp_none/input_items").status_code == 404


def test_anthropics_paths_without_v1(server: ServerThread) -> None:
    body = {"model": NAME, "max_tokens": 3, "messages": [{"role": "user", "content": "Hi"}]}
    assert httpx.post(f"{server.url}/messages", json=body, timeout=WAIT).json()["type"] == "message"
    del body["max_tokens"]
    assert httpx.post(f"{server.url}/messages/count_tokens", json=body, timeout=WAIT).json()["input_tokens"] > 0
    assert httpx.post(f"{server.url}/messages", json={}, timeout=WAIT).json()["type"] == "error"
