"""PackingWeights: a checkpoint's matrices packed for the native code, its vectors as they are."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from paceline.kernels import cpu
from paceline.kernels.packed import PackedWeight
from paceline.models.interface import WeightSource

FOUR_BITS, EIGHT_BITS = frozenset({"Q4_0", "Q4_1"}), frozenset({"Q8_0"})
COLUMNS = 32
"""Columns of a block: matrices of other widths stay tensors."""
LANES = 8
"""Rows are packed together by this many."""


class PackingWeights:
    """WeightSource around another one, for models that run with NativeKernels. The layers' matrices are rounded to 8
    bits with a scale a row; embedding and head to 8 bits with a scale per 32 values, because nothing after them evens
    out an error. With `keep_blocks` what the checkpoint holds in blocks of 4 or 8 bits stays as it is, and the rest
    gets a scale per 32 values. Tensors come in float32."""

    def __init__(self, weights: WeightSource, keep_blocks: bool = False) -> None:
        self._native = cpu.require()
        self._weights = weights
        self._keep_blocks = keep_blocks
        self._bits: set[int] = set()
        """Of the layers' matrices packed so far."""

    @property
    def bits(self) -> int:
        """Of a weight in the layers: 4 where every matrix that was packed is in 4-bit blocks."""
        return 4 if self._bits == {4} else 8

    def around(self, view: Callable[[WeightSource], WeightSource]) -> PackingWeights:
        """The same over another view of what is packed."""
        other = copy.copy(self)
        other._weights = view(self._weights)
        return other

    def has(self, name: str) -> bool:
        return self._weights.has(name)

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._weights.take(name, shape, dtype or torch.float32)

    def let_go(self) -> None:
        """Everything packed so far is copied: the source need not hold it in memory as well."""
        source = getattr(self._weights, "let_go", None)
        if source is not None:
            source()

    def vector(self, name: str, size: int) -> npt.NDArray[np.float32]:
        return np.ascontiguousarray(self._weights.take(name, (size,)).float().numpy())

    def matrix(self, parts: Sequence[tuple[str, int]], cols: int) -> PackedWeight:
        """Tensors (name, rows) stacked by rows into one packed matrix, its last rows padded with zeros. `cols` is a
        multiple of COLUMNS."""
        weight = self._packed(parts, cols)
        if parts[0][0].startswith("model.layers."):
            self._bits.add(weight.bits)
        return weight

    def _packed(self, parts: Sequence[tuple[str, int]], cols: int) -> PackedWeight:
        rows = sum(count for _, count in parts)
        packed = [self._blocks(name, count, cols) for name, count in parts]
        kinds = {blocks[0] for blocks in packed if blocks is not None}
        aligned = all(count % LANES == 0 for _, count in parts)
        by_row = not self._keep_blocks and parts[0][0].startswith("model.layers.")
        known = kinds <= FOUR_BITS | EIGHT_BITS if by_row else (
            kinds <= EIGHT_BITS or (self._keep_blocks and kinds <= FOUR_BITS))
        if aligned and None not in packed and known:
            bits = 4 if not by_row and kinds <= FOUR_BITS else 8
            matrix = self._native.Matrix("i8" if by_row else f"q{bits}", rows, cols)
            first = 0
            for blocks, (_, count) in zip(packed, parts):
                if blocks is not None:
                    matrix.take_blocks(np.ascontiguousarray(blocks[1]), blocks[0], first)
                first += count
            return PackedWeight(matrix, rows, bits)
        whole = np.zeros((-(-rows // LANES) * LANES, cols), dtype=np.float32)
        first = 0
        for name, count in parts:
            whole[first:first + count] = self._weights.take(name, (count, cols)).float().numpy()
            first += count
        matrix = self._native.Matrix("i8" if by_row else "q8", whole.shape[0], cols)
        matrix.take_floats(whole, 0)
        return PackedWeight(matrix, rows, 8)

    def _blocks(self, name: str, rows: int, cols: int) -> tuple[str, npt.NDArray[np.uint8]] | None:
        """As the file stores them; a source without blocks (weights made in memory) gives floats instead."""
        source = getattr(self._weights, "blocks", None)
        return None if source is None else source(name, (rows, cols))
