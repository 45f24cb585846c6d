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


SKINNY_ROWS = 64
"""Up to here tiles are tried against the vendor's product, which is made for more rows."""
PIECE = 1024
"""Columns of a piece in deterministic mode: part of what defines the bits."""


def choose(rows: int, size: int, inputs: int, dtype: torch.dtype, deterministic: bool, gated: bool) -> Product:
    """`size`: outputs, of a gated product after gating."""
    if deterministic:
        return _fixed_order(rows, size, inputs, dtype)
    if rows == 1:
        return _row(size, inputs, gated)
    if rows <= SKINNY_ROWS and dtype != torch.float32:
        return _skinny(rows, size, inputs)
    return Product(Way.VENDOR)


def _row(size: int, inputs: int, gated: bool) -> Product:
    # Trials on an H200: a weight row a program, as many columns at once as the warps can hold in flight. Long rows do
    # better with small programs, short ones need several rows a program to be worth a launch.
    if inputs >= 8192:
        return Product(Way.ROW, 1, 1, 256, 2)
    if inputs >= 2048:
        return Product(Way.ROW, 1, 1, 1024 if inputs % 1024 == 0 else 512, 8)
    return Product(Way.ROW, 2, 1, 512, 4)


def _skinny(rows: int, size: int, inputs: int) -> Product:
    # Enough programs to keep all memory channels busy: narrow tiles for narrow matrices.
    width = max(16, 1 << (rows - 1).bit_length())
    return Product(Way.TILES, 64 if size >= 8192 else 32 if size >= 2048 else 16, width, 128, 4, 4)


def _fixed_order(rows: int, size: int, inputs: int, dtype: torch.dtype) -> Product:
    """The instruction and the pieces of K are the same for every number of rows; only how many tiles run side by side
    differs, which changes no sum."""
    if dtype == torch.float32:
        return Product(Way.TILES, 32, 16, 32, 4, 2, PIECE)
    width = min(128, max(16, 1 << (rows - 1).bit_length()))
    pieces = -(-inputs // PIECE)
    tiles = -(-size // 64) * -(-rows // width)
    if rows > SKINNY_ROWS:
        return Product(Way.TILES, 128, width, 64, 8, 3, PIECE)
    return Product(Way.TILES, 64, width, 128, 4, 4 if width <= 32 else 3, PIECE, apart=pieces > 1 and tiles < 528)
