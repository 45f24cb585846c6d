"""Kernels: the numeric primitives a model is written in. One op has one name in every backend."""

from __future__ import annotations

from typing import Protocol

import torch

from paceline.kernels.layout import GroupView, Layout
from paceline.kernels.operands import Heads, KVCache, Norm
from paceline.kernels.packed import Weight


class Kernels(Protocol):
    """N rows of one step; every op treats each row by itself, so nothing of one request can reach another.

    A deterministic backend promises more: a row's result is bitwise the same alone, in any batch, in a verify pass
    of any width, in any chunking of a prompt, at any number of threads and wherever its blocks lie.
    """

    @property
    def name(self) -> str: ...

    @property
    def deterministic(self) -> bool: ...

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [N, K], weight [M, K], bias [M] -> [N, M] in x's dtype, not necessarily contiguous."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / sqrt(mean(x * x) + eps) * weight over the last axis; weight [K]."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[N, 2 F] holding gate, then up -> silu(gate) * up [N, F]."""
        ...

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotary embedding of the first `rot` features of each head, halves paired (feature i with i + rot / 2).

        x [N, H, d]; cos, sin [N, 1, rot] float32, full width and signed: cos = [c, c], sin = [-s, s]. The result is
        x * cos + swapped(x) * sin, where swapped exchanges the two halves; features from rot on pass through.
        """
        ...

    def store(self, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor, k: torch.Tensor,
              v: torch.Tensor, scales: tuple[torch.Tensor, torch.Tensor] | None = None) -> None:
        """Write k, v [N, H_kv, d] to the slots [N] of the caches [slots, H_kv, d], in place. With `scales` of keys
        and values [slots, H_kv] the caches hold 8-bit codes and a token's heads are rounded, each with its own."""
        ...

    def attend(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, layout: Layout, view: GroupView,
               scale: float, scales: tuple[torch.Tensor, torch.Tensor] | None = None) -> torch.Tensor:
        """Attention of each row over its committed prefix, its ancestors in the group and itself.

        q [N, H, d] -> [N, H, d]; the rows' own keys and values are already stored. With view.window a row at
        position p attends to positions p - window < key <= p. Positions a row does not attend to never influence
        it, whatever their slots hold. `scales`: as in store.
        """
        ...

    def route(self, logits: torch.Tensor, experts: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Router of a mixture: logits [N, E] -> weights [N, experts] float32 and expert ids [N, experts] int64,
        heaviest first, ties to the lowest id. Weights are the softmax over all E, or over the chosen ones when
        `renormalise`."""
        ...

    # What follows is fused where a backend can; elsewhere it is composed of the above (kernels/composed.py).

    def project(self, x: torch.Tensor, norm: Norm, weight: Weight, bias: torch.Tensor | None, heads: Heads,
                cos: torch.Tensor, sin: torch.Tensor, cache: KVCache, slots: torch.Tensor) -> torch.Tensor:
        """The way from the residual stream into attention: rotate_and_store(linear(norm(x))). weight
        [(H + 2 H_kv) d, K] holds the rows of queries, keys, values."""
        ...

    def rotate_and_store(self, qkv: torch.Tensor, heads: Heads, cos: torch.Tensor, sin: torch.Tensor, cache: KVCache,
                         slots: torch.Tensor) -> torch.Tensor:
        """qkv [N, (H + 2 H_kv) d] -> q [N, H, d]: queries and keys normed (where `heads` says so) and rotated, keys
        and values stored. qkv may be overwritten."""
        ...

    def gated(self, x: torch.Tensor, norm: Norm | None, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        """silu_mul(linear(norm(x))), weight [2 F, K] holding gate, then up -> [N, F]."""
        ...

    def linear_add(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None,
                   residual: torch.Tensor) -> torch.Tensor:
        """residual [N, M] + linear(x). The residual may be overwritten: it is not to be used any more."""
        ...

    def head(self, x: torch.Tensor, norm: Norm, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        """linear(norm(x)) in float32, contiguous."""
        ...
