"""Options: what a caller wrote beside a speculation method, read by its builder with types and bounds checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import RequestError

MAX_NODES = 1024


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
            raise RequestError(f"speculation {name} must be a whole number from {low} to {high}, got {value!r}.",
                               "speculation")
        return value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise RequestError(f"speculation {name} must be a number from {low} to {high}, got {value!r}.",
                               "speculation")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise RequestError(f"speculation {name} must be True or False, got {value!r}.", "speculation")
        return value

    def text(self, name: str, default: str | None = None) -> str | None:
        value = self.take(name, default)
        if value is not None and (not isinstance(value, str) or not value):
            raise RequestError(f"speculation {name} must be a text, got {value!r}.", "speculation")
        return value

    def tokens(self, name: str, vocab_size: int) -> list[int]:
        """A required list of token ids."""
        value = self.take(name, None)
        if not isinstance(value, list | tuple) or not all(
                isinstance(t, int) and not isinstance(t, bool) and 0 <= t < vocab_size for t in value):
            raise RequestError(f"speculation method {self.method!r} needs {name!r}: token ids, each below "
                               f"{vocab_size}.", "speculation")
        return list(value)

    def take(self, name: str, default: Any) -> Any:
        """The raw value, for what has a reader of its own."""
        self._known.append(name)
        return self._left.pop(name, default)

    def finish(self) -> None:
        if self._left:
            raise RequestError(f"Unknown speculation option {min(self._left)!r} for {self.method!r}; known: "
                               f"{', '.join(self._known)}.", "speculation")
