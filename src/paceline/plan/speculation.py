"""What speculation is worth: tokens a cycle, speed-up, the best depth, and where it stops to pay.

In the words of the papers: a is the chance that a drafted token is accepted when all before it were, K how many tokens
are drafted, c what drafting one of them costs in steps of the target. A cycle always yields one token more than were
accepted: the target's own, in place of the first wrong one or behind the last. Some texts leave it out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.errors import ConfigError
from paceline.models.fields import finite

MOST_K = 64
SIBLING = 0.5
"""Drafters put their best guess first: the others are right less often than it."""


def chance(value: float, name: str = "acceptance") -> float:
    found = finite(value)
    if found is None or not 0.0 <= found <= 1.0:
        raise ConfigError(f"{name} is a share from 0 to 1, got {value!r}.")
    return found


def expected_accepted(a: float, k: int) -> float:
    """Drafted tokens that stand: a + a^2 + ... + a^K = a (1 - a^K) / (1 - a)."""
    return float(k) if chance(a) == 1.0 else a * (1.0 - a**k) / (1.0 - a)


def expected_tokens(a: float, k: int) -> float:
    """Tokens a cycle, the target's own counted: (1 - a^(K+1)) / (1 - a). Plain decoding has 1."""
    return 1.0 + expected_accepted(a, k)


def tree_nodes(branches: Sequence[int]) -> int:
    """Drafted tokens of a tree in which every node of a depth has so many children: 120 for (3, 3, 3, 3)."""
    nodes, width = 0, 1
    for children in branches:
        width *= children
        nodes += width
    return nodes


def tree_tokens(a: float, branches: Sequence[int], sibling: float = SIBLING) -> float:
    """Tokens a cycle of such a tree, never more than its depth + 1. `sibling`: how often a second or later child is
    right where those before it were wrong, as a share of a. With 1 a depth is passed with 1 - (1 - a)^children."""
    if any(children < 1 for children in branches):
        raise ConfigError(f"branches are children of every node by depth, each at least 1, got {list(branches)}.")
    total = reached = 1.0
    for children in branches:
        reached *= 1.0 - (1.0 - chance(a)) * (1.0 - chance(sibling, "sibling") * a)**(children - 1)
        total += reached
    return total


def ranked_tree_tokens(paths: Sequence[Sequence[int]], accuracies: Sequence[Sequence[float]]) -> float:
    """Tokens a cycle of a sparse tree: of each path ([0, 2]: the third best after the best), the product of how often
    the best, second best, ... token is right, by depth."""
    total = 1.0
    for path in paths:
        reached = 1.0
        for depth, rank in enumerate(path):
            reached *= chance(accuracies[depth][rank], "an accuracy")
        total += reached
    return total


def speed_up(a: float, k: int, c: float, verify: float = 1.0) -> float:
    """Over plain decoding: tokens a cycle over its cost. `verify`: that of the target's step with K + 1 rows for one;
    1 where reading the weights is all that counts."""
    return expected_tokens(a, k) / (verify + k * c)


def best_k(a: float, c: float, verify: Callable[[int], float] = lambda k: 1.0, most: int = MOST_K) -> int:
    """The K with the largest speed-up; 0: drafting does not pay. All are tried: the curve may have several tops."""
    return max(range(most + 1), key=lambda k: (speed_up(a, k, c, verify(k)) if k else 1.0, -k))


def break_even(k: int, cost: float) -> float | None:
    """The acceptance at which K drafted tokens give what their cycle costs, in plain steps; None: none is enough."""
    if cost > k + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if expected_tokens(middle, k) >= cost else (middle, high)
    return high


def acceptance_of(tokens: float, k: int) -> float:
    """The acceptance behind a published number of tokens a cycle at K."""
    found = break_even(k, max(1.0, tokens))
    return 1.0 if found is None else found
