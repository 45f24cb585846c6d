"""JSON schemas as grammars can keep them: what is enforced, what is an annotation, what is refused.

Keywords that say nothing a mask could keep are left out (lenient) or refused (strict); some that the library does not
know are written in others that it does. What is left, and not known, the library refuses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any
from urllib.parse import unquote

from paceline.errors import GrammarError

KNOWN_FORMATS = frozenset((
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"))
"""Others say what a text is for, and are annotations."""
SAME_FORMATS = {f"uuid{version}": "uuid" for version in range(1, 9)}
_YEAR, _CLOCK = r"([1-9]\d{3}|0[1-9]\d\d|00[1-9]\d|000[1-9])-", r"\d\d:\d\d:[0-5]"
FORMAT_PATTERNS = {"date": f"^{_YEAR}", "time": f"^{_CLOCK}", "date-time": f"^{_YEAR}.{{6}}{_CLOCK}"}
"""What clients can read of a format: calendars begin with the year 1, and a minute has sixty seconds."""
ANNOTATIONS = ("uniqueItems", "propertyNames")
"""What a grammar cannot keep, and texts mostly keep by themselves: ignored, or refused where a schema is strict."""
KEYWORDS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("type", "enum", "const", "properties", "required", "additionalProperties",
                     "items", "prefixItems", "additionalItems", "minItems", "maxItems", "minLength", "maxLength",
                     "minimum", "maximum", "multipleOf", "anyOf", "allOf", "$defs", "definitions"), ("enforced", "")),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), ("enforced", "Draft 4's `true` and `false`, too")),
    "pattern": ("enforced", "Rust's syntax: no look-around, no back-references; else refused"),
    "patternProperties": ("enforced", "where no name can match two of its patterns, else refused"),
    "$ref": ("enforced", "within the schema, by path or `$anchor`; else refused"),
    **dict.fromkeys(("minProperties", "maxProperties"), (
        "enforced", "where all that are listed are required; where no others are allowed, also a least of 1 and a most "
                    "of 1, or of all that are listed; else refused")),
    "format": ("enforced", "those below; any other is an annotation"),
    "oneOf": ("enforced", "where its branches are provably apart, else refused"),
    "not": ("enforced", "of types, also by `anyOf`, of values beside `enum` or of integers, of `\"\"`, of required "
                        "properties; else refused"),
    "dependencies": ("enforced", "written as `anyOf`"),
    "dependentRequired": ("enforced", "written as `anyOf`"),
    "dependentSchemas": ("enforced", "written as `anyOf`"),
    **dict.fromkeys(ANNOTATIONS, ("annotation", "refused with `strict_schema`")),
    **dict.fromkeys(("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment",
                     "$id", "$schema", "$vocabulary", "$anchor", "contentEncoding", "contentMediaType",
                     "contentSchema", "discriminator"), ("annotation", "")),
    **dict.fromkeys(("if", "then", "else", "contains", "minContains", "maxContains", "unevaluatedProperties",
                     "unevaluatedItems", "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"),
                    ("refused", "")),
}
"""(what becomes of it, when); docs/structured-output.md has them as a table. Keywords that nobody knows are ignored."""

_ONE = ("additionalProperties", "additionalItems", "items", "not", "if", "then", "else", "contains", "propertyNames")
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
_TYPES = ("null", "boolean", "object", "array", "number", "string")
DEEPEST = 64
"""Levels of indentation that are allowed for where a schema has no end of its own."""
INDENT = 16
"""Blanks at the beginning of a line that are always allowed."""


def prepared(schema: Any, strict: bool = False) -> Any:
    """`schema` in the words that grammars are made of. Raises a GrammarError for what is none."""
    try:
        return _prepared(schema, strict)
    except RecursionError:
        raise GrammarError("json_schema cannot be used: it is nested too deeply. Make it flatter.",
                           "json_schema") from None
    except (TypeError, AttributeError) as problem:
        raise GrammarError(f"json_schema cannot be read ({problem}); correct it.", "json_schema") from None


def _prepared(schema: Any, strict: bool) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    found = dict(schema)
    for name in ANNOTATIONS:
        if name in found and (not strict or found[name] is False or found[name] == {}):
            del found[name]
        elif name in found:
            raise GrammarError(f"json_schema cannot be used: {name} cannot be enforced, and strict_schema is set. "
                               f"Leave {name} out, or strict_schema.", "json_schema")
    if isinstance(kind := found.get("format"), str):
        found["format"] = SAME_FORMATS.get(kind, kind)
        if found["format"] not in KNOWN_FORMATS:
            del found["format"]
        elif found["format"] in FORMAT_PATTERNS:
            found["allOf"] = [*found.get("allOf", ()), {"pattern": FORMAT_PATTERNS[found["format"]]}]
    if isinstance(excluded := found.get("not"), Mapping) and all(
            KEYWORDS.get(name, ("annotation", "")) == ("annotation", "") for name in excluded):
        found["not"] = True  # of what holds for everything, before annotations of other kinds are left out
    found = _each(found, lambda inner: _prepared(inner, strict))
    return _without_not(_without_counts(_without_dependencies(found)))


def _each(schema: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """`change` for every schema directly inside."""
    for name in _ONE:
        if isinstance(schema.get(name), Mapping):
            schema[name] = change(schema[name])
    for name in _LISTS:
        if isinstance(schema.get(name), list):
            schema[name] = [change(inner) for inner in schema[name]]
    for name in _MAPS:
        if isinstance(schema.get(name), Mapping):
            schema[name] = {key: change(inner) for key, inner in schema[name].items()}
    for name in schema.keys() - KEYWORDS.keys():  # schemas may lie anywhere ("#/components/schemas/a")
        if isinstance(schema[name], Mapping):
            schema[name] = change(schema[name])
    return schema


def _without_dependencies(schema: dict[str, Any]) -> dict[str, Any]:
    """A property is not there, or what depends on it holds."""
    depends: list[tuple[str, Any]] = []
    for name in ("dependencies", "dependentRequired", "dependentSchemas"):
        if isinstance(schema.get(name), Mapping):
            depends += schema.pop(name).items()
    if not depends:
        return schema
    either = [{"anyOf": [{"properties": {key: False}}, {"required": list(needs)} if isinstance(needs, list) else needs]}
              for key, needs in depends]
    schema["allOf"] = [*schema.get("allOf", ()), *either]
    return schema


def _without_counts(schema: dict[str, Any]) -> dict[str, Any]:
    """One property at least, of those that are listed: any of them is required. At most all of them: nothing is said.
    (The library counts properties only where all that are listed are required, or at most one.)"""
    listed = schema.get("properties")
    if (not isinstance(listed, Mapping) or not listed or schema.get("additionalProperties") is not False
            or schema.get("patternProperties") or schema.get("type") != "object"):
        return schema
    most = schema.get("maxProperties")
    if isinstance(most, int | float) and most >= len(listed):
        schema = {key: inner for key, inner in schema.items() if key != "maxProperties"}
    if schema.get("minProperties") != 1 or "maxProperties" in schema:
        return schema
    left = {key: inner for key, inner in schema.items() if key != "minProperties"}
    if schema.get("required"):
        return left
    some = {"anyOf": [{"required": [key]} for key in listed]}
    return left | {"allOf": [*schema.get("allOf", ()), some]}


def _without_not(schema: dict[str, Any]) -> dict[str, Any]:
    """What is excluded, as what is left; where that cannot be said, `not` stays and is refused."""
    excluded = schema.get("not")
    left = {key: inner for key, inner in schema.items() if key != "not"}
    if excluded is False:
        return left
    if excluded is True:
        return left | {"allOf": [*schema.get("allOf", ()), False]}
    if not isinstance(excluded, Mapping):
        return schema
    says = [(key, inner) for key, inner in excluded.items() if KEYWORDS.get(key, ("annotation",))[0] != "annotation"]
    if len(says) != 1:
        return schema
    [(name, value)] = says
    if name == "anyOf" and (types := _only_types(value)):
        name, value = "type", types
    if name == "type" and "integer" not in (gone := [value] if isinstance(value, str) else list(value)):
        own = schema.get("type", list(_TYPES))
        own = [own] if isinstance(own, str) else own
        return left | {"type": [one for one in own if one not in gone and not (one == "integer" and "number" in gone)]}
    if name in ("const", "enum"):
        unwanted = [value] if name == "const" else value
        if isinstance(schema.get("enum"), list):
            return left | {"enum": [one for one in schema["enum"] if not any(_same(one, other) for other in unwanted)]}
        return _without_values(schema, left, unwanted)
    if name == "required" and isinstance(value, list) and value:
        without = {"type": "object", "anyOf": [{"properties": {key: False}} for key in value]}
        return left | {"allOf": [*schema.get("allOf", ()), without]}
    return schema


def _only_types(branches: Any) -> list[str]:
    """All that these branches name, where they name nothing but types."""
    if not isinstance(branches, list) or not all(isinstance(one, Mapping) and [*one] == ["type"] for one in branches):
        return []
    return [kind for one in branches for kind in ([one["type"]] if isinstance(one["type"], str) else one["type"])]


def _without_values(schema: dict[str, Any], left: dict[str, Any], unwanted: list[Any]) -> dict[str, Any]:
    """Integers, as the ranges between those that are unwanted; texts, where only the empty one is."""
    if schema.get("type") == "integer":
        gone = sorted({int(one) for one in unwanted if isinstance(one, int | float) and not isinstance(one, bool)
                       and one == one // 1})
        if not gone:
            return left
        ends = [{"maximum": gone[0] - 1}, *({"minimum": low + 1, "maximum": high - 1} for low, high in pairwise(gone)),
                {"minimum": gone[-1] + 1}]
        ranges = [one for one in ends if one.get("minimum", -math.inf) <= one.get("maximum", math.inf)]
        return left | {"allOf": [*schema.get("allOf", ()), {"anyOf": ranges}]}
    if schema.get("type") == "string" and all(one == "" or not isinstance(one, str) for one in unwanted):
        return left | ({"minLength": max(1, schema.get("minLength", 0))} if "" in unwanted else {})
    return schema


def _same(one: Any, other: Any) -> bool:
    """JSON's own sense: 1 is 1.0, and true is not 1."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return bool(one == other) and isinstance(one, bool) is isinstance(other, bool)


