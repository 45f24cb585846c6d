"""What drafting would win: greedy decoding of held-out texts, replayed cycle by cycle."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

DEPTHS = (3, 5, 7)


@dataclass
class Acceptance:
    """Counts for drafts of up to `depth` tokens."""

    depth: int
    tokens: int = 0
    cycles: int = 0
    tried: list[int] = field(default_factory=list)
    right: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tried, self.right = [0] * self.depth, [0] * self.depth

    def replay(self, runs: np.ndarray, prompt: int, length: int) -> None:
        """One text: runs[a] is how many drafted tokens are right where token a is the newest. Each cycle gives those,
        and one that the target adds."""
        newest = prompt
        while newest < length - 1:
            room = length - 1 - newest
            right = min(int(runs[newest]), self.depth, room)
            for place in range(min(self.depth, room)):
                if place > right:
                    break
                self.tried[place] += 1
                self.right[place] += place < right
            self.tokens += min(right + 1, room)
            self.cycles += 1
            newest += right + 1

    @property
    def per_cycle(self) -> float:
        return self.tokens / max(1, self.cycles)

    @property
    def by_position(self) -> list[float]:
        """Share of drafted tokens that are right where all before them are."""
        return [right / tried if tried else 0.0 for right, tried in zip(self.right, self.tried)]


def summary(found: list[Acceptance]) -> dict[str, Any]:
    """For reports: tokens a cycle by depth, and the shares of the deepest."""
    deepest = max(found, key=lambda one: one.depth)
    return {"tokens_per_cycle": {str(one.depth): round(one.per_cycle, 4) for one in found},
            "by_position": [round(share, 4) for share in deepest.by_position]}
