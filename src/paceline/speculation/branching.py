"""Branching: a tree by how wide each depth is (a chain, siblings beside it, a full tree)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.errors import RequestError
from paceline.speculation.drafter import Budget
from paceline.speculation.growth import Growth
from paceline.speculation.options import MAX_NODES
from paceline.speculation.sequence import DraftedSequence


@dataclass(frozen=True, slots=True)
class Branching:
    """How wide a draft is at each depth. `everywhere`: every node goes on (a full tree); else the first of each
    level's siblings alone does, and the others are leaves beside the chain."""

    widths: tuple[int, ...] = (1,)
    """Children of a node at depth 0, 1, ...; the last stands for all that follow unless the tree is full, where one
    child each follows."""
    everywhere: bool = False

    def width(self, depth: int) -> int:
        if depth < len(self.widths):
            return self.widths[depth]
        return 1 if self.everywhere else self.widths[-1]

    @property
    def is_chain(self) -> bool:
        return all(width == 1 for width in self.widths)

    def start(self, sequence: DraftedSequence, budget: Budget, depth: int, min_confidence: float) -> Growth:
        return BranchingGrowth(self, sequence, budget, depth, min_confidence)

    @classmethod
    def read(cls, raw: Any) -> Branching:
        """Option "branches": a number (siblings at every depth) or a list (children of every node, by depth)."""
        widths = raw if isinstance(raw, list | tuple) else [raw]
        if not widths or not all(isinstance(width, int) and not isinstance(width, bool) and 1 <= width <= MAX_NODES
                                 for width in widths):
            raise RequestError(f"speculation branches must be a whole number from 1 to {MAX_NODES} or a list of such "
                               f"numbers, one per depth, got {raw!r}.", "speculation")
        return cls(tuple(widths), everywhere=isinstance(raw, list | tuple))


CHAIN = Branching()


class BranchingGrowth(Growth):
    def __init__(self, shape: Branching, sequence: DraftedSequence, budget: Budget, depth: int,
                 min_confidence: float) -> None:
        super().__init__(sequence, budget, depth, min_confidence)
        self._shape = shape

    def _goes_on(self, place: int) -> bool:
        return place == 0 or self._shape.everywhere

    def _widths(self) -> list[tuple[int, int]]:
        left = self.budget.nodes - len(self.tokens)
        found: list[tuple[int, int]] = []
        for node in self.newest:
            found.append((node, min(self._shape.width(self.level), left)))
            left -= found[-1][1]
        return [(node, count) for node, count in found if count]
