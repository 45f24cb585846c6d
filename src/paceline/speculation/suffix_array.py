"""Suffix arrays in numpy: all places of a token stream, sorted by what stands there."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

SORTED_BY = 32
"""Places are sorted by this many tokens, and equal ones by position: enough for every look-up (a pattern of up to 16
tokens and what follows it), and texts that repeat each other for pages cost no more than others."""


def suffix_array(tokens: NDArray[np.integer], progress: Callable[[int, int], None] | None = None) -> NDArray[np.int64]:
    """The positions 0 .. n-1, ordered by the next SORTED_BY tokens from each (what ends earlier comes first), then by
    position. Prefix doubling: sorted by one token, then by pairs of what is sorted already. `progress(done, total)`
    counts the rounds."""
    count = len(tokens)
    rounds = SORTED_BY.bit_length()
    rank = _ranks(tokens.astype(np.int64))
    order = np.argsort(rank, kind="stable")
    width = 1
    for turn in range(1, rounds):
        if progress is not None:
            progress(turn, rounds)
        if count == 0 or int(rank[order[-1]]) == count - 1:
            break  # all different: nothing left to decide
        following = np.zeros(count, np.int64)
        following[:-width] = rank[width:] + 1  # 0: the stream ends before
        pair = rank * (count + 1) + following
        order = np.argsort(pair, kind="stable")
        rank = _ranks_in(pair, order)
        width *= 2
    if progress is not None:
        progress(rounds, rounds)
    return order.astype(np.int64)


def _ranks(values: NDArray[np.int64]) -> NDArray[np.int64]:
    return _ranks_in(values, np.argsort(values, kind="stable"))


def _ranks_in(values: NDArray[np.int64], order: NDArray[np.int64]) -> NDArray[np.int64]:
    """0 for the smallest value, equal values alike, no number left out."""
    rank = np.zeros(len(values), np.int64)
    if len(values):
        rank[order[1:]] = np.cumsum(values[order[1:]] != values[order[:-1]])
    return rank
