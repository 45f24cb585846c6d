"""Commands whose names are reserved: they say that they are not there yet instead of being unknown."""

from __future__ import annotations

from collections.abc import Callable

from paceline.errors import NotYetError


def plan() -> None:
    """Memory and speed planner (not in this version yet)."""
    raise NotYetError("`paceline plan` is not in this version yet; `paceline doctor` says what this machine can do.")


COMMANDS: dict[str, Callable[[], None]] = {"plan": plan}
