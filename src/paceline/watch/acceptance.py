"""Acceptance over time: has a drafter stopped fitting, or does it fit suspiciously well?

Texts differ, so acceptance does too, and no law says what it should be: what is found here is told and switches nothing
off. (Where q is known, acceptance has a law, which is tested: laws.py.)
"""

from __future__ import annotations

import math
from typing import NamedTuple

WARM_UP = 64
"""Requests from which it is learned what is usual."""
ALLOWANCE = 0.7
"""Standard deviations by which the mean may move without anybody being told."""
LIMIT = 14.0
"""Of the cumulated sum: with ALLOWANCE, one false report in some 10**6 requests whose acceptance is normal."""
LEAST_TESTS = 8
"""Tokens that have to be tested for a request's share to say something."""
LEAST_DEVIATION = 0.05
MOST_PULL = 3.0
"""Standard deviations that one request may count: a change is seen in many."""


class Change(NamedTuple):
    """The mean of acceptance has moved."""

    rose: bool
    before: float
    after: float
    requests: int
    """Since when, about."""


class PageHinkley:
    """Two cumulated sums over standardised values, one for falls and one for rises. What is usual is learned from the
    first values, and anew after a change was told."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._count, self.mean, self._squares = 0, 0.0, 0.0
        self._sums = {False: 0.0, True: 0.0}
        self._since = {False: (0, 0.0), True: (0, 0.0)}
        """How many values are in each sum, and what they add up to."""

    def observe(self, value: float) -> Change | None:
        if self._count < WARM_UP:
            self._count += 1
            gap = value - self.mean
            self.mean += gap / self._count
            self._squares += gap * (value - self.mean)
            return None
        deviation = max(math.sqrt(self._squares / (WARM_UP - 1)), LEAST_DEVIATION)
        score = max(-MOST_PULL, min(MOST_PULL, (value - self.mean) / deviation))
        for rose, sign in ((False, -1.0), (True, 1.0)):
            grown = max(0.0, self._sums[rose] + sign * score - ALLOWANCE)
            count, total = self._since[rose]
            self._sums[rose] = grown
            self._since[rose] = (count + 1, total + value) if grown else (0, 0.0)
            if grown > LIMIT:
                count, total = self._since[rose]
                change = Change(rose, self.mean, total / count, count)
                self._forget()
                return change
        return None


class AcceptanceWatch:
    """Changes by method, from what each finished request counted."""

    def __init__(self) -> None:
        self.methods: dict[str, PageHinkley] = {}

    def observe(self, method: str, accepted: int, tested: int) -> Change | None:
        """A request of so many drafted tokens that were tested, one after the other until one is rejected."""
        if tested < LEAST_TESTS:
            return None
        return self.methods.setdefault(method, PageHinkley()).observe(accepted / tested)
