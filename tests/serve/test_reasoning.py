"""Thoughts, cut calls and talkative callers, asked for with the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from calling import TOKENIZER, WEATHER, calling_engine
from serving import NAME, WAIT, served

CALL = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'
RAMBLING = f"Let me look.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>\nWhile we wait: " * 4
THOUGHTS = "Is it Oslo?\nIt is."
THINKING = f"<think>\n{THOUGHTS}\n</think>\n\nOslo.\x00"


@pytest.fixture(scope="module")
def caller() -> Iterator[openai.OpenAI]:
    with served(calling_engine(RAMBLING)) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="unused", timeout=WAIT, max_retries=0)


@pytest.fixture(scope="module")
def thinker() -> Iterator[openai.OpenAI]:
    with served(calling_engine(THINKING, "<think>")) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="unused", timeout=WAIT, max_retries=0)


def ask(client: openai.OpenAI, **more: Any) -> Any:
    body = {"stop_token_ids": TOKENIZER.encode("\x00")} | more.pop("body", {})
    return client.chat.completions.create(**{
        "model": NAME, "messages": [{"role": "user", "content": "weather?"}], "temperature": 0, "max_tokens": 600,
        "extra_body": body} | more)


def test_the_text_stops_behind_the_calls(caller: openai.OpenAI) -> None:
    answer = ask(caller, tools=[WEATHER])
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me look."
    assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == [{"city": "Oslo"}] * 2
    assert answer.usage.completion_tokens == len(RAMBLING.partition("W")[0]) + 1
    one = ask(caller, tools=[WEATHER], parallel_tool_calls=False)
    assert len(one.choices[0].message.tool_calls) == 1 and one.choices[0].finish_reason == "tool_calls"
    assert one.usage.completion_tokens == RAMBLING.index(CALL) + len(CALL)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
@pytest.mark.parametrize("most", [3, 30, 62])
def test_a_forced_call_that_is_cut_is_a_call_so_far(caller: openai.OpenAI, choice: Any, most: int) -> None:
    got = ask(caller, tools=[WEATHER], tool_choice=choice, max_tokens=most).choices[0]
    assert got.finish_reason == "length" and not got.message.content
    [call] = got.message.tool_calls
    assert call.function.name == "get_weather"
    assert bool(call.function.arguments) is (most == 62) and call.function.arguments[:1] in ("", "{")


def test_thoughts_come_apart(thinker: openai.OpenAI) -> None:
    answer = ask(thinker)
    message = answer.choices[0].message
    assert message.content == "Oslo." and message.reasoning_content == THOUGHTS
    assert answer.usage.completion_tokens_details.reasoning_tokens == THINKING.index("</think>") - 6 + len("</think>")
    content = thoughts = ""
    for chunk in ask(thinker, stream=True):
        content += chunk.choices[0].delta.content or ""
        thoughts += getattr(chunk.choices[0].delta, "reasoning_content", None) or ""
    assert (content, thoughts) == ("Oslo.", THOUGHTS)


def test_a_structure_begins_behind_the_thoughts(thinker: openai.OpenAI) -> None:
    for body, wish in (({"guided_choice": ["yes", "no"]}, ("yes", "no")), ({"guided_regex": "[ab]"}, ("a", "b"))):
        message = ask(thinker, body=body).choices[0].message
        assert message.reasoning_content == THOUGHTS and message.content in wish
    message = ask(thinker, response_format={"type": "json_schema", "json_schema": {
        "name": "x", "schema": {"enum": [{"a": 1}]}}}).choices[0].message
    assert message.reasoning_content == THOUGHTS and json.loads(message.content) == {"a": 1}


@pytest.mark.parametrize("speculation", ["none", "ngram"])
def test_forced_calls_and_grammars_come_behind_the_thoughts(thinker: openai.OpenAI, speculation: str) -> None:
    body = {"speculation": speculation}
    forced = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    message = ask(thinker, body=body, **forced).choices[0].message
    assert message.reasoning_content == THOUGHTS and len(message.tool_calls) == 1
    message = ask(thinker, body=body | {"guided_grammar": 'root ::= "yes" | "no"'}).choices[0].message
    assert message.reasoning_content == THOUGHTS and message.content in ("yes", "no")


def test_every_protocol_tells_thoughts(thinker: openai.OpenAI) -> None:
    url = str(thinker.base_url).removesuffix("/v1/")
    said = {"messages": [{"role": "user", "content": "weather?"}], "model": NAME}
    stop = {"temperature": 0, "max_tokens": len(THINKING) - 1}
    with httpx.Client(base_url=url, timeout=WAIT) as plain:
        told = plain.post("/v1/messages", json=said | stop).json()
        assert told["content"] == [{"type": "thinking", "thinking": THOUGHTS, "signature": ""},
                                   {"type": "text", "text": "Oslo."}]
        options = {"options": {"temperature": 0, "num_predict": len(THINKING) - 1}, "stream": False}
        told = plain.post("/api/chat", json=said | options).json()
        assert told["message"] == {"role": "assistant", "content": "Oslo.", "thinking": THOUGHTS}
        asked = {"model": NAME, "input": "weather?", "temperature": 0, "max_output_tokens": len(THINKING) - 1}
        told = plain.post("/v1/responses", json=asked).json()
        assert [item["type"] for item in told["output"]] == ["reasoning", "message"]
        assert told["output"][0]["content"][0]["text"] == THOUGHTS
        assert told["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
        stream = plain.post("/v1/messages", json=said | stop | {"stream": True}).text
        assert stream.count("thinking_delta") > 3 and stream.count("content_block_start") == 4
        stream = plain.post("/v1/responses", json=asked | {"stream": True}).text
        assert "response.reasoning_text.delta" in stream and "response.reasoning_text.done" in stream
