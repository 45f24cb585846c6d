"""JSON schemas drawn by a seed, from all that is enforced, and how a model without preferences writes by them."""

from __future__ import annotations

import datetime
import functools
import json
import random
from decimal import Decimal, InvalidOperation
from typing import Any

import jsonschema

from paceline.grammar.library import Library
from paceline.grammar.schemas import KNOWN_FORMATS
from paceline.grammar.vocabulary import Vocabulary

Schema = dict[str, Any]
DEEPEST = 4
LONG = 160
"""Bytes after which a text is brought to an end."""
MOST = 1200
IN_STRING = 40
"""Where more bytes than these may follow, it is most likely in a string."""
NAMES = ("id", "name", "größe", "a b", 'quo"te', "tags", "x", "$ref", "items", "~/")
WORDS = ("red", "", "ü🙂", 'quo"te', "back\\slash", "line\nbreak", "{}", "null")
PATTERNS = ("^[a-z]{2}\\d$", "^(yes|no)$", "b+", "^[^\"\\\\]{0,5}$", "^\\w+@x\\.(de|org)$", "[äö]$", "^/?$")

FORMATS = jsonschema.FormatChecker(("email", "ipv4", "ipv6", "uuid"))


@FORMATS.checks("date", ValueError)
def _is_date(text: object) -> bool:
    return not isinstance(text, str) or bool(datetime.date.fromisoformat(text))


@FORMATS.checks("time", ValueError)
def _is_time(text: object) -> bool:
    return not isinstance(text, str) or datetime.time.fromisoformat(text.upper()).tzinfo is not None


@FORMATS.checks("date-time", ValueError)
def _is_date_time(text: object) -> bool:
    return not isinstance(text, str) or datetime.datetime.fromisoformat(text.upper()).tzinfo is not None


