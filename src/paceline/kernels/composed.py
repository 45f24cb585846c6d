"""Composed: the fused ops, written as the plain ones they stand for. Backends that fuse override them."""

from __future__ import annotations

import torch

from paceline.kernels.device.interface import DeviceKernels
from paceline.kernels.low_rank import LowRankSlots, RowSlots
from paceline.kernels.operands import Heads, KVCache, Norm
from paceline.kernels.packed import Weight


class Composed:
    """Base of the backends; the contracts are on Kernels."""

    device: DeviceKernels | None = None

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        raise NotImplementedError

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        raise NotImplementedError

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        raise NotImplementedError

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def activate(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        raise NotImplementedError

    def softcap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        # On contiguous memory one routine evaluates every element.
        return torch.tanh(x.contiguous() / cap) * cap

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def store(self, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor, k: torch.Tensor,
              v: torch.Tensor, scales: tuple[torch.Tensor, torch.Tensor] | None = None) -> None:
        raise NotImplementedError

    def store_keys(self, k_cache: torch.Tensor, slots: torch.Tensor, k: torch.Tensor) -> None:
        k_cache.index_copy_(0, slots, k.to(k_cache.dtype))

    def add_low_rank(self, out: torch.Tensor, x: torch.Tensor, low: LowRankSlots, rows: RowSlots) -> torch.Tensor:
        for slot, own in rows.segments:
            pair = low.of(slot)
            if pair is None:
                continue
            part = x if own is None else x.index_select(0, own)
            more = self.linear(self.linear(part, pair.down), pair.up).to(out.dtype)
            if own is None:
                out.add_(more)
            else:
                out.index_copy_(0, own, out.index_select(0, own) + more)
        return out

    def norm(self, x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        if norm is None:
            return x
        if norm.centred:
            return self.layer_norm(x, norm.weight, norm.bias, norm.eps)
        return self.rms_norm(x, norm.weight, norm.eps)

    def project(self, x: torch.Tensor, norm: Norm | None, weight: Weight, bias: torch.Tensor | None, heads: Heads,
                cos: torch.Tensor, sin: torch.Tensor, cache: KVCache, slots: torch.Tensor) -> torch.Tensor:
        qkv = self.linear(self.norm(x, norm), weight, bias)
        return self.rotate_and_store(qkv, heads, cos, sin, cache, slots)

    def rotate_and_store(self, qkv: torch.Tensor, heads: Heads, cos: torch.Tensor, sin: torch.Tensor, cache: KVCache,
                         slots: torch.Tensor) -> torch.Tensor:
        turning = heads.query + heads.keys
        qkv = qkv.contiguous().view(qkv.shape[0], turning + heads.keys, heads.dim)
        if not heads.keys:
            return self.rotate(qkv if heads.query_norm is None else self._norm_heads(qkv, heads.query_norm), cos, sin)
        if not heads.query:
            k = qkv[:, :turning] if heads.key_norm is None else self._norm_heads(qkv[:, :turning], heads.key_norm)
            self.store(cache.keys, cache.values, slots, self.rotate(k, cos, sin), qkv[:, turning:], cache.scales)
            return qkv[:, :0]
        if heads.query_norm is None or heads.key_norm is None:
            turned = self.rotate(qkv[:, :turning], cos, sin)
            q, k = turned[:, :heads.query], turned[:, heads.query:]
        else:
            q, k = qkv[:, :heads.query], qkv[:, heads.query:turning]
            q = self.rotate(self._norm_heads(q, heads.query_norm), cos, sin)
            k = self.rotate(self._norm_heads(k, heads.key_norm), cos, sin)
        self.store(cache.keys, cache.values, slots, k, qkv[:, turning:], cache.scales)
        return q

    def _norm_heads(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """[N, H, d], as many features together as the norm has weights."""
        together = norm.weight.shape[0]
        return self.norm(x.reshape(x.shape[0], -1, together), norm).view(x.shape)

    def gated(self, x: torch.Tensor, norm: Norm | None, weight: Weight, bias: torch.Tensor | None,
              activation: str = "silu") -> torch.Tensor:
        return self.gate(self.gate_up(self.norm(x, norm), weight, bias), activation)

    def gate_up(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.linear(x, weight, bias)

    def gate(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        if activation == "silu":
            return self.silu_mul(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return self.activate(gate, activation) * up

    def linear_add(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None,
                   residual: torch.Tensor) -> torch.Tensor:
        return residual + self.linear(x, weight, bias)

    def head(self, x: torch.Tensor, norm: Norm, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.linear(self.norm(x, norm), weight, bias).float().contiguous()
