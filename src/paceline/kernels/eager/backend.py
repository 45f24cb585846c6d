"""EagerKernels: the default torch backend. What each op promises is on Kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from paceline.kernels.composed import Composed
from paceline.kernels.eager import attention
from paceline.kernels.eager.linear import linear
from paceline.kernels.layout import GroupView, Layout
from paceline.kernels.packed import Weight, plain
from paceline.kernels.reference import attention as reference
from paceline.kernels.reference.quantised import as_bytes, quantised

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh")}


class EagerKernels(Composed):
    """Few, large torch calls. A row's bits may depend on the rows beside it."""

    name = "eager"
    deterministic = False

    def __init__(self) -> None:
        self._openblas = not torch._C.has_mkl
        self._zero = torch.zeros(1)

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        return linear(x, plain(weight), bias, self._openblas)

    def linear_by_head(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.bmm(weight, x.permute(1, 2, 0)).permute(2, 0, 1)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        size = x.shape[-1]
        if x.numel() == size and x.device.type == "cpu" and x.dtype == torch.float32:
            # One row: torch's rms_norm is six small calls; this is two, and a square root on the host.
            flat = x.reshape(-1)
            return torch.addcmul(self._zero, x, weight, value=(torch.dot(flat, flat).item() / size + eps) ** -0.5)
        if weight.dtype != x.dtype:
            return F.rms_norm(x.to(weight.dtype), (size,), weight, eps).to(x.dtype)
        return F.rms_norm(x, (size,), weight, eps)

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def activate(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        return ACTIVATIONS[activation](x)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        width = cos.shape[-1]
        if width == 0:
            return x
        whole = width == x.shape[-1]
        part = x if whole else x[..., :width]
        turned = torch.addcmul(part * cos, part.roll(width // 2, -1), sin)
        if turned.dtype != x.dtype:
            turned = turned.to(x.dtype)
        return turned if whole else torch.cat((turned, x[..., width:]), dim=-1)

    def store(self, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor, k: torch.Tensor,
              v: torch.Tensor, scales: tuple[torch.Tensor, torch.Tensor] | None = None) -> None:
        if scales is not None:
            k, v = quantised(k, v, k_cache.dtype, slots, scales)
        if k.dtype != k_cache.dtype:
            k, v = k.to(k_cache.dtype), v.to(v_cache.dtype)
        as_bytes(k_cache).index_copy_(0, slots, as_bytes(k))
        as_bytes(v_cache).index_copy_(0, slots, as_bytes(v))

    def attend(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, layout: Layout, view: GroupView,
               scale: float, scales: tuple[torch.Tensor, torch.Tensor] | None = None,
               softcap: float = 0.0) -> torch.Tensor:
        if scales is not None:
            return reference.attend(q, k_cache, v_cache, layout, view, scale, scales, softcap)
        return attention.attend(q, k_cache, v_cache, layout, view, scale, softcap)

    def route(self, logits: torch.Tensor, experts: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
        wide = logits.float()
        # topk leaves the order of ties open; a stable sort gives them to the lowest expert.
        ordered, chosen = torch.sort(wide, dim=-1, descending=True, stable=True)
        chosen = chosen[:, :experts]
        if renormalise:
            return torch.softmax(ordered[:, :experts], dim=-1), chosen
        return torch.softmax(wide, dim=-1).gather(-1, chosen), chosen
