"""The rules on the engine's own noise: laws and acceptance of many seeds, all draws keyed as the engine keys them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.engine.decide.randomness import inverse
from paceline.sampling.noise import ACCEPT, PRIVATE_DRAFT, RESIDUAL, TARGET, gumbel, token_bits, uniform
from paceline.speculation.tree import DraftTree
from paceline.speculation.verify import RULES
from speculation.statistics import chi_square, sigmas

START = 20
"""Where the cycle starts."""
LEAST = 1e-6
SMALL = (16, 12_000)
LARGE = (512, 200_000)


class Noise:
    """The draws of one cycle for many seeds at once: position START + depth, two accept tests each."""

    def __init__(self, count: int, depth: int, siblings: int) -> None:
        self.seeds = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        self.accept = np.stack([np.stack([uniform(self._bits(START + d, i, ACCEPT)) for i in range(siblings)], 1)
                                for d in range(depth)], 1).astype(np.float64)
        self.residual = np.stack([(self._bits(START + d, 0, RESIDUAL) + 0.5) * 2.0**-32 for d in range(depth)], 1)

    def _bits(self, position: int, index: int, purpose: int) -> np.ndarray:
        return token_bits(self.seeds, position, np.full(len(self.seeds), index), purpose=purpose,
                          cycle=0 if purpose == TARGET else START)

    def target(self, probs: np.ndarray) -> np.ndarray:
        """The target's own token at the first position."""
        noise = np.stack([gumbel(self._bits(START, token, TARGET)) for token in range(len(probs))], 1)
        return (np.log(probs).astype(np.float32) + noise).argmax(1)

    def draft_uniform(self, depth: int, index: int) -> np.ndarray:
        return (self._bits(START + depth, index, PRIVATE_DRAFT) + 0.5) * 2.0**-32


class Randomness:
    def __init__(self, noise: Noise, depth_of: list[int], target: np.ndarray | None) -> None:
        self._noise, self._depth_of, self._target = noise, depth_of, target
        self.seed = 0

    def accept(self, row: int, index: int) -> float:
        return float(self._noise.accept[self.seed, self._depth_of[row], index])

    def residual(self, row: int, weights: np.ndarray) -> int:
        return inverse(float(self._noise.residual[self.seed, self._depth_of[row]]), weights)

    def target(self, row: int) -> int:
        return 0 if self._target is None else int(self._target[self.seed, self._depth_of[row]])


def distributions(size: int, rows: int, seed: int, sharpness: float) -> np.ndarray:
    weights = np.random.default_rng(seed).dirichlet(np.full(size, sharpness), rows)
    return weights / weights.sum(1, keepdims=True)


def inverses(u: np.ndarray, probs: np.ndarray) -> np.ndarray:
    reached = probs.cumsum()
    return reached.searchsorted(u * reached[-1], side="right")


SIZES = [pytest.param(*SMALL, id="small"), pytest.param(*LARGE, id="large", marks=pytest.mark.full)]


@pytest.mark.parametrize(("size", "count"), SIZES)
def test_a_chain_of_two(size: int, count: int) -> None:
    """First and second token, and acceptance of both, under the rejection rule."""
    p0, p1 = distributions(size, 2, 1, 0.5)
    q0, q1 = distributions(size, 2, 2, 1.0)
    noise = Noise(count, 2, 1)
    drafts = np.stack([inverses(noise.draft_uniform(0, 0), q0), inverses(noise.draft_uniform(1, 0), q1)], 1)
    randomness = Randomness(noise, [0, 1, 2], np.zeros((count, 3), dtype=np.int64))
    rule = RULES["rejection"].verify
    first, second = np.zeros(size), np.zeros(size)
    accepted = [0, 0]
    tree = DraftTree.chain([0, 0])
    tree.q = [q0, q1]
    for randomness.seed, tree.tokens in enumerate(drafts.tolist()):
        verdict = rule(tree, lambda row: p0 if row == 0 else p1, randomness)
        first[verdict.tokens[0]] += 1
        accepted[0] += len(verdict.path) > 0
        if verdict.path:
            second[verdict.tokens[1]] += 1
            accepted[1] += len(verdict.path) > 1
    assert chi_square(first, p0) > LEAST
    assert chi_square(second, p1) > LEAST
    assert 0.5 * np.abs(first / count - p0).sum() < (0.02 if count < 100_000 else 0.025)
    for hits, trials, p, q in ((accepted[0], count, p0, q0), (accepted[1], accepted[0], p1, q1)):
        alpha = float(np.minimum(p, q).sum())
        assert sigmas(hits, trials, alpha) < 5.0
        assert hits / trials == pytest.approx(alpha, abs=0.02)


