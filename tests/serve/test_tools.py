"""Tools: calls found in a text as it grows, and told to the official client, streamed and whole."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from calling import ANSWER, ARGUMENTS, CALL, TIME, TOKENIZER, WEATHER, calling_engine
from hypothesis import given
from hypothesis import strategies as st
from serving import NAME, WAIT, served

from paceline.models.chat import ChatTemplate
from paceline.serve.conversation import render_arguments, spell_out
from paceline.serve.schema import ChatBody
from paceline.serve.tool_formats.events import AnswerParser, CallBegun, Content
from paceline.serve.tool_formats.hermes import HermesParser
from paceline.serve.tool_formats.llama3 import LlamaJsonParser

KNOWN = {"get_weather", "get_time", "f", "g"}


def parse(parser: AnswerParser, pieces: list[str]) -> tuple[str, list[tuple[str, Any]]]:
    """What the pieces add up to: the text for the reader, and the calls with their arguments."""
    content, calls, texts = "", [], []
    for event in [event for piece in pieces for event in parser.push(piece)] + list(parser.end()):
        if isinstance(event, Content):
            content += event.text
        elif isinstance(event, CallBegun):
            assert event.index == len(calls)
            calls.append(event.name)
            texts.append("")
        else:
            texts[event.index] += event.text
    return content, [(name, json.loads(text)) for name, text in zip(calls, texts)]


CASES: list[tuple[Any, str, str, list[tuple[str, Any]]]] = [
    (HermesParser, f"<tool_call>\n{CALL}\n</tool_call>", "", [("get_weather", ARGUMENTS)]),
    (HermesParser, f"Let me see.\n<tool_call>{CALL}</tool_call>\n<tool_call>{{\"name\": \"get_time\"}}</tool_call>",
     "Let me see.", [("get_weather", ARGUMENTS), ("get_time", {})]),
    (HermesParser, f"<tool_call>[{CALL}, {CALL}]</tool_call> done", "done",
     [("get_weather", ARGUMENTS), ("get_weather", ARGUMENTS)]),
    (HermesParser, '<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', "", [("f", {"x": 1})]),
    (HermesParser, '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [("f", {"x": 1})]),
    (HermesParser, f'Well: <tool_call>{CALL}{CALL}</tool_call> <tool_call>\n[1, 2]</tool_call>.',
     "Well:<tool_call>\n[1, 2]</tool_call>.", [("get_weather", ARGUMENTS)] * 2),
    (HermesParser, f'<tool_call>[{{"name": "h"}}, {CALL}] </tool_call> so', '<tool_call>[{"name": "h"}so',
     [("get_weather", ARGUMENTS)]),
    (HermesParser, f"<tool_call>{CALL}\n</tool_c", "", [("get_weather", ARGUMENTS)]),
    (HermesParser, f"<tool_call>{CALL} <tool_call>{CALL}</tool_call>", "", [("get_weather", ARGUMENTS)] * 2),
    (LlamaJsonParser, '{"name": "f", "parameters": {"x": [1, 2]}}', "", [("f", {"x": [1, 2]})]),
    (LlamaJsonParser, '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"y": null}}', "",
     [("f", {}), ("g", {"y": None})]),
    (LlamaJsonParser, '[{"name": "f", "parameters": {}},\n {"name": "g"}] That is, all.', "That is, all.",
     [("f", {}), ("g", {})]),
    (LlamaJsonParser, '{"name": "h", "parameters": {"x": 1}} ; {"name": "g"}', '{"name": "h", "parameters": {"x": 1}}',
     [("g", {})]),
]


@pytest.mark.parametrize("make, text, content, calls", CASES)
def test_calls_are_found_however_the_text_is_cut(make: Any, text: str, content: str, calls: Any) -> None:
    assert parse(make(KNOWN), [text]) == (content, calls)
    assert parse(make(KNOWN), list(text)) == (content, calls)
    for size in (2, 3, 7):
        assert parse(make(KNOWN), [text[i:i + size] for i in range(0, len(text), size)]) == (content, calls)


@pytest.mark.parametrize("make", [HermesParser, LlamaJsonParser])
@pytest.mark.parametrize("text", [
    "[1, 2, 3] is it", '{"t": 3} is the result', '{"t": 3}\n', "[]", " [ ", "{", '{"unfinished": ', " plain { text }",
    '{"name": "Ada", "arguments": {"born": 1815}}', '[{"name": "Ada"}, {"name": "Bob"}]; done',
    '{"name": ["f"]}', pytest.param('{"name": ' + "[" * 5000 + "]" * 5000 + "}", id="deep"),
    "<|pyth", "<|python_tag|>", "<|python_tag|>print(1)",
    "a < b and <tool_cal is nothing", "ends with <tool", "<tool_call>", " <tool_call> </tool_call> ",
    '<tool_call>{"no": "name"}</tool_call>', '<tool_call>{"name": "h", "arguments": {}}</tool_call>\n',
    "<tool_call>[1, 2, 3] is it</tool_call>", '<tool_call>{"t": 3}, it is </tool_cal', "<tool_call> is a tag; so what",
])
def test_what_is_no_call_is_shown_to_the_letter(make: Any, text: str) -> None:
    for size in (1, 2, 3, 7, len(text)):
        assert parse(make(KNOWN), [text[i:i + size] for i in range(0, len(text), size)]) == (text, [])


PIECES = st.sampled_from([
    "[", "]", "{", "}", ",", ";", ":", '"', "\\", "<", " ", "\n", "<tool_call>", "</tool_call>", "<|python_tag|>",
    '{"name": "unknown", "arguments": {"x": 1}}', '{"arguments": {}, "name": ', '"name"', '"arguments": ', "[1, 2]"])


@given(st.lists(PIECES | st.text(max_size=4), max_size=12).map("".join), st.lists(st.integers(0, 80), max_size=8))
def test_random_texts_without_calls_come_out_again(text: str, cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(text)]
    pieces = [text[begin:end] for begin, end in itertools.pairwise(places)]
    for make in (HermesParser, LlamaJsonParser):
        assert parse(make({"a known tool"}), pieces) == (text, [])


@given(st.lists(st.tuples(st.text(min_size=1, max_size=8), st.dictionaries(st.text(max_size=4), st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6), lambda inner: st.lists(inner, max_size=3)),
    max_size=3)), max_size=3), st.integers(1, 9), st.booleans())
def test_whatever_is_called_comes_out(calls: list[tuple[str, Any]], size: int, ascii: bool) -> None:
    text = "".join("<tool_call>" + json.dumps({"name": name, "arguments": arguments}, ensure_ascii=ascii)
                   + "</tool_call>" for name, arguments in calls)
    names = {name for name, _ in calls}
    assert parse(HermesParser(names), [text[i:i + size] for i in range(0, len(text), size)]) == ("", calls)


def test_one_call_at_a_time_when_asked() -> None:
    assert parse(HermesParser(KNOWN, 1), [f"<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>"]) == (
        "", [("get_weather", ARGUMENTS)])


def test_arguments_are_streamed_as_they_come() -> None:
    parser = HermesParser(KNOWN)
    begun = list(parser.push('<tool_call>{"name": "f", "arguments": {"text": "once upon'))
    assert [type(event).__name__ for event in begun][:2] == ["CallBegun", "CallArguments"]
    assert "".join(event.text for event in begun[1:]).endswith("once upon")


def body(**more: Any) -> ChatBody:
    return ChatBody.model_validate({"messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER, TIME]} | more)


def test_a_template_without_a_place_for_tools_is_helped_out() -> None:
    plain = ChatTemplate("{% for m in messages %}{{ m['role'] + ':' + m['content'] + '|' }}{% endfor %}")
    arguments = render_arguments(body(messages=[
        {"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "get_time", "arguments": "{\"zone\": \"CET\"}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "12:00"}]), plain)
    text = plain.render(**arguments)
    assert text.startswith("system:Be kind.\n\n") and '"get_weather"' in text
    assert 'assistant:<tool_call>\n{"name": "get_time", "arguments": {"zone": "CET"}}\n</tool_call>|' in text
    assert text.endswith("user:<tool_response>\n12:00\n</tool_response>|")
    assert arguments["tools"] is None

    knowing = ChatTemplate("{{ tools | tojson }}{% for m in messages %}{{ m.tool_calls | tojson }}{% endfor %}")
    arguments = render_arguments(body(messages=[{"role": "assistant", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "get_time", "arguments": "{\"a\": 1}"}}]}]), knowing)
    assert [tool["function"]["name"] for tool in arguments["tools"]] == ["get_weather", "get_time"]
    assert arguments["messages"][0]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert render_arguments(body(tool_choice="none"), knowing)["tools"] is None
    assert spell_out([{"role": "user", "content": "x"}], []) == [{"role": "user", "content": "x"}]


# ---------------------------------------------------------------- through the server

@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with served(calling_engine()) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="unused", timeout=WAIT, max_retries=0)


def ask(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(**{
        "model": NAME, "messages": [{"role": "user", "content": "weather?"}], "tools": [WEATHER], "temperature": 0,
        "max_tokens": 1000, "extra_body": {"stop_token_ids": TOKENIZER.encode("\x00")}} | more)


def test_the_client_gets_tool_calls(client: openai.OpenAI) -> None:
    choice = ask(client).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look."
    calls = choice.message.tool_calls
    assert [(call.type, call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("function", "get_weather", ARGUMENTS)] * 2
    assert len({call.id for call in calls}) == 2
    assert len(ask(client, parallel_tool_calls=False).choices[0].message.tool_calls) == 1


def test_the_client_gets_streamed_tool_calls(client: openai.OpenAI) -> None:
    content, calls, pieces = "", {}, 0
    reasons = []
    for chunk in ask(client, stream=True):
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        reasons.append(choice.finish_reason)
        for call in choice.delta.tool_calls or ():
            known = calls.setdefault(call.index, {"id": call.id, "name": call.function.name, "arguments": ""})
            assert known["id"] and known["name"], "a call begins with its id and name"
            known["arguments"] += call.function.arguments
            pieces += 1
    assert content == "Let me look." and reasons[-1] == "tool_calls"
    assert [(call["name"], json.loads(call["arguments"])) for call in calls.values()] == [
        ("get_weather", ARGUMENTS)] * 2
    assert pieces > 20, "arguments come bit by bit"


def test_without_tools_the_text_is_the_text(client: openai.OpenAI) -> None:
    for more in ({"tools": openai.omit}, {"tool_choice": "none"}):
        choice = ask(client, **more).choices[0]
        assert choice.finish_reason == "stop" and choice.message.tool_calls is None
        assert choice.message.content == ANSWER[:-1]


def test_a_call_of_no_known_tool_is_text(client: openai.OpenAI) -> None:
    choice = ask(client, tools=[TIME]).choices[0]
    assert choice.finish_reason == "stop" and choice.message.tool_calls is None
    assert choice.message.content == ANSWER[:-1]
    chunks = [chunk.choices[0].delta for chunk in ask(client, tools=[TIME], stream=True)]
    assert "".join(delta.content or "" for delta in chunks) == ANSWER[:-1]
    assert not any(delta.tool_calls for delta in chunks)


def test_the_clients_own_helper_for_streams_agrees(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
            model=NAME, messages=[{"role": "user", "content": "weather?"}], tools=[WEATHER], temperature=0,
            max_tokens=1000, extra_body={"stop_token_ids": TOKENIZER.encode("\x00")}) as stream:
        final = stream.get_final_completion()
    assert json.loads(final.choices[0].message.tool_calls[1].function.arguments) == ARGUMENTS
