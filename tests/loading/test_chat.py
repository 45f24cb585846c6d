"""Chat templates: rendered as their authors meant them, in a sandbox; every fault is the request's."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_files import write_folder, write_gguf

from paceline.errors import RequestError
from paceline.models.chat import ChatTemplate
from paceline.models.load import open_checkpoint
from paceline.models.tokenizer import Tokenizer

CHATML = """{{ bos_token }}{% for message in messages %}
    {% if message['role'] == 'system' and not loop.first %}
        {{ raise_exception('The system message must come first') }}
    {% endif %}
{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
HI = [{"role": "user", "content": "hi"}]


def render(source: str, messages: Any = HI, **options: Any) -> str:
    return ChatTemplate(source, TOKENS).render(messages, **options)


def test_blocks_leave_no_stray_whitespace_and_tokens_reach_the_template() -> None:
    assert render(CHATML) == "<s><|user|>hi</s><|assistant|>"
    assert render(CHATML, add_generation_prompt=False) == "<s><|user|>hi</s>"


@pytest.mark.parametrize(("source", "expected"), [
    ("{{ messages | tojson }}", '[{"role": "user", "content": "hi"}]'),
    ("{{ {'b': '<é>', 'a': 1} | tojson(indent=1) }}", '{\n "b": "<é>",\n "a": 1\n}'),
    ("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}", "1"),
    ("a{% generation %}b{{ messages[0].content }}{% endgeneration %}c", "abhic"),
    ("{{ strftime_now('%Y') | length }}", "4"),
    ("{{ tools is none }} {{ documents is none }} {{ unknown is defined }}", "True True False"),
    ("{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }}", "2"),
])
def test_what_hugging_face_templates_rely_on(source: str, expected: str) -> None:
    assert render(source) == expected


def test_variables_and_tools_reach_the_template() -> None:
    assert render("{{ thinking }} {{ tools[0].name }}", thinking=True, tools=[{"name": "f"}]) == "True f"
    both = ChatTemplate("plain", tool_source="with {{ tools | length }} tools")
    assert (both.render(HI), both.render(HI, tools=[{}, {}])) == ("plain", "with 2 tools")


@pytest.mark.parametrize(("source", "messages", "hint"), [
    (CHATML, [*HI, {"role": "system", "content": "late"}], "system message must come first"),
    ("{{ messages[0]['content'] + 1 }}", HI, "cannot render"),
    ("{{ ''.__class__.__mro__ }}", HI, "refuses these messages"),
    ("{{ messages.append(1) }}", HI, "refuses these messages"),
    ("{% if %}", HI, "template is broken"),
    (CHATML, [], "non-empty list"), (CHATML, "hi", "non-empty list"), (CHATML, {"role": "user"}, "non-empty list"),
    (CHATML, ["hi"], r"messages\[0\]"), (CHATML, [{"content": "x"}], r"messages\[0\].*'role'"),
    (CHATML, [*HI, {"role": "user"}], r"messages\[1\] has no 'content'"),
])
def test_faults_are_request_errors_about_the_messages(source: str, messages: Any, hint: str) -> None:
    with pytest.raises(RequestError, match=hint) as caught:
        render(source, messages)
    assert caught.value.param == "messages"


def test_without_jinja2_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith(("jinja2", "paceline.models.compiled_template")):  # which needs it
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(RequestError, match="package jinja2"):
        render(CHATML)


# -- where templates come from -----------------------------------------------------------------------------------------

def folder(tmp_path: Path, **files: str) -> ChatTemplate:
    made = write_folder(tmp_path / "m", {}, [{"a": torch.ones(1)}])
    for name, content in files.items():
        (made / name.replace("__", ".")).write_text(content)
    return ChatTemplate.from_checkpoint(open_checkpoint(made))


def test_template_from_tokenizer_config(tmp_path: Path) -> None:
    assert folder(tmp_path, tokenizer_config__json=json.dumps({"chat_template": "one"})).render(HI) == "one"


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    template = folder(tmp_path, tokenizer_config__json=json.dumps({"chat_template": named}))
    assert (template.render(HI), template.render(HI, tools=[{}])) == ("plain", "tools")


def test_the_jinja_file_wins(tmp_path: Path) -> None:
    template = folder(tmp_path, tokenizer_config__json=json.dumps({"chat_template": "old"}), chat_template__jinja="new")
    assert template.render(HI) == "new"


def test_template_from_gguf_metadata(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", metadata={"tokenizer.chat_template": "from gguf"}))
    assert ChatTemplate.from_checkpoint(checkpoint, Tokenizer.from_checkpoint(checkpoint)).render(HI) == "from gguf"


def test_a_model_without_template_says_to_pass_a_prompt(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="pass a prompt"):
        folder(tmp_path).render(HI)
