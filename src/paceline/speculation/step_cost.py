"""StepCost: what a step takes, by what it holds. One model, by which drafts are weighed and steps are sized."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from paceline.speculation.costs import CostCurve, Line

MEMORY_STEPS = 64.0
MEMORY_ROWS = 2048.0
"""How many steps that decode, and how many rows of prompts, are remembered well."""
MEMORY_CONTEXT = 0.995
"""What a step still weighs after the next, for what the tokens before its rows take: some 200 steps count."""
NOISE = 0.15
"""By which share two steps of the same kind differ, as one would expect."""
LONG_CONTEXT = 4000.0
"""Tokens before a row that might well take as long as a step of one row: how easily it is given up that they take
nothing, or what they were measured to take on purpose."""
MEAN_WEIGHT = 0.05
LEAST_SHARE = 0.25
"""Of a step with prompts, that rows which decode must take for it to tell of them."""
FEW_ROWS = 64.0
"""Rows of prompts: as long as fewer were seen, what is expected of others says nothing against what they take."""
UNLIKELY = 3.0
"""Times what was expected, or one part in so many, that a step with prompts counts for at most and at least."""


def step_prior(rows: int) -> float:
    """What a step of so many rows costs relative to one row, before anything was measured."""
    return 1.0 + 0.15 * (rows - 1)


class Load(NamedTuple):
    """What a step holds."""

    rows: int
    """That decode, drafts among them."""
    context: float = 0.0
    """Tokens before those rows, in all."""
    prompt_rows: int = 0
    prompt_context: float = 0.0
    """Tokens before the rows of prompts, in all."""


class StepCost:
    """Seconds of a step: a table by its decoding rows, so much for each token before them, and for rows of prompts by
    what stands before those.

    Every step that ran by itself teaches. One with prompts tells of both its halves, of the larger the more (what takes
    twice as long is twice as uncertain): so what decoding rows take is known where steps without prompts never come.
    """

    def __init__(self) -> None:
        self.line = Line(MEMORY_STEPS, 16.0)
        """Seconds by decoding rows, roughly: what the table goes on with where nothing was measured."""
        self.table: CostCurve = CostCurve(self._shape)
        """Seconds by decoding rows with nothing before them."""
        self.prompts = Line(MEMORY_ROWS, 1024.0)
        """Seconds of a row of a prompt by the tokens before it."""
        self.context = ContextCost()
        self.calibrating = False
        """Steps are made on purpose: what decoding rows take is told by those without prompts alone."""
        self.mean_context = 0.0
        """Tokens before a decoding row, lately."""

    @property
    def measured(self) -> bool:
        """Whether answers are in seconds."""
        return self.table.measured

    def knows(self, rows: int) -> bool:
        """Whether steps of about so many decoding rows were measured."""
        return self.table.knows(rows)

    def __call__(self, rows: int, context: float = 0.0) -> float:
        """Of a step without prompts."""
        return self.table(rows) + self.context.seconds * context

    def prompt_seconds(self, rows: int, context: float) -> float:
        """Of rows of prompts, with so many tokens before them in all; 0 while nothing is known."""
        return rows * self.prompts(context / rows) if rows and self.prompts.measured else 0.0

    def observe(self, load: Load, seconds: float) -> None:
        """Such a step took so long, by itself, drafting not counted."""
        if seconds <= 0.0:
            return  # the clock is too coarse to tell
        decoding = 0.0
        if self.table.measured:
            decoding = self(load.rows, load.context) if load.rows else self.line(0.0)
        if not load.prompt_rows:
            self._learn_decoding(load, seconds)
            return
        prompts = self.prompt_seconds(load.prompt_rows, load.prompt_context)
        own = max(0.0, seconds - decoding)
        share = _share(decoding, prompts or own)
        if load.rows and decoding > 0.0 and prompts > 0.0 and self.prompts.weight >= FEW_ROWS:
            whole = decoding + prompts
            off = min(UNLIKELY * whole, max(whole / UNLIKELY, seconds)) - whole
            own = max(0.0, prompts + (1.0 - share) * off)
            if decoding >= LEAST_SHARE * whole and not self.calibrating:
                self._learn_decoding(load, max(0.1 * decoding, decoding + share * off))
        self.prompts.observe(load.prompt_context / load.prompt_rows, own / load.prompt_rows,
                             max(1.0, load.prompt_rows * (1.0 - share)))

    def _learn_decoding(self, load: Load, seconds: float) -> None:
        self.context.observe(load.rows, load.context, seconds, self.table(1) if self.table.measured else seconds)
        self.mean_context += MEAN_WEIGHT * (load.context / load.rows - self.mean_context)
        seconds = max(0.1 * seconds, seconds - self.context.seconds * load.context)
        self.line.observe(load.rows, seconds)
        self.table.observe(load.rows, seconds)

    def _shape(self, rows: int) -> float:
        """Where the line would start below zero, rows cost at least half of what further ones do."""
        return max(self.line(rows), 0.5 * rows * self.line.slope) if self.line.told else step_prior(rows)

    def anchor(self, counts: Collection[int] = ()) -> None:
        """What is known now was measured on purpose, and is kept; of steps of other numbers of rows than `counts`, if
        any are given, nothing is."""
        self.table.anchor(counts)
        self.context.believe(self.context.seconds)

    def as_dict(self) -> dict[str, Any]:
        """What restore() reads."""
        return {"table": {str(rows): seconds for rows, seconds in self.table.points().items()},
                "context": self.context.seconds,
                "prompt": [self.prompts(0.0), self.prompts.slope] if self.prompts.measured else None}

    def restore(self, known: Mapping[str, Any]) -> None:
        """What as_dict() said, of this or another process. Raises where it cannot be that."""
        table = {int(rows): float(seconds) for rows, seconds in known["table"].items()}
        context = float(known["context"])
        prompt = None if known["prompt"] is None else [float(one) for one in known["prompt"]]
        numbers = [*table.values(), context, *(prompt or ())]
        rows_fit = table and min(table) >= 1 and max(table) < 1e6 and len(prompt or (0, 0)) == 2
        if not rows_fit or not all(0.0 <= one < 1e6 for one in numbers) or not min(table.values()) > 0.0:
            raise ValueError("a profile's seconds must be positive numbers")
        self.context.believe(context)
        for rows, seconds in table.items():
            self.line.observe(rows, seconds)
        self.table.restore(table)
        if prompt is not None:
            level, slope = prompt
            for before in (0.0, 1024.0):
                self.prompts.observe(before, level + slope * before, 64.0)


def _share(decoding: float, prompts: float) -> float:
    """Of what a step tells, how much is about its rows that decode."""
    return decoding * decoding / (decoding * decoding + prompts * prompts) if decoding > 0.0 else 0.0


class ContextCost:
    """Seconds that a step takes for each token before its rows: by how steps of one size differ, so that what rows take
    is not mistaken for it. Beside short texts the noise of steps is large: those change little of what is believed."""

    def __init__(self) -> None:
        self.seconds = self._believed = 0.0
        """Now, and before anything was seen."""
        self._means: dict[int, tuple[float, float]] = {}
        """By rows: tokens before them and seconds, on average."""
        self._xx = self._xy = 0.0

    def believe(self, seconds: float) -> None:
        """It was measured on purpose."""
        self.seconds = self._believed = seconds

    def observe(self, rows: int, context: float, seconds: float, one_row: float) -> None:
        """`one_row`: what a step of one row takes."""
        if seconds <= 0.0 or one_row <= 0.0:
            return
        mean = self._means.get(rows)
        if mean is None:
            if len(self._means) > 512:
                self._means.clear()
            self._means[rows] = (context, seconds)
            return
        off, more = context - mean[0], seconds - mean[1]
        more = min(mean[1], max(-mean[1], more))
        self._means[rows] = (mean[0] + MEAN_WEIGHT * off, mean[1] + MEAN_WEIGHT * more)
        weight = 1.0 / (mean[1] * mean[1])  # what takes longer is noisier
        self._xx = MEMORY_CONTEXT * self._xx + weight * off * off
        self._xy = MEMORY_CONTEXT * self._xy + weight * off * more
        hold = (NOISE * LONG_CONTEXT / one_row) ** 2
        self.seconds = max(0.0, (self._xy + hold * self._believed) / (self._xx + hold))