def resolved(root: Any, pointer: Any) -> Any:
    """What "#/$defs/..." stands for within `root`, or "#name", which an $anchor gives; None: nothing."""
    path = unquote(str(pointer)).removeprefix("#")
    if path and not path.startswith("/"):
        return _anchored(root, path)
    target = root
    for part in path.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and name.isdecimal() and int(name) < len(target):
            target = target[int(name)]
        else:
            target = target.get(name) if isinstance(target, Mapping) else None
    return target


def _anchored(root: Any, name: str) -> Any:
    waiting = [root]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            if part.get("$anchor") == name:
                return part
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
    return None


def whitespace(schema: Any) -> str:
    """What may come between the parts of a JSON text: nothing, a space, or a new line with an indent, of four blanks
    for each level that texts of this schema have. Bounded: a model that may write blanks for ever sometimes does."""
    try:
        deepest = _Levels(schema).of(schema, DEEPEST)
    except (AttributeError, TypeError, RecursionError):  # it is no schema that can be used, and will be refused
        deepest = DEEPEST
    return rf"\x20?|\x0A\x20{{0,{max(INDENT, 4 * deepest)}}}"


class _Levels:
    """How deep texts can be nested."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[tuple[int, int], int] = {}

    def of(self, schema: Any, most: int) -> int:
        """Of a schema within the root, up to `most`."""
        if schema is False or most <= 0:
            return 0
        if not isinstance(schema, Mapping):
            return most
        known = self._known.get((id(schema), most))
        if known is None:
            known = self._known[id(schema), most] = min(most, self._found(schema, most))
        return known

    def _found(self, schema: Mapping[str, Any], most: int) -> int:
        if "enum" in schema or "const" in schema:
            return max((_nested(one) for one in schema.get("enum", [schema.get("const")])), default=0)
        if "$ref" in schema:
            target = resolved(self._root, schema["$ref"])
            return most if target is None else self.of(target, most - 1) + 1
        if "type" not in schema:
            branches = [inner for name in ("anyOf", "oneOf", "allOf") for inner in schema.get(name, ())]
            return max((self.of(inner, most) for inner in branches), default=most)
        kinds = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        inside: list[Any] = [] if "object" not in kinds else [
            *schema.get("properties", {}).values(), *schema.get("patternProperties", {}).values(),
            schema.get("additionalProperties", True)]
        if "array" in kinds:
            items = schema.get("items", True)
            inside += [*items, schema.get("additionalItems", True)] if isinstance(items, list) else [items]
            inside += schema.get("prefixItems", ())
        return 1 + max(self.of(inner, most - 1) for inner in inside) if inside else 0


def _nested(value: Any) -> int:
    if not isinstance(value, Mapping | list):
        return 0
    return 1 + max((_nested(inner) for inner in (value.values() if isinstance(value, Mapping) else value)), default=0)
