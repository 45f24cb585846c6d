"""Launching paged attention: which tiles, how many programs, what is planned once a forward."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton

from paceline.kernels.layout import GroupView, Layout
from paceline.kernels.triton.attention_device import chunk_kernel, split_kernel
from paceline.kernels.triton.plan import Plan, make_plan
from paceline.kernels.triton.rows import DeviceRows, RowsShape

CROWD = 64
AHEAD = 4
"""Pieces of a tile whose results are loaded at once when they are combined."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """Shapes of the tiles. In deterministic mode every number that shapes a sum is the same for every tile."""

    split_m: int
    """(row, head) pairs of a tile whose keys are shared out; the smallest tiles are 16 high where that is allowed."""
    chunk_m: int
    block_n: int
    split: int
    """Keys that are summed up by themselves (deterministic), or the smallest number an item gets."""
    programs: int
    """Programs of the split kernel, and items wanted in all."""
    crowded_programs: int
    """The same where there are more than CROWD tiles."""
    split_warps: int = 4
    chunk_warps: int = 8
    split_stages: int = 3
    chunk_stages: int = 2
    small_m: int = 16


def tuning(dtype: torch.dtype, dim: int, deterministic: bool, processors: int) -> Tuning:
    """float32 multiplies without tensor cores, whose tiles must be small; the rest are trials on an H200."""
    if dtype == torch.float32:
        return Tuning(16, 16, 32, 256, processors * 4, processors * 4, chunk_warps=4, split_stages=1, chunk_stages=1)
    if deterministic:
        # One height, one number of warps: one instruction for decode, verification and prompts.
        return Tuning(64, 64, 64, 256, processors * 2, processors * 2, chunk_warps=4, small_m=64)
    return Tuning(64, 128, 64, 128, processors * 4, processors * (3 if dim > 64 else 6), chunk_warps=4, chunk_stages=3)


def attend(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, layout: Layout, view: GroupView,
           scale: float, scales: tuple[torch.Tensor, torch.Tensor] | None, chosen: Tuning, deterministic: bool,
           arrived: torch.Tensor) -> torch.Tensor:
    """The contract is Kernels.attend. `arrived`: int32 zeros, at least tiles * KV heads; left as they were."""
    _, heads, dim = q.shape
    kv_heads = k_cache.shape[1]
    shared = heads // kv_heads
    rows = layout.device
    if rows is None:
        rows = layout.device = DeviceRows.of(layout, shape_of(layout, chosen, shared), q.device)
    out = torch.empty((q.shape[0], heads, dim), dtype=q.dtype, device=q.device)
    key_scales, value_scales = (k_cache, v_cache) if scales is None else scales
    common: dict[str, Any] = {
        "KV_HEADS": kv_heads, "SHARED": shared, "DIM": dim, "BLOCK_D": max(16, triton.next_power_of_2(dim)),
        "BLOCK_N": chosen.block_n, "BLOCK_SIZE": layout.block_size, "WINDOW": view.window is not None,
        "SCALED": scales is not None, "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "enable_fp_fusion": not deterministic}
    base2 = scale * math.log2(math.e)
    shape = rows.shape
    if shape.tiles:
        plan = _plan(rows, layout, view, heads, kv_heads, dim, chosen, deterministic)
        tile_m = shape.tile_rows * shared
        room = plan.items.shape[0] * kv_heads
        split_kernel[(min(_programs(chosen, shape), room),)](
            q, k_cache, v_cache, key_scales, value_scales, out, plan.items, plan.total, view.tables, view.slots,
            rows.positions, rows.prefix, rows.ancestors, plan.results, plan.extremes, arrived, q.stride(0),
            out.stride(0), k_cache.stride(0), view.tables.stride(0), plan.extremes.shape[1], base2, view.window or 0,
            BLOCK_M=_height(tile_m, chosen), DEPTH=shape.depth,
            REDUCE_M=triton.next_power_of_2(tile_m), AHEAD=AHEAD, **common,
            num_warps=chosen.split_warps, num_stages=chosen.split_stages)
    if shape.chunks:
        chunk_kernel[(kv_heads, shape.chunks)](
            q, k_cache, v_cache, key_scales, value_scales, out, rows.chunks, rows.group, rows.positions, view.tables,
            q.stride(0), out.stride(0), k_cache.stride(0), view.tables.stride(0), shape.chunks, base2,
            view.window or 0, BLOCK_M=_height(shape.chunk_rows * shared, chosen, chosen.chunk_m), SPLIT=chosen.split,
            BY_SPLIT=deterministic, **common, num_warps=chosen.chunk_warps, num_stages=chosen.chunk_stages)
    return out


def shape_of(layout: Layout, chosen: Tuning, shared: int) -> RowsShape:
    """Room for just this step; `shared` query heads to a KV head."""
    return RowsShape.of(layout, *tile_rows(chosen, shared))


def tile_rows(chosen: Tuning, shared: int) -> tuple[int, int]:
    """Most rows of a tile whose keys are shared out, and of a chunk."""
    return max(1, chosen.split_m // shared), max(1, chosen.chunk_m // shared)


def _programs(chosen: Tuning, shape: RowsShape) -> int:
    return chosen.crowded_programs if shape.tiles > CROWD else chosen.programs


def _height(pairs: int, chosen: Tuning, height: int | None = None) -> int:
    """BLOCK_M for a tile of so many (row, head) pairs."""
    if height is None:
        height = chosen.small_m if pairs <= chosen.small_m else chosen.split_m
    return max(height, 1 << (pairs - 1).bit_length())


def _plan(rows: DeviceRows, layout: Layout, view: GroupView, heads: int, kv_heads: int, dim: int, chosen: Tuning,
          deterministic: bool) -> Plan:
    plan: Plan | None = view.scratch.get("triton.plan")
    if plan is None:
        longest = view.tables.shape[1] * layout.block_size
        plan = view.scratch["triton.plan"] = make_plan(
            rows, window=view.window, longest=longest, heads=heads, kv_heads=kv_heads, dim=dim, split=chosen.split,
            fixed=deterministic, target=_programs(chosen, rows.shape), block_n=chosen.block_n)
    return plan
