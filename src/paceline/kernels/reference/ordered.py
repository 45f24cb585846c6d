"""Reductions and functions whose bits depend on their own operands only.

Addition, multiplication, division and square root round correctly, so elementwise they are the same everywhere.
Sums are not: torch may split one over threads or vector lanes as the shape suggests. Here the order is written out.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def ordered_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last axis by halving: [..., n] -> [...]. The order of additions depends on n alone."""
    while (n := x.shape[-1]) > 1:
        half = (n + 1) // 2
        upper = x[..., half:]
        if n % 2:
            upper = F.pad(upper, (0, 1))
        x = x[..., :half] + upper
    return x[..., 0]


def exp(x: torch.Tensor) -> torch.Tensor:
    """e ** x. On contiguous memory torch evaluates every element with one vector routine; strided input may not."""
    return torch.exp(x.contiguous())


def silu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(x). torch's own silu uses another routine for the last elements of a tensor than for the rest."""
    return x / (1 + exp(-x))
