"""The randomness of a verification rule, keyed by seed, position and cycle."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.sampling.noise import accept_uniform, residual_uniform


class KeyedRandomness:
    """speculation.verify.Randomness for one draft of one sequence.

    Accept tests and residual samples are keyed by the position of the token they decide on and by the position where
    the drafting cycle started: a position drafted again later gets fresh ones. The target's own tokens are those
    plain decoding samples, whatever the cycle.
    """

    __slots__ = ("_chosen", "_cycle", "_position", "_seed")

    def __init__(self, seed: int, cycle: int, position: Callable[[int], int], chosen: Sequence[int]) -> None:
        """`position(row)` is the absolute position of the token sampled after a row; `chosen[row]` the target's own."""
        self._seed = seed
        self._cycle = cycle
        self._position = position
        self._chosen = chosen

    def accept(self, row: int, index: int) -> float:
        return accept_uniform(self._seed, self._position(row), index, cycle=self._cycle)

    def residual(self, row: int, weights: NDArray[np.float64]) -> int:
        return inverse(residual_uniform(self._seed, self._position(row), cycle=self._cycle), weights)

    def target(self, row: int) -> int:
        return self._chosen[row]


def inverse(u: float, weights: NDArray[np.float64]) -> int:
    """The index at which the running sum of `weights` passes the share u in [0, 1) of the whole; its weight is
    never 0."""
    reached = weights.cumsum()
    at = int(reached.searchsorted(u * float(reached[-1]), side="right"))
    # u times the sum may round up to it: then it is the last index that adds anything.
    return at if at < len(reached) else int(np.flatnonzero(weights)[-1])
