# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Decoding by itself: what a step reads follows from the step before, on the device.

Every seat has its text, texts[seat] int32 of which lengths[seat] tokens count. A token that the host does not know yet
is negative: it is the newest of its seat.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.kernels.device import repeats
from paceline.kernels.triton.sampling.edits import count

IDLE = tl.constexpr(repeats.IDLE)


@triton.jit
def newest(seats, ends, lengths, group, groups):
    """Of each group: its seat, the position of its newest token, and whether it runs: it is there, and not at its
    end."""
    seat = tl.load(seats + group, mask=group < groups, other=-1)
    place = tl.load(lengths + seat, mask=seat >= 0, other=0) - 1
    end = tl.load(ends + group, mask=group < groups, other=0)
    return seat, place, (seat >= 0) & (place < end)


@triton.jit
def append(seat, token, live, texts, room, lengths):
    """A token of each seat, one or a block of different ones."""
    length = tl.load(lengths + seat, mask=live, other=0)
    tl.store(texts + seat.to(tl.int64) * room + length, tl.maximum(token, 0), mask=live & (length < room))
    tl.store(lengths + seat, length + 1, mask=live)


@triton.jit
def begin_kernel(seats, ends, texts, room, lengths, blocks, blocks_stride, group, positions, prefix, tiles, tokens,
                 rope_positions, slots, sample_positions, row_seats, rows, BLOCK_SIZE: tl.constexpr,
                 BLOCK: tl.constexpr):
    """One program: a row per group."""
    row = tl.arange(0, BLOCK)
    there = row < rows
    seat, place, live = newest(seats, ends, lengths, row, rows)
    known = tl.where(live, place, 0)
    token = tl.load(texts + seat * room + known, mask=live, other=0)
    block = tl.load(blocks + row * blocks_stride + known // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
    tl.store(group + row, tl.where(live, row, -1), mask=there)
    tl.store(positions + row, tl.where(live, place, -1), mask=there)
    tl.store(prefix + row, tl.where(live, place + 1, 0), mask=there)
    tl.store(tiles + row, row, mask=there)
    tl.store(tiles + rows + row, live.to(tl.int32), mask=there)
    tl.store(tokens + row, token.to(tl.int64), mask=there)
    tl.store(rope_positions + row, known.to(tl.int64), mask=there)
    tl.store(slots + row, tl.where(live, block * BLOCK_SIZE + known % BLOCK_SIZE, -1), mask=there)
    tl.store(sample_positions + row, tl.where(live, place + 1, 0).to(tl.int64), mask=there)
    tl.store(row_seats + row, tl.where(live, seat, -1).to(tl.int32), mask=there)


@triton.jit
def end_kernel(seats, ends, time, texts, room, lengths, sampled, out, out_stride, rows, table, counts, width,
               COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """One program. Notes the tokens sampled [rows] int32 in out[time] and in the texts. COUNT: penalised seats are
    among them."""
    row = tl.arange(0, BLOCK)
    seat, _, live = newest(seats, ends, lengths, row, rows)
    now = tl.load(time)
    token = tl.load(sampled + row, mask=row < rows, other=-1)
    tl.store(out + now * out_stride + row, tl.where(live, token, IDLE), mask=row < rows)
    tl.debug_barrier()  # all warps have read the time before one of them sets it
    tl.store(time, now + 1)
    append(seat, token, live, texts, room, lengths)
    if COUNT:
        count(seat, token, live, table, counts, width)


@triton.jit
def fill_kernel(tokens, seats, texts, room, lengths, rows, BLOCK: tl.constexpr):
    """Grid (blocks of rows). tokens and seats [rows] int64: who does not know its token gets its seat's newest."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = row < rows
    pending = there & (tl.load(tokens + row, mask=there, other=0) < 0)
    seat = tl.load(seats + row, mask=pending, other=0)
    length = tl.load(lengths + seat, mask=pending, other=1)
    tl.store(tokens + row, tl.load(texts + seat * room + length - 1, mask=pending, other=0).to(tl.int64), mask=pending)


@triton.jit
def note_kernel(sampled, seats, texts, room, lengths, rows, table, counts, width, COUNT: tl.constexpr,
                BLOCK: tl.constexpr):
    """One program. The tokens sampled [rows] int32 are the next of their seats; seat -1 is padding. COUNT: penalised
    seats are among them."""
    row = tl.arange(0, BLOCK)
    seat = tl.load(seats + row, mask=row < rows, other=-1)
    token = tl.load(sampled + row, mask=row < rows, other=0)
    append(seat, token, seat >= 0, texts, room, lengths)
    if COUNT:
        count(seat, token, seat >= 0, table, counts, width)
