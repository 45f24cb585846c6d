"""What `not` leaves: whatever a grammar lets through is valid, and what is valid it lets through."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal, localcontext
from itertools import permutations, product
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from grammar.random_schemas import allowed, chosen, exactly, library
from paceline.errors import GrammarError
from paceline.grammar.structure import structure_of
from paceline.request import SamplingParams

TEXTS = ["", "a", "ab", "abc", "b", 'a"', '"', "\\", "\\n", "a\\", "\n", "ü", "🙂", "12", "a1", "/", "\t\"\\"]
NUMBERS = [0, 1, -1, 5, 5.5, -2.25, 100, 3]
PATTERNS = ["^a", "b+", "^[a-c]{2}$", '"', "\\\\$", '^[^"]*$', "^[^\\\\]+$", "^(a|12)$", "\\d", "^(?:a?b?)*$", "^ab|b$",
            "^.$", "^[^\\d]*$", "^$", "[^a]", "^\\w+$", "\\W", "^[\\D]$"]
VALUES: list[Any] = [
    *TEXTS, *NUMBERS, True, False, None, [], [1], ["a"], [1, "a"], ["a", 1], [1, 2, 3], {}, {"a": 1}, {"a": "a"},
    {"b": 1}, {"a": 1, "b": 1}, {"a": [1], "b": None}, {"a": "b", "b": "a", "c": 1}, {"a": {"a": 1}}, [[1], {"a": 5}]]
MOST = 300
REFUSALS = ("not cannot be enforced of", "Unsatisfiable", "no text matches", "min/maxProperties only", "oneOf",
            "contains")


def _pattern(validator: Any, pattern: str, text: Any, schema: Any) -> Any:
    """As in JavaScript: to Python the end is before a last line break, too, and digits are those of all scripts."""
    if isinstance(text, str) and not re.search(pattern.replace("$", r"\Z"), text, re.ASCII):
        yield jsonschema.ValidationError(f"{text!r} is not {pattern}")


VALIDATOR = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"pattern": _pattern})

TYPES = ["null", "boolean", "object", "array", "number", "integer", "string"]
types = some.one_of(some.just({}), some.builds(lambda kinds: {"type": kinds}, some.one_of(
    some.sampled_from(TYPES), some.lists(some.sampled_from(TYPES), min_size=2, max_size=5, unique=True))))
scalars = some.sampled_from([*TEXTS, *NUMBERS, True, False, None])
small = some.integers(0, 3)
leaves = some.one_of(
    some.builds(lambda one, own: {"const": one} | own, some.sampled_from([*VALUES[:-6], {}, [1], [1, "a"]]), types),
    some.builds(lambda some_, own: {"enum": some_} | own, some.lists(scalars, min_size=1, max_size=5), types),
    some.builds(lambda kinds: {"type": kinds}, some.lists(some.sampled_from(
        ["null", "boolean", "object", "array", "number", "string"]), min_size=1, max_size=3, unique=True)),
    some.builds(lambda kind: {"type": kind}, some.sampled_from(["string", "number", "object", "array"])),
    some.builds(lambda pattern: {"pattern": pattern}, some.sampled_from(PATTERNS)),
    some.builds(lambda name, most: {name: most}, some.sampled_from(
        ["minLength", "maxLength", "minItems", "maxItems"]), small),
    some.builds(lambda name, end: {name: end}, some.sampled_from(
        ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]), some.sampled_from(NUMBERS)),
    some.builds(lambda names: {"required": names}, some.lists(some.sampled_from("abc"), max_size=2, unique=True)))


def larger(inner: some.SearchStrategy[Any]) -> some.SearchStrategy[Any]:
    few = some.lists(inner, min_size=1, max_size=2)
    return some.one_of(
        some.builds(lambda name, parts: {name: parts}, some.sampled_from(["anyOf", "allOf", "oneOf"]), few),
        some.builds(lambda one: {"not": one}, inner),
        some.builds(lambda one, name: {"properties": {name: one}, "required": [name]}, inner, some.sampled_from("ab")),
        some.builds(lambda one: {"properties": {"a": one}}, inner),
        some.builds(lambda parts: {"prefixItems": parts}, few),
        some.builds(lambda one: {"contains": one}, inner),
        some.builds(lambda one, other: {"if": one, "then": other}, inner, inner),
        some.builds(lambda one, other: {**one, **other}, inner, inner))


listed = some.one_of(some.builds(lambda values: {"enum": values}, some.lists(some.sampled_from(VALUES), min_size=4)),
                     some.builds(lambda value: {"const": value}, some.sampled_from(VALUES)))
usual = some.sampled_from([
    {}, {}, {}, {}, {}, {}, {"type": "string"}, {"type": "integer"}, {"type": "number", "minimum": -1},
    {"type": ["string", "null", "integer"]}, {"enum": VALUES}, {"type": "object"}, {"type": "array"},
    {"type": "object", "properties": {"a": {"type": ["integer", "string"]}, "b": True}},
    {"anyOf": [{"type": "string"}, {"type": "object"}]}])
own_words = some.one_of(usual, usual, some.builds(lambda own, values: own | values, types, listed))
schemas = some.builds(lambda own, excluded: own | {"not": excluded}, own_words,
                      some.recursive(leaves, larger, max_leaves=4))


def compiled(schema: Any) -> Any:
    """None where it is refused."""
    structure = structure_of(SamplingParams(json_schema=schema))
    assert structure is not None
    return library().compile(structure)


def walked(matcher: Any, seed: int, odd: float) -> str | None:
    """A text of random bytes, of which `odd` are such as need escapes, where they may come."""
    luck, text = random.Random(seed), bytearray()
    while len(text) < MOST:
        options = allowed(matcher)
        if matcher.is_accepting() and (not options or luck.random() < 0.5):
            return text.decode()
        escapes = [byte for byte in options if byte in b'\\"u0/\xc3\xf0']
        byte = luck.choice(escapes) if escapes and luck.random() < odd else chosen(luck, options, len(text))
        assert matcher.consume_tokens([byte]), matcher.get_error()
        text.append(byte)
    return None


def accepts(matcher: Any, value: Any) -> bool:
    """In one order of its properties or another: a grammar has one of its own."""
    for ordered in orders(value):
        tokens, copy = [*json.dumps(ordered, ensure_ascii=False).encode()], matcher.deep_copy()
        if copy.try_consume_tokens(tokens) == len(tokens) and copy.is_accepting():
            return True
    return False


def orders(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for names in permutations(value):
            for inner in product(*(orders(value[name]) for name in names)):
                yield dict(zip(names, inner))
    elif isinstance(value, list):
        yield from map(list, product(*map(orders, value)))
    else:
        yield value


def test_what_not_leaves_is_let_through_and_nothing_else() -> None:
    check_many(150)


@pytest.mark.full
def test_what_not_leaves_in_three_thousand_schemas() -> None:
    check_many(3000)


def check_many(count: int) -> None:
    found = Counter[str]()

    @settings(max_examples=count, deadline=None)
    @given(schemas, some.integers(0, 1 << 30))
    def each(schema: Any, seed: int) -> None:
        found[check(schema, seed)] += 1

    each()
    assert found["kept"] >= 0.2 * found.total() and found["kept"] >= 2 * found["refused"], found


def check(schema: Any, seed: int) -> str:
    """What became of it; "empty": it is refused, and no value fits it."""
    validator = VALIDATOR(schema)
    try:
        matcher = compiled(schema)
    except GrammarError as problem:
        assert any(reason in str(problem) for reason in REFUSALS), problem
        possible = any(map(validator.is_valid, VALUES))
        assert "Unsatisfiable" not in str(problem) or not possible, problem
        return "refused" if possible else "empty"
    for value in VALUES:
        assert accepts(matcher, value) is validator.is_valid(value), value
    exact = VALIDATOR(json.loads(json.dumps(schema), parse_float=Decimal))
    for turn, odd in enumerate((0.0, 0.2, 0.6)):
        text = walked(matcher.deep_copy(), seed + turn, odd)
        if text is not None:
            with localcontext(prec=2 * MOST):
                assert exact.is_valid(json.loads(text, parse_float=exactly)), text
    return "kept"
