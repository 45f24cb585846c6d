"""Every schema, at temperature 1, on random weights: what comes out parses and validates, drafted or not."""

from __future__ import annotations

import functools
import json
from typing import Any

import jsonschema
import pytest

from grammar.structured import PROMPT, structured_llm
from paceline import SamplingParams
from paceline.bench.schemas import SCHEMAS
from paceline.request import RequestOutput

NAMES = sorted(SCHEMAS)
WAYS = ["auto", "oracle tree", "wrong tree"]
"""Every run tries each schema in one of them."""
MORE = ["ngram", "suffix", "lookahead", "oracle", "wrong"]


def test_there_are_sixty_schemas_and_more() -> None:
    assert len(SCHEMAS) >= 60
    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)


def params_of(name: str) -> SamplingParams:
    return SamplingParams(json_schema=SCHEMAS[name], temperature=1.0, max_tokens=1500, seed=NAMES.index(name) + 1)


@functools.cache
def outputs(way: str | None = None, every: bool = False) -> dict[str, RequestOutput]:
    """Of schemas in one batch: all of them without a way or if `every` is asked for, else those of the way."""
    names = NAMES if way is None or every else NAMES[WAYS.index(way)::len(WAYS)]
    wishes: list[Any] = [way] * len(names)
    if way is not None and way.split()[0] in ("oracle", "wrong"):
        wishes = [{"method": way.split()[0], "tokens": outputs()[name].outputs[0].token_ids, "k": 5,
                   "branches": 3 if "tree" in way else 1} for name in names]
    elif way is not None:
        wishes = [{"method": way, "adaptive": False}] * len(names)
    llm = structured_llm()
    found = llm.generate([PROMPT] * len(names), [params_of(name) for name in names], speculation=wishes)
    llm.engine.cache.check([])
    return dict(zip(names, found))


@pytest.mark.parametrize("name", NAMES)
def test_the_text_parses_and_validates(name: str) -> None:
    out = outputs()[name]
    assert out.error is None and out.outputs[0].finish_reason == "stop"
    value = json.loads(out.outputs[0].text)
    jsonschema.validate(value, SCHEMAS[name], format_checker=jsonschema.FormatChecker())


@pytest.mark.parametrize("way", WAYS)
def test_speculation_changes_no_token(way: str) -> None:
    check_equal(outputs(way))


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS + MORE)
def test_speculation_of_every_schema_changes_no_token(way: str) -> None:
    assert len(outputs(way, every=True)) == len(NAMES)
    check_equal(outputs(way, every=True))


def check_equal(found: dict[str, RequestOutput]) -> None:
    for name, drafted in found.items():
        assert drafted.error is None
        assert drafted.outputs[0].token_ids == outputs()[name].outputs[0].token_ids, name
        assert drafted.outputs[0].finish_reason == "stop"
        assert drafted.speculation.failure is None, drafted.speculation.failure


def test_drafts_were_accepted_where_they_were_right() -> None:
    oracle = [out.speculation for out in outputs("oracle tree").values()]
    assert sum(one.accepted for one in oracle) > 300
    sources = {origin.drafter for out in outputs("oracle tree").values() for origin in out.speculation.provenance}
    assert {"oracle", "grammar"} <= sources


def test_what_is_accepted_of_wrong_drafts_is_the_grammars() -> None:
    sources = {origin.drafter for out in outputs("wrong tree").values() for origin in out.speculation.provenance}
    assert sources <= {None, "grammar"}
