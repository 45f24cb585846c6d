"""Linear layers in calls of one fixed row count, so that a row cannot tell how many rows came with it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from paceline.kernels.reference.products import bmm, one_order

TILE = 8
"""Rows a call. A GEMM chooses its kernel, and with it the order of its sum, by the row count; inside one call of a
given shape a row's sum does not depend on the other rows."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [N, K] @ weight [M, K]^T + bias [M] -> [N, M], 8 rows per call, the last tile padded with zero rows."""
    rows = x.shape[0]
    padded = F.pad(x, (0, 0, 0, -rows % TILE)).contiguous()
    transposed = weight.t()
    out = torch.empty((padded.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    with one_order(x.device):
        for begin in range(0, padded.shape[0], TILE):
            torch.mm(padded[begin:begin + TILE], transposed, out=out[begin:begin + TILE])
    out = out[:rows]
    return out if bias is None else out + bias


def linear_by_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [N, H, K], weight [H, M, K] -> [N, H, M], 8 rows per call likewise."""
    rows = x.shape[0]
    padded = F.pad(x, (0, 0, 0, 0, 0, -rows % TILE)).transpose(0, 1).contiguous()
    transposed = weight.transpose(1, 2)
    parts = [bmm(padded[:, begin:begin + TILE].contiguous(), transposed) for begin in range(0, padded.shape[1], TILE)]
    return torch.cat(parts, dim=1)[:, :rows].transpose(0, 1)
