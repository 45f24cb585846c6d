"""What a $ref stands for, also where the keyword that it lies in is written in others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote, unquote

REWRITTEN = frozenset(("not", "if", "then", "else", "dependencies", "dependentSchemas", "propertyNames"))
"""Keywords that no prepared schema has any more."""


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


def referring(root: Any, each: Callable[[dict[str, Any], Callable[[Any], Any]], dict[str, Any]]) -> Any:
    """`root`, what it refers to in keywords that are rewritten, or by an $anchor, being among its $defs. `each` changes
    every schema directly inside of one."""
    moved: dict[str, Any] = {}

    def change(schema: Any) -> Any:
        if not isinstance(schema, Mapping):
            return schema
        found = dict(schema)
        pointer = found.get("$ref")
        if isinstance(pointer, str) and _moves(pointer) and (target := resolved(root, pointer)) is not None:
            found["$ref"] = "#/$defs/" + quote(pointer.replace("~", "~0").replace("/", "~1"))
            if pointer not in moved:
                moved[pointer] = True  # it may refer to itself
                moved[pointer] = change(target)
        found.pop("$anchor", None)
        return each(found, change)

    changed = change(root)
    return changed | {"$defs": {**changed.get("$defs", {}), **moved}} if moved else root


def _moves(pointer: str) -> bool:
    path = unquote(pointer)
    return path.startswith("#") and len(path) > 1 and (path[1] != "/" or not REWRITTEN.isdisjoint(path.split("/")))
