"""DraftRows: how many rows of a repeated step drafts get, for all of its sequences together. Every choice is judged by
what it was measured to yield: tokens a second, of the step as it really runs."""

from __future__ import annotations

from paceline.kernels.device.lookup import LOOK_BACK, MOST_DRAFTED
from paceline.speculation.drafters.ngram import confidence

ROWS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Of a step with drafts."""
FACTORS = (2, 4, 8)
"""Rows per sequence that are tried."""
LEAST_CHANCE = 0.12
"""A token that is less likely to be accepted is not drafted."""
WEIGHT = 0.25
LEAST_WIN = 1.01
"""Times the speed of plain steps that drafts must have."""
FIRST_PAUSE, LONGEST_PAUSE = 16, 256
"""Steps between two tries of a choice that is not the best."""


def room_for(groups: int, drafted: int) -> int:
    """Rows of the step that has room for so many drafted ones."""
    return next((rows for rows in ROWS if rows >= groups + drafted), ROWS[-1])


def choices(groups: int) -> list[int]:
    """The choices for so many sequences: rows for drafts."""
    return sorted({rows - groups for factor in FACTORS
                   if groups < (rows := min(room_for(groups, (factor - 1) * groups), groups * (1 + MOST_DRAFTED)))})


class _Choice:
    """What came of one number of rows."""

    __slots__ = ("left", "pause", "seconds", "tokens")

    def __init__(self) -> None:
        self.tokens = self.seconds = 0.0
        """Of one time the step ran, in all; 0: not tried."""
        self.pause = self.left = 0

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def learn(self, tokens: float, seconds: float) -> None:
        weight = WEIGHT if self.seconds else 1.0
        self.tokens += weight * (tokens - self.tokens)
        self.seconds += weight * (seconds - self.seconds)


class DraftRows:
    """For one engine. Choices are kept by how many sequences there are."""

    def __init__(self) -> None:
        self._known: dict[int, dict[int, _Choice]] = {}

    def choose(self, groups: int) -> int:
        """Rows for drafts in the next step of so many sequences (a bucket); 0: none."""
        known = self._known.setdefault(groups, {rows: _Choice() for rows in (0, *choices(groups))})
        for rows, one in known.items():
            if not one.seconds:
                return rows
        best = max(known, key=lambda rows: known[rows].speed if rows else LEAST_WIN * known[rows].speed)
        known[best].pause = 0
        for rows, one in known.items():
            if rows == best:
                continue
            if not one.pause:
                one.pause = one.left = FIRST_PAUSE
            one.left -= 1
            if one.left <= 0:  # once more: the texts may have changed
                one.pause = one.left = min(2 * one.pause, LONGEST_PAUSE)
                return rows
        return best

    def learn(self, groups: int, rows: int, tokens: float, seconds: float) -> None:
        """A step of so many sequences, `rows` of it for drafts, yielded this each time it ran."""
        choice = self._known.get(groups, {}).get(rows)
        if choice is not None and seconds > 0.0:
            choice.learn(tokens, seconds)


def worthwhile(least: float = LEAST_CHANCE) -> list[int]:
    """How many tokens are worth drafting where so many matched (RepeatInputs.depths)."""
    return [0, *(_depth(matched, least) for matched in range(1, LOOK_BACK + 1))]


def _depth(matched: int, least: float) -> int:
    chance = 1.0
    for depth in range(MOST_DRAFTED):
        chance *= confidence(matched + depth)
        if chance < least:
            return depth
    return MOST_DRAFTED
