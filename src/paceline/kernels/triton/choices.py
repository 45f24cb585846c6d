"""Which product runs at which shape: the one table to tune."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch


class Way(Enum):
    ROW = "row"
    """One row: multiply and add, no tensor cores; memory bound."""
    TILES = "tiles"
    """Tensor cores with the weight's rows as M."""
    VENDOR = "vendor"
    """The vendor's library, through torch."""


@dataclass(frozen=True, slots=True)
class Product:
    """How out [rows, size] = x [rows, K] weight [size, K]^T is computed."""

    way: Way
    block_m: int = 1
    """Rows of the weight a program takes."""
    block_n: int = 1
    """Rows of x a program takes."""
    block_k: int = 512
    warps: int = 4
    stages: int = 4
    piece: int = 0
    """Columns that are summed up by themselves, 0: all."""
    apart: bool = False
    """The pieces run side by side."""


VENDOR = Product(Way.VENDOR)
SKINNY_ROWS = 64
"""Up to here tiles are tried against the vendor's product, which is made for more rows."""
NORM_INSIDE = 2048
"""Up to so many columns a norm is computed by every program of a single row's product, which saves a launch; longer
rows take each of them longer than a launch takes."""
PIECE = 1024
"""Columns of a piece of a matrix with few rows."""


def choose(rows: int, size: int, inputs: int, dtype: torch.dtype, deterministic: bool, gated: bool) -> Product:
    """`size`: outputs, of a gated product after gating."""
    if deterministic:
        return _fixed_order(rows, size, inputs, dtype, gated)
    if rows == 1:
        return _row(size, inputs)
    if rows <= SKINNY_ROWS and dtype != torch.float32:
        return _skinny(rows, size, inputs, gated)
    return VENDOR


def _row(size: int, inputs: int) -> Product:
    # Trials on an H200: one weight row per program, as many columns at once as the warps can hold in flight. A head on
    # short rows has so many programs that several rows each are worth it.
    if inputs >= 8192:
        return Product(Way.ROW, 1, 1, 512, 4)
    if inputs >= 2048:
        return Product(Way.ROW, 1, 1, 1024 if inputs % 1024 == 0 else 512, 8)
    return Product(Way.ROW, 4, 1, 256, 4) if size >= 16384 else Product(Way.ROW, 1, 1, 512, 4)


def _skinny(rows: int, size: int, inputs: int, gated: bool) -> Product:
    # Trials on an H200. Memory wants many programs: long rows are cut into pieces, from 17 rows on narrow matrices into
    # low tiles. A gated product or a head saves a launch beside the vendor's, which else is level with tiles from 32
    # rows on.
    width = max(16, 1 << (rows - 1).bit_length())
    if inputs >= 8192:
        return Product(Way.TILES, 64, width, 128, 4, 4, _quarter(inputs), True) if rows <= 32 else VENDOR
    if inputs >= 2048:
        if gated or (size >= 65536 and rows > 32):
            return Product(Way.TILES, 128, width, 64, 4, 4)
        if size >= 65536:
            return Product(Way.TILES, 64, width, 128, 4, 4)
        narrow = size < 6144 and rows <= 32
        return Product(Way.TILES, 64, width, 128, 4, 4, PIECE, True) if narrow else VENDOR
    if rows <= 16:
        cut = inputs > PIECE and size < 8192
        return Product(Way.TILES, 64, width, 128, 4, 4, PIECE if cut else 0, cut)
    if size >= 16384:
        return Product(Way.TILES, 64, width, 64, 4, 6)
    if gated:
        return Product(Way.TILES, 16, width, 256, 4, 3)
    if rows > 32:
        return VENDOR
    return Product(Way.TILES, 16, width, 256, 4, 3) if inputs >= 1024 else Product(Way.TILES, 64, width, 64, 4, 6)


def _quarter(inputs: int) -> int:
    """Columns of a piece that make four of them, whole blocks each."""
    return -(-inputs // 512) * 128


def _fixed_piece(size: int, inputs: int) -> int:
    """Part of what defines the bits in deterministic mode, so a function of the matrix alone: long rows are cut, and
    those of matrices that have too few rows to keep the memory busy with one program per tile."""
    if inputs >= 8192:
        return _quarter(inputs)
    return PIECE if size < 8192 else 0


def _fixed_order(rows: int, size: int, inputs: int, dtype: torch.dtype, gated: bool) -> Product:
    """The instruction and the pieces of K are the same for every number of rows; only how many tiles run side by side
    differs, which changes no sum."""
    piece = _fixed_piece(size, inputs)
    if dtype == torch.float32:
        return Product(Way.TILES, 32, 16, 32, 4, 2, piece)
    width = min(128, max(16, 1 << (rows - 1).bit_length()))
    if rows > SKINNY_ROWS:
        return Product(Way.TILES, 128, width, 64, 8, 3, piece)
    if gated and piece == 0:
        return Product(Way.TILES, 128, width, 64, 4, 4, piece)
    apart = 0 < piece < inputs and -(-size // 64) * -(-rows // width) < 528
    return Product(Way.TILES, 64, width, 128, 4, 4 if width <= 32 else 3, piece, apart)
