"""Calls in every format and structures behind thoughts, on random weights: drafted or not, they are the same tokens,
and what is called has arguments that keep their schema."""

from __future__ import annotations

import functools
import json
from typing import Any

import jsonschema
import pytest

from grammar.structured import PROMPT, TOOL, structured_llm, token
from paceline import SamplingParams
from paceline.request import RequestOutput
from paceline.serve import reasoning
from paceline.serve.chat import gather
from paceline.serve.tool_formats import FORMATS
from paceline.serve.tool_formats.events import AnswerParser
from paceline.serve.tool_formats.lark import Lark

TOOLS: dict[str, dict[str, Any]] = {
    "walk": {"type": "object", "properties": {"far": {"type": "integer", "minimum": 0, "maximum": 99},
                                              "how": {"type": "string", "enum": ["slow", "fast"]}},
             "required": ["far", "how"], "additionalProperties": False},
    "feed": {"type": "object", "properties": {"what": {"type": "array", "items": {"enum": ["hay", None]}, "minItems": 1,
                                                       "maxItems": 3}},
             "required": ["what"], "additionalProperties": False}}
SAID = {"say": {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]}}
CHOICE = ("yes", "no")
SPECIAL = {"[TOOL_CALLS]": token(TOOL)}
CASES: dict[str, dict[str, Any]] = {
    **{name: {"grammar": one.grammar(TOOLS, 1, Lark({}))} for name, one in FORMATS.items()},
    "a tag that is a token": {"grammar": FORMATS["mistral"].grammar(TOOLS, 1, Lark(SPECIAL)),
                              "skip_special_tokens": False},
    "calls in harmony": {"grammar": FORMATS["harmony"].grammar(TOOLS, 1, Lark({})),
                         "structure_after": reasoning.before_message(True, Lark({}))},
    "a message in harmony": {"choice": CHOICE, "structure_after": reasoning.before_message(False, Lark({}))},
    "behind thoughts": {"choice": CHOICE, "structure_after": reasoning.before_answer(reasoning.MAYBE, Lark({}))},
    "behind open thoughts": {"json_schema": TOOLS["walk"],
                             "structure_after": reasoning.before_answer(reasoning.BEGUN, Lark({}))},
    "a grammar that stops": {
        "grammar": 'start: free "." rest\nfree[max_tokens=9]: /(?s:.*)/\nrest[stop="a"]: /[^b]*/\n',
        "max_tokens": 40},
    "a text in Qwen-coder's": {"grammar": FORMATS["qwen-coder"].grammar(SAID, 1, Lark({})), "max_tokens": 60},
    "a call behind thoughts": {"grammar": FORMATS["hermes"].grammar(TOOLS, 1, Lark({})),
                               "structure_after": reasoning.before_answer(reasoning.MAYBE, Lark({}))},
}
SEEDS = (3, 5)
WAYS = ["auto", "ngram", "oracle tree", "wrong tree"]


@functools.cache
def outputs(way: str | None = None) -> list[list[RequestOutput]]:
    """For each case, one of each seed; the last is greedy."""
    asked = [SamplingParams(**{"max_tokens": 80} | case, temperature=1.0 if seed != SEEDS[-1] else 0.0, seed=seed)
             for case in CASES.values() for seed in SEEDS]
    wishes: list[Any] = [None if way is None else {"method": way, "adaptive": False}] * len(asked)
    if way is not None and " " in way:
        wishes = [{"method": way.split()[0], "tokens": out.outputs[0].token_ids, "k": 5, "branches": 3}
                  for outs in outputs() for out in outs]
    llm = structured_llm()
    found = llm.generate([PROMPT] * len(asked), asked, speculation=wishes)
    llm.engine.cache.check([])
    return [found[at:at + len(SEEDS)] for at in range(0, len(found), len(SEEDS))]


def calls_in(parser: AnswerParser, text: str) -> list[tuple[str, Any]]:
    calls = gather([*parser.push(text), *parser.end()])[2]
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


@pytest.mark.parametrize("way", WAYS)
def test_speculation_changes_no_token(way: str) -> None:
    accepted = 0
    for case, plain, drafted in zip(CASES, outputs(), outputs(way)):
        for one, other in zip(plain, drafted):
            assert one.error is None and other.error is None and other.speculation.failure is None
            assert other.outputs[0].token_ids == one.outputs[0].token_ids, case
            assert other.outputs[0].finish_reason == one.outputs[0].finish_reason
            accepted += other.speculation.accepted
    assert accepted > 100, "of forced texts at least"


@pytest.mark.parametrize("name", [*FORMATS, "a tag that is a token"])
def test_forced_calls_keep_their_schema(name: str) -> None:
    for out in outputs()[[*CASES].index(name)]:
        assert out.outputs[0].finish_reason == "stop"
        text = out.outputs[0].text.replace(TOOL, "[TOOL_CALLS]")
        [(called, arguments)] = calls_in(FORMATS.get(name, FORMATS["mistral"]).parser(TOOLS, None), text)
        jsonschema.validate(arguments, TOOLS[called])


@pytest.mark.parametrize("name", ["a message in harmony", "behind thoughts"])
def test_structures_behind_thoughts_are_kept(name: str) -> None:
    ended = [out for out in outputs()[[*CASES].index(name)] if out.outputs[0].finish_reason == "stop"]
    assert ended, "thoughts are free, but some end"
    assert all(out.outputs[0].text.endswith(CHOICE) for out in ended)
