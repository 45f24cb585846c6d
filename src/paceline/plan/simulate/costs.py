"""What steps take: by the planner's roofline, or as an engine measured its own; and what drafts make of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from paceline.plan.drafters import Drafter
from paceline.plan.planner import Plan, best_draft
from paceline.plan.roofline import Roofline
from paceline.speculation.step_cost import Load, StepCost

TOKEN = 1 << 20
"""A token, as progress by drafts is counted: in whole numbers, so that many steps at once add up to the same."""
KNOWN_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
KNOWN_CHUNK = 2048
"""Rows of steps that decode, and of prompts, that an engine knows the time of before its first request."""
OFTEN = 8
"""Times that it saw each of them."""


class Part(NamedTuple):
    """Rows of a prompt in a step."""

    rows: int
    start: int
    """Tokens before them."""


class Costs(Protocol):
    def seconds(self, batch: int, rows: int, context: float, prompts: Sequence[Part] = ()) -> float:
        """Of a step in which each of `batch` sequences has `rows`, behind `context` tokens on average; and parts of
        prompts beside them."""

    def read_bytes(self, batch: int, rows: int, context: float, prompts: Sequence[Part] = ()) -> float:
        """Of memory, in such a step."""

    def known(self, context: float) -> StepCost:
        """What an engine knows of them, by which its scheduler sizes steps, where texts are about so long."""


def _parts(batch: int, rows: int, context: float, prompts: Sequence[Part]) -> list[tuple[int, int, float]]:
    return [*([(batch, rows, context)] if batch else []), *((1, part.rows, part.start) for part in prompts)]


@dataclass(frozen=True)
class PlannedCosts:
    """Of the planner's roofline."""

    roofline: Roofline

    def seconds(self, batch: int, rows: int, context: float, prompts: Sequence[Part] = ()) -> float:
        if not prompts:
            return self.roofline.verify(batch, rows, context) if rows > 1 else self.roofline.decode(batch, context)
        whole = self.roofline.mixed(_parts(batch, rows, context, prompts)).total
        drafts = self.roofline.hardware.drafted_s if batch and rows > 1 else None
        return whole + (drafts or 0.0) * len(self.roofline.shape.layers)

    def read_bytes(self, batch: int, rows: int, context: float, prompts: Sequence[Part] = ()) -> float:
        return self.roofline.read_bytes(_parts(batch, rows, context, prompts))

    def known(self, context: float) -> StepCost:
        cost = StepCost()
        for _ in range(OFTEN):
            for before in (0.0, context):
                for rows in KNOWN_ROWS:
                    cost.observe(Load(rows, rows * before), self.seconds(rows, 1, before))
                start = int(before)
                cost.observe(Load(0, 0.0, KNOWN_CHUNK, KNOWN_CHUNK * (start + KNOWN_CHUNK / 2)),
                             self.seconds(0, 1, 0.0, [Part(KNOWN_CHUNK, start)]))
        cost.anchor()
        cost.mean_context = context
        return cost


@dataclass(frozen=True)
class MeasuredCosts:
    """What an engine on this machine learned of its own steps."""

    cost: StepCost
    roofline: Roofline | None = None
    """Of the same machine, for what its steps read; None: that holds nobody up."""

    def seconds(self, batch: int, rows: int, context: float, prompts: Sequence[Part] = ()) -> float:
        decoding = self.cost(batch * rows, batch * rows * context) if batch else self.cost.line(0.0)
        count = sum(part.rows for part in prompts)
        before = sum(part.rows * (part.start + part.rows / 2) for part in prompts)
        return max(decoding, 0.0) + self.cost.prompt_seconds(count, before)

    def read_bytes(self, batch: int, rows: int, context: float, prompts: Sequence[Part] = ()) -> float:
        return 0.0 if self.roofline is None else self.roofline.read_bytes(_parts(batch, rows, context, prompts))

    def known(self, context: float) -> StepCost:
        cost = deepcopy(self.cost)
        cost.mean_context = context
        return cost


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
