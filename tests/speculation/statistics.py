"""Chi-square without scipy."""

from __future__ import annotations

import numpy as np
import torch


def chi_square(counts: np.ndarray, law: np.ndarray) -> float:
    """The probability of counts so far off, or further, if `law` is true. Cells with fewer than 5 expected are one;
    one that cannot be and was seen makes it 0."""
    counts, law = counts.ravel().astype(float), law.ravel()
    if counts[law == 0.0].any():
        return 0.0
    expected = law * counts.sum()
    small = expected < 5.0
    expected, counts = (np.append(x[~small], x[small].sum()) for x in (expected, counts))
    if expected[-1] == 0.0:
        expected, counts = expected[:-1], counts[:-1]
    statistic = float(((counts - expected) ** 2 / expected).sum())
    half = torch.tensor([(len(expected) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def sigmas(hits: int, trials: int, chance: float) -> float:
    """How many standard deviations a share is off."""
    return abs(hits / trials - chance) / max((chance * (1.0 - chance) / trials) ** 0.5, 1e-12)
