# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Drafts that a device finds by itself, and the rows of a step that has some."""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.kernels.device import columns, lookup, repeats
from paceline.kernels.triton.sampling.rows import COLUMNS
from paceline.kernels.triton.stepping_device import newest

LOOKUP = tl.constexpr(columns.LOOKUP)
LOOK_BACK = tl.constexpr(lookup.LOOK_BACK)
ALWAYS = tl.constexpr(lookup.ALWAYS)
IDLE = tl.constexpr(repeats.IDLE)
ROUND = tl.constexpr(repeats.ROUND)
HIGHEST = tl.constexpr(lookup.HIGHEST)
MOST_DRAFTED = tl.constexpr(lookup.MOST_DRAFTED)


@triton.jit
def propose_kernel(seats, ends, levels, table, texts, room, lengths, tokens, levels_out, found_out, matched_out,
                   groups, MOST: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """One program per group: what followed the most recent occurrence of the longest n-gram that its text ends with.
    Walks the text from its end; the most recent match of full length ends the walk."""
    group = tl.program_id(0)
    seat, place, live = newest(seats, ends, lengths, group, groups)
    end = tl.load(ends + group)
    words = tl.load(table + seat * COLUMNS + LOOKUP, mask=live, other=0)
    shortest, longest, most = words & 255, (words >> 8) & 255, (words >> 16) & 255
    text, length = texts + seat * room, place + 1
    best = tl.full((), -1, tl.int64)
    high = tl.where(live & (longest > 0), length - 1, 0)
    while high > 0:
        at = high - tl.arange(0, BLOCK)
        equal = at > 0
        run = tl.zeros_like(at)
        for i in range(longest):
            there = equal & (at - 1 - i >= 0)
            last = tl.load(text + length - 1 - i, mask=i < length, other=-2)
            equal = there & (tl.load(text + at - 1 - i, mask=there, other=-1) == last)
            run += equal.to(tl.int32)
        key = tl.where(run >= shortest, run.to(tl.int64) * 4294967296 + at, -1)
        best = tl.maximum(best, tl.max(tl.where(run > 0, key, -1), 0))
        high = tl.where((best >> 32) == longest, 0, high - BLOCK)
    at = (best & 4294967295).to(tl.int32)
    there = best >= 0
    at = tl.where(there, at, 0)
    back = tl.arange(0, LOOK_BACK)
    seen = back < at
    same = seen & (tl.load(text + at - 1 - back, mask=seen, other=-1)
                   == tl.load(text + length - 1 - back, mask=seen, other=-2))
    matched = tl.min(tl.where(same, LOOK_BACK, back), 0)
    column = tl.arange(0, WIDTH)
    level = tl.load(levels + matched * MOST_DRAFTED + column, mask=column < MOST, other=0)
    level = tl.where((words & ALWAYS) != 0, HIGHEST, level).to(tl.int32)
    worth = tl.sum(((level > 0) & (column < MOST)).to(tl.int32), 0)
    depth = tl.minimum(worth, tl.minimum(most, end - place - 1))
    ahead = length - at
    # A match of full length that runs into the end of the text goes on from its own beginning.
    whole = (best >> 32) == longest
    depth = tl.minimum(depth, tl.where(whole, MOST, tl.minimum(ahead, MOST)))
    depth = tl.where(there, tl.maximum(depth, 0), 0).to(tl.int32)
    copied = tl.load(text + at + column % tl.maximum(ahead, 1), mask=column < depth, other=0)
    tl.store(tokens + group * MOST + column, copied, mask=column < depth)
    tl.store(levels_out + group * MOST + column, level, mask=column < depth)
    tl.store(found_out + group, depth)
    tl.store(matched_out + group, tl.where(there, matched, 0))


@triton.jit
def spread_kernel(seats, ends, texts, room, lengths, drafts, levels, found, taken, blocks, blocks_stride, group_of_row,
                  positions, prefix, tiles, tile_count, tokens, rope_positions, slots, sample_positions, row_seats,
                  parents, offsets, groups, rows, MOST: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
                  PER_GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr):
    """One program: a row for every group that runs, then those of its draft, and its PER_GROUP tiles."""
    g = tl.arange(0, GROUPS)
    there = g < groups
    seat, place, live = newest(seats, ends, lengths, g, groups)
    drafted = tl.load(found + g, mask=live, other=0)
    spare = rows - tl.sum(live.to(tl.int32), 0)
    column = tl.arange(0, WIDTH)
    level = tl.load(levels + g[:, None] * MOST + column[None, :], mask=column[None, :] < drafted[:, None], other=0)
    least = HIGHEST
    for down in range(1, HIGHEST):  # the lowest level whose tokens all have a row
        least = tl.where(tl.sum((level >= HIGHEST - down).to(tl.int32)) <= spare, HIGHEST - down, least)
    want = tl.sum((level >= least).to(tl.int32), 1)
    cap = 0
    for depth in range(1, MOST + 1):
        cap = tl.where(tl.sum(tl.minimum(want, depth), 0) <= spare, depth, cap)
    have = tl.minimum(want, cap)
    size = tl.where(live, have + 1, 0)
    first = tl.cumsum(size, 0) - size
    total = tl.sum(size, 0)
    tl.store(taken + g, have, mask=there)
    tl.store(offsets + g, first, mask=there)
    tl.store(offsets + groups, total)
    for i in range(PER_GROUP):
        tile = g * PER_GROUP + i
        tl.store(tiles + tile, first + i * TILE, mask=there)
        tl.store(tiles + tile_count + tile, tl.minimum(tl.maximum(size - i * TILE, 0), TILE), mask=there)
    own = tl.load(texts + seat * room + place, mask=live, other=0)
    for depth in range(MOST + 1):
        on = live & (depth <= have)
        row, at = first + depth, tl.where(live, place + depth, 0)
        below = tl.zeros_like(g) + depth > 0
        token = tl.where(below, tl.load(drafts + g * MOST + depth - 1, mask=on & below, other=0), own)
        block = tl.load(blocks + g * blocks_stride + at // BLOCK_SIZE, mask=on, other=0).to(tl.int64)
        tl.store(group_of_row + row, g, mask=on)
        tl.store(positions + row, at, mask=on)
        tl.store(prefix + row, at + 1, mask=on)
        tl.store(tokens + row, token.to(tl.int64), mask=on)
        tl.store(rope_positions + row, at.to(tl.int64), mask=on)
        tl.store(slots + row, block * BLOCK_SIZE + at % BLOCK_SIZE, mask=on)
        tl.store(sample_positions + row, (at + 1).to(tl.int64), mask=on)
        tl.store(row_seats + row, seat.to(tl.int32), mask=on)
        tl.store(parents + row, tl.where(below, row - 1, -1), mask=on)
    r = tl.arange(0, ROWS)
    over = (r >= total) & (r < rows)
    nothing = tl.zeros_like(r)
    tl.store(group_of_row + r, nothing - 1, mask=over)
    tl.store(positions + r, nothing - 1, mask=over)
    tl.store(prefix + r, nothing, mask=over)
    tl.store(tokens + r, nothing.to(tl.int64), mask=over)
    tl.store(rope_positions + r, nothing.to(tl.int64), mask=over)
    tl.store(slots + r, (nothing - 1).to(tl.int64), mask=over)
    tl.store(sample_positions + r, nothing.to(tl.int64), mask=over)
    tl.store(row_seats + r, nothing - 1, mask=over)
    tl.store(parents + r, nothing - 1, mask=over)


@triton.jit
def record_kernel(time, accepted, verdict_tokens, verdict_room, taken, matched, out, out_stride, round_stride, groups,
                  MOST: tl.constexpr, GROUPS: tl.constexpr):
    """One program: a round per group, to out[time]."""
    g = tl.arange(0, GROUPS)
    there = g < groups
    now = tl.load(time)
    into = out + now * out_stride + g * round_stride
    stand = tl.load(accepted + g, mask=there, other=-1)
    tl.store(into, tl.where(stand < 0, IDLE, stand), mask=there)
    tl.store(into + 1, tl.load(taken + g, mask=there, other=0), mask=there)
    tl.store(into + 2, tl.load(matched + g, mask=there, other=0), mask=there)
    for depth in range(MOST + 1):
        tl.store(into + ROUND + depth, tl.load(verdict_tokens + g * verdict_room + depth, mask=there, other=-1),
                 mask=there)
    tl.debug_barrier()  # all warps have read the time before one of them sets it
    tl.store(time, now + 1)
