"""The outside of a schema: what does not fit it, in the keywords that grammars are made of (`not` is none of them)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, pairwise
from math import ceil, floor
from typing import Any, Final

from paceline.grammar.beyond import other_texts, texts_beyond
from paceline.grammar.conditions import without_conditions
from paceline.grammar.expressions import TooComplexError
from paceline.grammar.formats import KNOWN_FORMATS, SAME_FORMATS
from paceline.grammar.values import is_number, kind_of

Schema = dict[str, Any]
Outsides = dict[str, list[Schema]]
"""By type: alternatives that all lie outside. [{}]: every value of the type does; none: no value."""
KINDS: Final = ("null", "boolean", "object", "array", "number", "string")
MOST_PARTS: Final = 2000
"""Parts that are turned round for one schema: by De Morgan's laws they may be many more than were written."""
STEPS: Final = 40
"""Steps of turning a pattern round that count as a part."""


class UnsayableError(Exception):
    """Its text names the keyword whose outside no grammar has."""


class Outside:
    """`resolve` finds what a $ref stands for."""

    def __init__(self, resolve: Callable[[Any], Any]) -> None:
        self._resolve = resolve
        self._inside: list[Any] = []
        self._left = MOST_PARTS
        self._patterns: dict[str, str | None] = {}

    def of(self, schema: Any, kinds: Sequence[str] = KINDS) -> Any:
        """A schema of the values of `kinds` that do not fit `schema`: True, False or an object. Raises an
        UnsayableError."""
        found = self._of(schema, kinds)
        whole = [kind for kind in kinds if {} in found[kind]]
        if len(whole) == len(KINDS):
            return True
        branches: list[Schema] = [{"type": whole[0] if len(whole) == 1 else whole}] if whole else []
        branches += [{"type": kind} | one for kind in kinds if kind not in whole for one in found[kind]]
        return (branches[0] if len(branches) == 1 else {"anyOf": branches}) if branches else False

    def _of(self, schema: Any, kinds: Sequence[str]) -> Outsides:
        self._spend(1)
        if not isinstance(schema, Mapping):
            return {kind: [] if schema is True else [{}] for kind in kinds}
        schema = without_conditions(dict(schema))
        found: Outsides = {kind: [] for kind in kinds}
        if "type" in schema:
            found, kinds = _other_types(schema["type"], kinds), _within(schema["type"], kinds)
        for name, value in schema.items():
            for kind, more in self._keyword(name, value, schema, kinds).items():
                found[kind] = [{}] if {} in found[kind] + more else found[kind] + more
        return found

    def _spend(self, parts: int) -> None:
        self._left -= parts
        if self._left < 0:
            raise UnsayableError("so many parts")

    def _keyword(self, name: str, value: Any, schema: Mapping[str, Any], kinds: Sequence[str]) -> Outsides:
        """What breaks this keyword, whatever the others say."""
        if name in ("const", "enum"):
            return self._other_values([value] if name == "const" else value, kinds)
        if name == "not":
            own = _within(value["type"], kinds) if isinstance(value, Mapping) and "type" in value else kinds
            return {kind: [{"allOf": [value]}] if isinstance(value, Mapping) else [{}] for kind in own
                    if value is not False}
        if name == "allOf":
            return _either([self._of(one, kinds) for one in value], kinds)
        if name == "anyOf":
            return _all([self._of(one, kinds) for one in value], kinds)
        if name == "oneOf":
            none = _all([self._of(one, kinds) for one in value], kinds)
            self._spend(len(value) ** 2)
            two: Outsides = {kind: [{"allOf": [*pair]} for pair in combinations(value, 2)] for kind in kinds}
            return _either([none, two], kinds)
        if name in _REFUSED:
            raise UnsayableError(name)
        if name == "$ref":
            return self._reference(value, schema, kinds)
        for kind, one in self._of_one_kind(name, value, schema):
            if kind in kinds:
                return {kind: one()}
        return {}

    def _of_one_kind(self, name: str, value: Any,
                     schema: Mapping[str, Any]) -> list[tuple[str, Callable[[], list[Schema]]]]:
        """The types that the keyword says something of, with what breaks it there."""
        if name in _NUMBERS:
            other = _other_bound(name, value, schema)
            return [(kind, lambda: _said(name, other)) for kind in ("number", "integer")]
        if name in ("minLength", "minItems", "minProperties"):
            return [(_COUNTED[name[3:]], lambda: [{"max" + name[3:]: ceil(value) - 1}] if value > 0 else [])]
        if name in ("maxLength", "maxItems", "maxProperties"):
            return [(_COUNTED[name[3:]], lambda: [{"min" + name[3:]: max(0, floor(value) + 1)}])]
        if name == "pattern":
            return [("string", lambda: self._other_texts(value))]
        if name == "required":
            return [("object", lambda: [{"properties": {key: False}} for key in value])]
        if name == "properties":
            return [("object", lambda: [{"properties": {key: outer}, "required": [key]}
                                        for key, one in value.items() if (outer := self.of(one)) is not False])]
        if name in ("prefixItems", "items") and isinstance(value, list):
            return [("array", lambda: [{"prefixItems": [*[True] * place, outer], "minItems": place + 1}
                                       for place, one in enumerate(value) if (outer := self.of(one)) is not False])]
        if name in ("items", "additionalItems"):
            return [("array", lambda: self._rest_of_items(name, value, schema))]
        if name == "contains":
            return [("array", lambda: self._none_contained(value, schema))]
        if name in _UNSAYABLE and not _says_nothing(name, value):
            return [(_UNSAYABLE[name], lambda: _said(name, None))]
        return []

    def _rest_of_items(self, name: str, value: Any, schema: Mapping[str, Any]) -> list[Schema]:
        """One item more than are listed; that some item of many is another, nothing can say."""
        listed = schema.get("items") if name == "additionalItems" else schema.get("prefixItems", [])
        if _says_nothing(name, value) or not isinstance(listed, list):
            return []
        return [{"minItems": len(listed) + 1}] if value is False else _said(name, None)

    def _none_contained(self, value: Any, schema: Mapping[str, Any]) -> list[Schema]:
        if schema.get("minContains", 1) != 1 or "maxContains" in schema:
            raise UnsayableError("contains")
        return [{"items": self.of(value)}]

    def _other_texts(self, pattern: str) -> list[Schema]:
        if pattern not in self._patterns:
            try:
                self._patterns[pattern], steps = other_texts(pattern)
            except TooComplexError:
                raise UnsayableError(f"the pattern {pattern}") from None
            self._spend(ceil(steps / STEPS))
        beyond = self._patterns[pattern]
        return [] if beyond is None else [{"pattern": beyond}]

    def _reference(self, pointer: Any, schema: Mapping[str, Any], kinds: Sequence[str]) -> Outsides:
        target = self._resolve(pointer)
        beside = schema.keys() - {"$ref", "title", "description", "$defs", "definitions"}
        if target is None or beside or any(target is one for one in self._inside):
            raise UnsayableError("$ref")  # what stands beside it counts in new drafts alone
        self._inside.append(target)
        found = self._of(target, kinds)
        self._inside.pop()
        return found

    def _other_values(self, values: Sequence[Any], kinds: Sequence[str]) -> Outsides:
        numbers = sorted(one for one in values if is_number(one))
        texts = [one for one in values if isinstance(one, str)]
        found: Outsides = {}
        for kind in kinds:
            own = [one for one in values if kind_of(one) == kind]
            if kind in ("number", "integer"):
                found[kind] = _gaps(numbers, kind)
            elif kind == "string":
                found[kind] = _beside_texts(texts)
            elif kind == "boolean":
                other = [one for one in (True, False) if not any(one is gone for gone in own)]
                found[kind] = [{}] if len(other) == 2 else [{"enum": other}] if other else []
            elif kind == "null":
                found[kind] = [] if own else [{}]
            else:
                spelled = _spelled_array if kind == "array" else _spelled_object
                found |= _all([self._of(spelled(one), [kind]) for one in own], [kind])
        return found


