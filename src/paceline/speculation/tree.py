"""DraftTree: what every drafter proposes. A chain is a tree without branches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class DraftTree:
    """Proposed continuations of one sequence, parents before children.

    parents[i] is the index of node i's parent, or -1 if it follows the last committed token.
    `q`, when the drafter sampled, holds what it sampled from: q[i] is the whole distribution [V] (float64, after
    every sampling control) that node i was sampled from, one array shared by siblings that were sampled together, which
    stand in the order in which they were sampled; None for deterministic drafts, all of them or node by node.
    `sources[i]` names the drafter of node i where several contributed. `scores[i]`, where the drafter has an opinion,
    is how likely it thinks node i is accepted given that its parent is (0..1): the engine learns how far to trust it
    and cuts off what will not pay.
    """

    tokens: list[int]
    parents: list[int]
    drafter: str = ""
    q: Sequence[NDArray[np.float64] | None] | None = None
    sources: list[str] | None = None
    scores: list[float] | None = None

    @classmethod
    def chain(cls, tokens: list[int], drafter: str = "", scores: list[float] | None = None) -> DraftTree:
        return cls(list(tokens), list(range(-1, len(tokens) - 1)), drafter, scores=scores)

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents):
            raise ValueError("a draft tree needs one parent per token")
        if not self.is_chain and any(not -1 <= parent < i for i, parent in enumerate(self.parents)):
            raise ValueError("a draft tree's parents must come before their children")
        for name, values in (("scores", self.scores), ("sources", self.sources)):
            if values is not None and len(values) != len(self.tokens):
                raise ValueError(f"a draft tree with {name} needs one per token")

    def check(self, vocab_size: int | None = None) -> None:
        """Raise if this cannot enter a step with other people's rows: types are not enforced when a tree is made, and
        a drafter may have changed it since. On the path of every draft, so it reads each list at the speed of C."""
        self.__post_init__()
        if not {*map(type, self.tokens), *map(type, self.parents)} <= {int}:
            raise TypeError("a draft tree's tokens and parents must be of type int")
        if self.tokens and vocab_size is not None and (min(self.tokens) < 0 or max(self.tokens) >= vocab_size):
            raise ValueError(f"a drafted token lies outside the vocabulary of {vocab_size}")
        if self.scores is not None and not abs(sum(self.scores)) < inf:  # the negated form catches NaN as well
            raise ValueError("a draft tree's scores must be finite numbers")
        if not isinstance(self.drafter, str) or not {*map(type, self.sources or ())} <= {str}:
            raise TypeError("a draft tree's drafter and sources must be texts")

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        return list(self.parents) == list(range(-1, len(self.parents) - 1))

    def trimmed(self, nodes: int) -> DraftTree:
        """The first `nodes` nodes; parents come first, so every prefix of the list is a tree."""
        if nodes >= len(self.tokens):
            return self
        q = None if self.q is None else self.q[:nodes]
        sources = None if self.sources is None else self.sources[:nodes]
        scores = None if self.scores is None else self.scores[:nodes]
        return DraftTree(self.tokens[:nodes], self.parents[:nodes], self.drafter, q, sources, scores)

    def source(self, node: int) -> str:
        """The drafter that proposed a node."""
        return self.drafter if self.sources is None else self.sources[node]

    def depths(self) -> list[int]:
        """Depth of each node; 1 for the children of the last committed token."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    def path(self, node: int) -> list[int]:
        """Tokens from depth 1 down to `node`, inclusive."""
        tokens: list[int] = []
        while node >= 0:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]
