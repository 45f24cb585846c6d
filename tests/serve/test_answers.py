"""Each format of calls: its template, its grammar and its parser agree, however a text is cut."""

from __future__ import annotations

import itertools
import json
import pickle
from typing import Any

import openai
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grammar.structured import TOOL, compiled, random_text, token, tokenizer
from paceline.grammar.library import Library
from paceline.grammar.sequence import SequenceGrammar
from paceline.grammar.structure import structure_of
from paceline.grammar.vocabulary import Vocabulary
from paceline.models.chat import ChatTemplate
from paceline.request import SamplingParams
from paceline.serve.answers import Answers
from paceline.serve.reasoning import BEGUN, MAYBE, NEVER, ThinkParser, expected
from paceline.serve.schema import ChatBody
from paceline.serve.tool_formats import FORMATS, format_of
from paceline.serve.tool_formats.events import (
    AnswerParser,
    CallBegun,
    CallsOnly,
    Content,
    PlainText,
    Reasoning,
    UntilCallsEnd,
)
from paceline.serve.tool_formats.lark import Lark

TOOLS: dict[str, Any] = {
    "feed": {"type": "object", "properties": {"animal": {"type": "string"}, "meals": {"type": "integer"}},
             "required": ["animal"], "additionalProperties": False},
    "walk": {"type": "object", "properties": {"legs": {"type": "array", "items": {"enum": [2, 4]}, "maxItems": 2}},
             "additionalProperties": False}}
NAMES = sorted(FORMATS)
BYTES = Vocabulary([bytes([n]) for n in range(256)], lambda text: list(text.encode()))


def written(name: str, calls: list[tuple[str, dict[str, Any]]], ascii: bool = False) -> str:
    """As a model of this format writes them."""
    def dumps(value: Any) -> str:
        return json.dumps(value, ensure_ascii=ascii)

    def objects(word: str) -> list[str]:
        return [dumps({"name": call, word: arguments}) for call, arguments in calls]

    if name == "hermes":
        return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects("arguments"))
    if name == "llama3-json":
        return "; ".join(objects("parameters"))
    if name == "mistral":
        return f"[TOOL_CALLS][{', '.join(objects('arguments'))}]"
    if name == "mistral-args":
        return "".join(f"[TOOL_CALLS]{call}[ARGS]{dumps(arguments)}" for call, arguments in calls)
    if name == "harmony":
        return "<|end|><|start|>assistant".join(
            f"<|channel|>commentary to=functions.{call} <|constrain|>json<|message|>{dumps(arguments)}"
            for call, arguments in calls)
    return "\n".join(f"<tool_call>\n<function={call}>\n" + "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else dumps(value)}\n</parameter>\n"
        for key, value in arguments.items()) + "</function>\n</tool_call>" for call, arguments in calls)


