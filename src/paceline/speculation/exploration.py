"""Exploration: what may be spent on finding out, so that nobody pays much for what others may learn."""

from __future__ import annotations

SHARE = 0.015
"""Of the engine's time, that goes to what is not expected to pay."""
CROWD = 4
"""Sequences that decode at once, from which on that share becomes less, as what drafts can win there does. (A device's
tries are steps by themselves, and cost the same in any company.)"""
MOST_STEPS = 2.0
"""Steps' worth of time that can be saved up for that."""
TELLERS = 8
"""One in so many tries what nothing is known of, and tells the others."""
KNOWN = 8
"""Verified drafts from which on something is known of a method."""


class Allowance:
    """Seconds for tries, a share of all that pass. Who asks while it is not overdrawn may spend, whatever it costs: so
    something is tried however dear, only the more rarely."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def earn(self, step: float, running: int = 1) -> None:
        """A step of so many sequences took so long."""
        self._seconds = min(MOST_STEPS * step, self._seconds + SHARE * min(1.0, CROWD / running) * step)

    def spend(self, seconds: float) -> bool:
        """Whether a try that takes about so long may be made; it counts as made."""
        if self._seconds < 0.0:
            return False
        self._seconds -= seconds
        return True


def tellers(running: int) -> int:
    """Of so many sequences, how many may try at once what nothing is known of."""
    return max(1, running // TELLERS)
