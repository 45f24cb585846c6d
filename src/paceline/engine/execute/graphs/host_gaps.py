"""HostGaps: how long a device stood idle for the host before the steps of each kind."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


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


@dataclass(slots=True)
class HostGap:
    """Steps that somebody waited for, and the time between the end of the step before each and its own beginning."""

    count: int = 0
    seconds: float = 0.0
    """Of all of them together."""

    @property
    def mean(self) -> float | None:
        """Seconds a step; None: there was none."""
        return self.seconds / self.count if self.count else None


class HostGaps:
    def __init__(self) -> None:
        self._gaps = {kind: HostGap() for kind in StepKind}

    def __getitem__(self, kind: StepKind) -> HostGap:
        return self._gaps[kind]

    def note(self, kind: StepKind, seconds: float) -> None:
        gap = self._gaps[kind]
        gap.count += 1
        gap.seconds += max(0.0, seconds)
