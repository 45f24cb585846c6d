"""Launching matrix products in the way choices.py names."""

from __future__ import annotations

from typing import Any

import torch
import triton

from paceline.kernels.operands import Heads, KVCache, Norm
from paceline.kernels.triton.choices import Product, Way
from paceline.kernels.triton.launch import fetched, overlapped
from paceline.kernels.triton.linear_device import (
    abreast_kernel,
    row_kernel,
    row_project_kernel,
    tile_kernel,
)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, how: Product, arrived: torch.Tensor, *,
            norm: Norm | None = None, gated: bool = False, residual: torch.Tensor | None = None,
            dtype: torch.dtype | None = None, exact: bool = False) -> torch.Tensor:
    """x [N, K] -> [N, M] in `dtype` (None: x's), contiguous.

    norm: only where how.way is ROW. gated: weight holds gates, then ups, M of each. residual [N, M] is added.
    arrived: int32 zeros, one a tile. exact: every operation rounds by itself, and a product before what follows it.
    """
    rows, inputs = x.shape
    size = weight.shape[0] // 2 if gated else weight.shape[0]
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty((rows, size), dtype=dtype or x.dtype, device=x.device)
    shift, onto = x if bias is None else bias, x if residual is None else residual
    common: dict[str, Any] = {
        "BIASED": bias is not None, "ADDED": residual is not None, "FETCHED": fetched(weight), "num_warps": how.warps,
        **overlapped(x.device, *x.shape)}
    if how.way is Way.ROW:
        row_kernel[(triton.cdiv(size, how.block_m),)](
            x, x if norm is None else norm.weight, weight, shift, onto, out, size, 0.0 if norm is None else norm.eps,
            K=inputs, BLOCK_N=how.block_m, BLOCK_K=how.block_k, NORMED=norm is not None, GATED=gated, **common)
        return out
    common |= {
        "ROUNDED": exact and out.dtype == x.dtype, "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        "num_stages": how.stages, "enable_fp_fusion": not exact}
    piece = how.piece or inputs
    pieces = triton.cdiv(inputs, piece)
    tiles = triton.cdiv(size, how.block_m), triton.cdiv(rows, how.block_n)
    if how.way is Way.ABREAST:
        abreast_kernel[tiles](
            x, weight, shift, onto, out, rows, size, inputs, x.stride(0), PIECE=piece, BLOCK_M=how.block_m,
            BLOCK_N=how.block_n, BLOCK_K=how.block_k, **common)
        return out
    apart = how.apart and pieces > 1
    partial = out
    if apart:
        partial = torch.empty((pieces, rows, weight.shape[0]), dtype=torch.float32, device=x.device)
    tile_kernel[(*tiles, pieces if apart else 1)](
        x, weight, shift, onto, out, partial, arrived, rows, size, inputs, x.stride(0),
        PIECE=piece if pieces > 1 else 0, PIECES=pieces, APART=apart, BLOCK_M=how.block_m, BLOCK_N=how.block_n,
        BLOCK_K=how.block_k, EVEN=inputs % how.block_k == 0, GATED=gated, **common)
    return out


def project_row(x: torch.Tensor, norm: Norm | None, weight: torch.Tensor, bias: torch.Tensor | None, heads: Heads,
                cos: torch.Tensor, sin: torch.Tensor, cache: KVCache, slots: torch.Tensor,
                how: Product) -> torch.Tensor:
    """Kernels.project of a single row, in one launch; without a norm, of one that is normed already. For heads that
    turn as a whole and have no norms, and caches without scales."""
    q = torch.empty((1, heads.query, heads.dim), dtype=x.dtype, device=x.device)
    pairs = (heads.query + 2 * heads.keys) * heads.dim // 2
    row_project_kernel[(triton.cdiv(pairs, how.block_m),)](
        x, x if norm is None else norm.weight, weight, x if bias is None else bias, q, cache.keys, cache.values, slots,
        cos, sin, cache.keys.stride(0), cache.values.stride(0), 0.0 if norm is None else norm.eps, K=x.shape[1],
        HEADS=heads.query, KV_HEADS=heads.keys, DIM=heads.dim, BLOCK_N=how.block_m, BLOCK_K=how.block_k,
        NORMED=norm is not None, BIASED=bias is not None, FETCHED=fetched(weight), num_warps=how.warps,
        **overlapped(x.device, *x.shape))
    return q
