"""specinfer: the trees of several drafters in one, common beginnings merged."""

from __future__ import annotations

from paceline.speculation.drafter import Budget, DraftContext, Drafter
from paceline.speculation.ensemble import Ensemble, shared_ensemble
from paceline.speculation.options import Options
from paceline.speculation.packing import Pack
from paceline.speculation.sequence import DraftedSequence
from paceline.speculation.tree import DraftTree


class SpecInferDrafter(Ensemble):
    """Every drafter's tree as it is, level by level, the drafters in the order in which they were named; where the
    budget does not hold them all, the deepest nodes are left out."""

    def pack(self, sequence: DraftedSequence, drafts: dict[int, DraftTree], budget: Budget) -> Pack:
        pack = Pack()
        nodes = [(depth, part, node) for part, draft in drafts.items() for node, depth in enumerate(draft.depths())
                 if depth <= budget.depth]
        for _, part, node in sorted(nodes):
            if len(pack.tree) >= budget.nodes:
                break
            pack.add_node(part, drafts[part], node)
        return pack


def build(method: str, options: Options, context: DraftContext) -> Drafter:
    return shared_ensemble(SpecInferDrafter, method, options, context)
