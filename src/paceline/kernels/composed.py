"""Composed: the fused ops, written as the plain ones they stand for. Backends that fuse override them."""

from __future__ import annotations

import torch

from paceline.kernels.operands import Heads, KVCache, Norm
from paceline.kernels.packed import Weight


class Composed:
    """Base of the backends; the contracts are on Kernels."""

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        raise NotImplementedError

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        raise NotImplementedError

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def store(self, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor, k: torch.Tensor,
              v: torch.Tensor, scales: tuple[torch.Tensor, torch.Tensor] | None = None) -> None:
        raise NotImplementedError

    def project(self, x: torch.Tensor, norm: Norm, weight: Weight, bias: torch.Tensor | None, heads: Heads,
                cos: torch.Tensor, sin: torch.Tensor, cache: KVCache, slots: torch.Tensor) -> torch.Tensor:
        qkv = self.linear(self.rms_norm(x, norm.weight, norm.eps), weight, bias)
        return self.rotate_and_store(qkv, heads, cos, sin, cache, slots)

    def rotate_and_store(self, qkv: torch.Tensor, heads: Heads, cos: torch.Tensor, sin: torch.Tensor, cache: KVCache,
                         slots: torch.Tensor) -> torch.Tensor:
        turning = heads.query + heads.keys
        qkv = qkv.contiguous().view(qkv.shape[0], turning + heads.keys, heads.dim)
        if heads.query_norm is None or heads.key_norm is None:
            turned = self.rotate(qkv[:, :turning], cos, sin)
            q, k = turned[:, :heads.query], turned[:, heads.query:]
        else:
            q, k = qkv[:, :heads.query], qkv[:, heads.query:turning]
            q = self.rotate(self.rms_norm(q, heads.query_norm.weight, heads.query_norm.eps), cos, sin)
            k = self.rotate(self.rms_norm(k, heads.key_norm.weight, heads.key_norm.eps), cos, sin)
        self.store(cache.keys, cache.values, slots, k, qkv[:, turning:], cache.scales)
        return q

    def gated(self, x: torch.Tensor, norm: Norm | None, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        normed = x if norm is None else self.rms_norm(x, norm.weight, norm.eps)
        return self.silu_mul(self.linear(normed, weight, bias))

    def linear_add(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None,
                   residual: torch.Tensor) -> torch.Tensor:
        return residual + self.linear(x, weight, bias)

    def head(self, x: torch.Tensor, norm: Norm, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.linear(self.rms_norm(x, norm.weight, norm.eps), weight, bias).float().contiguous()
