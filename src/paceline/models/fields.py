"""Fields: what a file says, read key by key. No number, text or flag of a file gets further without its check here."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from re import _constants, _parser  # type: ignore[attr-defined]  # the library has no other way to take one apart
from typing import Any, Protocol

from paceline.errors import ModelFormatError

MOST = (1 << 31) - 1
"""Of what a file may count."""
MOST_LAYERS = 1024
"""Some things are made for each layer before its tensors are looked for."""
MOST_EXPERTS = 1 << 14
MOST_POSITIONS = 1 << 27
_LONGEST_SHOWN = 120
_REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT)


class Source(Protocol):
    """A mapping, or a file that parses a value when it is asked for."""

    def get(self, key: str, /) -> Any: ...


def shown(value: Any) -> str:
    """A value as a message quotes it: whatever it is, and not all of it."""
    try:
        text = repr(value)
    except Exception:  # more digits or levels than can be written
        text = f"an object of type {type(value).__name__}"
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def finite(value: Any) -> float | None:
    """As a float; None: it is no number, or none that a float can be."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def pattern(text: str, where: str) -> re.Pattern[str]:
    """A regular expression of a file. One that repeats what repeats can take for ever to find nothing."""
    try:
        if _repeats_inside(_parser.parse(text), False):
            raise ModelFormatError(f"{where}: {shown(text)} repeats what repeats, which may never end: name modules.")
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ModelFormatError(f"{where}: {shown(text)} is no regular expression ({error}).") from error


def _repeats_inside(part: Any, inside: bool) -> bool:
    """Whether a part of a parsed expression has a repetition without end within another one."""
    if isinstance(part, tuple) and len(part) == 2 and part[0] in _REPEATS:
        low, high, body = part[1]
        endless = high is _constants.MAXREPEAT or high - low > 99
        return (endless and inside) or _repeats_inside(body, inside or endless)
    return isinstance(part, tuple | list | _parser.SubPattern) and any(_repeats_inside(one, inside) for one in part)


class Fields:
    """Of one object. A key that is missing, or null, has its default; without one that is an error, and errors name the
    file and the key."""

    needed_by = "the model"

    def __init__(self, raw: Source, where: str) -> None:
        self._raw = raw
        self.where = where

    def get(self, key: str, default: Any = None) -> Any:
        """As it is, unchecked."""
        value = self._raw.get(key)
        return default if value is None else value

    def count(self, key: str, default: int | None = None, *, least: int | None = None, most: int = MOST) -> int:
        """`least`: 1, or 0 where that is the default."""
        least = (0 if default == 0 else 1) if least is None else least
        value = self._given(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(key, "a positive whole number" if least else "a whole number", value)
        if not least <= value <= most:
            raise self.wrong(key, f"a whole number from {least} to {most}", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._given(key, default)
        found = finite(value)
        if found is None:
            raise self.wrong(key, "a finite number", value)
        return found

    def positive(self, key: str, default: float | None = None) -> float:
        """0 as well, where that is the default."""
        value = self._given(key, default)
        found = finite(value)
        if found is not None and (found > 0 or (found == 0 and default == 0)):
            return found
        raise self.wrong(key, "a positive number", value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false", value)
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._given(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "a text", value)
        return value

    def counts(self, key: str) -> tuple[int, ...] | None:
        """A list of whole numbers; None: there is none."""
        return self._list(key, "whole numbers", lambda one: isinstance(one, int) and not isinstance(one, bool)
                          and 0 <= one <= MOST)

    def texts(self, key: str) -> tuple[str, ...] | None:
        """A list of texts; None: there is none."""
        return self._list(key, "texts", lambda one: isinstance(one, str))

    def mapping(self, key: str) -> Mapping[str, Any]:
        """An object inside; an empty one where there is none."""
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            raise self.wrong(key, "an object", value)
        return value

    def named(self, key: str) -> str:
        """A key as errors call it."""
        return f"{self.where}: {key}"

    def wrong(self, key: str, wanted: str, value: Any) -> ModelFormatError:
        return ModelFormatError(f"{self.named(key)} must be {wanted}, got {shown(value)}.")

    def missing(self, key: str) -> ModelFormatError:
        return ModelFormatError(f"{self.where} has no {key}; {self.needed_by} cannot be built without it.")

    def _given(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            raise self.missing(key)
        return value

    def _list(self, key: str, of: str, fits: Callable[[Any], bool]) -> tuple[Any, ...] | None:
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or not all(map(fits, value)):
            raise self.wrong(key, f"a list of {of}", value)
        return tuple(value)
