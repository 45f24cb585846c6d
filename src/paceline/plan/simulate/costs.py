"""What steps take: by the planner's roofline, or as an engine measured its own; and what drafts make of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from paceline.plan.drafters import Drafter
from paceline.plan.planner import Plan, best_draft
from paceline.plan.roofline import Roofline
from paceline.speculation.step_cost import StepCost

TOKEN = 1 << 20
"""A token, as progress by drafts is counted: in whole numbers, so that many steps at once add up to the same."""


class Part(NamedTuple):
    """Rows of a prompt in a step."""

    rows: int
    start: int
    """Tokens before them."""


class Costs(Protocol):
    def seconds(self, batch: int, rows: int, context: float, prompts: Sequence[Part] = ()) -> float:
        """Of a step in which each of `batch` sequences has `rows`, behind `context` tokens on average; and parts of
        prompts beside them."""


@dataclass(frozen=True)
class PlannedCosts:
    """Of the planner's roofline."""

    roofline: Roofline

    def seconds(self, batch: int, rows: int, context: float, prompts: Sequence[Part] = ()) -> float:
        if not prompts:
            return self.roofline.verify(batch, rows, context) if rows > 1 else self.roofline.decode(batch, context)
        beside = [(batch, rows, context)] if batch else []
        whole = self.roofline.mixed([*beside, *((1, part.rows, part.start) for part in prompts)]).total
        drafts = self.roofline.hardware.drafted_s if batch and rows > 1 else None
        return whole + (drafts or 0.0) * len(self.roofline.shape.layers)


@dataclass(frozen=True)
class MeasuredCosts:
    """What an engine on this machine learned of its own steps."""

    cost: StepCost

    def seconds(self, batch: int, rows: int, context: float, prompts: Sequence[Part] = ()) -> float:
        decoding = self.cost(batch * rows, batch * rows * context) if batch else self.cost.line(0.0)
        count = sum(part.rows for part in prompts)
        before = sum(part.rows * (part.start + part.rows / 2) for part in prompts)
        return max(decoding, 0.0) + self.cost.prompt_seconds(count, before)


class Draft(NamedTuple):
    """How steps of so many sequences draft."""

    k: int
    """Tokens for each of them; 0: none, since that pays more."""
    gain: int
    """Progress of a step, in TOKENs by 1 << 20."""
    seconds: float
    """Drafting itself."""

    @property
    def most(self) -> int:
        """Tokens that one step gives at most."""
        return -(-self.gain // TOKEN)


PLAIN = Draft(0, TOKEN, 0.0)


@dataclass(frozen=True)
class Speculation:
    """A drafter by its acceptance: every step gives what is expected of it, fractions carried over."""

    plan: Plan
    drafter: Drafter
    acceptance: float
    k: int | None
    context: int
    """At which it is decided what pays."""
    _known: dict[int, Draft] = field(default_factory=dict)

    def draft(self, batch: int) -> Draft:
        found = self._known.get(batch)
        if found is None:
            found = self._known[batch] = self._decided(batch)
        return found

    def _decided(self, batch: int) -> Draft:
        real = self.plan.roofline
        row = best_draft(real, self.drafter, batch, self.context, self.acceptance, self.k)
        if not row.k:
            return PLAIN
        seconds = self.drafter.cost(real.hardware, real.dtype, real.kv_dtype, batch, self.context, row.k)
        return Draft(row.k, max(TOKEN, math.floor(row.tokens * TOKEN)), seconds)


def speculation(plan: Plan, context: int, k: int | None) -> Speculation | None:
    """By the plan's first drafter; None: it has none."""
    if not plan.drafters:
        return None
    drafter = plan.drafters[0]
    acceptance = next((row.acceptance for row in plan.drafts if row.drafter == drafter.name), drafter.acceptance)
    return Speculation(plan, drafter, acceptance, k, context)
