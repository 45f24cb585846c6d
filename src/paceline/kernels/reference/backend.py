"""ReferenceKernels: the deterministic backend. What each op promises is on Kernels."""

from __future__ import annotations

import torch

from paceline.kernels.composed import Composed
from paceline.kernels.layout import GroupView, Layout
from paceline.kernels.packed import Weight, plain
from paceline.kernels.reference import attention
from paceline.kernels.reference.linear import linear, linear_by_head
from paceline.kernels.reference.ordered import ACTIVATIONS, exp, ordered_sum, silu
from paceline.kernels.reference.quantised import as_bytes, quantised


class ReferenceKernels(Composed):
    """Simple, bitwise independent of batch, chunking and threads; sums in float32 whatever the dtype."""

    name = "reference"
    deterministic = True

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        return linear(x, plain(weight), bias)

    def linear_by_head(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return linear_by_head(x, weight)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        mean = ordered_sum(wide * wide) / x.shape[-1]
        return ((wide / torch.sqrt(mean + eps)[..., None]).to(weight.dtype) * weight).to(x.dtype)

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        wide = x.float()
        wide = wide - (ordered_sum(wide) / x.shape[-1])[..., None]
        variance = ordered_sum(wide * wide) / x.shape[-1]
        normed = wide / torch.sqrt(variance + eps)[..., None] * weight
        return (normed if bias is None else normed + bias).to(x.dtype)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (silu(gate) * up).to(gate_up.dtype)

    def activate(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        return ACTIVATIONS[activation](x.float()).to(x.dtype)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        width = cos.shape[-1]
        if width == 0:
            return x
        turned = x[..., :width].float()
        turned = turned * cos + turned.roll(width // 2, -1) * sin
        turned = turned.to(x.dtype)
        return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), dim=-1)

    def store(self, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor, k: torch.Tensor,
              v: torch.Tensor, scales: tuple[torch.Tensor, torch.Tensor] | None = None) -> None:
        if scales is not None:
            k, v = quantised(k, v, k_cache.dtype, slots, scales)
        as_bytes(k_cache).index_copy_(0, slots, as_bytes(k.to(k_cache.dtype)))
        as_bytes(v_cache).index_copy_(0, slots, as_bytes(v.to(v_cache.dtype)))

    def attend(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, layout: Layout, view: GroupView,
               scale: float, scales: tuple[torch.Tensor, torch.Tensor] | None = None,
               softcap: float = 0.0) -> torch.Tensor:
        return attention.attend(q, k_cache, v_cache, layout, view, scale, scales, softcap)

    def route(self, logits: torch.Tensor, experts: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
        wide = logits.float()
        # A stable sort keeps equal logits in order of their index: ties go to the lowest expert.
        chosen = torch.sort(wide, dim=-1, descending=True, stable=True).indices[:, :experts]
        weights = exp(wide - wide.amax(-1, keepdim=True))
        picked = weights.gather(-1, chosen)
        return picked / ordered_sum(picked if renormalise else weights)[..., None], chosen
