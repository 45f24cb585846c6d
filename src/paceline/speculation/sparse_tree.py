"""SparseTree: Medusa's tree, settled before anything is drafted: which of the best tokens go on, place by place.

A path of indices names a node: (0, 2) is the third best token after the best one. Which nodes pay is a matter of how
often the guesses of each rank are right at each depth (`accuracies`): the tree with the most accepted tokens of all of
its size is made by adding the likeliest node time after time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from typing import Any

from paceline.errors import RequestError
from paceline.speculation.drafter import Budget
from paceline.speculation.growing import ROOT
from paceline.speculation.growth import Growth
from paceline.speculation.options import MAX_NODES, shown
from paceline.speculation.sequence import DraftedSequence

Path = tuple[int, ...]
DEFAULT_NODES = 63
"""As many as the published trees have."""
USUAL_ACCURACIES = (
    (.58, .12, .059, .037, .026, .020, .015, .012, .010, .008),
    (.37, .11, .062, .043, .032, .026, .021, .017, .015, .013),
    (.26, .10, .059, .043, .034, .028, .023, .020, .017, .015),
    (.20, .08, .055, .041, .033, .027, .023, .020, .018, .016),
    (.16, .07, .050, .038, .031, .026, .022, .019, .017, .015),
)
"""How often the best, second best, ... guess is right, by depth: assumed, such that the tree that follows has all but
four nodes in common with the one that Medusa's authors measured for a model of 7 B. What a head of yours does is
better, where somebody has measured it (option "accuracies")."""


def likeliest_tree(accuracies: Sequence[Sequence[float]], nodes: int) -> tuple[Path, ...]:
    """The `nodes` paths that are accepted most often, if ranks are right independently of one another: accuracies[d][i]
    is how often the i-th guess of depth d + 1 is the right one. Likeliest first, so parents before children."""
    found: list[Path] = []
    waiting: list[tuple[float, int, Path]] = []

    def offer(path: Path, chance: float) -> None:
        if len(path) <= len(accuracies) and path[-1] < len(accuracies[len(path) - 1]) and chance > 0.0:
            heappush(waiting, (-chance, len(path), path))

    for index, chance in enumerate(accuracies[0] if accuracies else ()):
        offer((index,), chance)
    while waiting and len(found) < nodes:
        chance, depth, path = heappop(waiting)
        found.append(path)
        for index, more in enumerate(accuracies[depth] if depth < len(accuracies) else ()):
            offer((*path, index), -chance * more)
    return tuple(found)


@dataclass(frozen=True)
class SparseTree:
    choices: tuple[Path, ...]
    """Parents before children; what a smaller budget leaves out stands at the end."""

    @property
    def is_chain(self) -> bool:
        return all(index == 0 for path in self.choices for index in path)

    @cached_property
    def ranks(self) -> dict[Path, int]:
        return {path: place for place, path in enumerate(self.choices)}

    def start(self, sequence: DraftedSequence, budget: Budget, depth: int, min_confidence: float) -> Growth:
        return SparseGrowth(self, sequence, budget, depth, min_confidence)

    @classmethod
    def read(cls, choices: Any, accuracies: Any) -> SparseTree:
        """Options "choices" (paths, or True: the likeliest tree) and "accuracies" (by which it is the likeliest)."""
        if accuracies is not None:
            if choices is not True or not _are_accuracies(accuracies):
                raise RequestError("speculation accuracies must be lists of numbers from 0 to 1, one per depth, the "
                                   f"best guess's first, beside choices=True, got {shown(accuracies)}.", "speculation")
            return cls(likeliest_tree(accuracies, DEFAULT_NODES))
        if choices is True:
            return cls(likeliest_tree(USUAL_ACCURACIES, DEFAULT_NODES))
        if not (isinstance(choices, list | tuple) and 1 <= len(choices) <= MAX_NODES and all(map(_is_path, choices))):
            raise RequestError(f"speculation choices must be True or a list of 1 to {MAX_NODES} paths, each a list of "
                               f"places among the best tokens such as [0, 2], got {shown(choices)}.", "speculation")
        paths = dict.fromkeys(map(tuple, choices))
        if missing := [path for path in paths if len(path) > 1 and path[:-1] not in paths]:
            raise RequestError(f"speculation choices hold {list(missing[0])} and not {list(missing[0][:-1])}, which it "
                               "goes on from: add it.", "speculation")
        place = {(): -1} | {path: index for index, path in enumerate(paths)}
        in_order = all(place[path[:-1]] < place[path] for path in paths)
        return cls(tuple(paths if in_order else sorted(paths, key=lambda path: (len(path), path))))


def _is_path(raw: Any) -> bool:
    return isinstance(raw, list | tuple) and len(raw) > 0 and all(
        isinstance(index, int) and not isinstance(index, bool) and 0 <= index < MAX_NODES for index in raw)


def _are_accuracies(raw: Any) -> bool:
    return isinstance(raw, list | tuple) and 0 < len(raw) <= MAX_NODES and all(
        isinstance(level, list | tuple) and 0 < len(level) <= MAX_NODES and all(
            isinstance(one, int | float) and not isinstance(one, bool) and 0.0 <= one <= 1.0 for one in level)
        for level in raw)


class SparseGrowth(Growth):
    def __init__(self, shape: SparseTree, sequence: DraftedSequence, budget: Budget, depth: int,
                 min_confidence: float) -> None:
        super().__init__(sequence, budget, depth, min_confidence)
        self._shape = shape
        self._below: dict[Path, list[int]] = {}
        """Places of the children that each path has, ascending."""
        for path in shape.choices[:budget.nodes]:
            self._below.setdefault(path[:-1], []).append(path[-1])
        for places in self._below.values():
            places.sort()
        self._paths: list[Path] = []

    def _path(self, node: int) -> Path:
        return () if node == ROOT else self._paths[node]

    def _widths(self) -> list[tuple[int, int]]:
        found = []
        for node in self.newest:
            places = self._below.get(self._path(node), [])
            if places:
                found.append((node, len(places) if self.settled else places[-1] + 1))
        return found

    def _kept(self, node: int, count: int) -> Sequence[int]:
        """Where tokens stand as they were sampled there is no best one: so many of them, in their order."""
        path = self._path(node)
        places = self._below[path]
        kept = places[:count] if self.settled else [place for place in places if place < count]
        self._paths += [(*path, place) for place in kept]
        return range(len(kept)) if self.settled else kept

    def _order(self) -> list[int]:
        ranks = self._shape.ranks
        return sorted(range(len(self.tokens)), key=lambda node: ranks[self._paths[node]])
