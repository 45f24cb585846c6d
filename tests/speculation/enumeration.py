"""Exact laws: a run of a rule in which every random choice is explored, not drawn.

`law(run)` runs `run` once for each way its choices can fall and adds up the probability of what comes out. Uniforms
are explored too: one knows the interval it still lies in, and a comparison splits it. So the rules under test are the
very functions the engine calls.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from paceline.speculation.tree import DraftTree

Table = Callable[[tuple[int, ...]], np.ndarray]
"""From the tokens so far to the distribution of the next."""


class Fork:
    """One way for the choices of a run to fall, and how likely it is."""

    def __init__(self, script: list[int]) -> None:
        self.script = script
        self.sizes: list[int] = []
        self.mass = 1.0

    def pick(self, weights: Sequence[float] | np.ndarray) -> int:
        """An index, with its weight for a probability. Those of weight 0 are no way to fall."""
        options = [i for i, weight in enumerate(weights) if weight > 0.0]
        at = len(self.sizes)
        self.sizes.append(len(options))
        if at == len(self.script):
            self.script.append(0)
        choice = options[self.script[at]]
        self.mass *= float(weights[choice])
        return choice

    def uniform(self) -> Uniform:
        return Uniform(self)


class Uniform:
    """A uniform number in [0, 1) of which only the answers given so far are settled."""

    def __init__(self, fork: Fork) -> None:
        self._fork, self._low, self._high = fork, 0.0, 1.0

    def __lt__(self, bar: float) -> bool:
        share = min(1.0, max(0.0, (bar - self._low) / (self._high - self._low)))
        below = self._fork.pick([share, 1.0 - share]) == 0
        if below:
            self._high = min(self._high, bar)
        else:
            self._low = max(self._low, bar)
        return below

    def index(self, weights: np.ndarray) -> int:
        """What drawing by this number from a distribution gives."""
        for i, reached in enumerate(np.cumsum(weights)[:-1]):
            if self < float(reached):
                return i
        return len(weights) - 1


def law(run: Callable[[Fork], Hashable]) -> dict[Any, float]:
    """The probability of each value `run` can return."""
    out: dict[Any, float] = {}
    script: list[int] = []
    while True:
        fork = Fork(script)
        value = run(fork)
        out[value] = out.get(value, 0.0) + fork.mass
        while script and script[-1] + 1 == fork.sizes[len(script) - 1]:
            script.pop()
        if not script:
            return out
        script[-1] += 1


class ForkRandomness:
    """paceline.speculation.verify.Randomness, explored."""

    def __init__(self, fork: Fork, p: Callable[[int], np.ndarray]) -> None:
        self.fork, self.p = fork, p
        self._own: dict[int, int] = {}

    def accept(self, row: int, index: int) -> Any:
        return self.fork.uniform()

    def residual(self, row: int, weights: np.ndarray) -> int:
        return self.fork.pick(weights)

    def target(self, row: int) -> int:
        if row not in self._own:
            self._own[row] = self.fork.pick(self.p(row))
        return self._own[row]


# -------------------------------------------------------------------------------------------------- drafters

Draft = Callable[[Fork, Table], DraftTree]


def sampled(shape: Sequence[int], *, replace: bool = True) -> Draft:
    """A drafter of full trees: shape[d] children below every node of depth d, drawn from one q, independently or
    without replacement (as far as there is something left to draw)."""

    def draft(fork: Fork, q: Table) -> DraftTree:
        tree = Growing()
        level: list[int] = [-1]
        for width in shape:
            level = [node for parent in level for node in grow(fork, tree, parent, q(tree.context(parent)), width,
                                                                replace)]
        return tree.done()

    return draft


class Growing:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.q: list[np.ndarray | None] = []

    def add(self, parent: int, token: int, q: np.ndarray | None) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.q.append(q)
        return len(self.tokens) - 1

    def context(self, node: int) -> tuple[int, ...]:
        return tuple(self.done().path(node))

    def done(self) -> DraftTree:
        return DraftTree(list(self.tokens), list(self.parents), "test", q=list(self.q))


def grow(fork: Fork, tree: Growing, parent: int, q: np.ndarray, width: int, replace: bool) -> list[int]:
    left, nodes = q, []
    for _ in range(width):
        if left.sum() <= 0.0:
            break
        token = fork.pick(left / left.sum())
        nodes.append(tree.add(parent, token, q))
        if not replace:
            left = left.copy()
            left[token] = 0.0
    return nodes


# -------------------------------------------------------------------------------------------------- the check

Rule = Callable[[DraftTree, Callable[[int], np.ndarray], Any], Any]


def cycle_law(rule: Rule, draft: Draft, p: Table, q: Table,
              randomness: type = ForkRandomness) -> dict[tuple[int, ...], float]:
    """The law of what one drafting cycle emits."""

    def run(fork: Fork) -> tuple[int, ...]:
        tree = draft(fork, q)

        def after(row: int) -> np.ndarray:
            return p(tuple(tree.path(row - 1)))

        return tuple(rule(tree, after, randomness(fork, after)).tokens)

    return law(run)


def deviation(emitted: dict[tuple[int, ...], float], p: Table, length: int) -> float:
    """How far the joint law of the first `length` tokens is from the target's, at most, where what a cycle did not
    emit comes from the target. Zero for every cycle means that any number of cycles in a row is exact."""
    got: dict[tuple[int, ...], float] = {}

    def go_on(tokens: tuple[int, ...], mass: float, into: dict[tuple[int, ...], float]) -> None:
        if len(tokens) >= length:
            into[tokens[:length]] = into.get(tokens[:length], 0.0) + mass
            return
        for token, chance in enumerate(p(tokens)):
            if chance > 0.0:
                go_on((*tokens, token), mass * float(chance), into)

    want: dict[tuple[int, ...], float] = {}
    go_on((), 1.0, want)
    for tokens, mass in emitted.items():
        go_on(tokens, mass, got)
    return max(abs(got.get(key, 0.0) - want.get(key, 0.0)) for key in got.keys() | want.keys())


# -------------------------------------------------------------------------------------------------- adversaries

def table(seed: int, size: int, kind: str = "random") -> Table:
    """A distribution for every context: the same one each time it is asked."""
    known: dict[tuple[int, ...], np.ndarray] = {}

    def at(context: tuple[int, ...]) -> np.ndarray:
        if context not in known:
            known[context] = _made(np.random.default_rng([seed, size, *context]), size, kind)
        return known[context]

    return at


def _made(rng: np.random.Generator, size: int, kind: str) -> np.ndarray:
    weights = rng.dirichlet(np.ones(size))
    if kind == "zeros":
        weights[rng.permutation(size)[:size // 2]] = 0.0
    elif kind == "point":
        weights = np.eye(size)[rng.integers(size)]
    elif kind == "low":
        weights[size // 2:] = 0.0
    elif kind == "high":
        weights[:size // 2] = 0.0
    elif kind == "uniform":
        weights = np.ones(size)
    elif kind == "sharp":
        weights = weights ** 8
    return weights / weights.sum()


ADVERSARIES: dict[str, Callable[[int], tuple[Table, Table]]] = {
    "random": lambda size: (table(1, size), table(2, size)),
    "zeros": lambda size: (table(3, size, "zeros"), table(4, size, "zeros")),
    "equal": lambda size: (table(5, size), table(5, size)),
    "disjoint": lambda size: (table(6, size, "low"), table(7, size, "high")),
    "sure target": lambda size: (table(8, size, "point"), table(9, size)),
    "sure drafter": lambda size: (table(10, size), table(11, size, "point")),
    "both sure": lambda size: (table(12, size, "point"), table(13, size, "point")),
    "flat drafter": lambda size: (table(14, size, "sharp"), table(14, size, "uniform")),
    "sharp drafter": lambda size: (table(15, size), table(16, size, "sharp")),
}
