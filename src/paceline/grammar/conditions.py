"""Keywords of the form "if this, then that", as alternatives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def without_conditions(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema without `dependencies` and `if`: what depends on something holds, or that is not there."""
    depends: list[tuple[str, Any]] = []
    for name in ("dependencies", "dependentRequired", "dependentSchemas"):
        if isinstance(schema.get(name), Mapping):
            depends += schema[name].items()
    either: list[Any] = [
        {"anyOf": [{"properties": {key: False}}, {"required": list(needs)} if isinstance(needs, list) else needs]}
        for key, needs in depends]
    if "if" in schema and ("then" in schema or "else" in schema):
        either.append({"anyOf": [{"allOf": [schema["if"], schema.get("then", True)]},
                                 {"allOf": [{"not": schema["if"]}, schema.get("else", True)]}]})
    gone = {"dependencies", "dependentRequired", "dependentSchemas", "if", "then", "else"}
    left = {key: inner for key, inner in schema.items() if key not in gone}
    return left | ({"allOf": [*schema.get("allOf", ()), *either]} if either else {})
