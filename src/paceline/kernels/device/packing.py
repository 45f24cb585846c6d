"""A step's layout as DeviceRows: how much room it takes, and its values in one flat array."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from paceline.kernels.device.rows import CHUNK_FROM, TREE_ROWS, DeviceRows, RowsShape
from paceline.kernels.layout import Layout
from paceline.kernels.trees import ancestry

Integers = npt.NDArray[np.int32]


def shape_of(layout: Layout, tile_rows: int, chunk_rows: int) -> RowsShape:
    """Large enough for this step, and little larger."""
    tiles = chunks = depth = 0
    widest = 1
    for (begin, end), parents in zip(pairwise(layout.offsets), layout.parents, strict=True):
        rows = end - begin
        if parents is not None:
            depth = max(depth, max(map(len, ancestry(parents))))
            tiles += -(-rows // min(tile_rows, TREE_ROWS))
            widest = max(widest, min(rows, tile_rows, TREE_ROWS))
        elif rows >= CHUNK_FROM and not layout.mutual:
            chunks += -(-rows // chunk_rows)
        else:
            tiles += -(-rows // tile_rows)
            widest = max(widest, min(rows, tile_rows))
    # A kernel is compiled for each depth: few of them.
    depth = 1 << (depth - 1).bit_length() if depth else 0
    return RowsShape(layout.rows, tiles, widest, depth, chunks=chunks, chunk_rows=chunk_rows)


def device_rows(layout: Layout, shape: RowsShape, device: torch.device) -> DeviceRows:
    """New buffers, filled with this step."""
    return DeviceRows.over(shape, torch.from_numpy(pack(layout, shape)).to(device))


def pack(layout: Layout, shape: RowsShape) -> Integers:
    """The step as a flat array of shape.size values, on the host. Raises ValueError when it does not fit."""
    data = np.empty(shape.size, dtype=np.int32)
    count = layout.rows
    if count > shape.rows:
        raise ValueError(f"{count} rows do not fit into buffers for {shape.rows}")
    group, position, prefix, ancestors, tiles, chunks = shape.parts(data)
    group[count:] = position[count:] = -1
    prefix[count:] = 0
    tiles[:, :] = 0
    chunks[:, :] = 0
    ancestors[:, :] = 0
    starts = np.array(layout.starts, dtype=np.int32)
    if count == len(layout.starts):  # the steady state: one row per group
        group[:count] = np.arange(count)
        position[:count] = starts
        prefix[:count] = starts + 1
    else:
        offsets = np.array(layout.offsets)
        lengths = np.diff(offsets)
        group[:count] = np.repeat(np.arange(len(starts)), lengths)
        position[:count] = np.repeat(starts - offsets[:-1], lengths) + np.arange(count)
        if layout.mutual:
            position[:count] = np.repeat(starts + lengths - 1, lengths)
        prefix[:count] = position[:count] + 1
    for index, parents in enumerate(layout.parents):
        if parents is not None:
            _place_tree(layout.offsets[index], layout.starts[index], parents, position, prefix, ancestors)
    _cut(layout, shape, tiles, chunks)
    return data


def _place_tree(offset: int, start: int, parents: list[int], position: Integers, prefix: Integers,
                ancestors: Integers) -> None:
    prefix[offset:offset + len(parents)] = start
    room = ancestors.shape[1]
    for row, path in enumerate(ancestry(parents)):
        if len(path) > room:
            raise ValueError(f"a path of {len(path)} rows does not fit into buffers for {room}")
        position[offset + row] = start + len(path) - 1
        ancestors[offset + row, :len(path)] = np.array(path, dtype=np.int32) + offset


def _cut(layout: Layout, shape: RowsShape, tiles: Integers, chunks: Integers) -> None:
    """Into tiles and chunks."""
    count = layout.rows
    if count == len(layout.starts) and shape.tiles >= count:
        tiles[0, :count] = np.arange(count)
        tiles[1, :count] = 1
        return
    placed: dict[str, list[tuple[int, int]]] = {"tiles": [], "chunks": []}
    for (begin, end), parents in zip(pairwise(layout.offsets), layout.parents, strict=True):
        whole = parents is None and not layout.mutual and end - begin >= shape.chunk_from and shape.chunks > 0
        step = shape.chunk_rows if whole else shape.tile_rows
        if parents is not None:
            step = min(step, TREE_ROWS)
        placed["chunks" if whole else "tiles"].extend((row, min(step, end - row)) for row in range(begin, end, step))
    for name, target in (("tiles", tiles), ("chunks", chunks)):
        found = placed[name]
        if len(found) > target.shape[1]:
            raise ValueError(f"{len(found)} {name} do not fit into buffers for {target.shape[1]}")
        if found:
            target[:, :len(found)] = np.array(found, dtype=np.int32).T
