"""Launching latent attention (MLA), what it caches, and products with a matrix for each head."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton

from paceline.kernels.device.packing import device_rows, shape_of
from paceline.kernels.layout import GroupView, Layout
from paceline.kernels.triton.latent_device import latent_kernel, span_kernel, store_kernel
from paceline.kernels.triton.linear_device import by_head_kernel

SPLIT = 256
"""Keys that are summed up by themselves; part of what defines the bits."""
BUSY, PROGRAMS = 2, 16
"""Programs for each processor: so many rows keep the card busy by themselves; as many, about, share out the spans of
fewer rows. Those that find nothing to do take time too."""
MOST_RESULTS = 256 << 20
"""Bytes of spans' sums that are kept at a time, at most."""


def attend(q: torch.Tensor, k_cache: torch.Tensor, rank: int, layout: Layout, view: GroupView, scale: float,
           softcap: float, fused: bool, processors: int) -> torch.Tensor:
    """q [N, H, rank + rope] over k_cache [slots, 1, rank + rope], whose first `rank` features are the values ->
    [N, H, rank]. The contract is Kernels.attend. What is launched follows from the shapes alone: how many rows there
    are, and how long a text the block tables have room for."""
    q = q.contiguous()
    count, heads, width = q.shape
    rows = layout.device
    if rows is None:
        rows = layout.device = device_rows(layout, shape_of(layout, *tile_rows(count)), q.device)
    out = torch.empty((count, heads, rank), dtype=q.dtype, device=q.device)
    single = q.dtype == torch.float32
    block_h = _block_heads(heads, q.dtype)
    blocks, spans = triton.cdiv(heads, block_h), triton.cdiv(view.tables.shape[1] * layout.block_size, SPLIT)
    cells = cells_of(count, spans, heads, rank, q.dtype, processors)
    results = extremes = out
    if cells:
        results = torch.empty((count, cells, heads, rank), dtype=torch.float32, device=q.device)
        extremes = torch.empty((2, count, cells, heads), dtype=torch.float32, device=q.device)
    given = (view.tables, view.slots, rows.group, rows.positions, rows.prefix, rows.ancestors, q.stride(0),
             k_cache.stride(0), view.tables.stride(0), cells, scale * math.log2(math.e), view.window or 0,
             softcap * math.log2(math.e))
    shape: dict[str, Any] = {
        "HEADS": heads, "RANK": rank, "ROPE": width - rank, "BLOCK_H": block_h,
        "BLOCK_R": max(16, triton.next_power_of_2(rank)), "BLOCK_P": max(16, triton.next_power_of_2(width - rank)),
        "BLOCK_N": 16 if single else 32, "BLOCK_SIZE": layout.block_size, "SPLIT": SPLIT, "DEPTH": rows.shape.depth,
        "FIRST": view.first, "WINDOW": view.window is not None, "CAPPED": softcap > 0.0,
        "PRECISION": "ieee" if single else "tf32",
        "enable_fp_fusion": fused, "num_warps": 8 if block_h > 32 else 4, "num_stages": 1 if single else 2}
    if cells:
        programs = min(cells, max(1, PROGRAMS * processors // (count * blocks)))
        span_kernel[(count, blocks, programs)](q, k_cache, results, extremes, *given, **shape)
    latent_kernel[(count, blocks)](q, k_cache, out, results, extremes, *given, CELLS=cells > 0, WHOLE=cells == spans,
                                   **shape)
    return out


def cells_of(rows: int, spans: int, heads: int, rank: int, dtype: torch.dtype, processors: int) -> int:
    """For how many spans of each of so many rows what is found in them is kept, so that programs of their own sum them
    up. `spans`: of the longest text."""
    blocks = triton.cdiv(heads, _block_heads(heads, dtype))
    if spans == 1 or rows * blocks >= BUSY * processors:
        return 0
    return min(spans, MOST_RESULTS // (rows * heads * rank * 4))


def scratch(rows: int, longest: int, heads: int, rank: int, dtype: torch.dtype, processors: int) -> int:
    """Bytes that attention takes beside its operands, texts of up to `longest` tokens."""
    cells = cells_of(rows, triton.cdiv(longest, SPLIT), heads, rank, dtype, processors)
    return rows * cells * heads * (rank + 2) * 4


def tile_rows(rows: int) -> tuple[int, int]:
    """Of tiles and of chunks in a step of so many rows. Nobody reads them, every row has programs of its own: as few as
    there can be."""
    return rows, rows


def _block_heads(heads: int, dtype: torch.dtype) -> int:
    """Heads of one program."""
    return 16 if dtype == torch.float32 else min(64, max(16, triton.next_power_of_2(heads)))


def store(k_cache: torch.Tensor, slots: torch.Tensor, k: torch.Tensor) -> None:
    """Kernels.store_keys, passing by rows whose slot is -1."""
    flat = k.flatten(1)
    rows, width = flat.shape
    store_kernel[(rows,)](flat, k_cache, slots, flat.stride(0), k_cache.stride(0), WIDTH=width,
                          BLOCK=triton.next_power_of_2(width), num_warps=4)


def linear_by_head(x: torch.Tensor, weight: torch.Tensor, fused: bool) -> torch.Tensor:
    """x [N, H, K], weight [H, M, K] -> [N, H, M]. The order of a sum depends on neither N nor the rest of the rows."""
    rows, heads, inputs = x.shape
    size = weight.shape[1]
    if x.stride(2) != 1:
        x = x.contiguous()
    out = torch.empty((rows, heads, size), dtype=x.dtype, device=x.device)
    height, width, columns, stages = 64, 64 if rows > 16 else 16, 64, 3
    if x.dtype == torch.float32:  # without tensor cores
        height, width, columns, stages = 32, 16, 32, 2
    by_head_kernel[(triton.cdiv(size, height), triton.cdiv(rows, width), heads)](
        x, weight, out, rows, size, inputs, x.stride(0), x.stride(1), BLOCK_M=height, BLOCK_N=width, BLOCK_K=columns,
        EVEN=inputs % columns == 0, PRECISION="ieee" if x.dtype == torch.float32 else "tf32", enable_fp_fusion=fused,
        num_warps=4, num_stages=stages)
    return out