@pytest.mark.parametrize(("size", "count"), SIZES)
@pytest.mark.parametrize("rule", ["multi-round", "without-replacement"])
def test_two_siblings(rule: str, size: int, count: int) -> None:
    p, q = distributions(size, 1, 3, 0.5)[0], distributions(size, 1, 4, 1.0)[0]
    noise = Noise(count, 1, 2)
    u = noise.draft_uniform(0, 1)
    drafts = np.stack([inverses(noise.draft_uniform(0, 0), q), inverses(u, q)], 1)
    if rule == "without-replacement":
        for token in range(size):
            same = drafts[:, 0] == token
            drafts[same, 1] = inverses(u[same], np.where(np.arange(size) == token, 0.0, q))
    randomness = Randomness(noise, [0, 1, 1], np.zeros((count, 2), dtype=np.int64))
    verify = RULES[rule].verify
    counts = np.zeros(size)
    firsts = 0
    tree = DraftTree([0, 0], [-1, -1], "test", q=[q, q])
    for randomness.seed, tree.tokens in enumerate(drafts.tolist()):
        verdict = verify(tree, lambda row: p, randomness)
        counts[verdict.tokens[0]] += 1
        firsts += verdict.path == [1]
    assert chi_square(counts, p) > LEAST
    # Of the first sibling alone: what the second adds depends on the rule.
    assert sigmas(firsts, count, float(np.minimum(p, q).sum())) < 5.0


def test_deterministic_drafts() -> None:
    """The target's own draw, by its Gumbel noise, is what comes out."""
    size, count = 12, 12_000
    p = distributions(size, 1, 5, 0.7)[0]
    noise = Noise(count, 1, 1)
    randomness = Randomness(noise, [0, 1, 1], np.stack([noise.target(p)] * 2, 1))
    counts = np.zeros(size)
    tree = DraftTree([3, 4], [-1, -1])
    for randomness.seed in range(count):
        counts[RULES["rejection"].verify(tree, lambda row: p, randomness).tokens[0]] += 1
    assert chi_square(counts, p) > LEAST


@pytest.mark.full
def test_rejection_to_a_percent() -> None:
    """Acceptance within 1 % and the text's law within .01 in total variation, at 100,000 samples."""
    size, count = 16, 100_000
    p, q = distributions(size, 1, 6, 0.5)[0], distributions(size, 1, 7, 1.0)[0]
    noise = Noise(count, 1, 1)
    randomness = Randomness(noise, [0, 1], None)
    tree = DraftTree.chain([0])
    tree.q = [q]
    counts, accepted = np.zeros(size), 0
    for randomness.seed, token in enumerate(inverses(noise.draft_uniform(0, 0), q).tolist()):
        tree.tokens = [token]
        verdict = RULES["rejection"].verify(tree, lambda row: p, randomness)
        counts[verdict.tokens[0]] += 1
        accepted += bool(verdict.path)
    assert 0.5 * np.abs(counts / count - p).sum() < 0.01
    assert accepted / count == pytest.approx(float(np.minimum(p, q).sum()), rel=0.01)


@pytest.mark.parametrize("mistake", ["resample from p", "shared noise"])
def test_the_statistics_would_see_a_mistake(mistake: str) -> None:
    size, count = SMALL
    p, q = distributions(size, 1, 1, 0.5)[0], distributions(size, 1, 2, 1.0)[0]
    noise = Noise(count, 1, 1)
    drafts = inverses(noise.draft_uniform(0, 0), q)

    class Wrong(Randomness):
        def accept(self, row: int, index: int) -> float:
            if mistake == "shared noise":
                return float(shared[self.seed])
            return super().accept(row, index)

        def residual(self, row: int, weights: np.ndarray) -> int:
            return super().residual(row, p if mistake == "resample from p" else weights)

    shared: Any = noise.draft_uniform(0, 0)
    randomness = Wrong(noise, [0, 1], None)
    tree = DraftTree.chain([0])
    tree.q = [q]
    counts = np.zeros(size)
    for randomness.seed, token in enumerate(drafts.tolist()):
        tree.tokens = [token]
        counts[RULES["rejection"].verify(tree, lambda row: p, randomness).tokens[0]] += 1
    assert chi_square(counts, p) < LEAST
