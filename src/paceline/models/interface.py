"""What the engine needs of a model, and what a model needs of its weights."""

from __future__ import annotations

from typing import Protocol

import torch

from paceline.kernels.groups import CacheGroup
from paceline.kernels.interface import Kernels
from paceline.models.config import ModelConfig
from paceline.models.forward import Forward


class WeightSource(Protocol):
    """Tensors by their Hugging Face names, already in the engine's dtype and on its device."""

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor, contiguous, in `dtype` or the engine's; a ModelFormatError names it when it is missing or has
        another shape. Shared with the file: not to be written to."""
        ...

    def has(self, name: str) -> bool: ...


class CausalLM(Protocol):
    """A decoder over the rows of a step. Knows nothing of requests, sampling or speculation."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """Which layers share a block table, in the order of Layout.views."""
        ...

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[N] int64 -> [N, h]."""
        ...

    def layers(self, hidden: torch.Tensor, context: Forward, first: int = 0, last: int | None = None) -> torch.Tensor:
        """Run layers first .. last - 1 (None: to the end) on the residual stream [N, h]; stores their keys and values.
        layers(layers(x, c, 0, b), c, b) is layers(x, c). `hidden` may be overwritten."""
        ...

    def logits(self, hidden: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        """Final norm and head: residual stream [R, h] -> [R, vocabulary] float32."""
        ...

    def forward(self, token_ids: torch.Tensor, context: Forward) -> torch.Tensor:
        """embed, then all layers: [N] -> [N, h], before the final norm."""
        ...


def activations(model: CausalLM, device: torch.device) -> torch.dtype:
    """What a model computes in; its cache may hold something else."""
    return model.embed(torch.zeros(1, dtype=torch.int64, device=device)).dtype
