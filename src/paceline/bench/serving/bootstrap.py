"""How far figures may be trusted: 95 % intervals by resampling requests.

Requests that run side by side share a queue, so neighbours are alike and drawing them one by one would promise too
much: blocks of neighbours in the order of arrival are drawn, about as many as they are long, and of a level that ran
several times, whole runs first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

DRAWS = 500
BINS = 1024
"""Values that a percentile can have while it is resampled; the figure itself is exact."""
LEAST = 8
"""Fewer requests say nothing about their spread."""
TAIL = 5
"""Nor do fewer values beyond a percentile about how far it may be off: resampling never sees worse than the worst."""

Interval = tuple[float, float]


class Resampled:
    """How often each of the requests counts in each of the draws. `sizes`: requests of each run, which lie one after
    another."""

    def __init__(self, sizes: Sequence[int], seed: int = 0, draws: int = DRAWS) -> None:
        luck = np.random.default_rng(seed)
        starts = np.concatenate([[0], np.cumsum(sizes)])
        self.weights: NDArray[np.float32] = np.zeros((draws, int(starts[-1])), dtype=np.float32)
        for weights in self.weights:
            for run in luck.integers(0, len(sizes), len(sizes)):
                size = sizes[run]
                length = max(1, round(size ** 0.5))
                begins = luck.integers(0, size, -(-size // length))
                places = (begins[:, None] + np.arange(length)).ravel()[:size] % size
                np.add.at(weights, starts[run] + places, 1.0)

    def percentile(self, values: Sequence[Sequence[float]], share: float) -> Interval | None:
        """Of all values together; each request has some, perhaps none."""
        pooled = np.concatenate([np.asarray(one, dtype=float) for one in values] or [np.zeros(0)])
        if sum(map(bool, values)) < LEAST or len(pooled) * (1.0 - share) < TAIL:
            return None
        edges = np.unique(np.quantile(pooled, np.linspace(0.0, 1.0, BINS), method="inverted_cdf"))
        counts = np.zeros((len(values), len(edges)), dtype=np.float32)
        for place, one in enumerate(values):
            np.add.at(counts[place], np.searchsorted(edges, one), 1.0)
        reached = np.cumsum(self.weights @ counts, axis=1)
        found = edges[np.argmax(reached >= share * reached[:, -1:], axis=1)]
        return _interval(found[reached[:, -1] > 0])

    def ratio(self, above: Sequence[float], below: Sequence[float]) -> Interval | None:
        """Of two sums over requests."""
        if len(above) < LEAST:
            return None
        top, bottom = self.weights @ np.asarray(above, dtype=np.float32), self.weights @ np.asarray(below, np.float32)
        return _interval(top[bottom > 0] / bottom[bottom > 0])


def percentile(values: Sequence[Sequence[float]], share: float) -> float | None:
    """The least value that so many do not exceed."""
    pooled = [value for one in values for value in one]
    return float(np.quantile(pooled, share, method="inverted_cdf")) if pooled else None


def _interval(found: NDArray[np.floating]) -> Interval | None:
    if not len(found):
        return None
    low, high = np.quantile(found, (0.025, 0.975))
    return float(low), float(high)
