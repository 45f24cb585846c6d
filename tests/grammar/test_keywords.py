"""Every keyword of JSON Schema: what the page says becomes of it is what becomes of it."""

from __future__ import annotations

import functools
import json
import re
import uuid
from pathlib import Path
from typing import Any

import pydantic
import pytest

from paceline.errors import GrammarError
from paceline.grammar.library import Library
from paceline.grammar.schemas import KEYWORDS, KNOWN_FORMATS
from paceline.grammar.structure import structure_of
from paceline.grammar.vocabulary import Vocabulary
from paceline.request import SamplingParams

PAGE = Path(__file__).parents[2] / "docs" / "structured-output.md"
TWO = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
       "additionalProperties": False}
WHOLE = {"type": "integer"}
OBJECT = {"type": "object"}
CASES: dict[str, tuple[Any, Any, Any]] = {
    "type": ({"type": "string"}, "a", 1), "enum": ({"enum": [1, 2]}, 1, 3), "const": ({"const": 1}, 1, 2),
    "properties": (TWO, {"a": 1}, {"a": "x"}), "required": (TWO | {"required": ["a"]}, {"a": 1}, {"b": 1}),
    "additionalProperties": (TWO, {}, {"c": 1}),
    "patternProperties": (OBJECT | {"patternProperties": {"^x": WHOLE}}, {"x": 1}, {"x": ""}),
    "items": ({"type": "array", "items": WHOLE}, [1], ["a"]),
    "prefixItems": ({"type": "array", "prefixItems": [WHOLE]}, [1], ["a"]),
    "additionalItems": ({"type": "array", "items": [WHOLE], "additionalItems": False}, [1], [1, 2]),
    "minItems": ({"type": "array", "minItems": 1}, [1], []),
    "maxItems": ({"type": "array", "maxItems": 1}, [1], [1, 2]),
    "minLength": ({"type": "string", "minLength": 2}, "ab", "a"),
    "maxLength": ({"type": "string", "maxLength": 2}, "ab", "abc"),
    "pattern": ({"type": "string", "pattern": "^a+$"}, "aa", "ab"),
    "minimum": (WHOLE | {"minimum": 3}, 3, 2), "maximum": (WHOLE | {"maximum": 3}, 3, 4),
    "exclusiveMinimum": (WHOLE | {"exclusiveMinimum": 3}, 4, 3),
    "exclusiveMaximum": (WHOLE | {"exclusiveMaximum": 3}, 2, 3), "multipleOf": (WHOLE | {"multipleOf": 3}, 6, 7),
    "anyOf": ({"anyOf": [WHOLE, {"type": "null"}]}, None, "a"),
    "allOf": ({"allOf": [WHOLE, {"minimum": 3}]}, 3, 2), "$ref": ({"$ref": "#/$defs/x", "$defs": {"x": WHOLE}}, 1, "a"),
    "$defs": ({"$ref": "#/$defs/x", "$defs": {"x": WHOLE}}, 1, "a"),
    "definitions": ({"$ref": "#/definitions/x", "definitions": {"x": WHOLE}}, 1, "a"),
    "minProperties": (OBJECT | {"minProperties": 1}, {"x": 1}, {}),
    "maxProperties": (OBJECT | {"maxProperties": 1}, {"x": 1}, {"x": 1, "y": 1}),
    "format": ({"type": "string", "format": "date"}, "2026-01-01", "today"),
    "oneOf": ({"oneOf": [WHOLE, {"type": "string"}]}, 1, None),
    "not": ({"not": {"type": "string"}}, 1, "a"),
    "dependencies": (TWO | {"dependencies": {"a": ["b"]}}, {"a": 1, "b": 1}, {"a": 1}),
    "dependentRequired": (TWO | {"dependentRequired": {"a": ["b"]}}, {"a": 1, "b": 1}, {"a": 1}),
    "dependentSchemas": (TWO | {"dependentSchemas": {"a": {"properties": {"b": {"minimum": 5}}, "required": ["b"]}}},
                         {"a": 1, "b": 5}, {"a": 1, "b": 4}),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, [1], [1, 1]),
    "propertyNames": (OBJECT | {"propertyNames": {"pattern": "^a"}}, {"a": 1}, {"b": 1}),
    "$schema": ({"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "string"}, "a", None),
    "if": ({"if": {"type": "number"}, "then": {"minimum": 3}}, 3, 2),
    "then": ({"if": {"minLength": 1}, "then": {"pattern": "^a"}}, "", "b"),
    "else": ({"if": {"type": "number"}, "else": {"minLength": 3}}, 3, "a"),
    "contains": ({"type": "array", "contains": WHOLE}, [1], []),
    "minContains": ({"type": "array", "contains": WHOLE, "minContains": 2}, [1, 1], [1]),
    "maxContains": ({"type": "array", "contains": WHOLE, "maxContains": 1}, [1], [1, 1]),
    "unevaluatedProperties": (OBJECT | {"unevaluatedProperties": False}, {}, {"a": 1}),
    "unevaluatedItems": ({"type": "array", "unevaluatedItems": False}, [], [1]),
    "$dynamicRef": ({"$dynamicRef": "#a"}, 1, 2), "$recursiveRef": ({"$recursiveRef": "#"}, 1, 2),
    "$dynamicAnchor": ({"$dynamicAnchor": "a", "type": "string"}, "a", 2),
    "$recursiveAnchor": ({"$recursiveAnchor": True, "type": "string"}, "a", 2),
    "$vocabulary": ({"$vocabulary": {"https://json-schema.org/draft/2020-12/vocab/core": True}, "type": "string"}, "a",
                    None),
    "$anchor": ({"$ref": "#here", "$defs": {"x": {"$anchor": "here", "type": "integer"}}}, 1, None),
}
"""A schema, a value that fits it and one that does not."""


@functools.cache
def library() -> Library:
    return Library(Vocabulary([bytes([n]) for n in range(256)], lambda text: list(text.encode())))


def allows(schema: Any, value: Any, strict: bool = False, **written: Any) -> bool:
    structure = structure_of(SamplingParams(json_schema=schema, strict_schema=strict))
    assert structure is not None
    matcher = library().compile(structure)
    tokens = list(json.dumps(value, **written).encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_what_is_said_of_a_keyword_is_so(keyword: str) -> None:
    becomes, when = KEYWORDS[keyword]
    schema, fits, breaks = CASES.get(keyword) or ({keyword: "a", "type": "string"}, "a", None)
    if becomes == "refused":
        with pytest.raises(GrammarError, match="cannot be used"):
            allows(schema, fits)
        return
    assert allows(schema, fits)
    if breaks is not None:
        assert allows(schema, breaks) is (becomes == "annotation")
    if "strict" in when:
        with pytest.raises(GrammarError, match=f"{keyword} cannot be enforced"):
            allows({"type": "array", "items": schema}, [fits], strict=True)


def test_the_page_has_every_keyword() -> None:
    rows = re.findall(r"^\| (`.*`) \| (enforced|annotation|refused) \|(.*)\|$", PAGE.read_text(), re.M)
    told = {name: (becomes, when.strip()) for names, becomes, when in rows for name in re.findall(r"`([^`]+)`", names)}
    assert told == KEYWORDS
    assert all(f"`{name}`" in PAGE.read_text() for name in KNOWN_FORMATS)


@pytest.mark.parametrize(("schema", "fits", "breaks"), [
    ({"enum": [1, 2, True], "not": {"const": 1}}, True, 1), ({"enum": [1, 2], "not": {"enum": [1]}}, 2, 1),
    (TWO | {"not": {"required": ["a"]}}, {"b": 1}, {"a": 1}),
    (TWO | {"not": {"required": ["a", "b"]}}, {"b": 1}, {"a": 1, "b": 1}),
    ({"type": ["integer", "null"], "not": {"type": "null"}}, 1, None),
    (TWO | {"dependencies": {"a": {"required": ["b"]}}, "dependentRequired": {"b": ["a"]}}, {"a": 1, "b": 2}, {"b": 1}),
    ({"type": "array", "items": {"not": {"type": ["string", "null"]}}}, [1, {}], ["a"]),
    ({"not": {"type": "string", "description": "a text", "x-own": 1}}, 1, "a"),
    ({"not": False, "type": "null"}, None, 1),
    ({"enum": [[1], [True], {"a": True}], "not": {"enum": [[1], {"a": 1}]}}, [True], [1]),
    ({"enum": [[1], [True], {"a": True}], "not": {"enum": [[1], {"a": 1}]}}, {"a": True}, [1]),
    ({"not": {"anyOf": [{"type": "string"}, {"type": ["null", "array"]}]}}, 1, "a"),
    ({"anyOf": [WHOLE, {"not": {}}]}, 1, "a"), ({"anyOf": [WHOLE, {"not": {"title": "x"}}]}, 1, "a"),
    (WHOLE | {"not": {"const": 5}}, 6, 5), (WHOLE | {"not": {"const": 5.0}}, 4, 5),
    (WHOLE | {"not": {"const": ""}}, 0, ""),
    (WHOLE | {"not": {"enum": [5, 6, 8, 9.5, "a"]}, "minimum": 4}, 7, 8), (WHOLE | {"not": {"enum": [5, 6]}}, 7, 6),
    ({"type": "string", "not": {"const": ""}}, "a", ""),
    ({"type": "string", "minLength": 2, "not": {"enum": ["", 1]}}, "ab", "a"),
    ({"type": "number", "not": {"const": 5}}, 5.5, 5), ({"type": "number", "not": {"const": 5.0}}, -5, 5),
    ({"not": {"const": "ab"}}, "abc", "ab"), ({"type": "string", "not": {"const": 'a"b'}}, 'a"', 'a"b'),
    ({"type": "string", "not": {"enum": ["\\", '"', "\n"]}}, "n", "\\"),
    ({"not": {"enum": ["a", 1, None, True]}}, False, True), ({"not": {"enum": [{}, [1], []]}}, [2], [1]),
    ({"type": "object", "not": {"const": {"a": 1}}}, {"a": 1, "b": 2}, {"a": 1}),
    (WHOLE | {"enum": [1, 2.5], "not": {"minimum": 3}}, 1, 2.5),
    ({"type": "string", "enum": ["a", 1], "not": {"type": "object"}}, "a", 1),
    ({"anyOf": [WHOLE | {"enum": [1, 2.5], "not": {"minimum": 3}}, {"type": "null"}]}, None, 2.5),
    ({"type": "string", "not": {"pattern": "^[a-z]+$"}}, "a1", "az"), ({"not": {"pattern": '"'}}, "\\", 'a"'),
    ({"type": "string", "not": {"pattern": r"^\w{2,40}@x\.(de|org)$"}}, "a@x.de", "ab@x.org"),
    ({"type": "string", "not": {"pattern": r"^\S*$"}}, "a b", "ab"), ({"not": {"pattern": r"[^\s\w]"}}, "a b", "a-b"),
    ({"type": "string", "not": {"pattern": r"\s"}}, "ab", "a\tb"),
    ({"not": {"pattern": r"^[^\x00]*a[^\x00]*$"}}, "b", "a"),
    ({"anyOf": [{"not": {"pattern": r"^[\x00-\ud7ff]*$"}}, {"type": "null"}]}, None, "a"),
    ({"type": "string", "not": {"const": "\ud800"}}, "a", 1), ({"not": {"enum": ["\ud800", "a"]}}, "b", "a"),
    ({"not": {"minLength": 1.5}}, "a", "ab"), ({"not": {"maxLength": 1.5}}, "ab", "a"),
    ({"not": {"minItems": 1.5}}, [1], [1, 2]), ({"not": {"maxLength": -1.5}}, "", None),
    (OBJECT | {"properties": {str(n): {"type": "string", "not": {"pattern": r"^\s*$"}} for n in range(40)}},
     {"30": "a"}, {"30": " "}),
    (OBJECT | {"properties": {str(n): {"type": "string", "not": {"pattern": f"^{n}"}} for n in range(40)}},
     {"30": "a"}, {"30": "30"}),
    ({"type": "string", "not": {"maxLength": 2}}, "abc", "ab"), (WHOLE | {"not": {"minimum": 3}}, 2, 3),
    (WHOLE | {"not": {"anyOf": [{"maximum": 3}, {"const": 5}]}}, 4, 5),
    (WHOLE | {"not": {"allOf": [{"minimum": 3}, {"maximum": 5}]}}, 6, 5),
    (WHOLE | {"not": {"oneOf": [{"minimum": 3}, {"minimum": 5}]}}, 6, 4),
    ({"not": {"type": "object", "required": ["a"]}}, {"b": 1}, {"a": 1}), ({"not": {"minItems": 1}}, [], [1]),
    (OBJECT | {"not": {"properties": {"a": {"const": 1}}, "required": ["a"]}}, {"a": 2}, {"a": 1}),
    (OBJECT | {"not": {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}}, {"c": 1}, {"b": 1}),
    ({"not": {"type": "array", "contains": {"const": 1}}}, [2, "1"], [2, 1]),
    ({"not": {"not": {"type": ["string", "null"]}}}, None, 1),
    ({"anyOf": [{"not": {"additionalItems": False}}, {"type": "null"}]}, None, [1]),
    ({"type": "array", "not": {"prefixItems": [True], "items": False}}, [1, 2], [1]),
    ({"type": "array", "not": {"items": [True], "additionalItems": False}}, [1, 2], [1]),
    ({"not": {"$ref": "#/$defs/x"}, "$defs": {"x": {"type": "string", "minLength": 2}}}, "a", "ab"),
    (OBJECT | {"not": {"dependentRequired": {"a": ["b"]}}}, {"a": 1}, {"a": 1, "b": 1}),
    (OBJECT | {"if": {"properties": {"a": {"const": "x"}}, "required": ["a"]}, "then": {"required": ["b"]},
               "else": {"properties": {"a": {"type": "string"}}}}, {"a": "x", "b": 1}, {"a": "x"}),
    ({"type": "string", "pattern": '^[^"]$'}, "a", '"'), ({"type": "string", "pattern": r"^[^\\]$"}, '"', "\\"),
    ({"type": "string", "pattern": r"^\P{P}$"}, "a", '"'), ({"type": "string", "pattern": "^[^-]$"}, '"', '"a'),
    *[({"type": "string", "pattern": pattern}, "\x01", breaks) for breaks in ('"', "\\") for pattern in (
        r"^[\x00-\x1f]$", "^[\x00-\x1fa-z]*$", r"^[\u0000-!]$", "^[[:cntrl:]]$", r"^[]\x00-\x1f]$", r"^[[a]\x00-\x1f]$",
        r"^(?:[\x00-\x0f]|[\x10-\x1f])$", r"^(?:[\x01-\x1f]|[\x00\x02])$", r"^(?:[\x00-\x0f]|\p{Cc})$")],
    ({"type": "string", "pattern": "^[^a]$"}, "\x00", "a"), ({"type": "string", "pattern": r"^\x00$"}, "\x00", '"'),
    (OBJECT | {"patternProperties": {'^[^"]$': WHOLE}, "additionalProperties": False}, {"a": 1}, {'"': 1}),
    (TWO | {"maxProperties": 1}, {"b": 1}, {"a": 1, "b": 2}), (TWO | {"maxProperties": 2}, {"a": 1, "b": 2}, {"c": 1}),
    (TWO | {"minProperties": 1, "maxProperties": 1}, {"b": 1}, {}),
    (TWO | {"minProperties": 1, "maxProperties": 2}, {"b": 1}, {}),
    (TWO | {"minProperties": 1}, {"b": 1}, {}), (TWO | {"minProperties": 1, "required": ["a"]}, {"a": 1}, {"b": 1}),
    (TWO | {"required": ["a", "b"], "maxProperties": 2}, {"a": 1, "b": 2}, {"a": 1}),
    (WHOLE | {"minimum": 3, "exclusiveMinimum": True}, 4, 3), (WHOLE | {"maximum": 3, "exclusiveMaximum": True}, 2, 3),
    (OBJECT | {"properties": {"a": {"not": {"type": "null"}}, "b": {"$ref": "#/properties/a/not"}}},
     {"b": None}, {"b": 1}),
    (OBJECT | {"properties": {"a": {"not": {"$anchor": "x", "type": "null"}}, "b": {"$ref": "#x"}}},
     {"b": None}, {"b": 1}),
    (OBJECT | {"properties": {"a": {"$ref": "#/if"}, "b": {"$ref": "#/then/properties/not"}},
               "if": {"required": ["a"]}, "then": {"properties": {"not": {"const": 5}}}},
     {"a": {"a": {}}, "b": 5}, {"b": 6}),
    (OBJECT | {"properties": {"a": {"$ref": "#/propertyNames"}, "not": WHOLE, "b": {"$ref": "#/properties/not"}},
               "propertyNames": {"type": "string", "maxLength": 3}}, {"a": "a", "b": 1}, {"a": 1}),
    (OBJECT | {"properties": {
        "a": {"not": {"properties": {"b": {"$ref": "#/properties/a/not/properties/c"}, "c": {"type": "string"}},
                      "required": ["b"]}}, "d": {"$ref": "#/properties/a/not"}}}, {"d": {"b": "x"}}, {"d": {"b": 1}}),
    (OBJECT | {"properties": {"a": {"$ref": "#/dependentSchemas/x~1 ~0%25"}},
               "dependentSchemas": {"x/ ~%": {"type": ["object", "null"]}}}, {"a": None}, {"a": 1}),
    ({"$ref": "#foo", "$defs": {"x": {"$anchor": "foo", "type": "integer"}}}, 1, "a"),
    ({"type": "object", "properties": {"next": {"$ref": "#node"}}, "required": ["next"], "additionalProperties": False,
      "$defs": {"x": {"$anchor": "node", "type": ["integer", "null"]}}}, {"next": 1}, {"next": {}}),
    ({"$ref": "#/components/schemas/a", "components": {"schemas": {"a": {
        "type": "array", "items": WHOLE, "uniqueItems": True}}}}, [1], ["a"]),
])
def test_what_is_written_in_other_keywords_is_kept(schema: Any, fits: Any, breaks: Any) -> None:
    assert allows(schema, fits) and not allows(schema, breaks)


def test_a_keywords_name_may_be_a_propertys() -> None:
    schema = {"type": "object", "properties": {"not": {"type": "string"}, "uniqueItems": WHOLE, "format": WHOLE},
              "required": ["not", "uniqueItems", "format"], "additionalProperties": False}
    assert allows(schema, {"not": "a", "uniqueItems": 1, "format": 2})
    assert allows({"const": {"format": "x", "uniqueItems": True}}, {"format": "x", "uniqueItems": True})


class Person(pydantic.BaseModel):
    tags: set[str]
    home: Path
    secret: pydantic.SecretStr
    id: pydantic.UUID4


def test_what_pydantic_writes_can_be_used() -> None:
    value = {"tags": ["a"], "home": "/home/ada", "secret": "x", "id": str(uuid.UUID(int=5, version=4))}
    assert allows(Person.model_json_schema(), value)
    assert not allows(Person.model_json_schema(), value | {"id": "5"})
    Person.model_validate(value)


def test_indents_of_four_are_allowed_to_any_depth() -> None:
    value: Any = 1
    for _ in range(30):
        value = {"a": [value]}
    nested = {"type": "array", "items": {"anyOf": [{"$ref": "#"}, WHOLE]}}
    deep: Any = WHOLE
    lists: Any = 1
    for _ in range(12):
        deep, lists = {"type": "array", "items": deep}, [lists]
    pair = {"type": "array", "items": [WHOLE]}
    for schema, wanted in ((OBJECT, value), (nested, lists), (deep, lists), (pair, [1, lists]),
                           (pair | {"additionalItems": deep}, [1, lists])):
        assert allows(schema, wanted, indent=4) and allows(schema, wanted, indent=2)
    assert not allows(deep, lists, indent=40), "blanks are bounded"


@pytest.mark.parametrize(("kind", "fits", "breaks"), [
    ("date", ["2026-12-31", "0001-01-01", "2024-02-29", "2000-02-29", "0004-02-29", "2023-02-28", "2026-10-31"],
     ["0000-01-01", "2026-13-01", "2023-02-30", "2023-02-29", "1900-02-29", "2100-02-29", "0000-02-29", "2024-02-30",
      "2026-04-31"]),
    ("time", ["23:59:59Z", "10:00:00.5+02:00"], ["23:59:60Z", "24:00:00Z"]),
    ("date-time", ["2026-12-31T23:59:59Z", "2024-02-29T00:00:00Z", "0400-01-01T00:00:00+01:00"],
     ["0000-01-01T00:00:00Z", "2026-01-01T00:00:60Z", "2023-02-29T00:00:00Z"])])
def test_times_are_such_as_clients_can_read(kind: str, fits: list[str], breaks: list[str]) -> None:
    for schema in ({"format": kind}, {"type": "string", "format": kind, "pattern": ":|-"}):
        assert all(allows(schema, text) for text in fits)
        assert not any(allows(schema, text) for text in breaks)
    assert allows({"format": kind}, 1), "of other types a format says nothing"


ENDLESS = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"], "additionalProperties": False}
PRIMES = (7, 11, 13, 17, 19, 23)


@pytest.mark.parametrize("schema", [
    ENDLESS, {"type": "array", "items": {"$ref": "#"}, "minItems": 1}, {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {
        "a": {"type": "array", "prefixItems": [WHOLE, {"$ref": "#/$defs/b"}], "minItems": 2},
        "b": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}}},
    {"type": "object", "properties": {"a": WHOLE, "b": ENDLESS | {"properties": {"next": {"$ref": "#/properties/b"}}}},
     "required": ["b"]},
])
def test_a_schema_whose_texts_have_no_end_is_refused(schema: Any) -> None:
    with pytest.raises(GrammarError, match="no text has an end"):
        allows(schema, 1)


@pytest.mark.parametrize(("schema", "fits"), [
    (ENDLESS | {"required": []}, {"next": {}}), (ENDLESS | {"properties": {"next": {"anyOf": [
        {"$ref": "#"}, {"type": "null"}]}}}, {"next": {"next": None}}),
    ({"type": "array", "items": {"$ref": "#"}, "minItems": 0}, [[]]),
    (ENDLESS | {"type": ["object", "null"]}, {"next": None}), (ENDLESS | {"enum": [{"next": 1}]}, {"next": 1}),
])
def test_a_schema_that_holds_itself_may_have_an_end(schema: Any, fits: Any) -> None:
    try:
        assert allows(schema, fits)
    except GrammarError as problem:
        assert "no text has an end" not in str(problem)


@pytest.mark.parametrize("wish", [
    {"json_schema": WHOLE | {"multipleOf": 1000003}},
    {"json_schema": {"allOf": [WHOLE | {"multipleOf": prime} for prime in PRIMES]}},
    {"grammar": 'start: "a" b\nb: %json {"multipleOf": 99999989}\n'},
])
def test_multiples_that_would_take_gigabytes_are_refused_at_once(wish: dict[str, Any]) -> None:
    with pytest.raises(GrammarError, match="multipleOf"):
        structure_of(SamplingParams(**wish))


@pytest.mark.parametrize("step", [0.01, 1e-9, 60, 86400, 1000000, 3600000, 0.25, 1e300])
def test_usual_multiples_are_not(step: float) -> None:
    assert structure_of(SamplingParams(json_schema={"items": {"multipleOf": step}, "maximum": 5})) is not None


@pytest.mark.parametrize(("schema", "reason"), [
    (TWO | {"minProperties": 2}, "min/maxProperties only"), (TWO | {"maxProperties": 0}, "min/maxProperties only"),
    (OBJECT | {"patternProperties": {"^a": WHOLE, "b$": {"type": "string"}}}, "not disjoint"),
    ({"$ref": "https://example.org/a.json"}, "not present"),
    ({"type": "array", "not": {"uniqueItems": True}}, "not"),
    ({"not": {"format": "date"}}, "not cannot be enforced of .*format"),
    ({"not": {"type": "integer"}}, "not cannot be enforced of .*integer"),
    ({"not": {"multipleOf": 3}}, "not cannot be enforced of .*multipleOf"),
    ({"not": {"items": WHOLE}}, "not cannot be enforced of .*items"),
    ({"not": {"additionalProperties": False}}, "not cannot be enforced of .*additionalProperties"),
    ({"not": {"pattern": "(?=a)"}}, r"not cannot be enforced of .*the pattern \(\?=a\)"),
    ({"type": "string", "not": {"pattern": r"^[^\x00]*$"}}, "not cannot be enforced of the pattern"),
    ({"not": {"pattern": "\ud800"}}, "not cannot be enforced of the pattern"),
    ({"not": {"pattern": r"\ud800"}}, "not cannot be enforced of the pattern"),
    ({"not": {"pattern": "a{2,1}"}}, "not cannot be enforced of the pattern"),
    ({"not": {"type": "foo"}}, "not cannot be enforced of the type foo"),
    ({"not": {"const": "x" * 101}}, "not cannot be enforced of .*texts of such a length"),
    ({"not": {"$ref": "#/$defs/x"}, "$defs": {"x": {"properties": {"a": {"$ref": "#/$defs/x"}}}}},
     r"not cannot be enforced of .*\$ref"),
    ({"not": {"anyOf": [{"enum": [n, str(n)]} for n in range(2500)]}}, "not cannot be enforced of .*many parts"),
    ({"if": WHOLE, "then": {"minimum": 3}}, "not cannot be enforced of .*integer"),
    ({"type": "string", "pattern": r"(a)\1"}, "backreferences"),
    ({"oneOf": [WHOLE, {"type": "number"}]}, "two branches of its oneOf"),
    ({"type": "string", "pattern": r"^(\x00|[\x01-\x1f])$"}, "the NUL beside alternatives"),
    ({"type": "string", "pattern": r"(?sx) \[ [\x00] # ["}, "the flag x"),
    ({"type": "string", "pattern": "(?=a)b"}, "look-around"), ({"type": "string", "pattern": "("}, "unclosed group"),
    (functools.reduce(lambda inner, _: {"anyOf": [inner]}, range(150), WHOLE), "nested too deeply"),
    (functools.reduce(lambda inner, _: {"anyOf": [inner]}, range(500), WHOLE), "nested too deeply"),
])
def test_a_refusal_says_why(schema: Any, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason) as refused:
        allows(schema, 1)
    assert "coerce" not in str(refused.value), "options of the library's are none of a client's"
