"""DynamicTree: EAGLE-2's tree, which grows where the model thinks that the text will go.

Of every level the `top_k` likeliest nodes go on, by the product of the model's probabilities down to them, with `top_k`
children each. Of all that were ever sampled the likeliest are then passed on. No node is likelier than its parent, so
they hang together.

Rules that read q take drafts as they were sampled, so nothing may be left out afterwards. There each level gets its
share of the nodes, and its nodes divide it by how likely they are before their children are sampled.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import nlargest

from paceline.speculation.drafter import Budget
from paceline.speculation.growing import ROOT
from paceline.speculation.growth import Growth
from paceline.speculation.models import Samples
from paceline.speculation.sequence import DraftedSequence


@dataclass(frozen=True, slots=True)
class DynamicTree:
    top_k: int = 10

    @property
    def is_chain(self) -> bool:
        return False

    def start(self, sequence: DraftedSequence, budget: Budget, depth: int, min_confidence: float) -> Growth:
        return DynamicGrowth(self.top_k, sequence, budget, depth, min_confidence)


class DynamicGrowth(Growth):
    def __init__(self, top_k: int, sequence: DraftedSequence, budget: Budget, depth: int,
                 min_confidence: float) -> None:
        super().__init__(sequence, budget, depth, min_confidence)
        self._top_k = top_k

    def _worth(self, found: Samples, place: int) -> float:
        return super()._worth(found, place) if found.agreement is None else found.agreement[place]

    def _widths(self) -> list[tuple[int, int]]:
        likeliest = sorted(self.newest, key=lambda node: (-self._chance(node), node))[:self._top_k]
        if self.settled:
            return self._divided(likeliest)
        # Below a node that is less likely than all that would be passed on now, nothing will ever be.
        best = nlargest(self.budget.nodes, self.chances)
        bar = best[-1] if len(best) == self.budget.nodes else 0.0
        return [(node, self._top_k) for node in likeliest if self._chance(node) >= bar]

    def _divided(self, nodes: list[int]) -> list[tuple[int, int]]:
        """This level's share of the nodes that are left, one by one to whoever has least for how likely it is."""
        left = self.budget.nodes - len(self.tokens)
        share = min(-(-left // (self.depth - self.level)), left, self._top_k * len(nodes))
        counts = dict.fromkeys(nodes, 0)
        for _ in range(share):
            open_nodes = (node for node in nodes if counts[node] < self._top_k)
            counts[max(open_nodes, key=lambda node: self._chance(node) / (counts[node] + 1))] += 1
        return [(node, count) for node, count in counts.items() if count]

    def _chance(self, node: int) -> float:
        return 1.0 if node == ROOT else self.chances[node]

    def _order(self) -> list[int]:
        # Nodes are numbered level by level: at a tie the one that lies higher comes first.
        return sorted(range(len(self.tokens)), key=lambda node: (-self.chances[node], node))[:self.budget.nodes]
