"""What every verification rule takes and gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.speculation.tree import DraftTree

Probs = NDArray[np.float64]
"""[V] probabilities."""

Target = Callable[[int], Probs | None]
"""The target's distribution after a row, every sampling control applied, made on demand. Row 0 is the last committed
token, row r the draft's node r - 1. None: nothing can be sampled there (an error, or a wish to stop); whoever gets
there ends with randomness.target(row), and the engine with the row's fate."""


class Randomness(Protocol):
    """The randomness of one verification. Each number is a pure function of its place, fresh in every cycle."""

    def accept(self, row: int, index: int) -> float:
        """A uniform in [0, 1) for the index-th accept test of a token after `row`."""

    def residual(self, row: int, weights: Probs) -> int:
        """A token after `row` in proportion to `weights` [V], which sum to 1; never one of weight 0."""

    def target(self, row: int) -> int:
        """The token plain decoding samples after `row`."""


@dataclass(slots=True)
class Verdict:
    """tokens: what is emitted, in order: the accepted drafts, then one more (correction or bonus).
    rows: the row each of those tokens was sampled at. path: the accepted rows, ascending, row 0 excluded.
    bonus: nothing had been drafted where the last token came from. overlaps: where a token was sampled from a q, the
    sum of min(p, q) over the vocabulary, which is how likely such a draft is accepted, whatever became of this one."""

    tokens: list[int]
    rows: list[int]
    path: list[int]
    bonus: bool = False
    overlaps: list[float] = field(default_factory=list)


Verify = Callable[..., Verdict]
"""(DraftTree, Target, Randomness), and by name what can be set about the rule (verify.Rule.numbers)."""


def children_of(tree: DraftTree) -> dict[int, list[int]]:
    """The rows below each row that has any, in the order of the draft."""
    children: dict[int, list[int]] = {}
    for row, parent in enumerate(tree.parents, 1):
        children.setdefault(parent + 1, []).append(row)
    return children


def path_to(tree: DraftTree, row: int) -> list[int]:
    """The rows from depth 1 down to `row`, inclusive; empty for row 0."""
    rows: list[int] = []
    while row > 0:
        rows.append(row)
        row = tree.parents[row - 1] + 1
    return rows[::-1]
