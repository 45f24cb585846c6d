"""HeadWeights: a head's tensors as its network takes them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from paceline.errors import ModelFormatError


class HeadWeights:
    """WeightSource over tensors in memory, handed out in one dtype on one device."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, device: torch.device) -> None:
        self._tensors = tensors
        self.dtype = dtype
        self.device = device

    def has(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        found = self._tensors.get(name)
        if found is None or tuple(found.shape) != tuple(shape):
            raise ModelFormatError(f"A head's tensor '{name}' must have the shape {list(shape)}, "
                                   f"{'got none' if found is None else f'got {list(found.shape)}'}.")
        return found.to(self.device, dtype or self.dtype).contiguous()
