"""Kernels: the numeric primitives a model is written in. One op has one name in every backend."""

from __future__ import annotations

from typing import Protocol

import torch

from paceline.kernels.device.interface import DeviceKernels
from paceline.kernels.layout import GroupView, Layout
from paceline.kernels.low_rank import LowRankSlots, RowSlots
from paceline.kernels.operands import Heads, KVCache, Norm
from paceline.kernels.packed import Weight

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
"""gelu: x * (1 + erf(x / sqrt 2)) / 2; gelu_tanh: its usual approximation by tanh."""


class Kernels(Protocol):
    """N rows of one step; every op treats each row by itself, so nothing of one request can reach another.

    A deterministic backend promises more: a row's result is bitwise the same alone, in any batch, in a verify pass
    of any width, in any chunking of a prompt, at any number of threads and wherever its blocks lie.
    """

    @property
    def name(self) -> str: ...

    @property
    def deterministic(self) -> bool: ...

    @property
    def device(self) -> DeviceKernels | None:
        """What runs whole steps on the device with these kernels; None: the host lays out and decides every step."""
        ...

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [N, K], weight [M, K], bias [M] -> [N, M] in x's dtype, not necessarily contiguous."""
        ...

    def linear_by_head(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x [N, H, K], weight [H, M, K] -> [N, H, M]: each head of a row through a matrix of its own."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / sqrt(mean(x * x) + eps) * weight over the last axis, in x's dtype; weight [K], in x's dtype or wider."""
        ...

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        """(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias over the last axis, in x's dtype."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[N, 2 F] holding gate, then up -> silu(gate) * up [N, F]."""
        ...

    def activate(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """One of ACTIVATIONS of each element."""
        ...

    def softcap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        """cap * tanh(x / cap)."""
        ...

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotary embedding of the first `rot` features of each head, halves paired (feature i with i + rot / 2).

        x [N, H, d]; cos, sin [N, 1, rot] float32, full width and signed: cos = [c, c], sin = [-s, s]. The result is
        x * cos + swapped(x) * sin, where swapped exchanges the two halves; features from rot on pass through.
        With rot = 0 nothing turns.
        """
        ...

    def store(self, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor, k: torch.Tensor,
              v: torch.Tensor, scales: tuple[torch.Tensor, torch.Tensor] | None = None) -> None:
        """Write k, v [N, H_kv, d] to the slots [N] of the caches [slots, H_kv, d], in place. With `scales` of keys
        and values [slots, H_kv] the caches hold 8-bit codes and a token's heads are rounded, each with its own."""
        ...

    def store_keys(self, k_cache: torch.Tensor, slots: torch.Tensor, k: torch.Tensor) -> None:
        """Write k [N, H_kv, d] to the slots [N] of a latent cache [slots, H_kv, d], which has no plane of values."""
        ...

    def attend(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, layout: Layout, view: GroupView,
               scale: float, scales: tuple[torch.Tensor, torch.Tensor] | None = None,
               softcap: float = 0.0) -> torch.Tensor:
        """Attention of each row over its committed prefix, its ancestors in the group and itself; with layout.mutual
        over its committed prefix and all rows of its group.

        q [N, H, d] -> [N, H, d_v], the values' width; the rows' own keys and values are already stored. v_cache is as
        wide as k_cache, or a view of its first features (latent caches). With view.window a row at position p attends
        to positions p - window < key <= p (with layout.mutual p is its group's last), and in any case to none below
        view.first: what a row below it gets means nothing. Positions a row does not attend to never influence
        it, whatever their slots hold. `scales`: as in store. With a `softcap` scaled scores become
        softcap * tanh(score / softcap) before the softmax.
        """
        ...

    def route(self, logits: torch.Tensor, experts: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Router of a mixture: logits [N, E] -> weights [N, experts] float32 and expert ids [N, experts] int64,
        heaviest first, ties to the lowest id. Weights are the softmax over all E, or over the chosen ones when
        `renormalise`."""
        ...

    def add_low_rank(self, out: torch.Tensor, x: torch.Tensor, low: LowRankSlots, rows: RowSlots) -> torch.Tensor:
        """out [N, M] + up (down x) of the slot that each row of x [N, K] has, after down and after up rounded to x's
        dtype; a row whose slot adds nothing here, or without one, stays as it is. `out` may be overwritten."""
        ...

    # What follows is fused where a backend can; elsewhere it is composed of the above (kernels/composed.py). A
    # deterministic backend gives a fused op the bits of what it stands for.

    def norm(self, x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        """rms_norm or layer_norm, whichever it is; None: x as it is."""
        ...

    def project(self, x: torch.Tensor, norm: Norm | None, weight: Weight, bias: torch.Tensor | None, heads: Heads,
                cos: torch.Tensor, sin: torch.Tensor, cache: KVCache, slots: torch.Tensor) -> torch.Tensor:
        """The way from the residual stream into attention: rotate_and_store(linear(norm(x))). weight
        [(H + 2 H_kv) d, K] holds the rows of queries, keys, values."""
        ...

    def rotate_and_store(self, qkv: torch.Tensor, heads: Heads, cos: torch.Tensor, sin: torch.Tensor, cache: KVCache,
                         slots: torch.Tensor) -> torch.Tensor:
        """qkv [N, (H + 2 H_kv) d] -> q [N, H, d]: queries and keys normed (where `heads` says so) and rotated, keys
        and values stored. qkv may be overwritten."""
        ...

    def gated(self, x: torch.Tensor, norm: Norm | None, weight: Weight, bias: torch.Tensor | None,
              activation: str = "silu") -> torch.Tensor:
        """gate(gate_up(norm(x))), weight [2 F, K] holding gate, then up -> [N, F]."""
        ...

    def gate_up(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The product inside of `gated`, for whoever has something to do before `gate`: linear(x) -> [N, 2 F], summed
        as it is there."""
        ...

    def gate(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        """activate(gate) * up of [N, 2 F] -> [N, F]."""
        ...

    def linear_add(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None,
                   residual: torch.Tensor) -> torch.Tensor:
        """residual [N, M] + linear(x). The residual may be overwritten: it is not to be used any more."""
        ...

    def head(self, x: torch.Tensor, norm: Norm, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        """linear(norm(x)) in float32, contiguous."""
        ...
