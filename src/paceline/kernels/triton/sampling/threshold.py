# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The exact cut of top-k, top-p and min-p: the key from which on a row's tokens are kept. No sort.

Tokens are counted and weighed from several pivots on at once, which divide what is left until one token is: keys are
distinct and weights add up exactly, so the cut is the same whatever the order of the gathered tokens was.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.kernels.device import columns
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
from paceline.kernels.triton.sampling.windows import BINS, CURSOR, CUT, TALLY, cut_window

FLOORED = tl.constexpr(columns.FLOORED)
NUCLEUS = tl.constexpr(columns.NUCLEUS)
LOG_MIN_P = tl.constexpr(columns.LOG_MIN_P)
TOP_P = tl.constexpr(columns.TOP_P)
PIVOTS = tl.constexpr(8)


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
def measure(pivots, heavy, top, logits, stride, edited, from_edited, row, temperature, width, gathered, count, spilled,
            EDITS: tl.constexpr, BLOCK: tl.constexpr):
    """Of the tokens at hand: how many have keys from each pivot on, and (heavy) their weight; int64 [PIVOTS] each."""
    counts = tl.zeros([BLOCK, PIVOTS], tl.int32)
    weights = tl.zeros([BLOCK, PIVOTS], tl.int64)
    for start in range(0, tl.where(spilled, width, count.to(tl.int32)), BLOCK):
        keys = keys_at(start + tl.arange(0, BLOCK), logits, stride, edited, from_edited, row, temperature, width,
                       gathered, count, spilled, EDITS)
        here = keys[:, None] >= pivots[None, :]
        counts += here.to(tl.int32)
        if heavy:
            weights += tl.where(here, weight(top - score_of(keys))[:, None], 0)
    return tl.sum(counts, 0).to(tl.int64), tl.sum(weights, 0)


@triton.jit
def least(logits, stride, edited, from_edited, row, temperature, width, gathered, count, spilled, EDITS: tl.constexpr,
          BLOCK: tl.constexpr):
    """The least key of the tokens at hand."""
    found = tl.full([BLOCK], NOT_A_NUMBER, tl.int64)
    for start in range(0, tl.where(spilled, width, count.to(tl.int32)), BLOCK):
        keys = keys_at(start + tl.arange(0, BLOCK), logits, stride, edited, from_edited, row, temperature, width,
                       gathered, count, spilled, EDITS)
        found = tl.minimum(found, tl.where(keys > LOWEST, keys, NOT_A_NUMBER))
    return tl.min(found, 0)


@triton.jit
def cut(low, high, found, mass, ranked, wanted, share, before, weight_before, heavy, top, logits, stride, edited,
        from_edited, row, temperature, width, gathered, count, spilled, EDITS: tl.constexpr, BLOCK: tl.constexpr):
    """A key from which on there are just `wanted` tokens (ranked) or just the `share` of weight, with what lies before
    the tokens at hand; `low` where they do not come to that. And their weight, with what lies before.

    All keys at hand, `found` with a weight of `mass`, lie between `low` and `high`.
    """
    lane = tl.arange(0, PIVOTS)
    beyond = tl.full((), 0, tl.int64)
    going = tl.where(ranked, before + found >= wanted, (weight_before + mass).to(tl.float64) >= share)
    # From `low` on there is enough, from `high` on there is not, and `found - beyond` keys lie between.
    going = going & (found > 1)
    while going:
        # Wraps around where keys have both signs; the sums do not.
        step = tl.maximum((high >> 3) - (low >> 3), 1)
        pivots = tl.where(lane == PIVOTS - 1, high, tl.minimum(low + step * (lane + 1).to(tl.int64), high))
        counts, weights = measure(pivots, heavy, top, logits, stride, edited, from_edited, row, temperature, width,
                                  gathered, count, spilled, EDITS, BLOCK)
        enough = tl.where(ranked, before + counts >= wanted, (weight_before + weights).to(tl.float64) >= share)
        last = tl.sum((enough & (lane < PIVOTS - 1)).to(tl.int32), 0) - 1
        here = lane == last
        after = lane == last + 1
        moved = last >= 0
        low = tl.where(moved, tl.sum(tl.where(here, pivots, 0), 0), low)
        found = tl.where(moved, tl.sum(tl.where(here, counts, 0), 0), found)
        mass = tl.where(moved, tl.sum(tl.where(here, weights, 0), 0), mass)
        high = tl.sum(tl.where(after, pivots, 0), 0)
        beyond = tl.sum(tl.where(after, counts, 0), 0)
        going = found - beyond > 1
    return low, weight_before + mass


@triton.jit
def bounds(begin, end, top, best, spilled):
    """Keys between which all tokens with gaps in (begin, end] lie: the first at or below, the second above them."""
    # Gaps are rounded: a little room on either side.
    lowest = ordered(top - end - (tl.abs(top) + end) * 2.384185791015625e-07).to(tl.int64) << 32
    highest = ordered(top - begin + (tl.abs(top) + begin) * 2.384185791015625e-07).to(tl.int64) << 32
    whole = spilled | (end == float("inf"))
    low = tl.where(whole, LOWEST + 1, tl.maximum(lowest, LOWEST + 1))
    return low, tl.where(spilled | (begin < 0.0), best + 1, tl.minimum(highest, best + 1))


@triton.jit
def first_score_from(bound):
    """The least float32 that is at least `bound` (float64), ordered as in keys."""
    near = bound.to(tl.float32)
    return ordered(near) + (near.to(tl.float64) < bound).to(tl.int32)


@triton.jit
def threshold_kernel(logits, stride, edited, row_masked, seats, table, tops, tallies, keys, few, room, thresholds,
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
        begin, end, before, weight_before, held, mass, ranked, wanted, share = cut_window(tally, table, seat, flags,
                                                                                         few)
        count = tl.load(tally + CURSOR)
        spilled = count > room
        before = tl.where(spilled, before * 0, before)
        weight_before = tl.where(spilled, weight_before * 0, weight_before)
        found = tl.where(spilled, tl.load(tally + BINS - 1), held - before)
        mass = tl.where(spilled, tl.load(tally + 2 * BINS - 1), mass - weight_before)
        low, high = bounds(begin, end, top, best, spilled)
        from_edited = is_edited(flags, row_masked, row, ROW_MASKS)
        temperature = real(table, seat, TEMPERATURE).to(tl.float32)
        gathered = keys + row.to(tl.int64) * room
        heavy = (flags & NUCLEUS) != 0
        # By rank or by weight, and where both cut, by the weight of what the rank left.
        for _ in range(tl.where((flags & CUT) == CUT, 2, 1)):
            key, kept = cut(low, high, found, mass, ranked, wanted, share, before, weight_before, heavy, top, logits,
                            stride, edited, from_edited, row, temperature, width, gathered, count, spilled, EDITS,
                            BLOCK)
            if key == low:
                # All that is at hand: but a token that is not, just beyond the window, may lie above `low` too.
                key = least(logits, stride, edited, from_edited, row, temperature, width, gathered, count, spilled,
                            EDITS, BLOCK)
            threshold = tl.maximum(threshold, key)
            share = real(table, seat, TOP_P) * kept.to(tl.float64)
            ranked = ranked & (ranked == 0)
    if (flags & FLOORED) != 0:
        floor = first_score_from(top.to(tl.float64) + real(table, seat, LOG_MIN_P))
        threshold = tl.maximum(threshold, floor.to(tl.int64) << 32)
    tl.store(thresholds + row, threshold)
