"""Figures of two servers that took turns: medians, the turns' ratios, and how far their median may be trusted.

A machine's speed drifts, so only what ran one after the other is set against each other: a ratio is of one turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from paceline.bench.report import Row

DRAWS = 2000
LEAST = 5
"""Of fewer turns even the whole range holds the true median less often than nine times in ten."""
SHARES = (0.05, 0.95)

Pair = tuple[Sequence[Row], Sequence[Row]]
"""What the first and the second server have of one turn."""


def paired(turns: Sequence[Pair], seed: int) -> list[dict[str, Any]]:
    """A row for each figure that either of them has, with every turn's values; None where there is none."""
    by_case = [tuple({row.case: row for row in side} for side in turn) for turn in turns]
    known = {case: row for turn in by_case for side in reversed(turn) for case, row in side.items()}
    order = dict.fromkeys(case for turn in by_case for side in turn for case in side)
    found = []
    for case in order:
        first, second = ([turn[side][case].paceline if case in turn[side] else None for turn in by_case]
                         for side in (0, 1))
        ratios = [a / b if a is not None and b else None for a, b in zip(first, second)]
        found.append({"case": case, "unit": known[case].unit,
                      "better": "higher" if known[case].higher_is_better else "lower",
                      "a": spread(first), "b": spread(second),
                      "ratio": (middle := spread(ratios)) and middle | {"interval": interval(ratios, seed)}})
    return found


def spread(values: Sequence[float | None]) -> dict[str, Any] | None:
    there = [value for value in values if value is not None]
    return {"median": median(there), "range": [min(there), max(there)], "turns": list(values)} if there else None


def interval(ratios: Sequence[float | None], seed: int) -> list[float] | None:
    """In which their median lies, 90 % (with five to ten turns rather 80 to 90 %), by drawing turns again and again.
    The same seed gives the same."""
    there = [ratio for ratio in ratios if ratio is not None]
    if len(there) < LEAST:
        return None
    drawn = np.random.default_rng(seed).choice(there, (DRAWS, len(there)))
    low, high = np.quantile(np.median(drawn, axis=1), SHARES)
    return [float(low), float(high)]
