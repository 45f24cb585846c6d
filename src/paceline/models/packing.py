"""PackingWeights: a checkpoint's matrices packed for the native code, its vectors as they are."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.kernels import cpu
from paceline.kernels.packed import OutlierWeight, PackedWeight
from paceline.models.part import Part
from paceline.models.shard import Shard, shard_of
from paceline.models.weight_source import WeightSource, take_part

KEEPS = {
    "q4": frozenset({"Q4_0", "Q4_1"}),
    "q4k": frozenset({"Q4_K"}),
    "q8": frozenset({"Q8_0", "Q5_0", "Q4_0", "IQ4_NL"}),
    "q8f": frozenset({"Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"}),
}
"""Forms of packed matrices, smallest first, and the files' block types whose every weight they keep."""
BITS = {"q4": 5.0, "q4k": 4.625, "q8": 8.5, "q8f": 11.0}
"""What a weight takes in each form, its share of scales and minima included."""
BLOCKS = KEEPS["q8f"] | {"Q2_K"}
"""All block types that can be packed; the last one is rounded whatever the form."""
COLUMNS = 32
"""Columns of a block: matrices of other widths stay tensors."""
LANES = 8
"""Rows are packed together by this many."""
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def exact_form(kinds: Iterable[str]) -> str | None:
    """The smallest form in which weights of all these block types keep their values; None: there is none."""
    return next((form for form, kept in KEEPS.items() if kept.issuperset(kinds)), None)


def bits_in_blocks(kind: str) -> float:
    """What a weight takes that is stored as `kind`, where blocks are kept."""
    return BITS[exact_form([kind]) or "q8"]


