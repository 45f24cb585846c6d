"""What speculation did for one sequence, and where each of its tokens came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class SpeculationStats:
    """Counts of one request. A cycle is one verification pass with a draft."""

    method: str
    cycles: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    """Tokens the cycles yielded: accepted drafts plus one each, except where the text ended inside a draft."""
    by_depth: list[int] = field(default_factory=list)
    """by_depth[d]: cycles in which the draft was accepted at depth d + 1."""
    tried_by_depth: list[int] = field(default_factory=list)
    """tried_by_depth[d]: cycles whose draft reached depth d + 1."""
    provenance: list[str] = field(default_factory=list)
    """Per output token of sample 0: "accepted", "corrected", "bonus" or "plain"."""
    failure: str | None = None
    """Why the drafter was switched off for this request, if it was."""

    @property
    def mean_accepted_length(self) -> float:
        """Tokens per cycle, the bonus token counted (plain decoding is 1.0)."""
        return self.emitted / self.cycles if self.cycles else 1.0

    def record(self, depth: int, path: int, drafted: int, emitted: int) -> None:
        """One cycle: a draft so deep, accepted along a path of so many of its nodes."""
        self.cycles += 1
        self.drafted += drafted
        self.accepted += path
        self.emitted += emitted
        while len(self.by_depth) < depth:
            self.by_depth.append(0)
            self.tried_by_depth.append(0)
        for level in range(depth):
            self.tried_by_depth[level] += 1
        for level in range(path):
            self.by_depth[level] += 1

    def as_dict(self) -> dict[str, Any]:
        return {"method": self.method, "cycles": self.cycles, "drafted": self.drafted, "accepted": self.accepted,
                "mean_accepted_length": self.mean_accepted_length,
                "acceptance_by_position": [a / t for a, t in zip(self.by_depth, self.tried_by_depth)],
                "failure": self.failure}