_NUMBERS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_COUNTED: Final = {"Length": "string", "Items": "array", "Properties": "object"}
_UNSAYABLE: Final = {
    "format": "string", "additionalProperties": "object", "patternProperties": "object", "propertyNames": "object",
    "uniqueItems": "array"}
"""Keywords without an outside that a grammar could keep, and the type they speak of."""
_REFUSED: Final = ("unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef")


def _says_nothing(name: str, value: Any) -> bool:
    if name == "format":
        return SAME_FORMATS.get(value, value) not in KNOWN_FORMATS
    return value is (name != "uniqueItems") or (isinstance(value, Mapping) and not value)


def _said(name: str, other: list[Schema] | None) -> list[Schema]:
    if other is None:
        raise UnsayableError(name)
    return other


def _either(parts: Sequence[Outsides], kinds: Sequence[str]) -> Outsides:
    joined = {kind: [one for part in parts for one in part.get(kind, [])] for kind in kinds}
    return {kind: [{}] if {} in found else found for kind, found in joined.items()}


def _all(parts: Sequence[Outsides], kinds: Sequence[str]) -> Outsides:
    return {kind: _meet([part.get(kind, []) for part in parts]) for kind in kinds}


def _meet(parts: Sequence[list[Schema]]) -> list[Schema]:
    """Alternatives that lie in one of each of these."""
    if not all(parts):
        return []
    limits = [part for part in parts if {} not in part]
    if len(limits) < 2:
        return limits[0] if limits else [{}]
    return [{"allOf": [part[0] if len(part) == 1 else {"anyOf": part} for part in limits]}]


