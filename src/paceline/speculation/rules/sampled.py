"""The rules for sampled drafts: accept with probability min(1, p/q), otherwise go on with what p has more than q.

All three are one walk down the tree. At a row the target wants p; the children are drafts of that token, each sampled
from a q the drafter declares (None: a point mass, a deterministic draft). They are tested in the order in which they
were sampled. A rejected one leaves norm((p - q)+) to the others, and to the residual sample when none is left.

- rejection (Leviathan 2023, Chen 2023): at most one sampled child per row.
- multi-round (SpecInfer): children sampled independently, each from its q; a token sampled twice is tested twice.
- without-replacement (RSD, Sequoia): siblings that share a q array were sampled from it one after the other; after
  a rejection the q of those left is what remained without the rejected token. (Siblings that were sampled
  independently are exact too: one that repeats a rejected token is passed over, the others have this q. They are
  accepted less.)

Whether a child is there may depend on the children before it and on those further up, never on its own value.
"""

from __future__ import annotations

import numpy as np

from paceline.speculation.rules.verdict import Probs, Randomness, Target, Verdict, children_of, path_to
from paceline.speculation.tree import DraftTree


def multi_round(tree: DraftTree, p: Target, randomness: Randomness) -> Verdict:
    return _walk(tree, p, randomness, reduce_q=False)


rejection = multi_round
"""On a chain the loop over siblings has one round. That the tree is one is checked when it is proposed."""


def without_replacement(tree: DraftTree, p: Target, randomness: Randomness) -> Verdict:
    return _walk(tree, p, randomness, reduce_q=True)


def _walk(tree: DraftTree, p: Target, randomness: Randomness, *, reduce_q: bool) -> Verdict:
    children = children_of(tree)
    tokens: list[int] = []
    overlaps: list[float] = []
    at = 0
    twins = [0]
    """Rows that hold the same text as `at`, itself included: drafts that coincided go on together."""
    while True:
        candidates = sorted(child for row in twins for child in children.get(row, ()))
        token, taken = _token_after(tree, at, candidates, p, randomness, reduce_q, overlaps)
        tokens.append(token)
        if taken is None:
            path = path_to(tree, at)
            return Verdict(tokens, [0, *path], path, bonus=not candidates, overlaps=overlaps)
        at = taken
        twins = [row for row in candidates if tree.tokens[row - 1] == token]


def _token_after(tree: DraftTree, row: int, candidates: list[int], p: Target, randomness: Randomness,
                 reduce_q: bool, overlaps: list[float]) -> tuple[int, int | None]:
    """The token that comes after `row` and, where it is a draft, the candidate it is. How likely the first of them was
    is added to `overlaps`."""
    if all(_q(tree, candidate) is None for candidate in candidates):
        # Point masses one after the other come to a single sample of the target's own, looked for among them.
        token = randomness.target(row)
        return token, next((c for c in candidates if tree.tokens[c - 1] == token), None)
    left = p(row)
    if left is None:
        return randomness.target(row), None
    reduced: dict[tuple[int, int], Probs] = {}
    """By family (the parent, and the q array that siblings share), what is left of q."""
    for index, candidate in enumerate(candidates):
        token = tree.tokens[candidate - 1]
        declared = _q(tree, candidate)
        family = (tree.parents[candidate - 1], id(declared))
        q = None if declared is None else reduced.get(family, declared)
        chance = 1.0 if q is None else float(q[token])
        if index == 0 and q is not None:
            overlaps.append(float(np.minimum(left, q).sum()))
        if chance <= 0.0:
            continue  # sampled before, or never from this q: it says nothing, and changes nothing
        # Strict: u may be 0, and a token the target rules out must not pass.
        if randomness.accept(row, index) < float(left[token]) / chance:
            return token, candidate
        if q is None:
            left = _normed(_zeroed(left, token), left)
            continue
        left = _normed(np.maximum(left - q, 0.0), left)
        if reduce_q:
            reduced[family] = _normed(_zeroed(q, token), q)
    return randomness.residual(row, left), None


def _q(tree: DraftTree, row: int) -> Probs | None:
    return None if tree.q is None else tree.q[row - 1]


def _zeroed(probs: Probs, token: int) -> Probs:
    probs = probs.copy()
    probs[token] = 0.0
    return probs


def _normed(weights: Probs, otherwise: Probs) -> Probs:
    """`weights` scaled to sum 1; `otherwise` where nothing is left of them, which only rounding can bring about."""
    total = float(weights.sum())
    return weights / total if total > 0.0 else otherwise
