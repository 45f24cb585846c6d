"""DeviceRows: the rows of a step as device kernels read them, in one int32 buffer that one copy fills.

Everything the kernels need to know of a step lies in tensors of fixed size, so a captured graph can be replayed for
any step that fits them. A row that is padding has group -1 and position -1 and belongs to no tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.kernels.layout import Layout
from paceline.kernels.paths import ancestry

Integers = npt.NDArray[np.int32]
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
    def of(layout: Layout, tile_rows: int, chunk_rows: int) -> RowsShape:
        """Large enough for this step, and little larger."""
        tiles = chunks = depth = 0
        widest = 1
        for (begin, end), parents in zip(pairwise(layout.offsets), layout.parents, strict=True):
            rows = end - begin
            if parents is not None:
                depth = max(depth, max(map(len, ancestry(parents))))
                tiles += -(-rows // min(tile_rows, TREE_ROWS))
                widest = max(widest, min(rows, tile_rows, TREE_ROWS))
            elif rows >= CHUNK_FROM:
                chunks += -(-rows // chunk_rows)
            else:
                tiles += -(-rows // tile_rows)
                widest = max(widest, min(rows, tile_rows))
        # A kernel is compiled for each depth: few of them.
        depth = 1 << (depth - 1).bit_length() if depth else 0
        return RowsShape(layout.rows, tiles, widest, depth, chunks=chunks, chunk_rows=chunk_rows)

    @staticmethod
    def bucket(rows: int, tile_rows: int, depth: int) -> RowsShape:
        """Room for any step of up to `rows` rows without chunks, cut into tiles of up to `tile_rows`: the worst case
        is a tile a row."""
        return RowsShape(rows, rows, tile_rows, depth)

    def parts(self, data: Any) -> tuple[Any, Any, Any, Any, Any, Any]:
        """Views into a flat buffer of `size` values, numpy's or torch's: group, position, prefix [rows], ancestors
        [rows, depth], tiles [2, tiles], chunks [2, chunks]."""
        rows, depth = self.rows, self.depth
        after = (3 + depth) * rows
        return (data[:rows], data[rows:2 * rows], data[2 * rows:3 * rows], data[3 * rows:after].reshape(rows, depth),
                data[after:after + 2 * self.tiles].reshape(2, self.tiles),
                data[after + 2 * self.tiles:self.size].reshape(2, self.chunks))

    def pack(self, layout: Layout, out: Integers | None = None) -> Integers:
        """The step as a flat array of `size` values, on the host. Raises ValueError when it does not fit."""
        data = np.empty(self.size, dtype=np.int32) if out is None else out
        count = layout.rows
        if count > self.rows:
            raise ValueError(f"{count} rows do not fit into buffers for {self.rows}")
        group, position, prefix, ancestors, tiles, chunks = self.parts(data)
        group[count:] = position[count:] = -1
        prefix[count:] = 0
        tiles[:, :] = 0
        chunks[:, :] = 0
        ancestors[:, :] = 0
        starts = np.array(layout.starts, dtype=np.int32)
        if count == len(layout.starts):  # the steady state: a row a group
            group[:count] = np.arange(count)
            position[:count] = starts
            prefix[:count] = starts + 1
        else:
            offsets = np.array(layout.offsets)
            lengths = np.diff(offsets)
            group[:count] = np.repeat(np.arange(len(starts)), lengths)
            position[:count] = np.repeat(starts - offsets[:-1], lengths) + np.arange(count)
            prefix[:count] = position[:count] + 1
        for index, parents in enumerate(layout.parents):
            if parents is not None:
                self._tree(layout.offsets[index], layout.starts[index], parents, position, prefix, ancestors)
        self._tiles(layout, tiles, chunks)
        return data

    def _tree(self, offset: int, start: int, parents: list[int], position: Integers, prefix: Integers,
              ancestors: Integers) -> None:
        prefix[offset:offset + len(parents)] = start
        for row, path in enumerate(ancestry(parents)):
            if len(path) > self.depth:
                raise ValueError(f"a path of {len(path)} rows does not fit into buffers for {self.depth}")
            position[offset + row] = start + len(path) - 1
            ancestors[offset + row, :len(path)] = np.array(path, dtype=np.int32) + offset

    def _tiles(self, layout: Layout, tiles: Integers, chunks: Integers) -> None:
        count = layout.rows
        if count == len(layout.starts) and self.tiles >= count:
            tiles[0, :count] = np.arange(count)
            tiles[1, :count] = 1
            return
        placed: dict[str, list[tuple[int, int]]] = {"tiles": [], "chunks": []}
        for (begin, end), parents in zip(pairwise(layout.offsets), layout.parents, strict=True):
            whole = parents is None and end - begin >= self.chunk_from and self.chunks > 0
            step = self.chunk_rows if whole else self.tile_rows
            if parents is not None:
                step = min(step, TREE_ROWS)
            placed["chunks" if whole else "tiles"].extend(
                (row, min(step, end - row)) for row in range(begin, end, step))
        for name, target in (("tiles", tiles), ("chunks", chunks)):
            found = placed[name]
            if len(found) > target.shape[1]:
                raise ValueError(f"{len(found)} {name} do not fit into buffers for {target.shape[1]}")
            if found:
                target[:, :len(found)] = np.array(found, dtype=np.int32).T


@dataclass(slots=True)
class DeviceRows:
    """Views into `data`, the flat int32 buffer on the device."""

    shape: RowsShape
    data: torch.Tensor
    group: torch.Tensor
    """[N] row of the block tables; -1: padding."""
    positions: torch.Tensor
    """[N] logical positions; -1: padding."""
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
        """`data`: int32 [shape.size], owned by the caller, who fills it with what shape.pack gives."""
        return DeviceRows(shape, data, *shape.parts(data))

    @staticmethod
    def of(layout: Layout, shape: RowsShape, device: torch.device) -> DeviceRows:
        """New buffers, filled with this step."""
        return DeviceRows.over(shape, torch.from_numpy(shape.pack(layout)).to(device))
