"""Typical acceptance (Medusa): a draft stands if the target finds it likely enough. LOSSY: texts follow another law."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from paceline.speculation.rules.verdict import Probs, Randomness, Target, Verdict, children_of, path_to
from paceline.speculation.tree import DraftTree

EPSILON = 0.09
DELTA = 0.3


def threshold(p: Probs, epsilon: float = EPSILON, delta: float = DELTA) -> float:
    """A draft passes above this: min(epsilon, delta * exp(-entropy)), so lower where the target itself is unsure."""
    some = p[p > 0.0]
    entropy = -float((some * np.log(some)).sum())
    return min(epsilon, delta * math.exp(-entropy))


def typical(tree: DraftTree, p: Target, randomness: Randomness, epsilon: float = EPSILON,
            delta: float = DELTA) -> Verdict:
    """Take the longest path whose tokens all pass (of several, the likeliest), then one sample of the target's own;
    if that is a draft too, go on below it. Whatever the drafter declared as q is not looked at."""
    children = children_of(tree)
    tokens: list[int] = []
    at = 0
    while True:
        end = _furthest(tree, p, children, at, lambda probs: threshold(probs, epsilon, delta))
        tokens += [tree.tokens[row - 1] for row in path_to(tree, end)[len(tokens):]]
        own = randomness.target(end)
        tokens.append(own)
        below = children.get(end, [])
        drafted = next((row for row in below if tree.tokens[row - 1] == own), None)
        if drafted is None:
            path = path_to(tree, end)
            return Verdict(tokens, [0, *path], path, bonus=not below)
        at = drafted


def _furthest(tree: DraftTree, p: Target, children: dict[int, list[int]], at: int,
              bar: Callable[[Probs], float]) -> int:
    """The last row of the longest path below `at` that passes, `at` itself if none does."""
    best, best_rank = at, (0, 0.0)
    open_rows = [(at, (0, 0.0))]
    while open_rows:
        row, (depth, likelihood) = open_rows.pop()
        if (depth, likelihood) > best_rank:
            best, best_rank = row, (depth, likelihood)
        below = children.get(row)
        probs = p(row) if below else None
        if below is None or probs is None:
            continue
        least = bar(probs)
        for child in below:
            chance = float(probs[tree.tokens[child - 1]])
            if chance > least:
                open_rows.append((child, (depth + 1, likelihood + math.log(chance))))
    return best
