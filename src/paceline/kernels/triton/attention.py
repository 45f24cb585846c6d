"""Launching paged attention: which tiles, how many programs, what is planned once per forward."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton

from paceline.kernels.device import packing
from paceline.kernels.device.rows import DeviceRows, RowsShape
from paceline.kernels.layout import GroupView, Layout
from paceline.kernels.triton.attention_device import chunk_kernel, split_kernel
from paceline.kernels.triton.launch import overlapped
from paceline.kernels.triton.plan import Plan, make_plan

PROGRAMS = 64
"""For each processor, at most. So many that most items have one of their own, which the device starts as others end:
programs that take their share in turn are as slow as the one whose items happen to be longest."""
LOWEST, ONE_HEIGHT = 16, 64
"""(row, head) pairs of a tile, at least: what a product on tensor cores takes, and where all tiles must be computed by
one instruction (4 warps each)."""
AHEAD = 4
"""Pieces of a tile whose results are loaded at once when they are combined."""


@dataclass(frozen=True, slots=True)
class KeySplit:
    """How the keys of tiles are shared out, for up to `most` tiles of one row or up to `most` rows of a step."""

    most: float
    items: int
    """Wanted in all, for each of the device's processors."""
    warps: int = 4
    stages: int = 3
    height: int = 64
    """(row, head) pairs of a tile. Few rows make low tiles, so that there are enough of them: cutting their keys into
    more pieces instead takes as long again to put together."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """Shapes of the tiles. In deterministic mode the blocks and spans of keys, which shape the sums, are the same for
    every tile."""

    chunk_m: int
    """(row, head) pairs of a chunk's tile."""
    chunk_n: int
    """Keys that a chunk's tile takes at once; in deterministic mode as many as the others."""
    block_n: int
    split: int
    """Keys that are summed up by themselves (deterministic), or the smallest number an item gets."""
    processors: int
    shared: tuple[KeySplit, ...]
    """By number of rows, for tiles of several rows."""
    single: tuple[KeySplit, ...] = ()
    """By number of tiles, for tiles of one row; none: as the others."""
    chunk_warps: int = 8
    chunk_stages: int = 2

    def sharing(self, shape: RowsShape) -> KeySplit:
        if shape.tile_rows == 1 and self.single:
            return next(one for one in self.single if shape.tiles <= one.most)
        return self.several(shape.rows)

    def several(self, rows: int) -> KeySplit:
        """For tiles of several rows, in a step of so many."""
        return next(one for one in self.shared if rows <= one.most)


def tuning(dtype: torch.dtype, dim: int, deterministic: bool, processors: int) -> Tuning:
    """float32 multiplies without tensor cores, whose tiles must be small; the rest are trials on an H200."""
    if dtype == torch.float32:
        return Tuning(16, 32, 32, 256, processors, (KeySplit(math.inf, 4, stages=1, height=16),), chunk_warps=4,
                      chunk_stages=1)
    if dim > 64:
        single = (KeySplit(16, 4), KeySplit(32, 2, stages=6), KeySplit(128, 4, warps=2), KeySplit(math.inf, 4, 2, 6))
        several: tuple[KeySplit, ...] = (
            KeySplit(16, 2, height=16), KeySplit(32, 2, height=32), KeySplit(math.inf, 1, stages=5))
    else:
        single = (KeySplit(4, 2, stages=5), KeySplit(16, 2, 2, 5), KeySplit(64, 4, 2, 5), KeySplit(math.inf, 2, 2, 5))
        several = (KeySplit(32, 2, stages=5, height=16), KeySplit(math.inf, 2, stages=5, height=32))
    # Heads of 64 come with small models: low chunks, of which there are enough to keep the card busy (9 heads tried).
    chunk_m, chunk_n = (128, 64) if dim > 64 else (64, 128)
    split, warps = 128, 4
    if deterministic:
        # Blocks and spans define the bits. Chunks need more registers: for the span they are in, and for what is past.
        chunk_n, split, warps = 64, 256 if dim > 64 else 128, 8 if dim > 64 else 4
    return Tuning(chunk_m, chunk_n, 64, split, processors, several, single, chunk_warps=warps, chunk_stages=3)


