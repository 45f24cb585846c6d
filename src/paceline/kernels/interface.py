"""Kernels: the numeric primitives a model is written in. One op has one name in every backend."""

from __future__ import annotations

from typing import Protocol

import torch

from paceline.kernels.layout import GroupView, Layout
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
              v: torch.Tensor) -> None:
        """Write k, v [N, H_kv, d] to the slots [N] of the caches [slots, H_kv, d], in place."""
        ...

    def attend(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, layout: Layout, view: GroupView,
               scale: float) -> torch.Tensor:
        """Attention of each row over its committed prefix, its ancestors in the group and itself.

        q [N, H, d] -> [N, H, d]; the rows' own keys and values are already stored. With view.window a row at
        position p attends to positions p - window < key <= p. Positions a row does not attend to never influence
        it, whatever their slots hold.
        """
        ...

    def route(self, logits: torch.Tensor, experts: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Router of a mixture: logits [N, E] -> weights [N, experts] float32 and expert ids [N, experts] int64,
        heaviest first, ties to the lowest id. Weights are the softmax over all E, or over the chosen ones when
        `renormalise`."""
        ...
