"""Clock: how far a run has come, by minutes or by steps."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class Clock:
    minutes: float | None
    """How long the run may take; None: `steps` are counted."""
    steps: int | None
    before: float = 0.0
    """Seconds of the runs that this one goes on from."""
    begin: float = field(default_factory=time.monotonic)

    @property
    def elapsed(self) -> float:
        return self.before + time.monotonic() - self.begin

    def go_on(self, before: float) -> None:
        """From now on, and `before` of the time is over: what it took to come back here does not count."""
        self.before, self.begin = before, time.monotonic()

    def share(self, step: int) -> float:
        """Of the way to the end."""
        if self.minutes is not None:
            return self.elapsed / (60.0 * self.minutes)
        return step / (self.steps or 1)
