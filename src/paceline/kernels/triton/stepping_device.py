# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Decoding by itself: what a step reads follows from the step before, on the device.

A token that the host does not know yet is negative: it is the newest one of its seat, which the step that samples it
leaves in `last` [seats] int32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.kernels.triton.sampling.edits import count


@triton.jit
def begin_kernel(inputs, last, tables, table_stride, group, positions, prefix, tiles, slots, rope_positions,
                 sample_positions, seats, rows, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """One program. inputs [3, rows] int64: token, position (-1: padding) and seat of each row -> DeviceRows for a row
    a group, the rows' slots (-1), positions for the rotary tables, and seats and positions for the sampler."""
    row = tl.arange(0, BLOCK)
    there = row < rows
    position = tl.load(inputs + rows + row, mask=there, other=-1)
    seat = tl.load(inputs + 2 * rows + row, mask=there, other=-1)
    live = position >= 0
    token = tl.load(inputs + row, mask=live, other=0)
    tl.store(inputs + row, tl.load(last + seat, mask=live, other=0).to(tl.int64), mask=live & (token < 0))
    known = tl.maximum(position, 0)
    block = tl.load(tables + row * table_stride + known // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
    tl.store(group + row, tl.where(live, row, -1), mask=there)
    tl.store(positions + row, position.to(tl.int32), mask=there)
    tl.store(prefix + row, (position + 1).to(tl.int32), mask=there)
    tl.store(tiles + row, row, mask=there)
    tl.store(tiles + rows + row, live.to(tl.int32), mask=there)
    tl.store(slots + row, tl.where(live, block * BLOCK_SIZE + known % BLOCK_SIZE, -1), mask=there)
    tl.store(rope_positions + row, known, mask=there)
    tl.store(sample_positions + row, position + 1, mask=there)
    tl.store(seats + row, tl.where(live, seat, -1).to(tl.int32), mask=there)


@triton.jit
def end_kernel(inputs, last, sampled, out, out_stride, rows, table, counts, width, COUNT: tl.constexpr,
               BLOCK: tl.constexpr):
    """One program. Notes the tokens sampled [rows] int32 in out[step], and makes them the next step's inputs. The
    number of the step stands after the inputs. COUNT: penalised seats are among them."""
    row = tl.arange(0, BLOCK)
    there = row < rows
    step = tl.load(inputs + 3 * rows)
    position = tl.load(inputs + rows + row, mask=there, other=-1)
    seat = tl.load(inputs + 2 * rows + row, mask=there, other=0)
    token = tl.load(sampled + row, mask=there, other=-1)
    live = there & (position >= 0)
    tl.store(out + step * out_stride + row, token, mask=there)
    tl.store(inputs + row, tl.maximum(token, 0).to(tl.int64), mask=live)
    tl.store(last + seat, tl.maximum(token, 0), mask=live)
    tl.store(inputs + rows + row, position + 1, mask=live)
    tl.store(inputs + 3 * rows, step + 1)
    if COUNT:
        count(seat, token, live, table, counts, width)


@triton.jit
def fill_kernel(tokens, seats, last, rows, BLOCK: tl.constexpr):
    """Grid (blocks of rows). tokens and seats [rows] int64: who does not know its token gets its seat's newest."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = row < rows
    pending = there & (tl.load(tokens + row, mask=there, other=0) < 0)
    seat = tl.load(seats + row, mask=pending, other=0)
    tl.store(tokens + row, tl.load(last + seat, mask=pending, other=0).to(tl.int64), mask=pending)


@triton.jit
def note_kernel(sampled, seats, last, rows, table, counts, width, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """One program. The tokens sampled [rows] int32 become the newest of their seats; seat -1 is padding. COUNT:
    penalised seats are among them."""
    row = tl.arange(0, BLOCK)
    seat = tl.load(seats + row, mask=row < rows, other=-1)
    token = tl.load(sampled + row, mask=row < rows, other=0)
    tl.store(last + seat, tl.maximum(token, 0), mask=seat >= 0)
    if COUNT:
        count(seat, token, seat >= 0, table, counts, width)
