"""News: what a run tells while it goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class News:
    stage: str
    """"init", "rehearsal", "answers", "workers", "training" or "measured"."""
    share: float
    """Of the whole that is done."""
    text: str


Show = Callable[[News], None]
