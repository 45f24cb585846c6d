"""DeviceRows: the rows of a step as device kernels read them, in one int32 buffer that one copy fills.

Everything the kernels need to know of a step lies in tensors of fixed size, so a captured graph can be replayed for
any step that fits them. A row that is padding has group -1 and position -1 and belongs to no tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

CHUNK_FROM = 129
"""Groups of at least this many rows are attended in chunks: a program walks all keys of many rows. Below it the keys
are shared out among programs, which is what few rows need."""

TREE_ROWS = 4
"""Rows of a tree in one tile: they share the prefix, then each walks its own path, one after the other."""


@dataclass(frozen=True, slots=True)
class RowsShape:
    """What a DeviceRows has room for."""

    rows: int
    tiles: int
    """Tiles of at most `tile_rows` consecutive rows of one group, whose keys are shared out."""
    tile_rows: int
    depth: int = 0
    """Longest path of a tree from its root on; 0: chains only."""
    chunks: int = 0
    """Tiles of at most `chunk_rows` rows of one chain that walk all their keys by themselves."""
    chunk_rows: int = 1
    chunk_from: int = CHUNK_FROM

    @property
    def tiled_rows(self) -> int:
        """Rows that tiles can hold; those of chunks are not among them."""
        return min(self.rows, self.tiles * self.tile_rows)

    @property
    def size(self) -> int:
        """int32 values of the whole."""
        return (3 + self.depth) * self.rows + 2 * self.tiles + 2 * self.chunks

    @staticmethod
    def bucket(rows: int, tile_rows: int, depth: int) -> RowsShape:
        """Room for any step of up to `rows` rows without chunks, cut into tiles of up to `tile_rows`: the worst case
        is one tile per row."""
        return RowsShape(rows, rows, tile_rows, depth)

    def parts(self, data: Any) -> tuple[Any, Any, Any, Any, Any, Any]:
        """Views into a flat buffer of `size` values, numpy's or torch's: group, position, prefix [rows], ancestors
        [rows, depth], tiles [2, tiles], chunks [2, chunks]."""
        rows, depth = self.rows, self.depth
        after = (3 + depth) * rows
        return (data[:rows], data[rows:2 * rows], data[2 * rows:3 * rows], data[3 * rows:after].reshape(rows, depth),
                data[after:after + 2 * self.tiles].reshape(2, self.tiles),
                data[after + 2 * self.tiles:self.size].reshape(2, self.chunks))


@dataclass(slots=True)
class DeviceRows:
    """Views into `data`, the flat int32 buffer on the device."""

    shape: RowsShape
    data: torch.Tensor
    group: torch.Tensor
    """[N] row of the block tables; -1: padding."""
    positions: torch.Tensor
    """[N] logical positions, up to which a row sees (where rows see each other: that of the last one of the group, see
    Layout.mutual); -1: padding."""
    prefix: torch.Tensor
    """[N]: keys at positions below it are found through the block table, those from it on through `ancestors`. A
    chain is a tree without ancestors: position + 1."""
    ancestors: torch.Tensor
    """[N, depth]: row of the step that holds position prefix + j, the row itself last."""
    tiles: torch.Tensor
    """[2, T] first row and row count; 0: padding."""
    chunks: torch.Tensor
    """[2, C] likewise, of the chunks."""

    @staticmethod
    def over(shape: RowsShape, data: torch.Tensor) -> DeviceRows:
        """`data`: int32 [shape.size], owned by the caller, who fills it with what packing.pack gives."""
        return DeviceRows(shape, data, *shape.parts(data))
