"""Launching latent attention (MLA), and products with a matrix for each head."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
import triton

from paceline.kernels.device.packing import device_rows, shape_of
from paceline.kernels.layout import GroupView, Layout
from paceline.kernels.triton.latent_device import gather_latents_kernel, latent_kernel
from paceline.kernels.triton.linear_device import by_head_kernel

SPLIT = 256
"""Keys that are summed up by themselves; part of what defines the bits."""
MOST_RESULTS = 64 << 20
"""Bytes of spans' sums that are kept at a time; rows that need more take turns."""


def attend(q: torch.Tensor, k_cache: torch.Tensor, rank: int, layout: Layout, view: GroupView, scale: float,
           softcap: float, fused: bool, processors: int) -> torch.Tensor:
    """q [N, H, rank + rope] over k_cache [slots, 1, rank + rope], whose first `rank` features are the values ->
    [N, H, rank]. The contract is Kernels.attend."""
    q = q.contiguous()
    count, heads, width = q.shape
    rows = layout.device
    if rows is None:
        rows = layout.device = device_rows(layout, shape_of(layout, 1, 1), q.device)
    out = torch.empty((count, heads, rank), dtype=q.dtype, device=q.device)
    single = q.dtype == torch.float32
    block_h = 16 if single else min(64, max(16, triton.next_power_of_2(heads)))
    blocks = triton.cdiv(heads, block_h)
    splits = _splits(layout, view)
    # Many rows keep the card busy by themselves.
    apart = splits > 1 and count * blocks < 2 * processors
    at_once = min(count, max(1, MOST_RESULTS // (splits * heads * rank * 4))) if apart else count
    results = extremes = out
    if apart:
        results = torch.empty((at_once, splits, heads, rank), dtype=torch.float32, device=q.device)
        extremes = torch.empty((2, at_once, splits, heads), dtype=torch.float32, device=q.device)
    shape: dict[str, Any] = {
        "HEADS": heads, "RANK": rank, "BLOCK_H": block_h, "BLOCK_R": max(16, triton.next_power_of_2(rank)),
        "BLOCK_N": 16 if single else 32, "SPLIT": SPLIT, "WINDOW": view.window is not None, "enable_fp_fusion": fused,
        "num_warps": 8 if block_h > 32 else 4}
    base2, cap = scale * math.log2(math.e), softcap * math.log2(math.e)
    for first in range(0, count, at_once):
        here = min(at_once, count - first)
        latent_kernel[(here, blocks, splits if apart else 1)](
            q, k_cache, out, results, extremes, view.tables, view.slots, rows.group, rows.positions, rows.prefix,
            rows.ancestors, q.stride(0), k_cache.stride(0), view.tables.stride(0), first, splits, base2,
            view.window or 0, cap, ROPE=width - rank, BLOCK_P=max(16, triton.next_power_of_2(width - rank)),
            BLOCK_SIZE=layout.block_size, APART=apart, DEPTH=rows.shape.depth, CAPPED=softcap > 0.0,
            PRECISION="ieee" if single else "tf32", num_stages=1 if single else 2, **shape)
        if apart:
            gather_latents_kernel[(here, blocks)](
                results, extremes, out, rows.positions, first, splits, view.window or 0, **shape)
    return out


def _splits(layout: Layout, view: GroupView) -> int:
    """Spans of the longest text in a step, counted once for all layers."""
    found: int | None = view.scratch.get("latent.splits")
    if found is None:
        longest = max(start + end - begin for start, (begin, end) in zip(layout.starts, pairwise(layout.offsets)))
        found = view.scratch["latent.splits"] = triton.cdiv(longest, SPLIT)
    return found


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
