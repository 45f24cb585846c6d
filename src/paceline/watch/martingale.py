"""A test of "these numbers are uniform" that may be looked at after every number.

A martingale is the capital of somebody who bets against the claim at fair odds. Where the claim is true it is expected
to stay at 1, so by Ville's inequality the chance that it ever reaches 1 / alpha, however long the watch goes on, is at
most alpha. Where it is false some bet wins, and the capital grows exponentially.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

BINS = 32
ALPHA = 1e-6
"""The chance that a test raises a false alarm in all the time that an engine runs."""
THRESHOLD = -math.log(ALPHA)
"""The evidence, in nats, at which it is raised."""


def _bets() -> NDArray[np.float64]:
    """[bets, BINS] densities on [0, 1) with mean 1, none of which can lose everything: leaning to one side, to an end,
    to both ends or to the middle; timid ones for small faults, bold ones for large."""
    u = (np.arange(BINS) + 0.5) / BINS
    leaning = [1.0 + tilt * (2.0 * u - 1.0) for tilt in (-0.9, -0.4, -0.12, 0.12, 0.4, 0.9)]
    waves = [1.0 + height * np.cos(2.0 * np.pi * u) for height in (-0.6, 0.6)]
    ends = [0.5 + 0.5 * (side < width) / width for width in (1 / BINS, 1 / 8, 1 / 2) for side in (u, 1.0 - u)]
    return np.stack([*leaning, *waves, *ends])


class Martingale:
    """Evidence against "independent and uniform", from one number after the other.

    A fault may begin at any time, and capital that was lost before would hide it. So a part of the capital is kept back
    and put in little by little: of all that is kept back after t numbers, 1 / (1 + log(1 + t)) is left. A fault that
    begins after t numbers costs about log t + 2 log log t nats more than one that was there from the start.
    """

    __slots__ = ("_capital", "_kept", "count", "highest")

    _LOG_BETS = np.log(_bets())

    def __init__(self) -> None:
        self.count = 0
        self.highest = 0.0
        """The most evidence there ever was, in nats; what an alarm is raised by."""
        self._kept = 1.0
        self._capital = np.full(len(self._LOG_BETS), -np.inf)
        """Logarithms, one for each bet."""

    @property
    def evidence(self) -> float:
        """The logarithm of the capital, in nats."""
        return float(np.logaddexp(np.logaddexp.reduce(self._capital), math.log(self._kept)))

    def observe(self, u: float) -> None:
        """One more number, from 0 to 1, which must be uniform whatever came before."""
        kept = 1.0 / (1.0 + math.log1p(self.count + 1))
        put_in = math.log((self._kept - kept) / len(self._capital))
        self._kept = kept
        self.count += 1
        at = min(int(u * BINS), BINS - 1)
        self._capital = np.logaddexp(self._capital, put_in) + self._LOG_BETS[:, at]
        self.highest = max(self.highest, self.evidence)

    def refute(self) -> None:
        """Something came that could not come: no more evidence is needed."""
        self.count += 1
        self.highest = math.inf
