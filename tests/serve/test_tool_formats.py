"""Which format of calls a server reads: its template's, or the one --tool-parser names. Processes, official client.

The model's words are not its own: `guided_choice` leaves it one text to write, and the parser does not know.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from serving import NAME, WAIT, ServerThread, write_model

LLAMA_TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ 'ipython' if m['role'] == 'tool' else m['role'] }}\n"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n")
TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
              for name in ("get_weather", "get_time")]
ARGUMENTS = {"city": 'São Paulo, "SP"', "days": [1, {"a": "}"}]}
WEATHER = json.dumps(ARGUMENTS, ensure_ascii=False)
LLAMA = f'{{"name": "get_weather", "parameters": {WEATHER}}}; {{"name": "get_time", "parameters": {{}}}}'
HERMES = (f'<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>\n'
          '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>')
CALLS = [("get_weather", ARGUMENTS), ("get_time", {})]


@pytest.fixture(scope="module", params=[
    ("llama", "auto", LLAMA, HERMES), ("plain", "llama3-json", LLAMA, HERMES),
], ids=["by a Llama 3 template", "by option"])
def case(request: pytest.FixtureRequest, tiny_folder: Path,
         tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[openai.OpenAI, str, str]]:
    """A client of a server, a text that is calls there, and one that is not."""
    template, option, calls, text = request.param
    folder = tiny_folder
    if template == "llama":
        folder = write_model(tmp_path_factory.mktemp("llama"))
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": LLAMA_TEMPLATE}))
    server = ServerThread(folder, settings={"tool_parser": option})
    yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", timeout=WAIT, max_retries=0), calls, text
    server.stop()
    assert "Traceback" not in server.log()


def ask(client: openai.OpenAI, text: str, **more: Any) -> Any:
    return client.chat.completions.create(**{
        "model": NAME, "messages": [{"role": "user", "content": "How is the weather?"}], "tools": TOOLS,
        "max_tokens": 1000, "extra_body": {"guided_choice": [text]}} | more)


def test_calls_in_the_servers_format_are_found(case: tuple[openai.OpenAI, str, str]) -> None:
    client, calls, _ = case
    choice = ask(client, calls).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls] == CALLS
    assert len(ask(client, calls, parallel_tool_calls=False).choices[0].message.tool_calls) == 1


def test_calls_in_the_servers_format_are_streamed(case: tuple[openai.OpenAI, str, str]) -> None:
    client, calls, _ = case
    told: list[list[str]] = []
    chunks = list(ask(client, calls, stream=True))
    for call in [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]:
        if call.index == len(told):
            assert call.id and call.type == "function"
            told.append([call.function.name, ""])
        told[call.index][1] += call.function.arguments
    assert [(name, json.loads(arguments)) for name, arguments in told] == CALLS
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ""
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_another_format_is_text(case: tuple[openai.OpenAI, str, str]) -> None:
    client, _, text = case
    choice = ask(client, text).choices[0]
    assert choice.finish_reason == "stop" and choice.message.tool_calls is None and choice.message.content == text
    chunks = list(ask(client, text, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text


def test_calls_and_their_results_are_part_of_the_conversation(case: tuple[openai.OpenAI, str, str]) -> None:
    client, calls, _ = case
    asked = {"role": "user", "content": "How is the weather?"}
    made = ask(client, calls).choices[0].message.model_dump(exclude_none=True)
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "rain"} for call in made["tool_calls"]]
    answer = ask(client, "It rains.", messages=[asked, made, *results])
    assert answer.choices[0].message.content == "It rains."
