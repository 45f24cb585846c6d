"""What the heads are made of. Masters are float32; under autocast products run in 16 bits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from paceline.models.heads.config import HeadConfig

STD = 0.02


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)


class Projections(nn.Module):
    """The matrices of an attention, its queries, keys and values from `inputs` features."""

    def __init__(self, config: HeadConfig, inputs: int) -> None:
        super().__init__()
        dim, heads, kv_heads = config.head_dim, config.num_heads, config.num_kv_heads
        self.dim, self.heads, self.kv_heads = dim, heads, kv_heads
        self.q_proj = nn.Linear(inputs, heads * dim, bias=False)
        self.k_proj = nn.Linear(inputs, kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(inputs, kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(heads * dim, config.hidden_size, bias=False)

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs] -> [..., H, d]."""
        return self.q_proj(x).view(*x.shape[:-1], self.heads, self.dim)  # type: ignore[no-any-return]

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        return self.k_proj(x).view(*x.shape[:-1], self.kv_heads, self.dim)  # type: ignore[no-any-return]

    def values(self, x: torch.Tensor) -> torch.Tensor:
        return self.v_proj(x).view(*x.shape[:-1], self.kv_heads, self.dim)  # type: ignore[no-any-return]


class GatedMLP(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Rotation:
    """Rotary positions, halves paired."""

    def __init__(self, config: HeadConfig, positions: int, device: torch.device) -> None:
        powers = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        angles = torch.arange(positions, dtype=torch.float32)[:, None] * config.rope_theta ** -powers
        self._cos, self._sin = angles.cos().to(device), angles.sin().to(device)

    def __call__(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [..., heads, d] at positions [...]."""
        cos, sin = self._cos[positions][..., None, :], self._sin[positions][..., None, :]
        first, second = x.float().chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def initialise(module: nn.Module, layers: int) -> None:
    """Small normal matrices, those that add to the residual stream smaller."""
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1:
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(parameter, std=STD / (2 * layers) ** 0.5 if residual else STD)
