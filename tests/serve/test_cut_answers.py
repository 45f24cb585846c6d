"""Answers in every format, cut into pieces anywhere and ended anywhere: what is told is the same."""

from __future__ import annotations

import functools
import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.serve.chat import gather
from paceline.serve.reasoning import ThinkParser
from paceline.serve.tool_formats import FORMATS
from paceline.serve.tool_formats.events import AnswerParser, CallsOnly, PlainText, UntilCallsEnd, overlap

TOOLS: dict[str, dict[str, Any]] = {
    "f": {"type": "object", "properties": {"s": {"type": "string"}, "n": {"type": "integer"}, "o": {}}},
    "file.read": {"type": "object"}}
NASTY = 'a "quoted" \\ text\n}]{[ </tool_call> ü 🙂 [ARGS] <|end'
ARGUMENTS = {"s": NASTY, "n": 3, "o": {"deep": [{"}": "]"}]}}
JSON = json.dumps(ARGUMENTS, ensure_ascii=False)
ASCII = json.dumps(ARGUMENTS)


def hermes(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def qwen(name: str, **values: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def harmony(name: str, arguments: str) -> str:
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"


CALL, OTHER = f'{{"name": "f", "arguments": {JSON}}}', '{"name": "file.read", "arguments": {}}'
LLAMA = f'{{"name": "f", "parameters": {ASCII}}}'
CODED = NASTY.replace("</tool_call>", "</para")
TEXTS: dict[str, list[str]] = {
    "hermes": [hermes(CALL, OTHER), f"So:\n\n{hermes(CALL)} behind", f"<tool_call>{OTHER}{OTHER}</tool_call>",
               f"<tool_call>[{OTHER}, {CALL}]</tool_call>", '<tool_call>{"name": "g", "arguments": {}}</tool_call>'],
    "llama3-json": [LLAMA, f"<|python_tag|>{LLAMA}; {LLAMA}", f"[{LLAMA}, {LLAMA}] so", '{"name": "g"} is no call'],
    "mistral": [f"[TOOL_CALLS][{CALL}, {OTHER}]", f"So. [TOOL_CALLS] [{CALL}] and", f"[TOOL_CALLS]{OTHER}",
                "[TOOL_CALLS] of nothing", f"[TOOL_CALLS][{OTHER}][TOOL_CALLS][{OTHER}]"],
    "mistral-args": [f"[TOOL_CALLS]f[ARGS]{JSON}[TOOL_CALLS]file.read[ARGS]{{}}", f"So. [TOOL_CALLS]f[ARGS]{ASCII} so",
                     "[TOOL_CALLS]g[ARGS]{}", "a [TOOL_C b"],
    "qwen-coder": [qwen("f", s=CODED, n="3", o='{"a": [1]}'), f"So:\n{qwen('f', s='')}\n{qwen('file.read')} behind",
                   qwen("f", s="\n\nlines\n\n", o="[7]", x="8"), "<function=g>\n</function>",
                   "<tool_call>\n<function=f>\n<parameter=s>\nno end"],
    "harmony": [f"<|channel|>analysis<|message|>Hm, {{.<|end|><|start|>assistant{harmony('f', JSON)}",
                f"<|channel|>final<|message|>{NASTY}<|return|>", harmony("file.read", ""), "plain <|",
                f"{harmony('file.read', '{}')[:-8]}<|end|><|start|>assistant{harmony('f', ASCII)}"],
}
READERS = {
    "free": lambda name, most: UntilCallsEnd(FORMATS[name].parser(TOOLS, most)),
    "bare": lambda name, most: FORMATS[name].parser(TOOLS, most),
    "forced": lambda name, most: CallsOnly(FORMATS[name].parser(TOOLS, most), TOOLS),
}


def told(parser: AnswerParser, pieces: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    events = [event for piece in pieces for event in parser.push(piece)]
    content, thoughts, calls = gather([*events, *parser.end()])
    return content, thoughts, [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def test_every_format_is_here() -> None:
    assert TEXTS.keys() == FORMATS.keys()


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in TEXTS.items() for text in texts])
def test_pieces_do_not_matter(name: str, text: str, reader: str) -> None:
    make = functools.partial(READERS[reader], name)
    for most in (None, 1):
        whole = told(make(most), [text])
        assert told(make(most), list(text)) == whole
        for at in range(1, len(text)):
            assert told(make(most), [text[:at], text[at:]]) == whole, text[:at]


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in TEXTS.items() for text in texts])
def test_what_was_told_stands_wherever_the_text_is_cut(name: str, text: str) -> None:
    """Of a text that ends early, all is told that belongs to it: calls so far are the beginnings of those of the whole.
    (A thought that ends like a tag may be just that.)"""
    whole = told(READERS["bare"](name, None), [text])
    for at in range(len(text)):
        content, thoughts, calls = told(READERS["bare"](name, None), [text[:at]])
        assert told(READERS["bare"](name, None), list(text[:at])) == (content, thoughts, calls)
        assert whole[1].startswith(thoughts[:len(thoughts) - overlap(thoughts, "<|end|>")])
        assert len(calls) <= len(whole[2])
        for (called, arguments), (wanted, all_of_them) in zip(calls, whole[2]):
            assert called == wanted and all_of_them.startswith(arguments), text[:at]


@pytest.mark.parametrize("name", ["hermes", "llama3-json", "mistral"])
def test_a_brace_too_few_or_too_many_loses_no_call(name: str) -> None:
    call = CALL[:-1]
    text = {"hermes": "<tool_call>\n{0}\n</tool_call>\n<tool_call>\n{1}\n</tool_call>",
            "llama3-json": "{1}<|python_tag|>{0}", "mistral": "[TOOL_CALLS][{1}][TOOL_CALLS][{0}"}[name]
    few = text.replace("{0}", call).replace("{1}", OTHER)
    wanted = {("f", JSON), ("file.read", "{}")}
    for asked in (few, few.replace(OTHER, OTHER + "}"), few.replace(call, CALL + "}")):
        content, _, calls = told(READERS["free"](name, None), list(asked))
        assert (content, {*calls}) == ("", wanted) and told(READERS["free"](name, None), [asked])[2] == calls
    assert told(READERS["bare"]("hermes", None), [f"<tool_call>{call} and so on"])[2] == [("f", JSON)]


MARKS = st.sampled_from([
    "<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=s>", "</parameter>", "[TOOL_CALLS]",
    "[ARGS]", "f", "file.read", "<|channel|>", "analysis", "commentary to=functions.f ", "<|message|>", "<|end|>",
    "<|call|>", "<|start|>assistant", "<|python_tag|>", '{"name": "f", ', '"arguments": {', '"a": 1', "}", "}}", "]",
    "[", '"', "\\", "\n", " ", ",", ";", "<", CALL, "<think>", "</think>", "é"])


@given(st.lists(MARKS, max_size=14).map("".join), st.lists(st.integers(0, 90), max_size=6), st.sampled_from([*TEXTS]),
       st.booleans())
def test_whatever_is_written_pieces_do_not_matter(text: str, cuts: list[int], name: str, thinks: bool) -> None:
    places = [0, *sorted(cuts), len(text)]
    pieces = [text[begin:end] for begin, end in itertools.pairwise(places)]
    for make in (lambda: ThinkParser(READERS["free"](name, None), thinks), lambda: READERS["bare"](name, None),
                 lambda: ThinkParser(PlainText(), thinks)):
        assert told(make(), pieces) == told(make(), [text]) == told(make(), list(text))
