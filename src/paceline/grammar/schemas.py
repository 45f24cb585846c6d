"""JSON schemas as grammars can keep them: what is enforced, what is an annotation, what is refused.

Keywords that say nothing a mask could keep are left out (lenient) or refused (strict); some that the library does not
know are written in others that it does. What is left, and not known, the library refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from paceline.errors import GrammarError
from paceline.grammar.conditions import without_conditions
from paceline.grammar.formats import FORMAT_PATTERNS, KNOWN_FORMATS, SAME_FORMATS
from paceline.grammar.outside import KINDS, Outside, UnsayableError
from paceline.grammar.references import referring, resolved
from paceline.grammar.repairs import quotable
from paceline.grammar.values import kind_of, same

ANNOTATIONS = ("uniqueItems", "propertyNames")
"""What a grammar cannot keep, and texts mostly keep by themselves: ignored, or refused where a schema is strict."""
KEYWORDS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("type", "enum", "const", "properties", "required", "additionalProperties",
                     "items", "prefixItems", "additionalItems", "minItems", "maxItems", "minLength", "maxLength",
                     "minimum", "maximum", "multipleOf", "anyOf", "allOf", "$defs", "definitions"), ("enforced", "")),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), ("enforced", "Draft 4's `true` and `false`, too")),
    "pattern": ("enforced", r"Rust's syntax, digits and letters (`\d`, `\w`) those of ASCII: no look-around, no "
                            "back-references; else refused"),
    "patternProperties": ("enforced", "where no name can match two of its patterns, else refused"),
    "$ref": ("enforced", "within the schema, by path or `$anchor`; else refused"),
    **dict.fromkeys(("minProperties", "maxProperties"), (
        "enforced", "where all that are listed are required; where no others are allowed, also a least of 1 and a most "
                    "of 1, or of all that are listed; else refused")),
    "format": ("enforced", "those below; any other is an annotation"),
    "oneOf": ("enforced", "where its branches are provably apart, else refused"),
    "not": ("enforced", "where what is left can be said: of types, values, lengths, patterns, bounds, counts, "
                        "properties and items, also by `anyOf`, `allOf`, `oneOf`, `$ref` and `not`; else refused"),
    "dependencies": ("enforced", "written as `anyOf`"),
    "dependentRequired": ("enforced", "written as `anyOf`"),
    "dependentSchemas": ("enforced", "written as `anyOf`"),
    **dict.fromkeys(("if", "then", "else"), ("enforced", "written as `anyOf` and `not`, where that `not` is enforced")),
    **dict.fromkeys(ANNOTATIONS, ("annotation", "refused with `strict_schema`")),
    **dict.fromkeys(("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment",
                     "$id", "$schema", "$vocabulary", "$anchor", "contentEncoding", "contentMediaType",
                     "contentSchema", "discriminator"), ("annotation", "")),
    **dict.fromkeys(("contains", "minContains", "maxContains", "unevaluatedProperties",
                     "unevaluatedItems", "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"),
                    ("refused", "")),
}
"""(what becomes of it, when); docs/structured-output.md has them as a table. Keywords that nobody knows are ignored."""

ANNOTATED = frozenset(name for name, (becomes, when) in KEYWORDS.items() if (becomes, when) == ("annotation", ""))
SIMPLE = frozenset(("enum", "minLength", "maxLength", "minItems", "maxItems", "minimum", "maximum", "exclusiveMinimum",
                    "exclusiveMaximum", "pattern"))
"""Keywords that say the same wherever they stand."""
_ONE = ("additionalProperties", "additionalItems", "items", "not", "if", "then", "else", "contains", "propertyNames")
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
DEEPEST = 64
"""Levels of indentation that are allowed for where a schema has no end of its own."""
INDENT = 16
"""Blanks at the beginning of a line that are always allowed."""


def prepared(schema: Any, strict: bool = False) -> Any:
    """`schema` in the words that grammars are made of. Raises a GrammarError for what is none."""
    try:
        schema = referring(schema, _each)
        return _prepared(schema, strict, Outside(partial(resolved, schema)))
    except RecursionError:
        raise GrammarError("json_schema cannot be used: it is nested too deeply. Make it flatter.",
                           "json_schema") from None
    except (TypeError, AttributeError) as problem:
        raise GrammarError(f"json_schema cannot be read ({problem}); correct it.", "json_schema") from None


def _prepared(schema: Any, strict: bool, outside: Outside) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    found = without_conditions(dict(schema))
    if "not" in found:
        found = _without_not(found, outside)
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
            kept = [{"pattern": pattern} for pattern in FORMAT_PATTERNS[found["format"]]]
            found["allOf"] = [*found.get("allOf", ()), *kept]
    if isinstance(found.get("pattern"), str):
        found["pattern"] = quotable(found["pattern"])
    if isinstance(found.get("patternProperties"), Mapping):
        found["patternProperties"] = {quotable(name): inner for name, inner in found["patternProperties"].items()}
    return _without_counts(_each(found, lambda inner: _prepared(inner, strict, outside)))


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


def _without_not(schema: dict[str, Any], outside: Outside) -> dict[str, Any]:
    """What is excluded, as what is left. Raises a GrammarError where no grammar can keep that."""
    excluded = schema["not"]
    left = {key: inner for key, inner in schema.items() if key != "not"}
    only = excluded.keys() - ANNOTATED if isinstance(excluded, Mapping) else ()
    values = left.get("enum", [left["const"]] if "const" in left else None)
    if isinstance(values, list) and len(only) == 1 and only <= {"const", "enum"}:
        gone = excluded.get("enum", [excluded.get("const")])
        return left | {"enum": [one for one in values if not any(same(one, other) for other in gone)]}
    try:
        rest = outside.of(excluded, _kinds(left, values))
    except UnsayableError as problem:
        raise GrammarError(f"json_schema cannot be used: not cannot be enforced of {problem}: no grammar has what lies "
                           "outside of it. Say what is wanted instead.", "json_schema") from None
    if rest is True:
        return left
    if isinstance(rest, dict) and rest.keys() <= {"type", *SIMPLE} and not rest.keys() & left.keys() & SIMPLE:
        return left | rest
    return left | {"allOf": [*left.get("allOf", ()), rest]}


def _kinds(schema: Mapping[str, Any], values: Any) -> list[str]:
    """The types that a schema allows by its own words, of which there are values, where these are listed."""
    own = schema.get("type", KINDS)
    own = [own] if isinstance(own, str) else own
    own = [kind for kind in own if kind != "integer" or "number" not in own]
    if not isinstance(values, list):
        return own
    listed = {kind_of(one) for one in values}
    return [kind for kind in own if kind in listed or (kind == "integer" and "number" in listed)]


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