class Drawn:
    """One schema. Older drafts say some things in other words."""

    def __init__(self, seed: int) -> None:
        self._luck = random.Random(seed)
        self._old = self._luck.random() < 0.3
        self._defs: dict[str, Schema] = {}
        self.schema = self._any(0)
        if self._defs:
            self.schema = self.schema | {"definitions" if self._old else "$defs": self._defs}
        if self._luck.random() < 0.2:
            self.schema |= {"title": "T", "description": "what it is", "x-own": {"a": 1}}

    @property
    def validator(self) -> Any:
        kind = jsonschema.Draft7Validator if self._old else jsonschema.Draft202012Validator
        kind.check_schema(self.schema)
        exact = json.loads(json.dumps(self.schema), parse_float=Decimal)
        return kind(exact, format_checker=FORMATS)

    def _some(self, chance: float) -> bool:
        return self._luck.random() < chance

    def _any(self, depth: int) -> Schema:
        simple = [self._string, self._integer, self._number, self._value, self._types]
        nested = [self._object, self._object, self._array, self._any_of, self._all_of, self._one_of, self._ref,
                  self._without, self._conditional]
        choice = self._luck.choice(simple if depth >= DEEPEST else simple + nested if depth else nested)
        return choice(depth)

    def _string(self, depth: int) -> Schema:
        how = self._luck.randrange(4)
        if how == 0:
            return {"type": "string", "pattern": self._luck.choice(PATTERNS)}
        if how == 1:
            return {"type": "string", "format": self._luck.choice(sorted(KNOWN_FORMATS))}
        least = self._luck.randrange(5)
        return {"type": "string"} | ({"minLength": least} if self._some(0.5) else {}) | (
            {"maxLength": least + self._luck.randrange(9)} if self._some(0.7) else {})

    def _integer(self, depth: int) -> Schema:
        low = self._luck.randrange(-500, 500)
        bounds: Schema = {}
        if self._some(0.6):
            bounds[self._luck.choice(["minimum", "exclusiveMinimum"])] = low
        if self._some(0.6):
            bounds[self._luck.choice(["maximum", "exclusiveMaximum"])] = low + self._luck.randrange(40, 2000)
        if self._some(0.4):
            bounds["multipleOf"] = self._luck.choice([2, 3, 5, 7, 10, 15])
        return {"type": "integer"} | bounds

    def _number(self, depth: int) -> Schema:
        low = self._luck.randrange(-5000, 5000) / 100
        bounds: Schema = {}
        if self._some(0.5):
            bounds[self._luck.choice(["minimum", "exclusiveMinimum"])] = low
        if self._some(0.5):
            bounds[self._luck.choice(["maximum", "exclusiveMaximum"])] = low + self._luck.randrange(200, 9000) / 100
        if self._some(0.3):
            bounds["multipleOf"] = self._luck.choice([0.01, 0.25, 0.5, 1.5, 0.1])
        return {"type": "number"} | bounds

    def _value(self, depth: int) -> Schema:
        values = [1, 0, -7, 2.5, True, False, None, [1, "a"], {"a": {"b": []}}, *WORDS]
        if self._some(0.3):
            return {"const": self._luck.choice(values)}
        return {"enum": self._luck.sample(values, self._luck.randrange(1, 6))}

    def _types(self, depth: int) -> Schema:
        kinds = ["null", "boolean", "string", "number", "integer", "array", "object"]
        if self._some(0.4):
            return {"type": self._luck.choice(kinds[:2])}
        if self._some(0.3):
            return {"type": kinds[:4], "not": {"type": self._luck.choice(["string", "null"])}}
        return {"type": sorted(self._luck.sample(kinds, self._luck.randrange(2, 4)))}

    def _object(self, depth: int) -> Schema:
        names = self._luck.sample(NAMES, self._luck.randrange(5))
        required = [name for name in names if self._some(0.5)]
        made: Schema = {"type": "object", "properties": {name: self._any(depth + 1) for name in names}}
        if required or self._some(0.3):
            made["required"] = required
        rest = self._luck.randrange(5)
        if rest < 2:
            made["additionalProperties"] = False
        elif rest == 2:
            made["additionalProperties"] = self._any(max(depth + 1, DEEPEST))
        elif rest == 3 and "x" not in names:
            made["patternProperties"] = {"^x_": self._any(DEEPEST)}
        if len(required) == len(names) and made.get("additionalProperties") is not False and self._some(0.5):
            made["minProperties"] = len(names) + self._luck.randrange(2)
            made["maxProperties"] = len(names) + self._luck.randrange(1, 3)
        elif len(names) > 1 and self._some(0.3):
            made |= self._dependent(names[0], names[1])
        return made

    def _dependent(self, one: str, other: str) -> Schema:
        if self._some(0.3):
            return {"not": {"required": [one, other]}}
        if self._some(0.5):
            return {"dependencies" if self._old else "dependentRequired": {one: [other]}}
        return {"dependencies" if self._old else "dependentSchemas": {one: {"required": [other]}}}

    def _array(self, depth: int) -> Schema:
        made: Schema = {"type": "array"}
        least = self._luck.randrange(3)
        if self._some(0.35):
            first = [self._any(depth + 1) for _ in range(self._luck.randrange(1, 4))]
            rest = self._luck.choice([False, self._any(max(depth + 1, DEEPEST))])
            made |= {"items": first, "additionalItems": rest} if self._old else {"prefixItems": first, "items": rest}
            least, most = min(least, len(first)), len(first) if rest is False else len(first) + 2
        else:
            made["items"] = self._any(depth + 1)
            most = least + self._luck.randrange(4)
        if self._some(0.6):
            made["minItems"] = least
        if self._some(0.6):
            made["maxItems"] = max(most, least)
        return made

    def _any_of(self, depth: int) -> Schema:
        return {"anyOf": [self._any(depth + 1) for _ in range(self._luck.randrange(1, 4))]}

    def _all_of(self, depth: int) -> Schema:
        """A base, and what is said of it further."""
        if self._some(0.5):
            return {"allOf": [self._integer(depth), {"maximum": 3000, "minimum": -3000}]}
        own, further = self._any(depth + 1), self._any(depth + 1)
        return {"allOf": [{"type": "object", "properties": {"left": own}, "required": ["left"]},
                          {"type": "object", "properties": {"right": further}, "required": ["right"]}]}

    def _one_of(self, depth: int) -> Schema:
        if self._some(0.5):
            return {"oneOf": [self._integer(depth), self._string(depth), {"type": "null"}]}
        return {"oneOf": [{"type": "object", "properties": {"kind": {"const": kind}, "of": self._any(depth + 1)},
                           "required": ["kind"], "additionalProperties": False} for kind in ("a", "b", "c")]}

    def _ref(self, depth: int) -> Schema:
        where = "definitions" if self._old else "$defs"
        if not self._defs or self._some(0.4):
            name = f"part{len(self._defs)}"
            self._defs[name] = {}
            again = {"$ref": f"#/{where}/{name}"}
            self._defs[name] = self._any(depth + 1) if self._some(0.5) else {
                "type": "object", "properties": {"value": self._any(max(depth + 1, DEEPEST)), "more": {
                    "type": "array", "items": again, "maxItems": 2}}, "required": ["value"],
                "additionalProperties": False}
            return again
        return {"$ref": f"#/{where}/{self._luck.choice(sorted(self._defs))}"}

    def _conditional(self, depth: int) -> Schema:
        kind = {"properties": {"kind": {"const": "a"}}, "required": ["kind"]}
        return {"type": "object", "properties": {"kind": {"enum": ["a", "b"]}, "x": self._any(depth + 1)},
                "if": kind, "then": {"required": ["x"]}, "else": {"properties": {"x": {"type": "null"}}}}

    def _without(self, depth: int) -> Schema:
        some = self._luck.sample([*WORDS, 1, 2.5, None, True], self._luck.randrange(1, 4))
        return self._luck.choice([
            {"not": {"enum": some}}, {"type": "string", "not": {"enum": some}},
            {"type": "number", "not": {"enum": some}},
            {"type": "string", "not": {"pattern": self._luck.choice(PATTERNS)}},
            {"not": {"anyOf": [{"type": "number", "minimum": 5}, {"type": "string", "maxLength": 3},
                                {"type": "array"}]}},
            {"enum": ["a", "b", 1, True, None], "not": {"enum": ["a", 1]}}, {"not": {"type": ["object", "array"]}},
            {"enum": [[1], [True]], "not": {"const": [True]}}])


@functools.cache
def library() -> Library:
    """Each byte is a token."""
    return Library(Vocabulary([bytes([n]) for n in range(256)], lambda text: list(text.encode())))


def allowed(matcher: Any) -> list[int]:
    """The bytes that may follow."""
    mask = matcher.compute_bitmask()
    return [byte for byte in range(256) if mask[byte >> 3] >> (byte & 7) & 1]


def chosen(luck: random.Random, options: list[int], written: int) -> int:
    """One of them: what is seldom in JSON is seldom chosen, and in the end what closes something comes first."""
    if written > LONG:
        closing = b'"' if len(options) > IN_STRING else b'}]"'
        return next((byte for byte in closing if byte in options), None) or luck.choice(
            [byte for byte in options if byte > 32] or options)
    usual = [byte for byte in options if 32 < byte < 127 and byte != 92]
    return luck.choice(usual if usual and luck.random() < 0.93 else options)


def exactly(number: str) -> Decimal | float:
    try:
        return Decimal(number)
    except InvalidOperation:  # an exponent of a length that JSON allows
        return float(number)
