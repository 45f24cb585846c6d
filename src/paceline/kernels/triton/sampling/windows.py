# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: SIM102 - an if on a constant is settled when the kernel is compiled, one inside it when it runs
"""Where top-k and top-p cut a row, to within a window: counts and weights of tokens by their distance from the best.

Windows are numbered by gap (best score minus score), which ascends as scores descend and is equal where they are: so a
window holds a run of the order "best first", and the exact cut lies in one of them. While that holds many tokens it is
divided again; the tokens of the last alone are gathered.
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
    parameter,
    real,
    scaled,
    score_of,
    weight,
)

BINS = tl.constexpr(columns.BINS)
RANKED = tl.constexpr(columns.RANKED)
NUCLEUS = tl.constexpr(columns.NUCLEUS)
CUT = tl.constexpr(columns.RANKED | columns.NUCLEUS)
TRUNCATED = tl.constexpr(columns.RANKED | columns.NUCLEUS | columns.FLOORED)
TOP_K = tl.constexpr(columns.TOP_K)
TOP_P = tl.constexpr(columns.TOP_P)
LEVELS = tl.constexpr(3)
"""Level 0 are the coarse windows; those of each further level divide one of the level before."""
CURSOR = tl.constexpr(LEVELS.value * 2 * columns.BINS)
TALLY = tl.constexpr(CURSOR.value + 8)
"""A row's tally, int64: of each level the counts and weights of its windows and all before each, and how many tokens
were gathered."""


@triton.jit
def top_kernel(logits, stride, edited, row_masked, seats, table, tops, tallies, best, arrived, width,
               EDITS: tl.constexpr, ROW_MASKS: tl.constexpr, EVERY: tl.constexpr, BLOCK: tl.constexpr):
    """tops[row] becomes the key of the row's best score, and its tally zero; grid (rows, chunks).

    Of rows that are truncated, or of EVERY row. NOT_A_NUMBER where a logit is; LOWEST where no token is left. What was
    there before does not matter, so nobody has to come after this kernel; best and arrived are as in sample_kernel.
    """
    row = tl.program_id(0)
    seat = tl.load(seats + row)
    if seat < 0:
        return
    flags = parameter(table, seat, FLAGS)
    if EVERY == 0:
        if (flags & TRUNCATED) == 0:
            return
    chunk = tl.program_id(1)
    if chunk == 0:
        slot = tl.arange(0, BINS)
        for start in tl.static_range(0, CURSOR, BINS):
            tl.store(tallies + row * TALLY + start + slot, tl.zeros([BINS], tl.int64))
        tl.store(tallies + row * TALLY + CURSOR, 0)
    tokens = chunk * BLOCK + tl.arange(0, BLOCK)
    x = load_logits(logits, stride, edited, is_edited(flags, row_masked, row, ROW_MASKS), row, tokens, width, EDITS)
    score = scaled(x, real(table, seat, TEMPERATURE).to(tl.float32))
    key = tl.where(x > float("-inf"), key_of(score, tokens), LOWEST)
    tl.atomic_max(best + row, tl.max(tl.where(x != x, NOT_A_NUMBER, key), 0), sem="relaxed")
    # Acquire and release: the last to arrive sees what all the others found.
    if tl.atomic_add(arrived + row, 1, sem="acq_rel") == tl.num_programs(1) - 1:
        tl.store(tops + row, tl.atomic_xchg(best + row, LOWEST, sem="acq_rel"))
        tl.store(arrived + row, 0)


@triton.jit
def coarse_edges():
    """Upper ends of the coarse windows: 1/8, 1/4, ... 2^11, all."""
    at = tl.arange(0, BINS)
    return tl.where(at == BINS - 1, float("inf"), ((at + 124) << 23).to(tl.float32, bitcast=True))


@triton.jit
def fine_edges(low, high):
    """Upper ends of BINS windows between two edges."""
    at = tl.arange(0, BINS)
    return tl.where(at == BINS - 1, high, low + (high - low) * 0.0625 * (at + 1).to(tl.float32))


@triton.jit
def the_window(tally, LEVEL: tl.constexpr, ranked, wanted, share, low, base_count, base_weight, edges):
    """The first window of a level up to which there are `wanted` tokens (ranked) or the `share` (float64) of weight:
    its ends, how many tokens and how much weight lie before it, and how many and how much up to its end. The level
    begins at `low` with the base before it; what all of it does not reach ends in its last window."""
    at = tl.arange(0, BINS)
    counts = base_count + tl.load(tally + LEVEL * 2 * BINS + at)
    weights = base_weight + tl.load(tally + LEVEL * 2 * BINS + BINS + at)
    enough = tl.where(ranked, counts >= wanted, weights.to(tl.float64) >= share)
    index = tl.min(tl.where(enough | (at == BINS - 1), at, BINS), 0)
    here = at == index
    before = at == index - 1
    begin = tl.where(index > 0, tl.sum(tl.where(before, edges, 0.0), 0), low)
    count_before = tl.where(index > 0, tl.sum(tl.where(before, counts, 0), 0), base_count)
    weight_before = tl.where(index > 0, tl.sum(tl.where(before, weights, 0), 0), base_weight)
    end = tl.sum(tl.where(here, edges, 0.0), 0)
    count = tl.sum(tl.where(here, counts, 0), 0)
    return begin, end, count_before, weight_before, count, tl.sum(tl.where(here, weights, 0), 0)


@triton.jit
def wanted_of(tally, table, seat, flags):
    """What a cut row is cut at: is it by rank, at how many tokens, at how much weight (float64).

    With top-k on, the rank comes first: the weight that top-p shares out is what top-k left.
    """
    everything = tl.load(tally + BINS - 1)
    total = tl.load(tally + 2 * BINS - 1)
    wanted = tl.minimum(parameter(table, seat, TOP_K), everything)
    return (flags & RANKED) != 0, wanted, real(table, seat, TOP_P) * total.to(tl.float64)


@triton.jit
def is_crowded(before, count, end, few):
    """Whether a window is to be divided: it holds more than a `few` tokens, and is not the last, which has no end."""
    return (count - before > few) & (end < float("inf"))


@triton.jit
def narrowed(tally, table, seat, flags, few, LEVEL: tl.constexpr):
    """the_window where the cut lies, of the last level before LEVEL that was looked at, and what is wanted
    (wanted_of)."""
    ranked, wanted, share = wanted_of(tally, table, seat, flags)
    nothing = tl.full((), 0, tl.int64)
    begin, end, before, weight_before, count, mass = the_window(tally, 0, ranked, wanted, share, -1.0, nothing, nothing,
                                                                coarse_edges())
    for level in tl.static_range(1, LEVEL):
        if is_crowded(before, count, end, few):
            begin, end, before, weight_before, count, mass = the_window(
                tally, level, ranked, wanted, share, begin, before, weight_before, fine_edges(begin, end))
    return begin, end, before, weight_before, count, mass, ranked, wanted, share


@triton.jit
def count_kernel(logits, stride, edited, row_masked, seats, table, tops, tallies, few, width, EDITS: tl.constexpr,
                 ROW_MASKS: tl.constexpr, LEVEL: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Add each chunk's tokens to its row's tally: to the windows of a level, of finer ones where that before is
    crowded; grid (rows, chunks of CHUNK tokens)."""
    row = tl.program_id(0)
    seat = tl.load(seats + row)
    if seat < 0:
        return
    flags = parameter(table, seat, FLAGS)
    best = tl.load(tops + row)
    if ((flags & CUT) == 0) | (best == LOWEST) | (best == NOT_A_NUMBER):
        return
    tally = tallies + row * TALLY
    edges = coarse_edges()
    low = -1.0
    if LEVEL > 0:
        begin, end, before, _, count, _, _, _, _ = narrowed(tally, table, seat, flags, few, LEVEL)
        if is_crowded(before, count, end, few) == 0:
            return
        edges = fine_edges(begin, end)
        low = begin
    top = score_of(best)
    from_edited = is_edited(flags, row_masked, row, ROW_MASKS)
    temperature = real(table, seat, TEMPERATURE).to(tl.float32)
    nucleus = (flags & NUCLEUS) != 0
    counts = tl.zeros([BLOCK, BINS], tl.int32)
    weights = tl.zeros([BLOCK, BINS], tl.int64)
    first = tl.program_id(1) * CHUNK
    for start in range(first, first + CHUNK, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        x = load_logits(logits, stride, edited, from_edited, row, tokens, width, EDITS)
        gap = tl.where(x > float("-inf"), top - scaled(x, temperature), float("nan"))
        inside = (gap[:, None] <= edges[None, :]) & (gap[:, None] > low)
        counts += inside.to(tl.int32)
        if nucleus:
            weights += tl.where(inside, weight(gap)[:, None], 0)
    at = tally + LEVEL * 2 * BINS + tl.arange(0, BINS)
    tl.atomic_add(at, tl.sum(counts, 0).to(tl.int64), sem="relaxed")
    tl.atomic_add(at + BINS, tl.sum(weights, 0), sem="relaxed")


@triton.jit
def cut_window(tally, table, seat, flags, few):
    """The gaps (begin, end] whose tokens must be looked at one by one; how many tokens and how much weight lie before
    and up to the end; and what is wanted, as wanted_of says.

    Where rank and weight both cut, tokens before the window are looked at too: the weight is that of all up to the
    rank.
    """
    begin, end, before, weight_before, count, mass, ranked, wanted, share = narrowed(tally, table, seat, flags, few,
                                                                                    LEVELS)
    whole = (flags & CUT) == CUT
    nothing = tl.full((), 0, tl.int64)
    begin = tl.where(whole, -1.0, begin)
    before = tl.where(whole, nothing, before)
    weight_before = tl.where(whole, nothing, weight_before)
    return begin, end, before, weight_before, count, mass, ranked, wanted, share


@triton.jit
def gather_kernel(logits, stride, edited, row_masked, seats, table, tops, tallies, keys, few, room, width,
                  EDITS: tl.constexpr, ROW_MASKS: tl.constexpr, BLOCK: tl.constexpr):
    """keys [rows, room] int64: the keys of the tokens in each cut row's window, in any order; how many there are goes
    to the tally, and may be more than fit; grid (rows, chunks)."""
    row = tl.program_id(0)
    seat = tl.load(seats + row)
    if seat < 0:
        return
    flags = parameter(table, seat, FLAGS)
    best = tl.load(tops + row)
    if ((flags & CUT) == 0) | (best == LOWEST) | (best == NOT_A_NUMBER):
        return
    tally = tallies + row * TALLY
    begin, end, _, _, _, _, _, _, _ = cut_window(tally, table, seat, flags, few)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = load_logits(logits, stride, edited, is_edited(flags, row_masked, row, ROW_MASKS), row, tokens, width, EDITS)
    score = scaled(x, real(table, seat, TEMPERATURE).to(tl.float32))
    gap = score_of(best) - score
    inside = (x > float("-inf")) & (gap > begin) & (gap <= end)
    count = tl.sum(inside.to(tl.int32), 0)
    if count == 0:
        return
    start = tl.atomic_add(tally + CURSOR, count.to(tl.int64), sem="relaxed")
    at = start + tl.cumsum(inside.to(tl.int32), 0) - 1
    tl.store(keys + row.to(tl.int64) * room + at, key_of(score, tokens), mask=inside & (at < room))
