# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The exact cut of top-k, top-p and min-p: the key from which on a row's tokens are kept. No sort.

Tokens are counted and weighed from a pivot on, and the pivot halves what is left until one token is: keys are distinct
and weights add up exactly, so the cut is the same whatever the order of the gathered tokens was.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.kernels.triton.sampling import columns
from paceline.kernels.triton.sampling.rows import (
    FLAGS,
    LOWEST,
    NOT_A_NUMBER,
    TEMPERATURE,
    is_edited,
    key_of,
    load_logits,
    ordered,
    parameter,
    real,
    scaled,
    score_of,
    weight,
)
from paceline.kernels.triton.sampling.windows import CURSOR, CUT, TALLY, cut_window

FLOORED = tl.constexpr(columns.FLOORED)
LOG_MIN_P = tl.constexpr(columns.LOG_MIN_P)
TOP_P = tl.constexpr(columns.TOP_P)


@triton.jit
def keys_at(tokens, logits, stride, edited, from_edited, row, temperature, width, gathered, count, spilled,
            EDITS: tl.constexpr):
    """The keys of a tile: gathered ones, or where too many were, those of the whole row. LOWEST where there is none."""
    if spilled:
        x = load_logits(logits, stride, edited, from_edited, row, tokens, width, EDITS)
        keys = tl.where(x > float("-inf"), key_of(scaled(x, temperature), tokens), LOWEST)
    else:
        keys = tl.load(gathered + tokens, mask=tokens < count, other=LOWEST)
    return keys


@triton.jit
def measure(pivot, top, logits, stride, edited, from_edited, row, temperature, width, gathered, count, spilled,
            EDITS: tl.constexpr, BLOCK: tl.constexpr):
    """Of the tokens at hand: how many have keys from `pivot` on, their weight, the least of those keys, and the
    greatest key below the pivot."""
    counts = tl.zeros([BLOCK], tl.int32)
    weights = tl.zeros([BLOCK], tl.int64)
    above = tl.full([BLOCK], NOT_A_NUMBER, tl.int64)
    below = tl.full([BLOCK], LOWEST, tl.int64)
    for start in range(0, tl.where(spilled, width, count.to(tl.int32)), BLOCK):
        keys = keys_at(start + tl.arange(0, BLOCK), logits, stride, edited, from_edited, row, temperature, width,
                       gathered, count, spilled, EDITS)
        here = keys >= pivot
        counts += here.to(tl.int32)
        weights += tl.where(here, weight(top - score_of(keys)), 0)
        above = tl.where(here, tl.minimum(above, keys), above)
        below = tl.where(here, below, tl.maximum(below, keys))
    return tl.sum(counts, 0).to(tl.int64), tl.sum(weights, 0), tl.min(above, 0), tl.max(below, 0)


@triton.jit
def cut(ranked, wanted, share, before, weight_before, best, top, logits, stride, edited, from_edited, row, temperature,
        width, gathered, count, spilled, EDITS: tl.constexpr, BLOCK: tl.constexpr):
    """The greatest key from which on there are `wanted` tokens (ranked) or the `share` of weight, with what lies before
    the tokens at hand; the least of all keys where they do not come to that. And the weight from that key on."""
    # From `low` on, a key, there is enough; from `high` on there is not, and `found - beyond` keys lie between.
    # The first pivot is below all keys: it finds the least of them.
    low = tl.full((), LOWEST, tl.int64)
    high = best + 1
    found = tl.full((), -1, tl.int64)
    beyond = tl.full((), 0, tl.int64)
    mass = tl.full((), 0, tl.int64)
    going = count >= 0
    while going:
        first = found < 0
        pivot = tl.where(first, low + 1, (low >> 1) + (high >> 1) + ((low | high) & 1))
        number, heavy, above, below = measure(pivot, top, logits, stride, edited, from_edited, row, temperature, width,
                                              gathered, count, spilled, EDITS, BLOCK)
        enough = tl.where(ranked, before + number >= wanted, (weight_before + heavy).to(tl.float64) >= share)
        going = enough | (first == 0)
        lower = enough | first
        low = tl.where(lower, above, low)
        mass = tl.where(lower, heavy, mass)
        found = tl.where(lower, number, found)
        high = tl.where(lower, high, below + 1)
        beyond = tl.where(lower, beyond, number)
        going = going & (found - beyond > 1)
    return low, weight_before + mass


@triton.jit
def first_score_from(bound):
    """The least float32 that is at least `bound` (float64), ordered as in keys."""
    near = bound.to(tl.float32)
    return ordered(near) + (near.to(tl.float64) < bound).to(tl.int32)


@triton.jit
def threshold_kernel(logits, stride, edited, row_masked, seats, table, tops, tallies, keys, room, thresholds,
                     best_scores, width, EDITS: tl.constexpr, ROW_MASKS: tl.constexpr, BLOCK: tl.constexpr):
    """thresholds[row]: the key from which on tokens are kept; best_scores[row]: the best score. Of rows whose
    best was looked for (top_kernel); grid (rows,)."""
    row = tl.program_id(0)
    seat = tl.load(seats + row)
    if seat < 0:
        return
    flags = parameter(table, seat, FLAGS)
    best = tl.load(tops + row)
    top = score_of(best)
    tl.store(best_scores + row, top)
    threshold = tl.full((), LOWEST + 1, tl.int64)
    if ((flags & CUT) != 0) & (best > LOWEST) & (best < NOT_A_NUMBER):
        tally = tallies + row * TALLY
        _begin, _end, before, weight_before, ranked, wanted, share = cut_window(tally, table, seat, flags, room)
        count = tl.load(tally + CURSOR)
        spilled = count > room
        nothing = tl.full((), 0, tl.int64)
        before = tl.where(spilled, nothing, before)
        weight_before = tl.where(spilled, nothing, weight_before)
        from_edited = is_edited(flags, row_masked, row, ROW_MASKS)
        temperature = real(table, seat, TEMPERATURE).to(tl.float32)
        gathered = keys + row.to(tl.int64) * room
        # By rank or by weight, and where both cut, by the weight of what the rank left.
        for _ in range(tl.where((flags & CUT) == CUT, 2, 1)):
            key, mass = cut(ranked, wanted, share, before, weight_before, best, top, logits, stride, edited,
                            from_edited, row, temperature, width, gathered, count, spilled, EDITS, BLOCK)
            threshold = tl.maximum(threshold, key)
            share = real(table, seat, TOP_P) * mass.to(tl.float64)
            ranked = ranked & (ranked == 0)
    if (flags & FLOORED) != 0:
        floor = first_score_from(top.to(tl.float64) + real(table, seat, LOG_MIN_P))
        threshold = tl.maximum(threshold, floor.to(tl.int64) << 32)
    tl.store(thresholds + row, threshold)