class PackingWeights:
    """WeightSource around another one, for models that run with NativeKernels. The layers' matrices are rounded to 8
    bits with one scale per row; embedding and head to 8 bits with one per 32 values, because nothing after them evens
    out an error. Blocks of 32 columns are spread before (native/spread.h), which costs activations and weights fewer
    outliers, and where the source knows how (`compensation`) a column's error is made up for by those after it. With
    `keep_blocks` what the checkpoint holds in blocks keeps its values, in the smallest form that can hold them, and
    the rest gets a scale per 32 values. Tensors come in float32."""

    def __init__(self, weights: WeightSource, keep_blocks: bool = False, split_outliers: bool = False) -> None:
        """split_outliers: columns that the checkpoint keeps in floats stay floats (OutlierWeight), which whoever takes
        the matrices has to know."""
        self._native = cpu.require()
        self._weights = weights
        self._keep_blocks = keep_blocks
        self._split_outliers = split_outliers
        self._bits: set[int] = set()
        """Of the layers' matrices packed so far."""

    @property
    def bits(self) -> int:
        """Of a weight in the layers: 4 where every matrix that was packed is in 4-bit blocks."""
        return 4 if self._bits == {4} else 8

    @property
    def quantization(self) -> str:
        """As EngineOptions.quantization names it."""
        return "blocks" if self._keep_blocks else "int8"

    def around(self, view: Callable[[WeightSource], WeightSource]) -> PackingWeights:
        """The same over another view of what is packed."""
        other = copy.copy(self)
        other._weights = view(self._weights)
        return other

    @property
    def source(self) -> WeightSource:
        """What is packed."""
        return self._weights

    @property
    def shard(self) -> Shard:
        return shard_of(self._weights)

    def has(self, name: str) -> bool:
        return self._weights.has(name)

    def take_part(self, name: str, shape: tuple[int, ...], part: Part, dtype: torch.dtype | None = None
                  ) -> torch.Tensor:
        return take_part(self._weights, name, shape, part, dtype or torch.float32)

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
        weight = (self._split(parts, cols) if self._split_outliers else None) or self._packed(parts, cols)
        if parts[0][0].startswith("model.layers."):
            self._bits.add(weight.bits)
        return weight

    def _packed(self, parts: Sequence[tuple[str, int]], cols: int) -> PackedWeight:
        blocks = [self._blocks(name, count, cols) for name, count in parts]
        kinds = {kind for kind, _ in blocks}
        rows = sum(count for _, count in parts)
        by_row = not self._keep_blocks and parts[0][0].startswith("model.layers.")
        spread = not self._keep_blocks and self._multiplied(parts[0][0])
        passing = self._compensation(parts) if spread else None
        if kinds <= BLOCKS and all(count % LANES == 0 for _, count in parts[:-1]):
            form = "i8" if by_row else (exact_form(kinds) if self._keep_blocks else None) or "q8"
            matrix = self._native.Matrix(form, -(-rows // LANES) * LANES, cols, spread=spread)
            first = 0
            for (kind, source), (_, count) in zip(blocks, parts):
                _take(matrix, kind, source, first, passing)
                first += count
            return PackedWeight(matrix, rows, 4 if form in ("q4", "q4k") else 8)
        whole = np.zeros((-(-rows // LANES) * LANES, cols), dtype=np.float32)
        first = 0
        for name, count in parts:
            whole[first:first + count] = self._weights.take(name, (count, cols)).float().numpy()
            first += count
        matrix = self._native.Matrix("i8" if by_row else "q8", whole.shape[0], cols, spread=spread)
        matrix.take_floats(whole, 0, passing)
        return PackedWeight(matrix, rows, 8)

    def _multiplied(self, name: str) -> bool:
        """Whether activations meet the matrix: an embedding beside a head of its own is only looked up."""
        return name != EMBEDDING or not self.has(HEAD)

    def _compensation(self, parts: Sequence[tuple[str, int]]) -> npt.NDArray[np.float32] | None:
        """All parts have the same input."""
        source = getattr(self._weights, "compensation", None)
        return None if source is None else source(parts[0][0])

    def _split(self, parts: Sequence[tuple[str, int]], cols: int) -> OutlierWeight | None:
        """Where the source keeps columns in floats: those beside the rest, which gets one scale per row."""
        source = getattr(self._weights, "outliers", None)
        found = [outliers for name, _ in parts if source is not None and (outliers := source(name)) is not None]
        if not found:
            return None
        columns = torch.unique(torch.cat([outliers.columns for outliers in found]))
        whole = torch.cat([self._weights.take(name, (count, cols)).float() for name, count in parts])
        rows = len(whole)
        rest = torch.zeros(-(-rows // LANES) * LANES, cols)
        rest[:rows] = whole.index_fill(1, columns, 0.0)
        # Not spread: the file's codes have a scale per row and come back as they are; its outliers are out already.
        matrix = self._native.Matrix("i8", len(rest), cols)
        matrix.take_floats(rest.numpy(), 0)
        return OutlierWeight(matrix, rows, 8, columns, whole[:, columns].contiguous())

    def _blocks(self, name: str, rows: int, cols: int) -> tuple[str, npt.NDArray[np.uint8]]:
        """As the file stores them; a source without blocks (weights made in memory) gives floats instead."""
        source = getattr(self._weights, "blocks", None)
        return (None if source is None else source(name, (rows, cols))) or ("", np.empty((0, 0), dtype=np.uint8))


def _take(matrix: Any, kind: str, source: npt.NDArray[np.uint8], first: int,
          passing: npt.NDArray[np.float32] | None) -> None:
    """Rows of blocks into a native matrix from row `first` on; what is left of the last eight are zeros."""
    whole = len(source) // LANES * LANES
    # Rounding takes a second or two of a core for the smallest models: every core takes some of the rows.
    most = max(LANES, -(-whole // cores() // LANES) * LANES)
    with ThreadPoolExecutor(cores()) as threads:
        list(threads.map(lambda begin: matrix.take_blocks(
            np.ascontiguousarray(source[begin:min(begin + most, whole)]), kind, first + begin, passing),
            range(0, whole, most)))
    if whole < len(source):
        last = np.zeros((LANES, source.shape[1]), dtype=np.uint8)
        last[:len(source) - whole] = source[whole:]
        matrix.take_blocks(last, kind, first + whole, passing)


def packed_rows(rows: torch.Tensor) -> PackedWeight:
    """A matrix [rows, cols] of floats in 8 bits with a scale per 32 values; `cols` is a multiple of COLUMNS."""
    padded = np.zeros((-(-rows.shape[0] // LANES) * LANES, rows.shape[1]), dtype=np.float32)
    padded[:rows.shape[0]] = rows.float().numpy()
    matrix = cpu.require().Matrix("q8", *padded.shape, spread=True)
    matrix.take_floats(padded, 0, None)
    return PackedWeight(matrix, rows.shape[0], 8)


def cores() -> int:
    return max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
