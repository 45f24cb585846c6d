"""Options: what a caller wrote beside a speculation method, read by its builder with types and bounds checked."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

from paceline.errors import RequestError

MAX_NODES = 1024
MOST_LEVELS = 3
"""Drafters made of others, inside one another."""
_DEEPEST = 16
"""Dicts and lists inside one another: no wish that can be met needs as many."""
_PLAIN = (int, str, float)
_MOST_BITS = 64
_LONGEST_SHOWN = 200


def shown(value: Any) -> str:
    """A value as a message quotes it: whatever it is, and not all of it."""
    try:
        text = repr(value)
    except Exception:  # it has more digits or levels than can be written, or is an object with a mind of its own
        text = f"an object of type {type(value).__name__}"
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def check_nesting(wish: Any, levels: int = _DEEPEST) -> None:
    """Refuse what could not be walked through to its end: dicts and lists too deep in one another, or in themselves;
    and, wherever they stand, names that are no texts and numbers beyond all bounds."""
    if isinstance(wish, int) and wish.bit_length() > _MOST_BITS:  # it could not even be written down
        raise RequestError("speculation holds a number that is too large for anything.", "speculation")
    if isinstance(wish, _PLAIN) or not isinstance(wish, Mapping | list | tuple):
        return
    if levels == 0:
        raise RequestError(f"speculation options are nested too deep: drafters may stand inside drafters at most "
                           f"{MOST_LEVELS} levels deep, leave some out.", "speculation")
    inner: Sequence[Any] = wish if isinstance(wish, list | tuple) else list(wish.values())
    for name in wish if isinstance(wish, Mapping) else ():
        if not isinstance(name, str):
            raise RequestError(f"Unknown speculation option {shown(name)}: names of options are texts.", "speculation")
    for more in inner:
        check_nesting(more, levels - 1)


FILE_OPTIONS = frozenset({"model", "models", "path", "paths", "file", "datastore", "folder"})
"""Options of drafters that name something on the disk or on a hub."""
_SHARED = frozenset({"library_tokens", "cache_tokens"})


def files_named(wish: Any) -> Iterator[tuple[str, Any]]:
    """Options of a wish, and of the wishes within it, by which files would be opened or models fetched, and what they
    name. Ask before a stranger's wish is met."""
    return _named(wish, FILE_OPTIONS)


def shared_sizes(wish: Any) -> Iterator[tuple[str, Any]]:
    """Likewise those that set how large something is that all requests share."""
    return _named(wish, _SHARED)


def without_files(wish: Any) -> Any:
    """A wish as strangers may see it: what its options name on the disk or on a hub is left out."""
    if isinstance(wish, Mapping):
        return {name: without_files(value) for name, value in wish.items() if name not in FILE_OPTIONS}
    return [without_files(one) for one in wish] if isinstance(wish, list | tuple) else wish


def _named(wish: Any, names: Container[str]) -> Iterator[tuple[str, Any]]:
    if isinstance(wish, Mapping):
        for name, value in wish.items():
            if name in names:
                yield str(name), value
            yield from _named(value, names)
    elif isinstance(wish, list | tuple):
        for one in wish:
            yield from _named(one, names)


class Options:
    """Each reader takes one option out; finish() refuses what nobody asked for."""

    def __init__(self, method: str, raw: Mapping[str, Any], verify: str = "coupled") -> None:
        self.method = method
        self.verify = verify
        """The rule that the drafts will be verified by."""
        self._left = dict(raw)
        self._known: list[str] = ["k", "verify", "nodes", "adaptive"]

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise RequestError(f"speculation {name} must be a whole number from {low} to {high}, got {shown(value)}.",
                               "speculation")
        return value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise RequestError(f"speculation {name} must be a number from {low} to {high}, got {shown(value)}.",
                               "speculation")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise RequestError(f"speculation {name} must be True or False, got {shown(value)}.", "speculation")
        return value

    def text(self, name: str, default: str | None = None) -> str | None:
        value = self.take(name, default)
        if value is not None and (not isinstance(value, str) or not value):
            raise RequestError(f"speculation {name} must be a text, got {shown(value)}.", "speculation")
        return value

    def tokens(self, name: str, vocab_size: int) -> list[int]:
        """A required list of token ids."""
        value = self.take(name, None)
        if not isinstance(value, list | tuple) or not all(
                isinstance(t, int) and not isinstance(t, bool) and 0 <= t < vocab_size for t in value):
            raise RequestError(f"speculation method {self.method!r} needs {name!r}: token ids, each below "
                               f"{vocab_size}.", "speculation")
        return list(value)

    def named(self, name: str) -> bool:
        """Whether the caller wrote it, and it was not taken out yet."""
        return name in self._left

    def take(self, name: str, default: Any) -> Any:
        """The raw value, for what has a reader of its own."""
        self._known.append(name)
        return self._left.pop(name, default)

    def finish(self) -> None:
        if self._left:
            first = shown(min(self._left, key=str))
            raise RequestError(f"Unknown speculation option {first} for {self.method!r}; known: "
                               f"{', '.join(self._known)}.", "speculation")
