"""/v1/messages: Anthropic's protocol, by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from calling import ARGUMENTS, TOKENIZER, WEATHER, calling_engine
from serving import NAME, WAIT, ServerThread, served

from paceline import LLM, SamplingParams

TOOL: Any = {"name": "get_weather", "description": "The weather somewhere.",
             "input_schema": WEATHER["function"]["parameters"]}
ASKED: Any = [{"role": "user", "content": "weather?"}]


@pytest.fixture(scope="module")
def caller() -> Iterator[str]:
    """Of a model that calls tools."""
    with served(calling_engine(), api_keys=("secret", "other")) as url:
        yield url


def ask(url: str, path: str = "/v1/messages", **more: Any) -> httpx.Response:
    body = {"model": NAME, "max_tokens": 12, "messages": [{"role": "user", "content": "Who are you?"}], "seed": 7}
    headers = {"x-api-key": "secret", "anthropic-version": "2023-06-01"}
    return httpx.post(f"{url}{path}", json=body | more, headers=headers, timeout=WAIT)


def tools(url: str, **more: Any) -> httpx.Response:
    return ask(url, **{"messages": ASKED, "tools": [TOOL], "temperature": 0, "max_tokens": 1000,
                       "stop_token_ids": TOKENIZER.encode("\x00")} | more)


def told(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, each under its name."""
    found = []
    for event in response.text.strip().split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_a_conversation_that_is_too_long_is_told_in_the_words_that_clients_look_for(server: ServerThread) -> None:
    for text in ("word " * 4200, "x" * 500_000):
        refused = ask(server.url, messages=[{"role": "user", "content": text}])
        found = re.match(r"prompt is too long: (\d+) tokens > 4096 maximum", refused.json()["error"]["message"])
        assert refused.status_code == 400 and found is not None and int(found[1]) > 4096, refused.text


def test_a_fault_is_told_by_the_name_that_was_sent(server: ServerThread) -> None:
    refused = ask(server.url, output_format={"type": "json_schema", "schema": {"type": "x"}})
    assert "output_format" in refused.json()["error"]["message"]


def test_a_message_is_what_a_chat_says(server: ServerThread, offline: LLM) -> None:
    messages = [{"role": "system", "content": "Be brief.\nBe kind."}, {"role": "user", "content": "Who\nare you?"}]
    want = offline.chat(messages, SamplingParams(max_tokens=12, seed=7))[0]
    given: Any = {"system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
                             {"type": "text", "text": "Be kind."}],
                  "messages": [{"role": "user", "content": [{"type": "text", "text": "Who"},
                                                            {"type": "text", "text": "are you?"}]}]}
    answer = ask(server.url, **given).json()
    assert answer["content"] == [{"type": "text", "text": want.outputs[0].text}]
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", NAME)
    reasons = {"length": "max_tokens", "stop": "end_turn"}
    assert answer["stop_reason"] == reasons[str(want.outputs[0].finish_reason)] and answer["stop_sequence"] is None
    usage = answer["usage"]
    prompt = len(want.prompt_token_ids)
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == prompt
    assert usage["output_tokens"] == len(want.outputs[0].token_ids)
    counted = ask(server.url, "/v1/messages/count_tokens", **given | {"max_tokens": 12})
    assert counted.status_code == 400, "which takes no such field"
    body = {"model": NAME} | given
    assert httpx.post(f"{server.url}/v1/messages/count_tokens", json=body).json() == {"input_tokens": prompt}


def test_an_answer_may_be_begun(server: ServerThread, offline: LLM) -> None:
    begun = [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "I am"}]
    prompt = offline.engine.render(begun, add_generation_prompt=False, continue_final_message=True)
    want = offline.generate([prompt], SamplingParams(max_tokens=12, seed=7))[0].outputs[0].text
    given = [begun[0], {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": ""},
                                                         {"type": "text", "text": "I am"}]}]
    for messages in (begun, given):
        assert ask(server.url, messages=messages).json()["content"] == [{"type": "text", "text": want}]
        counted = httpx.post(f"{server.url}/v1/messages/count_tokens", json={"model": NAME, "messages": messages})
        assert counted.json() == {"input_tokens": len(prompt)}
    streamed = told(ask(server.url, messages=begun, stream=True))
    assert "".join(one["delta"]["text"] for one in streamed if one["type"] == "content_block_delta") == want
    plain = ask(server.url, messages=begun[:1]).json()["content"]
    for nothing in ("", []):
        with_it = [begun[0], {"role": "assistant", "content": nothing}]
        assert ask(server.url, messages=with_it).json()["content"] == plain


@pytest.mark.parametrize(("content", "word"), [
    ("I am ", "whitespace"), ([{"type": "tool_use", "id": "a", "name": "get_weather", "input": {}}], "tool_result")])
def test_some_beginnings_are_refused(server: ServerThread, content: Any, word: str) -> None:
    refused = ask(server.url, messages=[*ASKED, {"role": "assistant", "content": content}])
    assert refused.status_code == 400 and word in refused.json()["error"]["message"]


def test_a_result_of_a_call_that_nobody_made_is_refused(server: ServerThread) -> None:
    use = {"type": "tool_use", "id": "toolu_made", "name": "get_weather", "input": {}}
    for result, status in (("toolu_gone", 400), ("toolu_made", 200)):
        answer = ask(server.url, messages=[*ASKED, {"role": "assistant", "content": [use]}, {
            "role": "user", "content": [{"type": "tool_result", "tool_use_id": result, "content": "x"}]}])
        assert answer.status_code == status
        if status == 400:
            error = answer.json()["error"]
            assert error["type"] == "invalid_request_error" and "toolu_gone" in error["message"]
            assert "unexpected `tool_use_id` found in `tool_result` blocks" in error["message"]