def _named(types: Any) -> list[str]:
    named = [types] if isinstance(types, str) else list(types)
    for one in named:
        if one not in (*KINDS, "integer"):
            raise UnsayableError(f"the type {one}")
    return named


def _within(types: Any, kinds: Sequence[str]) -> list[str]:
    """The kinds of which some values have one of these types."""
    named = _named(types)
    return [kind for kind in kinds if kind in named or (kind == "integer" and "number" in named)
            or (kind == "number" and "integer" in named)]


def _other_types(types: Any, kinds: Sequence[str]) -> Outsides:
    named = _named(types)
    if "number" in kinds and "integer" in named and "number" not in named:
        raise UnsayableError("the type integer (fractions alone are no type)")
    own = _within(types, kinds)
    return {kind: [] if kind in own else [{}] for kind in kinds}


def _other_bound(name: str, value: Any, schema: Mapping[str, Any]) -> list[Schema] | None:
    """Draft 4's exclusiveMinimum is a boolean, and says something of the minimum."""
    if isinstance(value, bool):
        return []
    strict = schema.get("exclusive" + name.capitalize()) is True
    return {"minimum": [{"maximum" if strict else "exclusiveMaximum": value}],
            "maximum": [{"minimum" if strict else "exclusiveMinimum": value}],
            "exclusiveMinimum": [{"maximum": value}], "exclusiveMaximum": [{"minimum": value}]}.get(name)


def _gaps(numbers: Sequence[Any], kind: str) -> list[Schema]:
    """The ranges between sorted numbers. Of integers, closed ones, so that none of them is empty."""
    if kind == "integer":
        numbers = [int(one) for one in numbers if one == one // 1]
    if not numbers:
        return [{}]
    if kind == "number":
        inner = [{"exclusiveMinimum": low, "exclusiveMaximum": high} for low, high in pairwise(numbers) if low != high]
        return [{"exclusiveMaximum": numbers[0]}, *inner, {"exclusiveMinimum": numbers[-1]}]
    inner = [{"minimum": low + 1, "maximum": high - 1} for low, high in pairwise(numbers) if high - low > 1]
    return [{"maximum": numbers[0] - 1}, *inner, {"minimum": numbers[-1] + 1}]


def _beside_texts(texts: Sequence[str]) -> list[Schema]:
    if not texts:
        return [{}]
    if [*texts] == [""]:
        return [{"minLength": 1}]
    try:
        return [{"pattern": texts_beyond(texts)}]
    except TooComplexError:
        raise UnsayableError("texts of such a length") from None


def _spelled_array(value: Sequence[Any]) -> Schema:
    return {"prefixItems": [{"const": one} for one in value], "minItems": len(value), "maxItems": len(value)}


def _spelled_object(value: Mapping[str, Any]) -> Schema:
    return {"properties": {key: {"const": one} for key, one in value.items()}, "required": [*value],
            "maxProperties": len(value)}
