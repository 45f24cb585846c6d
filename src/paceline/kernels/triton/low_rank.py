"""Launching low-rank additions. Tiles and pieces are one choice for all: bits must not depend on the rows of a step."""

from __future__ import annotations

from typing import Any

import torch
import triton

from paceline.kernels.low_rank import LowRankSlots
from paceline.kernels.triton.launch import overlapped
from paceline.kernels.triton.low_rank_device import expand_kernel, shrink_kernel

TILE_ROWS, RANKS, OUTPUTS, COLUMNS = 16, 16, 64, 128
PIECE, PIECES = 512, 8
"""Columns that are summed up by themselves, at least, and how many such pieces there are, at most: with few rows they
are all the programs there are."""
APART_ROWS = 64
"""Up to here pieces are programs of their own."""


def add(out: torch.Tensor, x: torch.Tensor, low: LowRankSlots, slots: torch.Tensor) -> torch.Tensor:
    """Kernels.add_low_rank; slots [N] int64 on the device."""
    rows, inputs = x.shape
    size, room = low.up.shape[1:]
    if x.stride(1) != 1:
        x = x.contiguous()
    if out.stride(1) != 1:
        out = out.contiguous()
    piece = max(PIECE, triton.cdiv(inputs, PIECES * COLUMNS) * COLUMNS)
    pieces = triton.cdiv(inputs, piece)
    apart = rows <= APART_ROWS
    parts = pieces if apart else 1
    hidden = torch.empty((parts, rows, room), dtype=torch.float32, device=x.device)
    common: dict[str, Any] = {"BLOCK_N": TILE_ROWS, "BLOCK_R": RANKS,
                              "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32"}
    tiles = triton.cdiv(rows, TILE_ROWS)
    shrink_kernel[(tiles, triton.cdiv(room, RANKS), parts)](
        x, low.down, low.ranks, slots, hidden, rows, inputs, x.stride(0), room, PIECE=piece, PIECES=pieces, APART=apart,
        BLOCK_K=COLUMNS, num_warps=1, **common, **overlapped(x.device, rows, inputs))
    expand_kernel[(triton.cdiv(size, OUTPUTS), tiles)](
        hidden, low.up, low.ranks, slots, out, rows, size, out.stride(0), room, PIECES=parts, BLOCK_M=OUTPUTS,
        num_warps=4, **common, **overlapped(x.device, rows, size))
    return out
