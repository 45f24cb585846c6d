"""What fused kernels take together: a norm, the shape of a layer's heads, a layer's cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS norm over the last axis: weight [K]."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Heads:
    """`query` heads share `keys` key (and value) heads of `dim` features; optionally each head is normed."""

    query: int
    keys: int
    dim: int
    query_norm: Norm | None = None
    key_norm: Norm | None = None


@dataclass(frozen=True, slots=True)
class KVCache:
    """A layer's cache: [slots, kv_heads, dim] each. 8-bit caches have float32 scales [slots, kv_heads] beside them:
    a value is its code times its scale."""

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None

    @property
    def scales(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        if self.key_scales is None or self.value_scales is None:
            return None
        return self.key_scales, self.value_scales
