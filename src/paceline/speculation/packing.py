"""Packing: several drafts as one tree, and what came of it in terms of each."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.speculation.drafter import Budget, Observation
from paceline.speculation.growing import GrowingTree
from paceline.speculation.tree import DraftTree

UNKNOWN = -1
"""In Observation.chosen: this node of the part's draft did not make it into the verified tree."""


@dataclass(slots=True)
class Pack:
    """Trees packed into one. places[part][node]: where the part's node went, None if it was left out."""

    tree: GrowingTree = field(default_factory=GrowingTree)
    proposers: list[int] = field(default_factory=list)
    """Of each packed node: the part that proposed it first."""
    places: dict[int, list[int | None]] = field(default_factory=dict)
    scores: list[float] | None = None
    """Of each packed node: how likely it is accepted once its parent is."""

    def add_node(self, part: int, draft: DraftTree, node: int) -> int:
        """Put a part's node, whose parent was taken, into the tree."""
        places = self.places.setdefault(part, [None] * len(draft))
        above = draft.parents[node]
        parent = -1 if above < 0 else places[above]
        if parent is None:
            raise ValueError("a node was packed before its parent")
        place = places[node] = self.tree.add(parent, draft.tokens[node])
        if place == len(self.proposers):
            self.proposers.append(part)
        return place

    def settle(self, drafts: dict[int, DraftTree]) -> None:
        """Find the place of every node, also of those that came after the tree was full and stand in it all the
        same, because another part proposed them too."""
        for part, draft in drafts.items():
            places: list[int | None] = []
            for token, above in zip(draft.tokens, draft.parents):
                parent = -1 if above < 0 else places[above]
                places.append(None if parent is None else self.tree.find(parent, token))
            self.places[part] = places

    def draft(self, name: str, drafts: Mapping[int, DraftTree], names: Mapping[int, str]) -> DraftTree:
        """The packed tree, settled, as a draft of `name`; `names`: of the parts' drafters. It counts as deterministic
        (no q): nodes were merged and chosen by their values."""
        sources = [drafts[part].source(self.places[part].index(node)) or names[part]
                   for node, part in enumerate(self.proposers)]
        return DraftTree(self.tree.tokens, self.tree.parents, name, None, sources, self.scores)

    def translated(self, part: int, draft: DraftTree, seen: Observation) -> Observation:
        """What came of a step with the packed tree in terms of a part's own draft: its node numbers, its rows."""
        assert seen.draft is not None
        verified = len(seen.draft)  # the engine may have cut the end off
        places = [place if place is not None and place < verified else None
                  for place in self.places.get(part, [None] * len(draft))]
        accepted = [places.index(place) for place in seen.accepted if place in places]
        chosen = [seen.chosen[0], *(UNKNOWN if place is None else seen.chosen[place + 1] for place in places)] \
            if seen.chosen else []
        return Observation(seen.tokens, accepted, draft, chosen, seen.hidden)


def pack_likeliest(drafts: Mapping[int, DraftTree], chance: Callable[[int, Sequence[tuple[int, int]]], float],
                   budget: Budget, shared: Callable[[Sequence[float]], Sequence[float]] = list) -> Pack:
    """Pack drafts (by part) so that the nodes likeliest to be accepted come first, a parent always before its children,
    up to the budget and as long as they are worth their price. `chance(depth, group)`: of a token that these (part,
    node) propose, once its parent is accepted; `shared`: from such chances of siblings, the likeliest first, to what is
    left of them where one at most is right."""
    below = {part: _children(draft) for part, draft in drafts.items()}
    depths = {part: draft.depths() for part, draft in drafts.items()}
    scores: list[float] = []
    pack = Pack(scores=scores)
    queue: list[tuple[float, int, int, float, list[tuple[int, int]]]] = []
    order = 0

    def offer(proposals: list[tuple[int, int]], worth: float) -> None:
        """Queue the children of nodes that are one in the packed tree, those with the same token as one."""
        nonlocal order
        together: dict[int, list[tuple[int, int]]] = {}
        for part, node in proposals:
            for child in below[part][node + 1]:
                together.setdefault(drafts[part].tokens[child], []).append((part, child))
        siblings: list[tuple[float, int, list[tuple[int, int]]]] = []
        for group in together.values():
            part, node = group[0]
            depth = depths[part][node]
            if depth <= budget.depth:
                siblings.append((chance(depth, group), depth, group))
        siblings.sort(key=lambda one: -one[0])
        for own, (_, depth, group) in zip(shared([one[0] for one in siblings]), siblings):
            heapq.heappush(queue, (-worth * own, depth, order, own, group))
            order += 1

    offer([(part, -1) for part in drafts], 1.0)
    while queue and len(pack.tree) < budget.nodes:
        worth, _, _, own, group = heapq.heappop(queue)
        if -worth <= budget.price and len(pack.tree):
            break
        for part, node in group:
            pack.add_node(part, drafts[part], node)
        scores.append(own)
        offer(group, -worth)
    return pack


def _children(draft: DraftTree) -> list[list[int]]:
    """The children of node i at i + 1; those of the root at 0."""
    below: list[list[int]] = [[] for _ in range(len(draft) + 1)]
    for node, parent in enumerate(draft.parents):
        below[parent + 1].append(node)
    return below
