"""A drafter that samples, small enough to know everything about: the next token depends on the last one alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.engine.decide.randomness import inverse
from paceline.sampling.noise import PRIVATE_DRAFT, scalar_bits
from paceline.speculation.drafter import Budget, Needs, Observation
from paceline.speculation.sequence import DraftedSequence
from paceline.speculation.tree import DraftTree


class BigramDrafter:
    """Full trees by `shape` (children by depth), drawn with private noise from rows of `q` [V, V]."""

    needs = Needs(samples=True)

    def __init__(self, q: np.ndarray, shape: Sequence[int] = (1, 1, 1), *, replace: bool = True) -> None:
        self.name = "bigram"
        self._q = list(q)
        self._shape = shape
        self._replace = replace
        self.seen: list[Observation] = []

    def begin(self, sequence: DraftedSequence) -> None:
        pass

    def propose(self, sequences: Sequence[DraftedSequence], budgets: Sequence[Budget]) -> list[DraftTree | None]:
        return [self.tree(sequence.tokens, sequence.seed, budget.depth) for sequence, budget in zip(sequences, budgets)]

    def observe(self, sequence: DraftedSequence, observation: Observation) -> None:
        self.seen.append(observation)

    def release(self, sequence: DraftedSequence) -> None:
        pass

    def tree(self, text: list[int], seed: int, depth: int) -> DraftTree:
        tokens: list[int] = []
        parents: list[int] = []
        q: list[np.ndarray] = []
        level, cycle = [-1], len(text)
        for below, width in enumerate(self._shape[:depth]):
            grown: list[int] = []
            for place, parent in enumerate(level):
                declared = self._q[tokens[parent] if parent >= 0 else text[-1]]
                left = declared.copy()
                for sibling in range(width):
                    index = place * width + sibling
                    bits = scalar_bits(seed, cycle + below, index, PRIVATE_DRAFT, cycle=cycle)
                    token = inverse((bits + 0.5) * 2.0**-32, left)
                    grown.append(len(tokens))
                    tokens.append(token)
                    parents.append(parent)
                    q.append(declared)
                    if not self._replace:
                        left[token] = 0.0
            level = grown
        return DraftTree(tokens, parents, self.name, q=q)


def register(monkeypatch: Any, drafter: Any, name: str = "bigram") -> None:
    """Make a drafter object available under a method's name."""
    from paceline.speculation import spec

    monkeypatch.setitem(spec.BUILDERS, name, lambda method, options, context: drafter)


def tables(size: int, seed: int, sharpness: float = 1.0) -> np.ndarray:
    """[size, size], rows sum to 1."""
    rows = np.random.default_rng(seed).dirichlet(np.full(size, sharpness), size)
    return rows / rows.sum(1, keepdims=True)
