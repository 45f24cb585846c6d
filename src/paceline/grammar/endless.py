"""Schemas that are refused for what their grammars would come to: texts without an end, states without number."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from paceline.errors import GrammarError
from paceline.grammar.references import resolved

MOST_REMAINDERS = 1 << 17
"""A grammar has a state for each remainder of `multipleOf`, all of them made at once: some 40 MiB for so many."""
_EMBEDDED = re.compile(r"%json\s*")


def check(schema: Any, field: str) -> None:
    """Raises a GrammarError that says what is wrong with it. `field`: where it was given."""
    if _remainders(schema) > MOST_REMAINDERS:
        raise GrammarError(f"{field} cannot be used: multipleOf, or the least number that all of them divide, is too "
                           f"large ({MOST_REMAINDERS} is the limit, zeros at its end not counted). Choose a smaller "
                           "one.", field)
    if not _Ends(schema).has_end:
        raise GrammarError(f"{field} cannot be used: it requires itself inside itself, so no text has an end. Let a "
                           "part on the way be left out, be null or be empty.", field)


def embedded(grammar: str) -> Iterator[Any]:
    """The schemas in a grammar's text."""
    for place in _EMBEDDED.finditer(grammar):
        try:
            yield json.JSONDecoder().raw_decode(grammar, place.end())[0]
        except (ValueError, RecursionError):  # the grammar will be refused
            continue


def _remainders(schema: Any) -> int:
    """Of all its multiples together: which of them meet in one number, nobody needs to find out."""
    together = 1
    for step in _steps(schema):
        digits = "".join(map(str, Decimal(str(step)).as_tuple().digits)).rstrip("0")
        together = math.lcm(together, int(digits))
        if together > MOST_REMAINDERS ** 2:
            break
    return int(str(together).rstrip("0"))


def _steps(schema: Any) -> Iterator[int | float]:
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            step = part.get("multipleOf")
            if isinstance(step, int | float) and math.isfinite(step) and step > 0:
                yield step
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part


class _Ends:
    """Which parts of a schema have texts that end: each part waits for those that it cannot do without. Where in doubt
    they do."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._waits: dict[Any, int] = {}
        """By id: for how many others a part still waits. Alternatives are parts of their own, that wait for one."""
        self._waited_for: dict[Any, list[Any]] = {}
        self.has_end = self._find()

    def _find(self) -> bool:
        unread, ready = [self._root], []
        while unread:
            schema = unread.pop()
            if id(schema) in self._waits:
                continue
            needs = [] if not isinstance(schema, Mapping) else [*self._needs(schema)]
            self._waits[id(schema)] = len(needs)
            for number, choice in enumerate(needs):
                key = id(schema), number
                self._waits[key] = 1
                self._waited_for.setdefault(key, []).append(id(schema))
                for part in choice:
                    self._waited_for.setdefault(id(part), []).append(key)
                unread += choice
            if not needs:
                ready.append(id(schema))
        while ready:
            for key in self._waited_for.get(ready.pop(), ()):
                self._waits[key] -= 1
                if self._waits[key] == 0:
                    ready.append(key)
        return self._waits[id(self._root)] <= 0

    def _needs(self, schema: Mapping[str, Any]) -> Iterator[list[Any]]:
        """Lists of parts, of each of which one has to have an end."""
        if "enum" in schema or "const" in schema:
            return
        if "$ref" in schema and (target := resolved(self._root, schema["$ref"])) is not None:
            yield [target]
        for name in ("anyOf", "oneOf"):
            if isinstance(schema.get(name), list) and schema[name]:
                yield schema[name]
        for part in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
            yield [part]
        kind, properties, least = schema.get("type"), schema.get("properties"), schema.get("minItems")
        if kind in ("object", ["object"]) and isinstance(properties, Mapping):
            required = schema.get("required")
            for name in required if isinstance(required, list) else ():
                if isinstance(name, str) and name in properties:
                    yield [properties[name]]
        if kind in ("array", ["array"]) and isinstance(least, int) and least > 0:
            first = schema.get("prefixItems")
            first = first if isinstance(first, list) else []
            for part in first[:least]:
                yield [part]
            if least > len(first) and isinstance(schema.get("items"), Mapping):
                yield [schema["items"]]
