"""Chances: how likely it is that a token which a device looked up follows, by how many tokens matched before it; what
was fitted once, corrected by what this engine sees in texts of the same scope."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from paceline.kernels.device.lookup import HIGHEST, LEAST_CHANCE, LOOK_BACK, MOST_DRAFTED
from paceline.speculation.drafters.ngram import confidence
from paceline.speculation.stats import Round

DOUBT = 24.0
"""Sightings that what was fitted stands for."""
MEMORY = 2000.0
"""Sightings after which the older half counts half: texts change."""
LENGTHS = LOOK_BACK + MOST_DRAFTED
MOST_SCOPES = 256
"""Whose chances are kept, the latest ones."""
_FITTED = (0.0, *(confidence(matched) for matched in range(1, LENGTHS)))


class Chances:
    """In the texts of one scope."""

    def __init__(self) -> None:
        self._tried = [DOUBT] * LENGTHS
        self._right = [DOUBT * chance for chance in _FITTED]
        self._seen = 0.0
        self._levels: NDArray[np.int64] | None = None

    def learn(self, rounds: Iterable[Round]) -> None:
        """What became of drafts: every accepted token says that one more had matched after it."""
        tried, right = self._tried, self._right
        for drafted, accepted, matched in rounds:
            if drafted and matched >= 0:  # a head's drafts have matched nothing
                self._seen += 1
                for length in range(matched, matched + accepted):
                    tried[length] += 1
                    right[length] += 1
                if accepted < drafted:
                    tried[matched + accepted] += 1
        if self._seen > MEMORY:
            self._seen /= 2
            self._tried = [max(DOUBT, one / 2) for one in tried]
            self._right = [part * new / old for part, new, old in zip(right, self._tried, tried)]
        self._levels = None

    def of(self, matched: int) -> float:
        """That the token after so many that matched is right."""
        return self._right[matched] / self._tried[matched]

    def levels(self) -> NDArray[np.int64]:
        """[LOOK_BACK + 1, MOST_DRAFTED] as RepeatInputs.levels holds them."""
        if self._levels is None:
            each = np.array(self._right) / np.array(self._tried)
            lengths = np.arange(LOOK_BACK + 1)[:, None] + np.arange(MOST_DRAFTED)[None, :]
            reached = np.cumprod(each[lengths], axis=1)
            # As many levels between the least chance and certainty, each the same factor above the one below.
            level = 1 + (HIGHEST - 1) * (1 - np.log(np.maximum(reached, 1e-9)) / np.log(LEAST_CHANCE))
            self._levels = np.where(reached >= LEAST_CHANCE, level, 0).astype(np.int64)
        return self._levels


class ChancesByScope:
    """For one engine. The rows of a step go to the likeliest tokens of all its sequences, by one table: where those are
    of several scopes it is the one that was fitted, as nobody's texts may show in how another is drafted for."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, Chances] = OrderedDict()
        self._fitted = Chances()

    def __len__(self) -> int:
        return len(self._known)

    def of(self, scope: str) -> Chances:
        chances = self._known.get(scope)
        if chances is None:
            chances = self._known[scope] = Chances()
            if len(self._known) > MOST_SCOPES:
                self._known.popitem(last=False)
        self._known.move_to_end(scope)
        return chances

    def among(self, scopes: Iterable[str]) -> Chances:
        """What may be used for sequences of these scopes together."""
        first, *others = set(scopes)
        return self._fitted if others else self.of(first)
