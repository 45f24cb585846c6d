"""What a head borrows of its target: embeddings, the head's rows of the draft vocabulary, the final norm."""

from __future__ import annotations

from typing import Protocol

import torch

from paceline.kernels.operands import Norm
from paceline.kernels.packed import Weight
from paceline.models.config import ModelConfig
from paceline.models.layers import Linear
from paceline.models.packing import packed_rows


class Target(Protocol):
    """Any model of ours whose hidden states a head reads."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def head(self) -> Linear: ...

    @property
    def norm(self) -> Norm: ...

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor: ...


def head_rows(target: Target, ids: torch.Tensor | None) -> Linear:
    """The target's own head for these tokens; None: for all of them, and then nothing is copied."""
    head = target.head
    if ids is None:
        return Linear(head.weight, head.bias)
    bias = None if head.bias is None else head.bias.index_select(0, ids.to(head.bias.device))
    weight: Weight
    if isinstance(head.weight, torch.Tensor):
        weight = head.weight.index_select(0, ids.to(head.weight.device))
    else:
        weight = packed_rows(head.weight.rows(ids.cpu()))
    return Linear(weight, bias)
