# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Log-probabilities of sampled tokens, raw and processed, their ranks, and the best alternatives, without a sort."""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.kernels.device import columns
from paceline.kernels.triton.sampling.noise import natural_log
from paceline.kernels.triton.sampling.rows import (
    FLAGS,
    LOWEST,
    MOST,
    TEMPERATURE,
    UNIT,
    is_edited,
    key_of,
    load_logits,
    parameter,
    real,
    scaled,
    score_of,
    token_of,
    weight,
)
from paceline.kernels.triton.sampling.windows import TRUNCATED

GREEDY = tl.constexpr(columns.GREEDY)
RAW, PROCESSED, AHEAD, SUMS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)
"""A row's sums, int64: weight of the raw logits, weight of the support, tokens ahead of the sampled one."""


@triton.jit
def raw_logits(logits, stride, row, tokens, width):
    """Raw logits clipped to the largest float: one at +inf counts as that much."""
    x = tl.load(logits + row.to(tl.int64) * stride + tokens, mask=tokens < width, other=float("-inf"))
    return tl.minimum(x.to(tl.float32), MOST)


@triton.jit
def best_of_chunk_kernel(logits, stride, seats, best, number, width, BLOCK: tl.constexpr):
    """best [rows, chunks, number]: keys of each chunk's best raw logits, best first; grid (rows, chunks)."""
    row = tl.program_id(0)
    if tl.load(seats + row) < 0:
        return
    chunk = tl.program_id(1)
    tokens = chunk * BLOCK + tl.arange(0, BLOCK)
    x = raw_logits(logits, stride, row, tokens, width)
    keys = tl.where(x > float("-inf"), key_of(x, tokens), LOWEST)
    out = best + (row * tl.num_programs(1) + chunk) * number
    for i in range(number):
        key = tl.max(keys, 0)
        tl.store(out + i, key)
        keys = tl.where(keys == key, LOWEST, keys)


@triton.jit
def best_of_row_kernel(seats, best, number, candidates, chosen, BLOCK: tl.constexpr):
    """chosen [rows, number]: the best of best [rows, candidates], best first; grid (rows,)."""
    row = tl.program_id(0)
    if tl.load(seats + row) < 0:
        return
    at = tl.arange(0, BLOCK)
    keys = tl.load(best + row * candidates + at, mask=at < candidates, other=LOWEST)
    for i in range(number):
        key = tl.max(keys, 0)
        tl.store(chosen + row * number + i, key)
        keys = tl.where(keys == key, LOWEST, keys)


@triton.jit
def logprob_kernel(logits, stride, edited, row_masked, seats, table, thresholds, best_scores, tokens_in, chosen, number,
                   sums, arrived, out, width, EDITS: tl.constexpr, ROW_MASKS: tl.constexpr, NUMBER: tl.constexpr,
                   BLOCK: tl.constexpr):
    """Scores of tokens_in [rows]; grid (rows, chunks).

    out [rows, 3 + 2 number] int32: the bits of the raw and the processed one (float32; NaN without a token), the rank
    (1: the best raw; 0 without a token), the tokens of the keys `chosen` (-1: there are fewer), the bits of their raw
    ones. sums and arrived start and end as 0. NUMBER: a power of two of at least `number`.
    """
    row = tl.program_id(0)
    seat = tl.load(seats + row)
    if seat < 0:
        return
    flags = parameter(table, seat, FLAGS)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens_in + row)
    sampled = token >= 0
    x = raw_logits(logits, stride, row, tokens, width)
    own = raw_logits(logits, stride, row, tl.where(sampled, token, width), width)
    best = score_of(tl.load(chosen + row * number))
    alive = x > float("-inf")
    total = tl.sum(tl.where(alive, weight(best - x), 0), 0)
    ahead = tl.sum((alive & ((x > own) | ((x == own) & (tokens < token)))).to(tl.int32), 0)
    mine = sums + row * SUMS
    tl.atomic_add(mine + RAW, total, sem="relaxed")
    tl.atomic_add(mine + AHEAD, ahead.to(tl.int64), sem="relaxed")

    from_edited = is_edited(flags, row_masked, row, ROW_MASKS)
    temperature = real(table, seat, TEMPERATURE).to(tl.float32)
    top = tl.load(best_scores + row)
    if (flags & GREEDY) == 0:
        y = load_logits(logits, stride, edited, from_edited, row, tokens, width, EDITS)
        score = scaled(y, temperature)
        kept = y > float("-inf")
        if (flags & TRUNCATED) != 0:
            kept = kept & (key_of(score, tokens) >= tl.load(thresholds + row))
        tl.atomic_add(mine + PROCESSED, tl.sum(tl.where(kept, weight(top - score), 0), 0), sem="relaxed")

    if tl.atomic_add(arrived + row, 1, sem="acq_rel") == tl.num_programs(1) - 1:
        tl.store(arrived + row, 0)
        norm = best.to(tl.float64) + natural_log(tl.atomic_xchg(mine + RAW, 0).to(tl.float64) / UNIT)
        rank = tl.atomic_xchg(mine + AHEAD, 0) + 1
        held = tl.atomic_xchg(mine + PROCESSED, 0)
        raw = own.to(tl.float64) - norm
        processed = raw * 0.0
        if (flags & GREEDY) == 0:
            z = load_logits(logits, stride, edited, from_edited, row, tl.where(sampled, token, width), width, EDITS)
            gap = scaled(z, temperature).to(tl.float64) - top.to(tl.float64)
            processed = gap - natural_log(held.to(tl.float64) / UNIT)
        own_out = out + row * (3 + 2 * number)
        tl.store(own_out, tl.where(sampled, raw, float("nan")).to(tl.float32).to(tl.int32, bitcast=True))
        tl.store(own_out + 1, tl.where(sampled, processed, float("nan")).to(tl.float32).to(tl.int32, bitcast=True))
        tl.store(own_out + 2, tl.where(sampled, rank, 0).to(tl.int32))
        at = tl.arange(0, NUMBER)
        keys = tl.load(chosen + row * number + at, mask=at < number, other=LOWEST)
        there = keys > LOWEST
        values = tl.where(there, score_of(keys).to(tl.float64) - norm, float("-inf")).to(tl.float32)
        tl.store(own_out + 3 + at, tl.where(there, token_of(keys), -1), mask=at < number)
        tl.store(own_out + 3 + number + at, values.to(tl.int32, bitcast=True), mask=at < number)
