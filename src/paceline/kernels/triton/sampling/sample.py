# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: SIM102 - an if on a constant is settled when the kernel is compiled, one inside it when it runs
"""Sampling: the best token of a row, or the best of score and noise over its support. One kernel for all rows."""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.kernels.device import columns
from paceline.kernels.triton.sampling.noise import gumbel, token_bits
from paceline.kernels.triton.sampling.rows import (
    FLAGS,
    LOWEST,
    NOT_A_NUMBER,
    TEMPERATURE,
    is_edited,
    key_of,
    load_logits,
    parameter,
    real,
    scaled,
    score_of,
    token_of,
)

SEED = tl.constexpr(columns.SEED)
GREEDY = tl.constexpr(columns.GREEDY)
TRUNCATED = tl.constexpr(columns.RANKED | columns.NUCLEUS | columns.FLOORED)
EMPTY = tl.constexpr(columns.EMPTY)
NAN = tl.constexpr(columns.NAN)


@triton.jit
def most_bits(reached, top):
    """How many bits (float32) a token with a score of at most `top` may have if score and noise are to come to
    `reached`: a bound from above with room for all rounding. Noise is at most -log(bits / 2^32)."""
    needed = reached - top - 0.01 - (tl.abs(reached) + tl.abs(top) + 32.0) * 9.5367431640625e-07
    return tl.exp(-needed) * 4294967296.0 + 2.0


@triton.jit
def sample_kernel(logits, stride, edited, row_masked, seats, positions, table, thresholds, best, arrived, tokens_out,
                  taken, number, width, EDITS: tl.constexpr, ROW_MASKS: tl.constexpr, TRUNCATION: tl.constexpr,
                  BLOCK: tl.constexpr):
    """A token for every row, or why there is none (EMPTY, NAN); grid (rows, chunks). Rows of padding are EMPTY. The
    tokens taken [number, rows] int32 are masked; what is left of the support is as it was.

    best [rows] int64 starts as LOWEST, arrived [rows] int32 as 0; whoever comes last in a row leaves them so. The
    rows are the grid's fast axis: programs that start late find what their row has come to, and skip the logarithms
    where no token of theirs can be lucky enough.
    """
    row = tl.program_id(0)
    first = tl.program_id(1) * BLOCK
    seat = tl.load(seats + row)
    if seat < 0:
        if first == 0:
            tl.store(tokens_out + row, EMPTY)
        return
    flags = parameter(table, seat, FLAGS)
    tokens = first + tl.arange(0, BLOCK)
    from_edited = is_edited(flags, row_masked, row, ROW_MASKS)
    x = load_logits(logits, stride, edited, from_edited, row, tokens, width, EDITS)
    for i in range(number):
        x = tl.where(tokens == tl.load(taken + i * tl.num_programs(0) + row), float("-inf"), x)
    alive = x > float("-inf")
    seen = tl.load(best + row, volatile=True)
    if (flags & GREEDY) != 0:
        found = tl.max(tl.where(x != x, NOT_A_NUMBER, tl.where(alive, key_of(x, tokens), LOWEST)), 0)
    else:
        score = scaled(x, real(table, seat, TEMPERATURE).to(tl.float32))
        if TRUNCATION:
            if (flags & TRUNCATED) != 0:
                alive = alive & (key_of(score, tokens) >= tl.load(thresholds + row))
        # Scores are finite, so that an infinite one can stand for a NaN.
        top = tl.max(tl.where(x != x, float("inf"), tl.where(alive, score, float("-inf"))), 0)
        found = tl.where(top == float("inf"), NOT_A_NUMBER, LOWEST).to(tl.int64)
        bits = token_bits(first, parameter(table, seat, SEED), tl.load(positions + row), BLOCK)
        limit = tl.where(seen == LOWEST, float("inf"), most_bits(score_of(seen), top))
        lucky = alive & (bits.to(tl.float32) <= limit)
        if tl.max(lucky.to(tl.int32), 0) > 0:
            found = tl.maximum(found, tl.max(tl.where(lucky, key_of(score + gumbel(bits), tokens), LOWEST), 0))
    # In any case: threads may have seen different values, so none may branch on them.
    tl.atomic_max(best + row, found, sem="relaxed")
    # Acquire and release: the last to arrive sees what all the others found.
    if tl.atomic_add(arrived + row, 1, sem="acq_rel") == tl.num_programs(1) - 1:
        won = tl.atomic_xchg(best + row, LOWEST, sem="acq_rel")
        tl.store(arrived + row, 0)
        sampled = (won > LOWEST) & (won < NOT_A_NUMBER)
        tl.store(tokens_out + row, tl.where(sampled, token_of(won), tl.where(won == LOWEST, EMPTY, NAN)))
