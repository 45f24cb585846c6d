"""Growth: one sequence's draft tree while a model is asked for it, level by level. Shape: what such trees look like."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.speculation.drafter import Budget
from paceline.speculation.growing import ROOT
from paceline.speculation.models import SAMPLED_RULES, Ask, Samples
from paceline.speculation.sequence import DraftedSequence
from paceline.speculation.tree import DraftTree


class Shape(Protocol):
    """Which nodes of a draft go on, and how wide."""

    @property
    def is_chain(self) -> bool: ...

    def start(self, sequence: DraftedSequence, budget: Budget, depth: int, min_confidence: float) -> Growth:
        """A draft of this shape, of `depth` levels at most."""


class Growth(ABC):
    """Nodes that go on are read by the model; leaves never are.

    Which nodes go on, and with how many children, is settled before those children are sampled, by what stands above
    them alone: rules that read q need that. Under the others anything may be left out afterwards.
    """

    def __init__(self, sequence: DraftedSequence, budget: Budget, depth: int, min_confidence: float) -> None:
        self.sequence = sequence
        self.budget = budget
        self.depth = min(budget.depth, depth)
        self.settled = sequence.rule in SAMPLED_RULES
        """What is drafted stands as it was sampled: nothing is left out for its value."""
        self.level = 0
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.chances: list[float] = []
        """Of each node: how likely the model thinks that all down to it comes true."""
        self.newest: list[int] = [ROOT]
        """Nodes of the last level that may go on."""
        self._min_confidence = min_confidence
        self._q: list[NDArray[np.float64] | None] = []
        self._scores: list[float] = []
        self._asked: list[int] = []
        self._read: dict[int, int] = {ROOT: ROOT}
        """Nodes that the model reads, and their places among those."""

    @abstractmethod
    def _widths(self) -> list[tuple[int, int]]:
        """Those of `newest` that go on, and how many children each is to have."""

    def _worth(self, found: Samples, place: int) -> float:
        """How likely a token is to come true if all above it does."""
        if found.confidences is not None:
            return found.confidences[place]
        return 1.0 if found.q is None else float(found.q[found.tokens[place]])

    def _goes_on(self, place: int) -> bool:
        """Whether a node may go on that is its parent's so-manieth child."""
        return True

    def _kept(self, node: int, count: int) -> Sequence[int]:
        """Of `count` tokens sampled below a node, best first: the places of those that are drafted."""
        return range(count)

    def ask(self) -> Ask | None:
        """The next question to the model; None: grown."""
        wanted = self._widths() if self.newest and self.level < self.depth else []
        if not wanted:
            return None
        self._asked = [node for node, _ in wanted]
        for node in self._asked:
            self._read.setdefault(node, len(self._read) - 1)
        nodes = [node for node in self._read if node != ROOT]
        return Ask(self.sequence, [self.tokens[node] for node in nodes],
                   [self._read[self.parents[node]] for node in nodes],
                   [self._read[node] for node in self._asked], [count for _, count in wanted])

    def grow(self, samples: Sequence[Samples], least: float) -> None:
        """The answer, the Samples after each node of the last question. A node goes on if its chance is at least
        `least`, where the rule allows to look."""
        self.newest = []
        for node, found in zip(self._asked, samples):
            above = 1.0 if node == ROOT else self.chances[node]
            seen: set[int] = set()
            for place in self._kept(node, len(found.tokens)):
                token = found.tokens[place]
                sure = None if found.confidences is None else found.confidences[place]
                worth = self._worth(found, place)
                chance = above * worth
                likely = sure is None or (sure >= self._min_confidence and chance >= least)
                # Where the same token was sampled twice, all that would come below the second stands below the first:
                # both are continued with the same noise.
                if likely and token not in seen and self._goes_on(place):
                    self.newest.append(len(self.tokens))
                seen.add(token)
                self.chances.append(chance)
                self.tokens.append(token)
                self.parents.append(node)
                self._q.append(found.q)
                if sure is not None:
                    self._scores.append(worth)
        self.level += 1

    def tree(self, drafter: str) -> DraftTree | None:
        if not self.tokens:
            return None
        nodes = range(len(self.tokens)) if self.settled else self._order()
        sampled = any(q is not None for q in self._q)
        scored = len(self._scores) == len(self.tokens)
        place = {ROOT: ROOT} | {node: index for index, node in enumerate(nodes)}
        return DraftTree([self.tokens[node] for node in nodes], [place[self.parents[node]] for node in nodes], drafter,
                         q=[self._q[node] for node in nodes] if sampled else None,
                         scores=[self._scores[node] for node in nodes] if scored else None)

    def _order(self) -> Sequence[int]:
        """The nodes that are passed on, parents before children, and what is to be cut first at the end."""
        return range(len(self.tokens))
