"""The coupled draw: argmax of score + noise over each row's support, ties to the lowest token id.

Noise is bounded, so most tokens can be ruled out before their noise is computed. First the tokens close to the best
score are drawn in full; what they reach then bounds the rest twice over: a token far below cannot win with any
noise, and one further up only with noise so large that its random bits say no before any logarithm is taken.
"""

from __future__ import annotations

import numpy as np

from paceline.sampling.dense import Doubles, Floats, Ints, gather
from paceline.sampling.noise import GUMBEL_MAX, GUMBEL_MIN, gumbel, row_token_bits
from paceline.sampling.processed import OpenRows, Processed

NEAR = 6.0
"""Tokens this close to a row's best score are drawn in full."""

_MANY = 4096
_NO_ID = np.iinfo(np.int64).max


def margin(scores: Floats) -> Doubles:
    """What rounding may add to a comparison of perturbed scores of this size, with room to spare."""
    return 0.01 + np.abs(scores).astype(np.float64) * 2.0**-20


def choose(processed: Processed) -> list[int]:
    """The token of each row; NO_TOKEN for rows that failed or must stop."""
    chosen = processed.best
    if processed.truncated or processed.open:
        chosen = chosen.copy()
        _draw(processed, chosen)
    tokens: list[int] = chosen.tolist()
    return tokens


def _draw(processed: Processed, chosen: Ints) -> None:
    top = processed.top
    positions = np.array([row.position for row in processed.rows], dtype=np.int64)
    parts: list[tuple[Ints, Ints, Floats]] = []
    for rows, kept in processed.truncated:
        row, token, score = np.repeat(rows, kept.counts), kept.tokens, kept.scores
        if len(token) > _MANY:
            possible = score >= top[row] - (GUMBEL_MAX - GUMBEL_MIN + margin(top[row]))
            row, token, score = row[possible], token[possible], score[possible]
        parts.append((row, token, score))
    for x, rows in processed.open:
        near = gather(x, processed.temperature[rows], top[rows].astype(np.float64) - NEAR)
        parts.append((np.repeat(rows, near.counts), near.tokens, near.scores))
    row, token, score = (np.concatenate(column) for column in zip(*parts))
    perturbed = score + gumbel(row_token_bits(row, token, processed.seeds, positions))

    starts = np.flatnonzero(np.diff(row, prepend=-1))
    reached = np.full(len(top), -np.inf, dtype=np.float32)
    reached[row[starts]] = np.maximum.reduceat(perturbed, starts)
    _settle(chosen, row, token, perturbed, reached)
    for part in processed.open:
        row, token, perturbed = _outsiders(processed, part, reached, positions)
        if len(row):
            before = reached.copy()
            np.maximum.at(reached, row, perturbed)
            chosen[reached > before] = _NO_ID
            _settle(chosen, row, token, perturbed, reached)


def _settle(chosen: Ints, row: Ints, token: Ints, perturbed: Floats, reached: Floats) -> None:
    """Give each row the lowest id among the tokens that reach its best perturbed score (or the id it has)."""
    winner = perturbed == reached[row]
    fresh = row[winner]
    chosen[fresh[chosen[fresh] < 0]] = _NO_ID
    np.minimum.at(chosen, fresh, token[winner])


def _outsiders(processed: Processed, part: OpenRows, reached: Floats,
               positions: Ints) -> tuple[Ints, Ints, Floats]:
    """Tokens further than NEAR below the best score that may still reach what the near ones reached."""
    x, rows = part
    bar, near = reached[rows].astype(np.float64), processed.top[rows].astype(np.float64) - NEAR
    slack = margin(processed.top[rows]) + margin(reached[rows])
    found = gather(x, processed.temperature[rows], bar - GUMBEL_MAX - slack)
    local = np.repeat(np.arange(len(rows)), found.counts)
    far = found.scores < near[local]
    local, token, score = local[far], found.tokens[far], found.scores[far]
    row = rows[local]
    if not len(row):
        return row, token, score
    # Noise falls as bits rise: above this many no token below `near` gets to the bar.
    needed = np.maximum(bar - near - slack, -5.0)
    limit = np.minimum(np.ceil(-np.expm1(-np.exp(-needed)) * 2.0**32) + 1.0, 2.0**32 - 1.0)
    bits = row_token_bits(row, token, processed.seeds, positions)
    lucky = bits <= limit[local]
    row, token, score, bits = row[lucky], token[lucky], score[lucky], bits[lucky]
    return row, token, score + gumbel(bits)
