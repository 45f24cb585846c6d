"""merge: an arbiter that packs several drafters' proposals into one tree by what is expected to be accepted.

It learns for each sequence how often each drafter is right at each depth, and gives the rows of the verification pass
to the nodes most likely to be accepted, whoever proposed them.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.speculation.drafter import Budget, DraftContext, Drafter
from paceline.speculation.ensemble import Ensemble, shared_ensemble
from paceline.speculation.options import Options
from paceline.speculation.packing import Pack, pack_likeliest
from paceline.speculation.parts import Part
from paceline.speculation.sequence import DraftedSequence
from paceline.speculation.tree import DraftTree

PRIOR = 0.5
PRIOR_WEIGHT = 2.0
"""A drafter starts as one that was right once in two tries; a sibling after the first, half as often each."""
FORGET = 0.97
"""Old tries count less, so that a text that changes its character changes the drafter."""
DEEPEST = 16
BRANCHES = 8
"""Deeper nodes and later siblings are judged like these."""


class TrackRecord:
    """How often a drafter was right, by depth and by place among siblings, given that the parent was right."""

    __slots__ = ("_right", "_tried")

    def __init__(self) -> None:
        self._right = [[0.0] * BRANCHES for _ in range(DEEPEST)]
        self._tried = [[0.0] * BRANCHES for _ in range(DEEPEST)]

    def estimate(self, depth: int, place: int) -> float:
        """The chance that a node at this depth (from 1), this many siblings before it, is right."""
        row, column = min(depth, DEEPEST) - 1, min(place, BRANCHES - 1)
        prior = PRIOR * 0.5 ** column
        return (self._right[row][column] + prior * PRIOR_WEIGHT) / (self._tried[row][column] + PRIOR_WEIGHT)

    def note(self, depth: int, place: int, right: bool) -> None:
        row, column = min(depth, DEEPEST) - 1, min(place, BRANCHES - 1)
        self._tried[row][column] = self._tried[row][column] * FORGET + 1.0
        self._right[row][column] = self._right[row][column] * FORGET + float(right)


class MergeDrafter(Ensemble):
    """A node's worth is the product of the estimates along its path: the chance that it is accepted. Where several
    drafters propose the same node, it is wrong only if all of them are. The most worthy nodes are taken first, a
    parent always before its children, up to the budget and as long as they are worth their price."""

    def __init__(self, name: str, parts: Sequence[Part]) -> None:
        super().__init__(name, parts)
        self._records: dict[DraftedSequence, list[TrackRecord]] = {}

    def begin(self, sequence: DraftedSequence) -> None:
        self._records[sequence] = [TrackRecord() for _ in self.parts]
        super().begin(sequence)

    def release(self, sequence: DraftedSequence) -> None:
        self._records.pop(sequence, None)
        super().release(sequence)

    def learn(self, sequence: DraftedSequence, drafts: dict[int, DraftTree], tokens: list[int]) -> None:
        """Judge all proposals, also those that were not packed, by the tokens that were committed."""
        for part, draft in drafts.items():
            record = self._records[sequence][part]
            depths, places = draft.depths(), _places(draft)
            right: list[bool] = []
            for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents)):
                asked = (parent < 0 or right[parent]) and depths[node] <= len(tokens)
                right.append(asked and token == tokens[depths[node] - 1])
                if asked:
                    record.note(depths[node], places[node], right[node])

    def pack(self, sequence: DraftedSequence, drafts: dict[int, DraftTree], budget: Budget) -> Pack:
        records = self._records[sequence]
        places = {part: _places(draft) for part, draft in drafts.items()}

        def chance(depth: int, group: Sequence[tuple[int, int]]) -> float:
            wrong, heard = 1.0, set()
            for part, node in group:
                if part not in heard:
                    heard.add(part)
                    wrong *= 1.0 - records[part].estimate(depth, places[part][node])
            return 1.0 - wrong

        return pack_likeliest(drafts, chance, budget)


def _places(draft: DraftTree) -> list[int]:
    """How many siblings stand before each node."""
    seen: dict[int, int] = {}
    places = []
    for parent in draft.parents:
        places.append(seen.get(parent, 0))
        seen[parent] = places[-1] + 1
    return places


def build(method: str, options: Options, context: DraftContext) -> Drafter:
    return shared_ensemble(MergeDrafter, method, options, context)
