"""What a model needs of its weights."""

from __future__ import annotations

from typing import Protocol

import torch


class WeightSource(Protocol):
    """Tensors by their Hugging Face names, already in the engine's dtype and on its device."""

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor, contiguous, in `dtype` or the engine's; a ModelFormatError names it when it is missing or has
        another shape. Shared with the file: not to be written to."""
        ...

    def has(self, name: str) -> bool: ...
