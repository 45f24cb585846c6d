"""What a model needs of its weights."""

from __future__ import annotations

from typing import Protocol

import torch

from paceline.models.part import Part


class WeightSource(Protocol):
    """Tensors by their Hugging Face names, already in the engine's dtype and on its device."""

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor, contiguous, in `dtype` or the engine's; a ModelFormatError names it when it is missing or has
        another shape. Shared with the file: not to be written to."""
        ...

    def has(self, name: str) -> bool: ...


def take_part(weights: WeightSource, name: str, shape: tuple[int, ...], part: Part,
              dtype: torch.dtype | None = None) -> torch.Tensor:
    """Part of the tensor that has this shape whole. A source that can (`take_part`) reads nothing else of it."""
    source = getattr(weights, "take_part", None)
    if source is None:
        return part.of(weights.take(name, shape, dtype)).contiguous()
    found: torch.Tensor = source(name, shape, part, dtype)
    return found