def test_tools_are_told_apart_by_what_they_lack(server: ServerThread) -> None:
    assert ask(server.url, tools=[TOOL | {"type": None}]).status_code == 200
    for tool in ({"name": "f"}, {"name": 7, "input_schema": {}}, {"name": "f", "input_schema": 7}):
        assert "input_schema" in ask(server.url, tools=[tool]).json()["error"]["message"]


def test_a_stop_sequence_is_named(server: ServerThread) -> None:
    text = ask(server.url, ignore_eos=True).json()["content"][0]["text"]
    stop = text[3:5]
    answer = ask(server.url, ignore_eos=True, stop_sequences=["never said", stop]).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", stop)
    assert answer["content"][0]["text"] == text[:text.index(stop)]


def test_a_stream_adds_up(server: ServerThread) -> None:
    whole = ask(server.url, ignore_eos=True).json()
    response = ask(server.url, ignore_eos=True, stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = told(response)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"} and len(kinds) > 6
    assert "".join(event["delta"]["text"] for event in events[2:-3]) == whole["content"][0]["text"]
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 12
    assert events[0]["message"]["content"] == [] and events[0]["message"]["usage"]["input_tokens"] > 0


def test_tools_are_used_and_their_results_read(caller: str) -> None:
    answer = tools(caller).json()
    assert [block["type"] for block in answer["content"]] == ["text", "tool_use", "tool_use"]
    assert answer["stop_reason"] == "tool_use" and answer["content"][0]["text"] == "Let me look."
    calls = answer["content"][1:]
    assert [(call["name"], call["input"]) for call in calls] == [("get_weather", ARGUMENTS)] * 2
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "rain"}]}
               for call in calls]
    further = tools(caller, messages=[*ASKED, {"role": "assistant", "content": answer["content"]}, {
        "role": "user", "content": [*results, {"type": "text", "text": "so?"}]}])
    assert further.status_code == 200
    assert further.json()["usage"]["input_tokens"] > answer["usage"]["input_tokens"]
    one = tools(caller, tool_choice={"type": "auto", "disable_parallel_tool_use": True}).json()
    assert [block["type"] for block in one["content"]] == ["text", "tool_use"]
    none = tools(caller, tool_choice={"type": "none"}).json()
    assert none["stop_reason"] == "end_turn" and [block["type"] for block in none["content"]] == ["text"]


def test_tool_use_is_streamed(caller: str) -> None:
    events = told(tools(caller, stream=True))
    begun = [event for event in events if event["type"] == "content_block_start"]
    assert [(event["index"], event["content_block"]["type"]) for event in begun] == [
        (0, "text"), (1, "tool_use"), (2, "tool_use")]
    assert begun[1]["content_block"]["input"] == {} and begun[1]["content_block"]["id"].startswith("toolu_")
    for index in (1, 2):
        pieces = [event["delta"]["partial_json"] for event in events
                  if event["type"] == "content_block_delta" and event["index"] == index]
        assert len(pieces) > 5 and json.loads("".join(pieces)) == ARGUMENTS
    order = [event["index"] for event in events if event["type"] == "content_block_stop"]
    assert order == [0, 1, 2] and events[-2]["delta"]["stop_reason"] == "tool_use"


def test_structure(server: ServerThread) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "schema": schema}
    for more in ({"output_format": form}, {"output_config": {"format": form}}):
        answer = ask(server.url, max_tokens=60, **more).json()
        assert json.loads(answer["content"][0]["text"])["a"] in (1, 2)


def test_errors_have_anthropics_shape(server: ServerThread, caller: str) -> None:
    for more, word in (({"messages": []}, "messages"), ({"max_tokens": None}, "max_tokens"), ({"n": 2}, "n must be 1"),
                       ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "text only"),
                       ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "runs no tools"),
                       ({"tool_choice": {"type": "tool"}}, "tool_choice.name"), ({"mcp_servers": []}, "mcp_servers")):
        refused = ask(server.url, **more)
        assert refused.status_code == 400 and set(refused.json()) == {"type", "error"}
        assert refused.json()["error"]["type"] == "invalid_request_error" and word in refused.json()["error"]["message"]
    unknown = ask(server.url, model="claude")
    assert unknown.status_code == 404 and unknown.json()["error"]["type"] == "not_found_error"
    nobody = httpx.post(f"{caller}/v1/messages", json={})
    assert nobody.status_code == 401 and nobody.json()["error"]["type"] == "authentication_error"
    assert nobody.json()["type"] == "error"
    wrong = httpx.post(f"{caller}/v1/messages", json={}, headers={"x-api-key": "wrong"})
    assert wrong.status_code == 401
    openais = httpx.get(f"{caller}/v1/models")
    assert set(openais.json()["error"]) == {"message", "type", "param", "code"}


def test_keys_come_by_either_header_and_a_wrong_bearer_is_wrong(caller: str) -> None:
    def status(**headers: str) -> int:
        return httpx.get(f"{caller}/v1/models", headers={name.replace("_", "-"): value
                                                         for name, value in headers.items()}).status_code

    assert status(x_api_key="secret") == status(authorization="Bearer other") == 200
    assert status(authorization="Bearer wrong", x_api_key="secret") == status(x_api_key="") == 401
