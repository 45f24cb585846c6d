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


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """x * (1 + tanh(u)) / 2 with u = sqrt(2 / pi) * (x + 0.044715 * x ** 3), as x * sigmoid(2 u)."""
    return x / (1 + exp((x + 0.044715 * x * x * x) * -1.5957691216057308))


def gelu(x: torch.Tensor) -> torch.Tensor:
    """x * (1 + erf(x / sqrt 2)) / 2."""
    return x * (1 + erf(x * 0.7071067811865476)) * 0.5


def erf(x: torch.Tensor) -> torch.Tensor:
    """To 6e-7 (Abramowitz and Stegun, 7.1.26). torch's own takes another routine for the last elements of a tensor."""
    size = x.abs()
    t = 1 / (1 + 0.3275911 * size)
    series = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
    return torch.copysign(1 - series * exp(-size * size), x)


ACTIVATIONS = {"silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh}
