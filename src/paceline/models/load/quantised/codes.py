"""Codes: a weight matrix as a checkpoint stores it in few bits, and what it stands for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
import torch

BLOCK = 32
"""Columns of a block of the native code."""


@dataclass(frozen=True, slots=True)
class Codes:
    """weight[o, i] = (codes[o, i] - zeros[o, g]) * scales[o, g], where g is the group of column i. In `outliers`
    columns the weight is kept in floats instead."""

    codes: torch.Tensor
    """[out, in]: unsigned of 4 bits, of 8 as the file has them; 8-bit floats stand for themselves."""
    scales: torch.Tensor
    """[out, groups], floats."""
    zeros: torch.Tensor | None = None
    """[out, groups], integers; None: 0 everywhere."""
    group_of: torch.Tensor | None = None
    """[in] int64; None: groups are neighbouring columns, all of one size."""
    bits: int = 8
    outliers: Outliers | None = None

    def floats(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[out, in]. Computed in float32: exact for scales in half precision, rounded once for those in single."""
        values = self.codes.to(torch.float32)
        scales = self.scales.to(torch.float32)
        zeros = None if self.zeros is None else self.zeros.to(torch.float32)
        if self.group_of is not None:
            whole = values if zeros is None else values - zeros[:, self.group_of]
            whole = whole * scales[:, self.group_of]
        else:
            grouped = values.reshape(*scales.shape, -1)
            whole = ((grouped if zeros is None else grouped - zeros[:, :, None]) * scales[:, :, None]).flatten(1)
        if self.outliers is not None:
            whole[:, self.outliers.columns] = self.outliers.values.to(torch.float32)
        return whole.to(dtype)

    def split(self, rows: Sequence[int]) -> list[Codes]:
        """Cut by outputs: so many in each."""
        ends = list(accumulate(rows, initial=0))
        return [replace(self, codes=self.codes[begin:end], scales=self.scales[begin:end],
                        zeros=None if self.zeros is None else self.zeros[begin:end])
                for begin, end in pairwise(ends)]

    def blocks(self) -> tuple[str, npt.NDArray[np.uint8]] | None:
        """The same as GGUF's 4-bit blocks: ("Q4_0" or "Q4_1", bytes of each row). Q4_0 is exact; of Q4_1 the lowest
        value is rounded to half precision. None: groups, bits or scales that such blocks cannot hold."""
        width = self.codes.shape[1] // self.scales.shape[1]
        if self.bits != 4 or self.group_of is not None or width % BLOCK or self.outliers is not None:
            return None
        scales = self.scales.to(torch.float32)
        half = scales.to(torch.float16)
        if not bool(torch.isfinite(half).all()) or bool(((half == 0) & (scales != 0)).any()):
            return None
        zeros = torch.zeros_like(scales) if self.zeros is None else self.zeros.to(torch.float32)
        symmetric = bool((zeros == 8).all())
        heads = [half] if symmetric else [half, (-zeros * half.to(torch.float32)).to(torch.float16)]
        codes = self.codes.to(torch.uint8).numpy()
        codes = codes.reshape(codes.shape[0], -1, BLOCK)
        head = torch.stack(heads, -1).repeat_interleave(width // BLOCK, 1).numpy().view(np.uint8)
        packed = np.concatenate((head, codes[:, :, :16] | codes[:, :, 16:] << 4), axis=2)
        return ("Q4_0" if symmetric else "Q4_1"), packed.reshape(packed.shape[0], -1)


@dataclass(frozen=True, slots=True)
class Outliers:
    """Columns that are kept in floats, because what they are multiplied with is large."""

    columns: torch.Tensor
    """[n] int64, ascending."""
    values: torch.Tensor
    """[out, n], floats."""


def unpack_low_first(packed: torch.Tensor, bits: int, axis: int) -> torch.Tensor:
    """int32 -> the values of `bits` bits that each holds, the lowest bits first, along `axis` (0 or 1), as uint8."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    parts: torch.Tensor = packed[:, None, :] >> shifts[None, :, None] if axis == 0 else packed[:, :, None] >> shifts
    values: torch.Tensor = parts & (2 ** bits - 1)
    return values.to(torch.uint8).flatten(axis, axis + 1)


def pack_low_first(values: torch.Tensor, bits: int, axis: int) -> torch.Tensor:
    """The inverse of unpack_low_first; the length along `axis` is a multiple of 32 / bits."""
    count = 32 // bits
    wide = values.to(torch.int64)
    shifts = torch.arange(0, 32, bits, dtype=torch.int64)
    if axis == 0:
        sums = (wide.reshape(-1, count, wide.shape[1]) << shifts[None, :, None]).sum(1)
    else:
        sums = (wide.reshape(wide.shape[0], -1, count) << shifts).sum(2)
    return torch.where(sums >= 2 ** 31, sums - 2 ** 32, sums).to(torch.int32)