def told(parser: AnswerParser, pieces: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    """Content, thoughts, and calls with their arguments as text."""
    content, thoughts, calls = "", "", list[tuple[str, str]]()
    for event in [event for piece in pieces for event in parser.push(piece)] + list(parser.end()):
        if isinstance(event, Content):
            content += event.text
        elif isinstance(event, Reasoning):
            thoughts += event.text
        elif isinstance(event, CallBegun):
            assert event.index == len(calls)
            calls.append((event.name, ""))
        else:
            calls[event.index] = (calls[event.index][0], calls[event.index][1] + event.text)
    return content, thoughts, calls


def cut(text: str, places: list[int]) -> list[str]:
    return [text[begin:end] for begin, end in itertools.pairwise([0, *sorted(places), max([len(text), *places])])]


def test_the_template_says_which_format() -> None:
    for mark, name in (("<|channel|>analysis<|message|>", "harmony"), ("[TOOL_CALLS]", "mistral"),
                       ("[TOOL_CALLS]x[ARGS]", "mistral-args"), ("<tool_call><function=f><parameter=x>", "qwen-coder"),
                       ("<|python_tag|>", "llama3-json"), ("ipython", "llama3-json"), ("<tool_call>", "hermes"),
                       ("nothing", "hermes")):
        assert format_of(f"{{% if tools %}}{mark}{{% endif %}}").name == name
    assert format_of(None).name == "hermes"


WORDS = st.text(st.characters(exclude_characters="<[|", codec="utf-8"), max_size=8)
CALLS = st.lists(st.one_of(
    st.tuples(st.just("feed"), st.fixed_dictionaries({"animal": WORDS}, optional={"meals": st.integers()})),
    st.tuples(st.just("walk"), st.fixed_dictionaries({}, optional={"legs": st.lists(st.sampled_from([2, 4]))}))),
    min_size=1, max_size=3)
CUTS = st.lists(st.integers(0, 300), max_size=12)


@given(st.sampled_from(NAMES), CALLS, CUTS, st.booleans())
def test_whatever_is_called_comes_out_however_it_is_cut(name: str, calls: Any, cuts: list[int], ascii: bool) -> None:
    for before in ("", "So: ") if name not in ("llama3-json", "harmony") else ("",):
        text = before + written(name, calls, ascii)
        content, _, found = told(FORMATS[name].parser(TOOLS, None), cut(text, cuts))
        assert (content.strip(), [(one, json.loads(arguments)) for one, arguments in found]) == (before.strip(), calls)
        assert told(FORMATS[name].parser(TOOLS, None), [text])[2] == found


PARTS = st.sampled_from([
    "<tool_call>", "</tool_call>", "<function=feed>", "<function=", "<parameter=animal>", "</parameter>", "</function>",
    "[TOOL_CALLS]", "[ARGS]", "feed", "[", "]", "{", "}", '{"name": "feed", "arguments": ', '{"animal": "x"}', "\n",
    " ", "<|channel|>", "analysis", "commentary to=functions.feed", "<|message|>", "<|end|>", "<|start|>", "<|call|>",
    "<|", '"', "\\", "text", "<think>", "</think>", '{"name": "walk", "parameters": {}}', ";", ","])


@settings(max_examples=300)
@given(st.sampled_from(NAMES), st.lists(PARTS | st.text(max_size=3), max_size=14).map("".join), CUTS,
       st.sampled_from([None, 1]))
def test_any_text_is_read_alike_however_it_is_cut(name: str, text: str, cuts: list[int], most: int | None) -> None:
    def parsers() -> list[AnswerParser]:
        def reader() -> AnswerParser:
            return FORMATS[name].parser(TOOLS, most)

        return [reader(), UntilCallsEnd(reader()), CallsOnly(reader(), TOOLS), ThinkParser(reader(), False),
                ThinkParser(UntilCallsEnd(reader()), True)]

    for whole, pieces, letters in zip(parsers(), parsers(), parsers()):
        assert told(whole, [text]) == told(pieces, cut(text, cuts)) == told(letters, list(text))


@given(st.sampled_from([name for name in NAMES if name != "harmony"]),
       st.lists(PARTS | st.text(max_size=3), max_size=12).map("".join), CUTS)
def test_what_is_no_call_is_shown_to_the_letter(name: str, text: str, cuts: list[int]) -> None:
    assert told(FORMATS[name].parser({"a known tool": {}}, None), cut(text, cuts)) == (text, "", [])


@pytest.mark.parametrize("name", NAMES)
def test_a_grammar_has_the_model_write_what_the_parser_reads(name: str) -> None:
    bounded = json.loads(json.dumps(TOOLS).replace('"string"', '"string", "maxLength": 5'))
    for most in (1, None):
        wish = FORMATS[name].grammar(bounded, most, Lark({}))
        grammar = compiled(grammar=wish)
        calls = [("feed", {"animal": "cat"}), ("walk", {"legs": [2, 4]})][:1 if name == "harmony" else most]
        ids = tokenizer().encode(written(name, calls), add_special=False)
        sequence = SequenceGrammar(grammar, 700, [])
        sequence.append(ids)
        assert sequence.mask(()) is not None, "what models write is allowed"
        ended = 0
        for seed in range(6):
            text, whole = random_text(SequenceGrammar(grammar, 700, tokenizer().eos_ids), seed, most=120)
            content, _, found = told(CallsOnly(FORMATS[name].parser(TOOLS, most), TOOLS), [text])
            assert not content and all(one in TOOLS for one, _ in found)
            for one, arguments in found if whole else found[:-1]:
                assert set(json.loads(arguments)) <= set(TOOLS[one]["properties"])
            ended += whole and (len(found) == 1 if most == 1 else len(found) >= 1)
        assert ended or name == "qwen-coder", "whose strings go on as they like"


class Part(pydantic.BaseModel):
    label: str
    parts: list[Part]


class Build(pydantic.BaseModel):
    first: Part
    second: Part | None


@pytest.mark.parametrize("name", NAMES)
def test_tools_may_refer_to_their_own_definitions(name: str) -> None:
    build = openai.pydantic_function_tool(Build)["function"]["parameters"]
    count = {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "additionalProperties": False,
             "properties": {"next": {"$ref": "#/definitions/Part"}}, "required": ["next"], "definitions": {
                 "Part": {"type": "object", "properties": {"n": {"type": "integer"}}, "additionalProperties": False}}}
    grammar = compiled(grammar=FORMATS[name].grammar({"Build": build, "Count": count}, 1, Lark({})))

    def allowed(call: str, arguments: dict[str, Any]) -> bool:
        sequence = SequenceGrammar(grammar, 700, [])
        sequence.append(tokenizer().encode(written(name, [(call, arguments)]), add_special=False))
        return sequence.mask(()) is not None

    part = {"label": "a", "parts": [{"label": "b", "parts": []}]}
    assert allowed("Build", {"first": part, "second": None}) and allowed("Count", {"next": {"n": 2}})
    assert not allowed("Build", {"first": {"n": 1}, "second": None}) and not allowed("Count", {"next": part})


def test_tags_that_are_special_tokens_are_forced_and_shown() -> None:
    lark = Lark({"[TOOL_CALLS]": token(TOOL)})
    grammar = compiled(grammar=FORMATS["mistral"].grammar({"walk": TOOLS["walk"]}, 1, lark))
    mask = SequenceGrammar(grammar, 700, []).mask(())
    assert mask is not None and mask.nonzero()[0].tolist() == [token(TOOL)]


def test_forced_calls_that_are_cut_are_calls_so_far() -> None:
    for name in NAMES:
        text = written(name, [("feed", {"animal": "cat and dog"})])
        for size in range(len(text)):
            content, _, calls = told(CallsOnly(FORMATS[name].parser(TOOLS, None), TOOLS), [text[:size]])
            assert content == "" and len(calls) <= 1
            assert all('{"animal": "cat and dog"}'.startswith(arguments.rstrip()) for _, arguments in calls)
        assert told(CallsOnly(FORMATS[name].parser({"feed": {}}, 1), ["feed"]), [text[:3]])[2] == [("feed", "")]


def test_nothing_is_told_behind_the_calls() -> None:
    for name in NAMES:
        parser = UntilCallsEnd(FORMATS[name].parser(TOOLS, None))
        text = written(name, [("feed", {"animal": "cat"}), ("walk", {})])
        calls = told(parser, [text, "<|call|>" if name == "harmony" else "", "\n", "And so ", "on."])
        assert [one for one, _ in calls[2]] == ["feed", "walk"] and calls[0] == "" and parser.over
        parser = UntilCallsEnd(FORMATS[name].parser(TOOLS, 1))
        assert len(told(parser, [text, "<|call|>" if name == "harmony" else ""])[2]) == 1 and parser.over


# ---------------------------------------------------------------- thoughts

THOUGHT = "<think>\nLet me see.\n\nYes.\n</think>\n\nIt is 4."


@given(CUTS, st.booleans())
def test_thoughts_are_told_apart_however_the_text_is_cut(cuts: list[int], begun: bool) -> None:
    text = THOUGHT.removeprefix("<think>") if begun else THOUGHT
    assert told(ThinkParser(PlainText(), begun), cut(text, cuts)) == ("It is 4.", "Let me see.\n\nYes.", [])


def test_thoughts_go_by_the_template_and_the_prompt() -> None:
    assert expected("{{ messages }}", "<think>") == NEVER and expected(None, "") == NEVER
    knows = "{% if x %}<think>\n{% endif %}"
    assert expected(knows, "assistant\n<think>\n") == BEGUN and expected(knows, "assistant\n") == MAYBE
    assert expected(knows, "<think>\n\n</think>\n\n") == NEVER
    for text in ("No thoughts.", "", " <thin", "<think", "a <think> b </think>"):
        assert told(ThinkParser(PlainText(), False), list(text)) == (text, "", [])
    assert told(ThinkParser(PlainText(), False), ["<think>so", " far </thi"]) == ("", "so far </thi", [])


def test_harmony_has_channels() -> None:
    text = ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
            "<|end|><|start|>assistant to=functions.feed<|channel|>commentary json<|message|>"
            '{"animal": "c"}<|call|>')
    for pieces in ([text], list(text)):
        assert told(FORMATS["harmony"].parser(TOOLS, None), pieces) == (
            "I look.", "Hm.", [("feed", '{"animal": "c"}')])
    final = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Four."
    assert told(FORMATS["harmony"].parser({}, None), list(final)) == ("Four.", "Hm.", [])
    assert told(FORMATS["harmony"].parser({}, None), list("Plain.")) == ("Plain.", "", [])


