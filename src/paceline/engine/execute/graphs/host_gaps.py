"""HostGaps: how long a device stood idle for the host before the steps of each kind."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from statistics import median


class StepKind(Enum):
    """Of steps, by what the host has to do before one can be launched."""

    REPEATED = "repeated"
    """One token a sequence, several times."""
    DRAFTED = "drafted"
    """The same with drafts that the device looks up."""
    VERIFIED = "verified"
    """With drafts that the host proposed."""
    SINGLE = "single"
    """Prompts and mixes, and tokens that the host has a word about."""


KEPT = 1024


@dataclass(slots=True)
class HostGap:
    """Steps that somebody waited for, and the time between the end of the step before each and its own beginning."""

    count: int = 0
    seconds: float = 0.0
    """Of all of them together."""
    last: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))

    @property
    def mean(self) -> float | None:
        """Seconds a step; None: there was none."""
        return self.seconds / self.count if self.count else None

    @property
    def median(self) -> float | None:
        """Of the last ones: what was captured on the way does not count."""
        return median(self.last) if self.last else None


class HostGaps:
    def __init__(self) -> None:
        self._gaps = {kind: HostGap() for kind in StepKind}

    def __getitem__(self, kind: StepKind) -> HostGap:
        return self._gaps[kind]

    def note(self, kind: StepKind, seconds: float) -> None:
        gap = self._gaps[kind]
        gap.count += 1
        gap.seconds += max(0.0, seconds)
        gap.last.append(max(0.0, seconds))