def attend(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, layout: Layout, view: GroupView,
           scale: float, scales: tuple[torch.Tensor, torch.Tensor] | None, chosen: Tuning, deterministic: bool,
           arrived: torch.Tensor, softcap: float = 0.0, low: bool = True) -> torch.Tensor:
    """The contract is Kernels.attend. `arrived`: int32 zeros, at least tiles * KV heads; left as they were. low: tiles
    of any height add alike on this card."""
    _, heads, dim = q.shape
    kv_heads = k_cache.shape[1]
    shared = heads // kv_heads
    rows = layout.device
    if rows is None:
        rows = layout.device = packing.device_rows(layout, shape_of(layout, chosen, shared), q.device)
    out = torch.empty((q.shape[0], heads, dim), dtype=q.dtype, device=q.device)
    key_scales, value_scales = (k_cache, v_cache) if scales is None else scales
    common: dict[str, Any] = {
        "KV_HEADS": kv_heads, "SHARED": shared, "DIM": dim, "BLOCK_D": max(16, triton.next_power_of_2(dim)),
        "BLOCK_SIZE": layout.block_size, "FIRST": view.first, "WINDOW": view.window is not None,
        "CAPPED": softcap > 0.0, "SCALED": scales is not None,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32", "enable_fp_fusion": not deterministic,
        **overlapped(q.device, q.shape[0], heads * dim)}
    base2, cap = scale * math.log2(math.e), softcap * math.log2(math.e)
    shape, spans = rows.shape, chosen.split if deterministic else 0
    # Keys of 8 bits are widened in an order of its own by each instruction.
    one = deterministic and q.dtype != torch.float32 and (not low or scales is not None)
    least = ONE_HEIGHT if one else LOWEST
    if shape.tiles * kv_heads > arrived.shape[0]:
        raise ValueError(f"{shape.tiles} tiles of {kv_heads} heads do not fit into {arrived.shape[0]} counters")
    if shape.tiles:
        plan = _plan(rows, layout, view, heads, kv_heads, dim, chosen, deterministic)
        tile_m = shape.tile_rows * shared
        how = chosen.sharing(shape)
        split_kernel[(min(plan.items.shape[0] * kv_heads, PROGRAMS * chosen.processors),)](
            q, k_cache, v_cache, key_scales, value_scales, out, plan.items, plan.total, view.tables, view.slots,
            rows.positions, rows.prefix, rows.ancestors, plan.results, plan.extremes, arrived, q.stride(0),
            out.stride(0), k_cache.stride(0), view.tables.stride(0), plan.extremes.shape[1], base2,
            view.window or 0, cap, BLOCK_M=_height(tile_m, least), BLOCK_N=chosen.block_n, DEPTH=shape.depth,
            SPLIT=spans, REDUCE_M=triton.next_power_of_2(tile_m), AHEAD=AHEAD, **common,
            num_warps=4 if one else how.warps, num_stages=how.stages)
    if shape.chunks:
        chunk_kernel[(kv_heads, shape.chunks)](
            q, k_cache, v_cache, key_scales, value_scales, out, rows.chunks, rows.group, rows.positions, view.tables,
            q.stride(0), out.stride(0), k_cache.stride(0), view.tables.stride(0), shape.chunks, base2,
            view.window or 0, cap, BLOCK_M=_height(shape.chunk_rows * shared, least),
            BLOCK_N=chosen.chunk_n, SPLIT=spans, **common, num_warps=chosen.chunk_warps,
            num_stages=chosen.chunk_stages)
    return out


def shape_of(layout: Layout, chosen: Tuning, shared: int) -> RowsShape:
    """Room for just this step; `shared` query heads to a KV head."""
    return packing.shape_of(layout, *tile_rows(chosen, shared, layout.rows))


def tile_rows(chosen: Tuning, shared: int, rows: int) -> tuple[int, int]:
    """Most rows of a tile whose keys are shared out, in a step of so many rows that has such tiles; and of a chunk."""
    return max(1, chosen.several(rows).height // shared), max(1, chosen.chunk_m // shared)


def _height(pairs: int, least: int) -> int:
    """BLOCK_M for a tile of so many (row, head) pairs."""
    return max(least, 1 << (pairs - 1).bit_length())


def _plan(rows: DeviceRows, layout: Layout, view: GroupView, heads: int, kv_heads: int, dim: int, chosen: Tuning,
          deterministic: bool) -> Plan:
    plan: Plan | None = view.scratch.get("triton.plan")
    if plan is None:
        longest = view.tables.shape[1] * layout.block_size
        plan = view.scratch["triton.plan"] = make_plan(
            rows, window=view.window, longest=longest, heads=heads, kv_heads=kv_heads, dim=dim, split=chosen.split,
            fixed=deterministic, target=chosen.processors * chosen.sharing(rows.shape).items, block_n=chosen.block_n)
    return plan
