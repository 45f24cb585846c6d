# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Decoding by itself: what a step reads follows from the step before, on the device."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def begin_kernel(inputs, tables, table_stride, group, positions, prefix, tiles, slots, rope_positions, draw_positions,
                 seats, rows, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """One program. inputs [3, rows] int64: token, position (-1: padding) and seat of each row -> DeviceRows for a row
    a group, the rows' slots (-1), positions for the rotary tables, and seats and positions for the sampler."""
    row = tl.arange(0, BLOCK)
    there = row < rows
    position = tl.load(inputs + rows + row, mask=there, other=-1)
    seat = tl.load(inputs + 2 * rows + row, mask=there, other=-1)
    live = position >= 0
    known = tl.maximum(position, 0)
    block = tl.load(tables + row * table_stride + known // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
    tl.store(group + row, tl.where(live, row, -1), mask=there)
    tl.store(positions + row, position.to(tl.int32), mask=there)
    tl.store(prefix + row, (position + 1).to(tl.int32), mask=there)
    tl.store(tiles + row, row, mask=there)
    tl.store(tiles + rows + row, live.to(tl.int32), mask=there)
    tl.store(slots + row, tl.where(live, block * BLOCK_SIZE + known % BLOCK_SIZE, -1), mask=there)
    tl.store(rope_positions + row, known, mask=there)
    tl.store(draw_positions + row, position + 1, mask=there)
    tl.store(seats + row, tl.where(live, seat, -1).to(tl.int32), mask=there)


@triton.jit
def end_kernel(inputs, drawn, out, out_stride, rows, BLOCK: tl.constexpr):
    """One program. Notes the tokens drawn [rows] int32 in out[step], and makes them the next step's inputs. The number
    of the step stands behind the inputs."""
    row = tl.arange(0, BLOCK)
    there = row < rows
    step = tl.load(inputs + 3 * rows)
    position = tl.load(inputs + rows + row, mask=there, other=-1)
    token = tl.load(drawn + row, mask=there, other=-1)
    live = there & (position >= 0)
    tl.store(out + step * out_stride + row, token, mask=there)
    tl.store(inputs + row, tl.maximum(token, 0).to(tl.int64), mask=live)
    tl.store(inputs + rows + row, position + 1, mask=live)
    tl.store(inputs + 3 * rows, step + 1)
