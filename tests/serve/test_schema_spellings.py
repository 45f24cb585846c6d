"""Schemas of all kinds, asked for in five spellings: all mean the same grammar, and what is written by it is valid."""

from __future__ import annotations

import json
import random
from collections import Counter
from decimal import localcontext
from typing import Any

import pytest

from grammar.random_schemas import MOST, Drawn, allowed, chosen, exactly, library
from paceline.errors import GrammarError
from paceline.grammar.schemas import KEYWORDS
from paceline.grammar.structure import Structure, structure_of
from paceline.serve.answers import Answers
from paceline.serve.limits import ClientLimits
from paceline.serve.params import chat_params
from paceline.serve.routes.responses_input import ResponsesBody, messages_of, translated
from paceline.serve.schema import ChatBody

MESSAGES = [{"role": "user", "content": "x"}]
BEFORE_CALL = '<tool_call>\n{"name": "f", "arguments": '
BEHIND_CALL = "}\n</tool_call>"
REFUSALS = ("Unsatisfiable", "no text matches", "two branches of its oneOf", "no text has an end",
            "min/maxProperties only")
"""Why a schema may be refused: no text can keep it, or no grammar can."""


def spellings(schema: dict[str, Any]) -> dict[str, Structure]:
    """What each way to ask makes of it."""
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    named = {"type": "function", "function": {"name": "f"}}
    bodies = {name: ChatBody.model_validate({"messages": MESSAGES} | wish) for name, wish in {
        "response_format": {"response_format": {"type": "json_schema", "json_schema": {
            "name": "x", "schema": schema, "strict": True}}},
        "json_object": {"response_format": {"type": "json_object", "schema": schema}},
        "guided_json": {"guided_json": json.dumps(schema)},
        "structured_outputs": {"structured_outputs": {"json": schema}},
        "tool": {"tools": [tool], "tool_choice": named}}.items()}
    bodies["responses"] = translated(ResponsesBody.model_validate({"input": "x", "text": {"format": form}}),
                                     messages_of("x"))
    found = {}
    for name, body in bodies.items():
        structure = structure_of(chat_params(body, ClientLimits(), Answers.of(body, None, None, "auto").structure))
        assert structure is not None
        found[name] = structure
    return found


def written(schema: dict[str, Any], seed: int) -> str | None:
    """A text by random legal bytes, in all spellings at once; None: it came to no end."""
    found = spellings(schema)
    tool = found.pop("tool")
    assert len({structure.text for structure in found.values()}) == 1, "one schema, one grammar"
    matcher = library().compile(found["response_format"])
    called = library().compile(tool)
    assert called.try_consume_tokens([*BEFORE_CALL.encode()]) == len(BEFORE_CALL)
    luck, text = random.Random(seed), bytearray()
    while len(text) < MOST:
        options, ends = allowed(matcher), matcher.is_accepting()
        assert {*allowed(called)} == {*options} | ({ord("}")} if ends else set()), text
        if ends and (not options or luck.random() < 0.5):
            assert called.try_consume_tokens([*BEHIND_CALL.encode()]) == len(BEHIND_CALL) and called.is_accepting()
            return text.decode()
        byte = chosen(luck, options, len(text))
        assert matcher.consume_tokens([byte]) and called.consume_tokens([byte]), matcher.get_error()
        text.append(byte)
    return None


def outcome(seed: int) -> tuple[str, set[str]]:
    """What became of a schema, and its keywords."""
    drawn = Drawn(seed)
    validator = drawn.validator
    try:
        text = written(drawn.schema, seed)
    except GrammarError as problem:
        reason = next((one for one in REFUSALS if one in str(problem)), None)
        assert reason is not None, (problem, drawn.schema)
        return f"refused: {reason}", set()
    if text is None:
        return "no end", keywords(drawn.schema)
    with localcontext(prec=2 * MOST):
        validator.validate(json.loads(text, parse_float=exactly))
    return "valid", keywords(drawn.schema)


def keywords(part: Any) -> set[str]:
    if isinstance(part, list):
        return {name for inner in part for name in keywords(inner)}
    if isinstance(part, dict):
        return part.keys() | {name for inner in part.values() for name in keywords(inner)}
    return set()


def check(seeds: range) -> Counter[str]:
    outcomes = [outcome(seed) for seed in seeds]
    found = Counter(name for name, _ in outcomes)
    assert found["valid"] >= 0.9 * len(seeds), found
    assert found["no end"] <= 0.05 * len(seeds), found
    return found


def test_a_schema_is_the_same_in_every_spelling_and_kept() -> None:
    check(range(300))


@pytest.mark.full
def test_a_thousand_schemas_are_the_same_in_every_spelling_and_kept() -> None:
    print(check(range(1000)))


def test_all_that_is_enforced_is_drawn() -> None:
    drawn = {name for seed in range(400) for name in keywords(Drawn(seed).schema)}
    assert {name for name, (becomes, _) in KEYWORDS.items() if becomes == "enforced"} <= drawn
