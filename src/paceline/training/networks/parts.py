"""What the heads are made of. Masters are float32; under autocast products run in 16 bits."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from paceline.errors import ConfigError


class LayerShape(Protocol):
    """What layers are built from: a HeadConfig, or the shape of a whole model."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def intermediate_size(self) -> int: ...

    @property
    def num_heads(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def norm_eps(self) -> float: ...

    @property
    def rope_theta(self) -> float: ...


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

    def __init__(self, config: LayerShape, inputs: int) -> None:
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
    def __init__(self, config: LayerShape) -> None:
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

    def __init__(self, config: LayerShape, positions: int, device: torch.device) -> None:
        powers = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        angles = torch.arange(positions, dtype=torch.float32)[:, None] * config.rope_theta ** -powers
        self._cos, self._sin = angles.cos().to(device), angles.sin().to(device)

    def __call__(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [..., heads, d] at positions [...]."""
        cos, sin = self._cos[positions][..., None, :], self._sin[positions][..., None, :]
        first, second = x.float().chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


class TapProjection(nn.Module):
    """fc over tapped streams. Their features differ in size by factors of hundreds, so that steps of one size would be
    too large for some and too small for others: each is brought to about size 1 first, and what is written is the
    product. The factors are powers of two, which round nothing in any type: what is written is what was trained."""

    scale: torch.Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.register_buffer("scale", torch.ones(inputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x * self.scale.to(x.dtype), self.weight)

    @torch.no_grad()
    def calibrate(self, rows: torch.Tensor) -> None:
        """rows [N, inputs]: a sample of what comes."""
        self.scale.copy_(rows.float().square().mean(0).sqrt().clamp(min=1e-4).log2().round().neg().exp2())


class HeadModule(nn.Module):
    """What all heads have in common: the tensors of a checkpoint, written and read."""

    def __init__(self, config: LayerShape) -> None:
        super().__init__()
        self.config: Any = config

    def initialise(self) -> None:
        """Normal matrices that keep the size of what goes through them. So the layers soon count more than the
        embedding that entered, which the tied head would take for a wish to say the same again."""
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)

    def calibrate(self, rows: torch.Tensor) -> None:
        """rows [N, taps * h]: tapped streams of some tokens."""
        for module in self.modules():
            if isinstance(module, TapProjection):
                module.calibrate(rows)

    def exported(self) -> dict[str, torch.Tensor]:
        """By the names of the format, float32."""
        out = {name: one.detach().float() for name, one in self.named_parameters()}
        for name, module in self.named_modules():
            if isinstance(module, TapProjection):
                out[f"{name}.weight"] = out[f"{name}.weight"] * module.scale
        return {name: one.cpu().clone() for name, one in out.items()}

    @torch.no_grad()
    def take(self, tensors: dict[str, torch.Tensor]) -> None:
        """What `exported` gave, or another head of the same shape."""
        own = dict(self.named_parameters())
        for name, one in own.items():
            if name not in tensors or tensors[name].shape != one.shape:
                found = tuple(tensors[name].shape) if name in tensors else "not there"
                raise ConfigError(f"--init: {name} is {found}, and this head's is {tuple(one.shape)}: use the settings "
                                  "that head was trained with.")
        for name, one in own.items():
            one.copy_(tensors[name])
        for module in self.modules():
            if isinstance(module, TapProjection):
                module.weight.div_(module.scale)
