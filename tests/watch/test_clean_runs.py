"""Without a fault there is no alarm, whatever the distributions are."""

from __future__ import annotations

import random

import numpy as np
import pytest

from paceline.engine.decide.randomness import inverse
from paceline.engine.records.witness import Verified
from paceline.request import TokenLogprob
from paceline.speculation.tree import DraftTree
from paceline.speculation.verify import RULES
from paceline.watch.martingale import THRESHOLD
from paceline.watch.witness import MethodLaws

SIZE = 8


class Drawn:
    """speculation.verify.Randomness from a generator."""

    def __init__(self, rng: np.random.Generator, p: np.ndarray) -> None:
        self.rng, self.p = rng, p

    def accept(self, row: int, index: int) -> float:
        return float(self.rng.random())

    def residual(self, row: int, weights: np.ndarray) -> int:
        return inverse(float(self.rng.random()), weights)

    def target(self, row: int) -> int:
        return inverse(float(self.rng.random()), self.p[row])


def cycle(rng: np.random.Generator, rule: str, laws: MethodLaws) -> int:
    """A draft of up to three tokens from one random q, verified against as many random p; the tokens it gave."""
    sharp = rng.choice([0.05, 0.5, 5.0])
    q, p = rng.dirichlet(np.full(SIZE, sharp)), rng.dirichlet(np.full(SIZE, rng.choice([0.05, 0.5, 5.0])), 4)
    if rule == "rejection":
        tree = DraftTree.chain([inverse(float(rng.random()), q) for _ in range(3)])
    else:
        first = inverse(float(rng.random()), q)
        left = q.copy()
        if rule == "without-replacement":
            left[first] = 0.0
        if not left.sum() > 0.0:
            return 0
        tree = DraftTree([first, inverse(float(rng.random()), left)], [-1, -1])
    tree.q = [q] * len(tree)
    verdict = RULES[rule].verify(tree, lambda row: p[row], Drawn(rng, p))
    laws.verified(Verified(0, tree, verdict, 0, lambda row: p[row], lambda *_: TokenLogprob(0, 0.0, 0.0, 1)))
    return len(verdict.tokens)


@pytest.mark.parametrize("rule", ["rejection", "multi-round", "without-replacement"])
@pytest.mark.parametrize("requests", [40, pytest.param(10_000, marks=pytest.mark.full)])
def test_no_alarm_over_many_requests(rule: str, requests: int) -> None:
    rng, laws = np.random.default_rng(requests), MethodLaws(rule, random.Random(1))
    for _ in range(requests):
        tokens = 0
        while tokens < 8:
            tokens += cycle(rng, rule, laws)
    assert all(law.count > requests for law in laws.laws.values())
    assert max(law.evidence for law in laws.laws.values()) < THRESHOLD / 2
