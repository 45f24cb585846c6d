"""Tensors of which a rank takes its part, and linear layers whose weight lies split over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.kernels.interface import Kernels
from paceline.kernels.packed import Weight
from paceline.models.packing import PackingWeights
from paceline.models.part import Held, Part
from paceline.models.shard import WHOLE, Shard
from paceline.models.translate import Module
from paceline.models.weight_source import WeightSource, take_part

Shape = tuple[int, ...]


class Linear:
    """y = x W^T + b."""

    def __init__(self, weight: Weight, bias: torch.Tensor | None = None,
                 modules: Sequence[Module] = (), held: Held | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self.modules = tuple(modules)
        """What lies stacked in the weight; () where that cannot be told apart."""
        self.held = held or Held((weight.shape[0], weight.shape[1]))
        """Of what it is this rank's part."""

    def __call__(self, x: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        return kernels.linear(x, self.weight, self.bias)

    def add(self, onto: torch.Tensor, x: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        """onto + y; `onto` may be overwritten."""
        return kernels.linear_add(x, self.weight, self.bias, onto)


class GatheringLinear(Linear):
    """Split by outputs. Each rank comes with its share of the inputs; those are gathered, and so are the outputs: every
    sum is the one of the whole matrix."""

    def __init__(self, own: Linear, shard: Shard, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """own: this rank's part. inputs, outputs: how many each rank has."""
        super().__init__(own.weight, own.bias, own.modules, own.held)
        self._shard = shard
        self._inputs = inputs
        self._outputs = outputs

    def __call__(self, x: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        out = kernels.linear(self._shard.joined(x, self._inputs), self.weight, self.bias)
        return self._shard.joined(out, self._outputs)

    def add(self, onto: torch.Tensor, x: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        # Each rank adds to its part of the stream: what follows the sum (an adapter) does so as on one rank.
        first = sum(self._outputs[:self._shard.rank])
        own = onto.narrow(1, first, self._outputs[self._shard.rank]).contiguous()
        out = kernels.linear_add(self._shard.joined(x, self._inputs), self.weight, self.bias, own)
        return self._shard.joined(out, self._outputs)


class AddingLinear(Linear):
    """Split by inputs: what the ranks make of their shares is added up, and then the bias."""

    def __init__(self, own: Linear, shard: Shard) -> None:
        """own: this rank's part."""
        super().__init__(own.weight, own.bias, own.modules, own.held)
        self._shard = shard

    def __call__(self, x: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        out = self._shard.added(kernels.linear(x, self.weight))
        return out if self.bias is None else out + self.bias

    def add(self, onto: torch.Tensor, x: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        return onto + self(x, kernels)


class PartWeights:
    """WeightSource around another one, in which some tensors are only a rank's part of them."""

    def __init__(self, weights: WeightSource, parts: Mapping[str, tuple[Shape, Part]], shard: Shard = WHOLE) -> None:
        """parts: by name, the whole shape and what is kept."""
        self._weights = weights
        self._parts = parts
        self.shard = shard

    def has(self, name: str) -> bool:
        return self._weights.has(name)

    def take(self, name: str, shape: Shape, dtype: torch.dtype | None = None) -> torch.Tensor:
        found = self._parts.get(name)
        if found is None:
            return self._weights.take(name, shape, dtype)
        return take_part(self._weights, name, *found, dtype)

    def blocks(self, name: str, shape: tuple[int, int]) -> tuple[str, npt.NDArray[np.uint8]] | None:
        """Rows of a matrix as the file stores them."""
        source = getattr(self._weights, "blocks", None)
        whole, part = self._parts.get(name, (shape, None))
        found: tuple[str, npt.NDArray[np.uint8]] | None = None if source is None else source(name, whole)
        if found is None or part is None:
            return found
        kind, rows = found
        return kind, np.concatenate([rows[begin:end] for begin, end in part.ranges])

    def __getattr__(self, name: str) -> Any:
        """What else a source may have: outliers, compensation, let_go."""
        return getattr(self._weights, name)


def parted(weights: WeightSource, parts: Mapping[str, tuple[Shape, Part]]) -> WeightSource:
    """PartWeights, with what packs matrices still outermost."""
    if not parts:
        return weights
    if isinstance(weights, PackingWeights):
        return weights.around(lambda source: PartWeights(source, parts))
    return PartWeights(weights, parts)


def unshared(weights: WeightSource) -> WeightSource:
    """For layers that a rank holds whole."""
    if isinstance(weights, PackingWeights):
        return weights.around(lambda source: PartWeights(source, {}))
    return PartWeights(weights, {})
