"""Tools by other names: functions and function_call of old, custom tools that take a text, choices among some."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from calling import ANSWER, ARGUMENTS, TIME, TOKENIZER, WEATHER, calling_engine
from serving import NAME, WAIT, served

from paceline.engine.core import Engine
from paceline.errors import RequestError
from paceline.serve.answers import Answers
from paceline.serve.conversation import prepare, used_tools
from paceline.serve.schema import ChatBody, Message
from paceline.serve.told_calls import ToldCalls
from paceline.serve.tool_formats.events import CallArguments, CallBegun, Content, Reasoning

MESSAGES: Any = [{"role": "user", "content": "Well?"}]
SHELL: Any = {"type": "custom", "custom": {"name": "shell", "description": "Runs a line."}}
SPOKEN = '<tool_call>\n{"name": "shell", "arguments": {"input": "ls \\"a\\""}}\n</tool_call>\x00'


@pytest.fixture(scope="module")
def engine() -> Engine:
    return calling_engine()


@pytest.fixture(scope="module")
def client(engine: Engine) -> Iterator[openai.OpenAI]:
    with served(engine) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="unused", timeout=WAIT, max_retries=0)


def asking(**fields: Any) -> ChatBody:
    return ChatBody.model_validate({"messages": MESSAGES, **fields})


def forced_structure(body: ChatBody) -> dict[str, Any]:
    return Answers.of(body, None, None, "hermes").structure


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": NAME, "messages": MESSAGES, "temperature": 0, "max_tokens": 400,
                                             "stop": ["\x00"], **fields})


def test_functions_are_called_as_they_were(client: openai.OpenAI) -> None:
    functions = [WEATHER["function"], TIME["function"]]
    choice = ask(client, functions=functions).choices[0]
    assert choice.finish_reason == "function_call" and choice.message.tool_calls is None
    assert choice.message.function_call.name == "get_weather"
    assert json.loads(choice.message.function_call.arguments) == ARGUMENTS
    chunks = [chunk.choices[0] for chunk in ask(client, functions=functions, stream=True) if chunk.choices]
    calls = [chunk.delta.function_call for chunk in chunks if chunk.delta.function_call]
    assert calls[0].name == "get_weather" and chunks[-1].finish_reason == "function_call"
    assert json.loads("".join(call.arguments for call in calls)) == ARGUMENTS
    assert not any(chunk.delta.tool_calls for chunk in chunks)
    said = ask(client, functions=functions, function_call="none").choices[0]
    assert said.finish_reason == "stop" and said.message.content == ANSWER[:-1]


def test_function_call_is_tool_choice() -> None:
    functions = [WEATHER["function"], TIME["function"]]
    named = asking(functions=functions, function_call={"name": "get_time"})
    assert forced_structure(named) == forced_structure(asking(
        tools=[WEATHER, TIME], tool_choice={"type": "function", "function": {"name": "get_time"}}))
    for fields, param in (({"function_call": {"name": "get_time"}}, "function_call"),
                          ({"functions": functions, "tools": [TIME]}, "functions"),
                          ({"functions": functions, "function_call": {"name": "x"}}, "tool_choice")):
        with pytest.raises(RequestError) as caught:
            used_tools(asking(**fields))
        assert caught.value.param == param


def test_conversations_of_old_go_on() -> None:
    call = {"name": "get_time", "arguments": '{"zone": 1}'}
    old = [Message(role="assistant", function_call=call), Message(role="function", name="get_time", content="12")]
    asked, answered = prepare(old)
    assert asked["tool_calls"][0]["function"] == {"name": "get_time", "arguments": {"zone": 1}}
    assert "function_call" not in asked and answered["role"] == "tool"


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_some_of_the_tools_may_be_called(mode: str) -> None:
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [
        {"type": "function", "function": {"name": "get_time"}}]}}
    body = asking(tools=[WEATHER, TIME], tool_choice=allowed)
    assert [tool.function.name for tool in used_tools(body)] == ["get_time"]
    assert forced_structure(body) == forced_structure(asking(tools=[TIME], tool_choice=mode))
    with pytest.raises(RequestError, match="'get_time', which is not among the tools"):
        used_tools(asking(tools=[WEATHER], tool_choice=allowed))


def test_a_custom_tool_takes_a_text(client: openai.OpenAI, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.model, "script", TOKENIZER.encode(SPOKEN))
    message = ask(client, tools=[SHELL, TIME], max_tokens=90)
    assert message.choices[0].finish_reason == "tool_calls"
    call, = message.choices[0].message.tool_calls
    assert call.type == "custom" and call.custom.name == "shell" and call.custom.input == 'ls "a"'
    chunks = [chunk.choices[0] for chunk in ask(client, tools=[SHELL, TIME], max_tokens=90, stream=True)]
    calls = [one for chunk in chunks for one in chunk.delta.tool_calls or ()]
    assert "".join(one.custom["input"] for one in calls) == 'ls "a"'
    assert calls[0].custom["name"] == "shell" and calls[0].id and chunks[-1].finish_reason == "tool_calls"


def test_what_a_custom_tool_said_comes_back_as_it_was() -> None:
    call = {"id": "c", "type": "custom", "custom": {"name": "shell", "input": "ls"}}
    asked, = prepare([Message(role="assistant", tool_calls=[call])])
    assert asked["tool_calls"] == [{"id": "c", "type": "function",
                                    "function": {"name": "shell", "arguments": {"input": "ls"}}}]


def test_a_custom_tool_can_be_demanded_and_its_grammar_is_refused() -> None:
    named = asking(tools=[SHELL, TIME], tool_choice={"type": "custom", "custom": {"name": "shell"}})
    assert set(Answers.of(named, None, None, "hermes").tools) == {"shell"}
    assert '"required": ["input"]' in forced_structure(named)["grammar"]
    text = {"type": "custom", "custom": {"name": "shell", "format": {"type": "text"}}}
    assert used_tools(asking(tools=[text]))[0].function.name == "shell"
    grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /a/"}}
    with pytest.raises(RequestError, match=r"tools\[1\].custom.format asks for a grammar, which is not") as no:
        used_tools(asking(tools=[TIME, {"type": "custom", "custom": {"name": "shell", "format": grammar}}]))
    assert no.value.param == "tools"


def test_calls_of_both_kinds_are_told_in_one_answer() -> None:
    told = ToldCalls(asking(tools=[SHELL, TIME]))
    assert told.deltas(Reasoning("Hm.")) == [{"reasoning_content": "Hm."}] and told.ending is None
    spoken = [CallBegun(0, "shell"), CallArguments(0, '{"input": "l'), CallArguments(0, 's"}'), Content("And"),
              CallBegun(1, "get_time"), CallArguments(1, "{}")]
    deltas = [delta for event in spoken for delta in told.deltas(event)] + told.end()
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert [call["index"] for call in calls] == [0, 1, 1, 0] and told.ending == "tool_calls"
    assert calls[-1]["custom"] == {"input": "ls"} and calls[2]["function"] == {"arguments": "{}"}
    assert {"content": "And"} in deltas
    broken = ToldCalls(asking(tools=[SHELL])).message([{"id": "c", "type": "function", "function": {
        "name": "shell", "arguments": '{"line": 1}'}}])
    assert broken["tool_calls"][0]["custom"]["input"] == '{"line": 1}', "whatever the model wrote is told"
