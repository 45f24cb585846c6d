"""Laws: what must be true of tokens that were drawn, tested by where each lies in the distribution it was drawn from.

A token x that was drawn from p is turned into a number: the probability of all tokens before it in some order, plus a
random share of its own. If x follows p the number is uniform, whatever p is, so that tokens of different positions,
requests and temperatures add up in one test. Which faults show depends on the order:

- by probability, likeliest first: tokens that are too likely (an argmax in place of a sample), or not likely enough;
- by q / p, the drafter's favourites first: tokens that follow the drafter more than they should;
- by id: whatever has to do with the order in which a uniform number is looked up in a distribution.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from paceline.watch.martingale import Martingale

Probs = NDArray[np.float64]


def place(weights: Probs, token: int, key: Probs | None, share: float) -> float:
    """The probability of the tokens before `token` in descending order of `key` (None: ids), ties by id, plus `share`
    of its own; of all there is."""
    if key is None:
        before = float(weights[:token].sum())
    else:
        own = key[token]
        ahead = key > own
        ahead[:token] |= key[:token] == own
        before = float(weights[ahead].sum())
    return min(1.0, (before + share * float(weights[token])) / float(weights.sum()))


class Law:
    """Evidence, in nats, against one claim about draws; by several orders, each with an equal part of the capital."""

    def __init__(self, orders: tuple[str, ...], rng: random.Random) -> None:
        """`rng`: nobody else's, or what it draws would not be independent of what is judged."""
        self._rng = rng
        self.tests: Mapping[str, Martingale] = {name: Martingale() for name in orders}

    @property
    def count(self) -> int:
        """Draws that were judged."""
        return max(test.count for test in self.tests.values())

    @property
    def evidence(self) -> float:
        """The most there ever was: an alarm at THRESHOLD is false with a chance of ALPHA at most."""
        highest = [test.highest for test in self.tests.values()]
        if math.inf in highest:
            return math.inf
        # Each of n tests may have an n-th of the false alarms.
        return max(0.0, max(highest) - math.log(len(highest)))

    def drawn(self, weights: Probs, token: int, other: Probs | None = None) -> None:
        """A token that is said to be drawn from `weights`. `other`: what it may follow instead; it must have been
        settled before the token was drawn."""
        if not weights[token] > 0.0:
            self._refute()
            return
        share = self._rng.random()
        for name, test in self.tests.items():
            if name == "id":
                test.observe(place(weights, token, None, share))
            elif name == "probability":
                test.observe(place(weights, token, weights, share))
            elif other is not None:
                with np.errstate(divide="ignore", invalid="ignore"):
                    ratio = np.where(weights > 0.0, other / weights, -1.0)
                test.observe(place(weights, token, ratio, share))

    def happened(self, chance: float, true: bool) -> None:
        """An event that is said to have had this chance."""
        chance = min(max(chance, 0.0), 1.0)
        share = self._rng.random()
        for test in self.tests.values():
            test.observe(share * chance if true else chance + share * (1.0 - chance))

    def _refute(self) -> None:
        for test in self.tests.values():
            test.refute()
