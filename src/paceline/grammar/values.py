"""Values as JSON has them: 1 is 1.0, and true is not 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def kind_of(value: Any) -> str:
    """The name of its type; numbers are all of one."""
    if value is None:
        return "null"
    if is_number(value):
        return "number"
    return ("boolean" if isinstance(value, bool) else "string" if isinstance(value, str) else
            "array" if isinstance(value, list) else "object")


def same(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other) and isinstance(one, bool) is isinstance(other, bool)