def test_structures_begin_behind_thoughts() -> None:
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "hi"}]})
    for source, end, texts, wrong in (
            ("<think>", "<think>\n", ["so\n</think>\n\nyes", "</think>no"], ["yes", "no</think>x"]),
            ("<think>", "", ["<think>yes</think>\nno", "yes"], ["a", "<think>yes</think>a"]),
            ("<|channel|><|message|>", "", [
                "<|channel|>final<|message|>yes",
                "<|channel|>analysis<|message|>no<|end|><|start|>assistant<|channel|>final<|message|>yes"], ["yes"])):
        answers = Answers.of(body, ChatTemplate(source), None, "auto")
        answers = answers.behind(tokenizer().encode(end, add_special=False), tokenizer())
        params = answers.params(SamplingParams(choice=["yes", "no"]))
        structure = structure_of(params)
        assert structure is not None
        for text in texts + wrong:
            matcher = Library(BYTES).compile(structure)
            read = matcher.try_consume_tokens(list(text.encode()))
            assert (read == len(text) and matcher.is_accepting()) is (text in texts), text


def test_answers_travel_with_their_request() -> None:
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "hi"}], "tools": [
        {"type": "function", "function": {"name": "feed", "parameters": TOOLS["feed"]}}]})
    params = Answers.of(body, None, None, "hermes").params(SamplingParams())
    watch = pickle.loads(pickle.dumps(params)).stop_when()
    assert not watch(written("hermes", [("feed", {"animal": "x"})])) and not watch("\n") and watch("Well")


def test_special_tokens_are_shown_to_those_who_ask_for_them() -> None:
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "hi"}]})
    answers = Answers.of(body, None, None, "hermes")
    assert answers.params(SamplingParams()).skip_special_tokens
    assert not answers.params(SamplingParams(skip_special_tokens=False)).skip_special_tokens
