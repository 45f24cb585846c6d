"""Pace: what rows take, measured, and how many of them a step may hold, so that nobody waits long for a token."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.engine.schedule.step import Step

MEMORY_STEPS = 64.0
MEMORY_ROWS = 2048.0
"""How many steps that decode, and how many rows of prompts, are remembered well."""
STEADY = 0.001
"""What a slope is held by, as a share of all that is remembered: with little to tell it by, it stays what it was."""
SURPRISE = 3.0
"""Times what was expected that a step counts for, at most: what keeps the machine busy now and then is not its rows.
To be twice as dear is to be expected of twice as much."""
IDLE_STEPS = 4.0
"""While nobody decodes a step may take so many times as long: only who comes next waits for it."""
FIXED_COSTS = 4.0
"""Times what any step takes that its rows may take at least."""
LEAST_CHUNK = 8
"""Rows of a prompt in a step at least, however long they take."""


class Line:
    """y = level + slope x by least squares, both at least 0; what is older weighs less."""

    def __init__(self, memory: float, spread: float) -> None:
        """`memory`: how much weight is remembered; `spread`: of x, as one would expect it."""
        self._memory = memory
        self._hold = STEADY * memory * spread * spread
        self._weight = 0.0
        self._x = self._y = 0.0
        """Means."""
        self._xx = self._xy = 0.0
        """About the means."""
        self.slope = 0.0

    @property
    def measured(self) -> bool:
        return self._weight > 0.0

    @property
    def proportion(self) -> float | None:
        """y by x while x was always the same, and not 1: what grows with it cannot be told. None: it can, or must be
        tried."""
        return None if self._xx or self._x <= 1.0 else self._y / self._x

    def observe(self, x: float, y: float, weight: float = 1.0) -> None:
        if self._y > 0.0:
            y = min(y, SURPRISE * max(self(x), self._y * x / self._x if self._x > 0.0 else y))
        kept = math.exp(-weight / self._memory)
        old = kept * self._weight
        self._weight = old + weight
        share, off_x, off_y = weight / self._weight, x - self._x, y - self._y
        self._x += share * off_x
        self._y += share * off_y
        self._xx = kept * self._xx + old * share * off_x * off_x
        self._xy = kept * self._xy + old * share * off_x * off_y
        self.slope = max(0.0, (self._xy + self._hold * self.slope) / (self._xx + self._hold))

    def __call__(self, x: float) -> float:
        return max(0.0, self._y + self.slope * (x - self._x))


class Pace:
    """Sizes steps by time. Rows that decode cost by their number, rows of a prompt by what stands before them."""

    def __init__(self, seconds: float | None = None) -> None:
        """`seconds`: that a step may take while somebody decodes; None: as long as it takes."""
        self.seconds = seconds
        self._decoding = Line(MEMORY_STEPS, 16.0)
        """Seconds of a step by its rows."""
        self._prompts = Line(MEMORY_ROWS, 1024.0)
        """Seconds of a row by the tokens before it."""

    def observe(self, step: Step, seconds: float) -> None:
        """Such a step took so long, by itself."""
        decoding, rows, before = 0, 0, 0.0
        for group in step.groups:
            count = len(group.tokens)
            if group.start < group.seq.prompt_len or (count > 1 and group.draft is None):
                rows += count
                before += count * (group.start + count / 2)
            else:
                decoding += count
        if not rows:
            self._decoding.observe(decoding, seconds)
        else:
            self._prompts.observe(before / rows, max(0.0, seconds - self._decoding(decoding)) / rows, rows)

    def decoding_rows(self, most: int, drafts: bool = False) -> int:
        """How many of so many rows may decode in one step. Where any step takes long, as many as take some times as
        long as that: the fixed cost would be paid for each of many small steps. `drafts`: that are there for the sake
        of drafts, which are bets: half the time must do."""
        if self.seconds is None or not self._decoding.measured:
            return most
        seconds = self.seconds / 2 if drafts else self.seconds
        fixed, row, all_of_it = self._decoding(0.0), self._decoding.slope, self._decoding.proportion
        if all_of_it is not None and self._decoding(most) > seconds:
            fixed, row = 0.0, all_of_it
        if not row:
            return most
        return max(1, min(most, int(max(seconds - fixed, FIXED_COSTS * fixed) / row)))

    def left_for_prompts(self, decoding: int, somebody_decodes: bool) -> float:
        """Seconds that a step with so many decoding rows has for prompts: as many as those rows take at least, so that
        prompts come in however many decode."""
        if self.seconds is None or not self._prompts.measured:
            return math.inf
        if not somebody_decodes:
            return IDLE_STEPS * self.seconds
        others = self._decoding(decoding)
        return max(self.seconds - others, others)

    def rows_within(self, seconds: float, start: int) -> int:
        """Rows of a prompt, behind so many tokens, that take so long."""
        if math.isinf(seconds):
            return 1 << 62
        one, more = self._prompts(start), self._prompts.slope
        if more * seconds > 1e-9 * one * one:
            return int((math.sqrt(one * one + 2.0 * more * seconds) - one) / more)
        return int(seconds / one) if one > 0.0 else 1 << 62

    def prompt_seconds(self, start: int, rows: int) -> float:
        """What so many rows of a prompt take, behind so many tokens."""
        return rows * self._prompts(start + rows / 2)
