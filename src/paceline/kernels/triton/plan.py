# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The work list of split attention, made on the device: which keys of which tile each item walks.

A record is RECORD int32 values, of which ten are used: first row, row count, group, first key, end of keys, end of the
shared keys (from there on each row has a path of its own), how many items the tile has, which of them this is, the
tile's first cell (a cell holds what one item found for one row), the tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from paceline.kernels.device.rows import DeviceRows, RowsShape
from paceline.kernels.triton.launch import overlapped
from paceline.kernels.triton.overlap_device import start

RECORD = 16
_RECORD = tl.constexpr(RECORD)
_FAR = tl.constexpr(1 << 30)


@triton.jit(do_not_specialize=["count", "window", "target"])
def plan_kernel(tiles, group_of_row, positions, prefix, items, total, count, window, target, KV_HEADS: tl.constexpr,
                WINDOW: tl.constexpr, SPLIT: tl.constexpr, FIXED: tl.constexpr, BLOCK_N: tl.constexpr,
                ROWS: tl.constexpr, TILES: tl.constexpr, OVERLAP: tl.constexpr):
    """One program per tile; each counts the items of the tiles before its own. About `target` items are wanted for all
    KV heads together. FIXED: a tile is one item where its keys are no more than an item's share of all, else it has an
    item for each SPLIT keys; not FIXED: items are spans of the same multiple of SPLIT keys."""
    start(OVERLAP)
    own = tl.program_id(0)
    t = tl.arange(0, TILES)
    r = tl.arange(0, ROWS)
    firsts = tl.load(tiles + t, mask=t < count, other=0)
    counts = tl.load(tiles + count + t, mask=t < count, other=0)
    there = r[None, :] < counts[:, None]
    pos = tl.load(positions + firsts[:, None] + r[None, :], mask=there, other=-1)
    high = tl.max(pos, 1) + 1
    low = tl.zeros_like(high)
    if WINDOW:
        low = tl.maximum(tl.min(tl.where(there, pos, _FAR), 1) - window + 1, 0)
    keys = tl.sum(tl.where(high > 0, high - low, 0), 0).to(tl.int64) * KV_HEADS  # beyond 32 bits: long shared prefixes
    share = target.to(tl.int64) * SPLIT
    if FIXED:
        spans = tl.cdiv(high, SPLIT) - low // SPLIT
        whole = spans <= tl.cdiv(keys, share)
        pieces = tl.where(high > 0, tl.where(whole, 1, spans), 0)
        span = tl.where(tl.sum(tl.where((t == own) & whole, 1, 0), 0) > 0, _FAR, SPLIT)
    else:
        span = SPLIT * tl.maximum(1, tl.cdiv(keys, share)).to(tl.int32)
        pieces = tl.where(high > 0, tl.cdiv(high, span) - low // span, 0)
    if own == 0:
        tl.store(total, tl.sum(pieces, 0))

    mine = t == own
    base = tl.sum(tl.where(t < own, pieces, 0), 0)
    cells = tl.sum(tl.where(t < own, pieces * counts, 0), 0)
    number = tl.sum(tl.where(mine, pieces, 0), 0)
    first = tl.sum(tl.where(mine, firsts, 0), 0)
    rows = tl.sum(tl.where(mine, counts, 0), 0)
    end = tl.sum(tl.where(mine, high, 0), 0)
    begin = tl.sum(tl.where(mine, low, 0), 0)
    if number > 0:
        group = tl.load(group_of_row + first)
        own_pos = tl.load(positions + first + r, mask=r < rows, other=-1)
        own_prefix = tl.load(prefix + first + r, mask=r < rows, other=_FAR)
        tail = tl.min(tl.where(own_prefix <= own_pos, own_prefix, _FAR), 0)
        shared = tl.where(tail < _FAR, tail // BLOCK_N * BLOCK_N, _FAR)
        for base_item in range(0, number, 32):
            i = base_item + tl.arange(0, 32)
            at = (begin // span + i) * span
            record = items + (base + i) * _RECORD
            live = i < number
            tl.store(record, tl.zeros_like(i) + first, mask=live)
            tl.store(record + 1, tl.zeros_like(i) + rows, mask=live)
            tl.store(record + 2, tl.zeros_like(i) + group, mask=live)
            tl.store(record + 3, tl.maximum(at, begin // BLOCK_N * BLOCK_N), mask=live)
            tl.store(record + 4, tl.minimum(at + span, end), mask=live)
            tl.store(record + 5, tl.zeros_like(i) + shared, mask=live)
            tl.store(record + 6, tl.zeros_like(i) + number, mask=live)
            tl.store(record + 7, i, mask=live)
            tl.store(record + 8, tl.zeros_like(i) + cells, mask=live)
            tl.store(record + 9, tl.zeros_like(i) + own, mask=live)


@dataclass(slots=True)
class Plan:
    """Lives for one forward, shared by the layers of a cache group."""

    items: torch.Tensor
    """[room, RECORD] int32."""
    total: torch.Tensor
    """[1] int32: how many there are."""
    results: torch.Tensor
    """[cells * heads, head dim] float32: sums of what each item saw, not divided yet."""
    extremes: torch.Tensor
    """[2, cells * heads] float32: the highest score (base 2) and the sum of weights."""


def room_for(shape: RowsShape, longest: int, kv_heads: int, split: int, fixed: bool, target: int) -> tuple[int, int]:
    """Items and cells that a step may need, texts of up to `longest` tokens."""
    items, cells = (count * triton.cdiv(longest, split) for count in (shape.tiles, shape.tiled_rows))
    if not fixed:
        # Spans are so long that they fit `target` times, and each tile may have two that are cut short.
        wanted = triton.cdiv(target, kv_heads)
        items = min(items, wanted + 2 * shape.tiles)
        cells = min(cells, wanted * shape.tile_rows + 2 * shape.tiled_rows)
    return items, cells


def make_plan(rows: DeviceRows, *, window: int | None, longest: int, heads: int, kv_heads: int, dim: int, split: int,
              fixed: bool, target: int, block_n: int) -> Plan:
    """Launches the planning. `longest`: context that fits the block tables; `target`: items wanted, see plan_kernel."""
    shape, device = rows.shape, rows.data.device
    room, cells = room_for(shape, longest, kv_heads, split, fixed, target)
    height = cells * heads
    plan = Plan(torch.empty((max(room, 1), RECORD), dtype=torch.int32, device=device),
                torch.empty(1, dtype=torch.int32, device=device),
                torch.empty((height, dim), dtype=torch.float32, device=device),
                torch.empty((2, height), dtype=torch.float32, device=device))
    plan_kernel[(shape.tiles,)](
        rows.tiles, rows.group, rows.positions, rows.prefix, plan.items, plan.total, shape.tiles, window or 0, target,
        KV_HEADS=kv_heads, WINDOW=window is not None, SPLIT=split, FIXED=fixed, BLOCK_N=block_n,
        ROWS=triton.next_power_of_2(shape.tile_rows), TILES=triton.next_power_of_2(shape.tiles), num_warps=4,
        **overlapped(device, shape.rows, heads * dim))
    return plan
