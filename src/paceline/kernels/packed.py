"""PackedWeight: a weight matrix in the native code's blocks, where other backends have a tensor."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch


class PackedWeight:
    """[rows, cols] in blocks of 4 or 8 bits, on the CPU. NativeKernels multiplies with it as it is."""

    device = torch.device("cpu")

    def __init__(self, matrix: Any, rows: int, bits: int) -> None:
        """`matrix`: a native Matrix of at least `rows` rows; those beyond are padding."""
        self.matrix = matrix
        self.bits = bits
        self.shape: tuple[int, int] = (rows, matrix.cols)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """[N] int64 -> the rows of that number in floats, [N, cols] float32."""
        out = np.empty((ids.shape[0], self.shape[1]), dtype=np.float32)
        self.matrix.embed(ids.numpy(), out)
        return torch.from_numpy(out)


class OutlierWeight(PackedWeight):
    """A packed matrix whose columns of large inputs are kept in floats beside it (as LLM.int8 does): packed they
    are zero, so that neither they nor the inputs they meet coarsen the steps of the others."""

    def __init__(self, matrix: Any, rows: int, bits: int, columns: torch.Tensor, values: torch.Tensor) -> None:
        """columns [n] int64; values [rows, n] float32."""
        super().__init__(matrix, rows, bits)
        self.columns = columns
        self.values = values

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        out = super().rows(ids)
        out[:, self.columns] = self.values[ids]
        return out


Weight: TypeAlias = torch.Tensor | PackedWeight


def whole_rows(weight: Weight) -> int:
    """Of the matrix that this is a part of, where ranks hold some of its rows each: what decides in which order its
    rows are summed may depend on this, and not on how many ranks there are."""
    return int(getattr(weight, "whole_rows", weight.shape[0]))


def part_of(weight: Weight, rows: int) -> Weight:
    """The same, known as a part of a matrix of so many rows."""
    if weight.shape[0] != rows:
        setattr(weight, "whole_rows", rows)  # noqa: B010 - tensors and packed weights have no such field of their own
    return weight


def plain(weight: Weight) -> torch.Tensor:
    """For backends that know tensors only: right, though nothing is won by packing then."""
    return weight if isinstance(weight, torch.Tensor) else weight.rows(torch.arange(weight.shape[0]))
