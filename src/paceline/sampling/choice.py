"""The coupled sample: argmax of score + noise over each row's support, ties to the lowest token id.

Noise is bounded, so most tokens can be ruled out before their noise is computed. First the tokens close to the best
score get their noise in full; what they reach then bounds the rest twice over: a token far below cannot win with any
noise, and one further up only with noise so large that its random bits say no before any logarithm is taken.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from paceline.sampling.dense import Candidates, Doubles, Floats, Ints, gather, roughly_at_least, scaled_flat, values_at
from paceline.sampling.noise import GUMBEL_MAX, GUMBEL_MIN, gumbel, lucky_tokens, token_bits
from paceline.sampling.processed import OpenRows, Processed

NEAR = 6.0
"""Tokens this close to a row's best score get their noise in full."""

_SMALL = 1024
"""Vocabularies up to this size get it in full: there is nothing to save."""

_MANY = 4096
_NO_ID = np.iinfo(np.int64).max


def margin(scores: Floats) -> Doubles:
    """What rounding may add to a comparison of perturbed scores of this size, with room to spare."""
    return 0.01 + np.abs(scores).astype(np.float64) * 2.0**-20


def choose(processed: Processed) -> list[int]:
    """The token of each row; NO_TOKEN for rows that failed or must stop."""
    chosen = processed.best if processed.native is None else processed.sampled
    if processed.truncated or processed.open:
        chosen = chosen.copy()
        _sample(processed, chosen)
    tokens: list[int] = chosen.tolist()
    return tokens


def _sample(processed: Processed, chosen: Ints) -> None:
    top = processed.top
    positions = processed.positions
    parts: list[tuple[Ints, Ints, Ints, Floats]] = []
    for rows, kept in processed.truncated:
        if len(kept.tokens) == len(rows):
            chosen[rows] = kept.tokens
        else:
            parts.append((rows, *_possible(rows, kept, top)))
    for x, rows in processed.open:
        depth = NEAR if x.shape[1] > _SMALL else np.inf
        near = gather(x, processed.temperature[rows], top[rows].astype(np.float64) - depth)
        parts.append((rows, *near))
    if not parts:
        return
    rows, counts, token, score = parts[0] if len(parts) == 1 else (np.concatenate(column) for column in zip(*parts))
    row = rows.repeat(counts)
    perturbed = score + gumbel(token_bits(processed.seeds[row], positions[row], token))
    starts = counts.cumsum() - counts
    reached = np.maximum.reduceat(perturbed, starts)
    ids = np.where(perturbed == reached.repeat(counts), token, _NO_ID)
    chosen[rows] = np.minimum.reduceat(ids, starts)
    if processed.open and processed.logits.shape[1] > _SMALL:
        reached_by = np.empty(len(top), dtype=np.float32)
        reached_by[rows] = reached
        for part in processed.open:
            _challenge(processed, part, reached_by, positions, chosen)


def _possible(rows: Ints, kept: Candidates, top: Floats) -> Candidates:
    """`kept` without what no noise could lift to its row's best score, where it is worth looking."""
    if len(kept.tokens) <= _MANY:
        return kept
    row = rows.repeat(kept.counts)
    possible = kept.scores >= top[row] - (GUMBEL_MAX - GUMBEL_MIN + margin(top[row]))
    counts = np.bincount(row[possible], minlength=len(top))[rows]
    return Candidates(counts, kept.tokens[possible], kept.scores[possible])


def _challenge(processed: Processed, part: OpenRows, reached: Floats, positions: Ints, chosen: Ints) -> None:
    """Let the tokens further off try: `reached` is what each row's near tokens came to, `chosen` which of them did."""
    x, rows = part
    goal = reached[rows].astype(np.float64)
    slack = margin(processed.top[rows]) + margin(reached[rows])
    floor = goal - GUMBEL_MAX - slack
    # Noise falls as bits rise: above this many no token that is not near gets that far.
    needed = np.maximum(goal - (processed.top[rows] - NEAR) - slack, -5.0)
    limit = np.minimum(np.ceil(-np.expm1(-np.exp(-needed)) * 2.0**32) + 1.0, 2.0**32 - 1.0)
    for i, row in enumerate(rows.tolist()):
        token, perturbed = _contenders(x[i:i + 1], processed.temperature[row:row + 1], floor[i:i + 1], int(limit[i]),
                                       int(processed.seeds[row]), int(positions[row]))
        if len(token) and (best := perturbed.max()) >= reached[row]:
            first = int(token[perturbed == best].min())
            chosen[row] = first if best > reached[row] else min(first, int(chosen[row]))


def _contenders(x: Tensor, temperature: Floats, floor: Doubles, limit: int, seed: int,
                position: int) -> tuple[Ints, Floats]:
    """Tokens of one row x [1, V] with a score of at least `floor` and bits of at most `limit`, and what they reach."""
    width = x.shape[1]
    if roughly_at_least(x, temperature, floor) < width // 16:
        _, token, score = gather(x, temperature, floor)
        bits = token_bits(seed, position, token)
        lucky = bits <= limit
        token, score, bits = token[lucky], score[lucky], bits[lucky]
    else:
        token, bits = lucky_tokens(seed, position, width, limit)
        value = values_at(x, token)
        alive = value > -np.inf
        token, bits, score = token[alive], bits[alive], scaled_flat(value[alive], temperature)
    return token, score + gumbel(bits)
