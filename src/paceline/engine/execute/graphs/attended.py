"""Attended: those of a batch whose next step needs the host's word, and how long the device would wait for it.

While the host decides about them (drafts, structures, what it samples itself) the others could run. Where that is long
enough for a step of theirs, steps are planned for both apart, in turns: each waits for its own tokens only, and the
device runs one while the host has its word on the other. Where it is not, they share steps: a step of few rows takes as
long as one of some more.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from paceline.engine.schedule.sequence import Placement, Sequence
from paceline.engine.schedule.step import Step

WEIGHT = 0.25
LONGEST = 0.025
"""Seconds: what takes longer was something else."""
TURNS = 512
"""Steps apart, before the host's time is measured again."""


class Attended:
    """For one engine."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """From the reading of what a step of theirs yields until the next one is launched; 0: not known."""
        self._read_at: float | None = None
        self._free_last = True
        self._turns = 0

    def goes_apart(self, running: Seq[Sequence], step_seconds: float) -> bool:
        """Whether those who need the host and those who do not are to have steps of their own. `step_seconds`: what a
        step of the latter takes."""
        return (self.seconds >= step_seconds and any(seq.placement is Placement.FREE for seq in running)
                and any(seq.placement < Placement.AHEAD for seq in running))

    def free_next(self, in_flight: Iterable[bool]) -> bool:
        """Whether the next step is of those who are free; `in_flight`: whether each step there is repeated. With none
        they take turns, also where one of both could not run."""
        self._free_last = next((not repeated for repeated in in_flight), not self._free_last)
        self._turns += 1
        if self._turns >= TURNS:  # what the host takes can only be told while they share steps
            self._turns, self.seconds = 0, 0.0
        return self._free_last

    def read(self, step: Step, now: float, alone: bool) -> None:
        """What a step yields is known on the host. `alone`: nothing else is in flight, for which the host might wait
        meanwhile."""
        self._read_at = now if alone and _attended(step) else None

    def submitted(self, step: Step, now: float) -> None:
        """A step was launched."""
        if self._read_at is not None and _attended(step):
            seconds = now - self._read_at
            if seconds < LONGEST:
                self.seconds += (WEIGHT if self.seconds else 1.0) * (seconds - self.seconds)
            self._read_at = None

    def forget(self) -> None:
        """Nothing is in flight any more."""
        self._read_at = None


def _attended(step: Step) -> bool:
    return any(group.seq.placement < Placement.AHEAD for group in step.groups)
