"""Pace: what rows take, measured, and how many of them a step may hold, so that nobody waits long for a token."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from paceline.speculation.step_cost import Load, StepCost

if TYPE_CHECKING:
    from paceline.engine.schedule.step import RowGroup, Step

IDLE_STEPS = 4.0
"""While nobody decodes a step may take so many times as long: only who comes next waits for it."""
FIXED_COSTS = 4.0
"""Times what any step takes that its rows may take at least."""
LEAST_CHUNK = 8
"""Rows of a prompt in a step at least, however long they take."""


class Pace:
    """Sizes steps by time. Rows that decode cost by their number, rows of a prompt by what stands before them."""

    def __init__(self, seconds: float | None = None, cost: StepCost | None = None) -> None:
        """`seconds`: that a step may take while somebody decodes; None: as long as it takes. `cost`: the engine's own
        model of what steps take."""
        self.seconds = seconds
        self.cost = StepCost() if cost is None else cost

    def observe(self, step: Step, seconds: float) -> None:
        """Such a step took so long, by itself, drafting not counted."""
        self.cost.observe(load_of(step), seconds)

    def observe_repeated(self, step: Step, seconds: float) -> None:
        """A device took so long for such a step each time. Others have the host's time on top: this stands for them as
        long as none of about that size was measured."""
        rows = step.drafted_rows or len(step.groups)
        if seconds > 0.0 and not self.cost.knows(rows):
            self.cost.observe(Load(rows, rows * sum(group.start for group in step.groups) / len(step.groups)), seconds)

    def decoding_rows(self, most: int, drafts: bool = False) -> int:
        """How many of so many rows may decode in one step. Where any step takes long, as many as take some times as
        long as that: the fixed cost would be paid for each of many small steps. `drafts`: that are there for the sake
        of drafts, which are bets: half the time must do."""
        line = self.cost.line
        if self.seconds is None or not line.measured:
            return most
        seconds = self.seconds / 2 if drafts else self.seconds
        context = self.cost.context.seconds * self.cost.mean_context
        fixed, row, all_of_it = line(0.0), line.slope, line.proportion
        if all_of_it is not None and line(most) + most * context > seconds:
            fixed, row = 0.0, all_of_it
        if not row:
            return most
        return max(1, min(most, int(max(seconds - fixed, FIXED_COSTS * fixed) / (row + context))))

    def left_for_prompts(self, decoding: int, somebody_decodes: bool) -> float:
        """Seconds that a step with so many decoding rows has for prompts: as many as those rows take at least, so that
        prompts come in however many decode."""
        if self.seconds is None or not self.cost.prompts.measured:
            return math.inf
        if not somebody_decodes:
            return IDLE_STEPS * self.seconds
        others = self.cost.line(decoding) + decoding * self.cost.context.seconds * self.cost.mean_context
        return max(self.seconds - others, others)

    def rows_within(self, seconds: float, start: int) -> int:
        """Rows of a prompt, behind so many tokens, that take so long."""
        if math.isinf(seconds):
            return 1 << 62
        one, more = self.cost.prompts(start), self.cost.prompts.slope
        if more * seconds > 1e-9 * one * one:
            return int((math.sqrt(one * one + 2.0 * more * seconds) - one) / more)
        return int(seconds / one) if one > 0.0 else 1 << 62

    def prompt_seconds(self, start: int, rows: int) -> float:
        """What so many rows of a prompt take, behind so many tokens."""
        return self.cost.prompt_seconds(rows, rows * (start + rows / 2))


def decodes(group: RowGroup) -> bool:
    """Whether its rows are a token that was sampled, and its draft; else they are a prompt's, or computed again."""
    return group.start >= group.seq.prompt_len and (len(group.tokens) == 1 or group.draft is not None)


def load_of(step: Step) -> Load:
    """What a step holds that ran once."""
    rows = prompt_rows = 0
    context = prompt_context = 0.0
    for group in step.groups:
        count = len(group.tokens)
        if decodes(group):
            rows += count
            context += count * group.start
        else:
            prompt_rows += count
            prompt_context += count * (group.start + count / 2)
    return Load(rows, context, prompt_rows, prompt_context)
