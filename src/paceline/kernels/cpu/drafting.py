"""DraftKernels: what trained heads run with beside a model in native code. A draft decides nothing, so what lies
between its products and its attention is left to torch, whose sums need not be in our order."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from paceline.kernels.cpu.backend import NativeKernels
from paceline.kernels.eager.backend import ACTIVATIONS, EagerKernels
from paceline.kernels.packed import Weight


class DraftKernels(NativeKernels):
    """Rows are still treated one by one: a text's drafts do not depend on who is drafted for beside it."""

    deterministic = False

    def __init__(self, threads: int = 1, instruction_set: str = "") -> None:
        super().__init__(threads, instruction_set)
        self._plain = EagerKernels()

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        if isinstance(weight, torch.Tensor) and weight.shape[0] == 1:
            # A confidence head's: the reference's tiles are made for more. Row by row, unlike a library's product.
            product = (x * weight).sum(-1, keepdim=True)
            return product if bias is None else product + bias
        return super().linear(x, weight, bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._plain.silu_mul(gate_up)

    def activate(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        return ACTIVATIONS[activation](x)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return self._plain.rotate(x, cos, sin)
