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
    ABREAST = "abreast"
    """The same for few rows, the pieces of K side by side in the warps of a program."""
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
    """The pieces run side by side, a program each."""


VENDOR = Product(Way.VENDOR)
FEW_ROWS = 16
"""Up to here tiles are as low as tensor cores allow."""
SKINNY_ROWS = 64
"""Up to here tiles are tried against the vendor's product, which is made for more rows."""
SMALL_ROWS = 256
"""Up to here a small matrix (is_small) is not left to the vendor's product, even where that adds in the same order."""
ONE_EACH = 132
"""Processors of an H200. Small products take no longer than it takes to begin and to wait for memory, as long as there
is at most one program for each of them."""
NORM_INSIDE = 2048
"""Up to so many columns a norm is computed by every program of a single row's product, which saves a launch; longer
rows take each of them longer than a launch takes."""
LOW_TILES = ((9, 0),)
"""Compute capabilities on which low tiles, of another instruction, were seen to add as high ones do
(tests/gpu/kernel_checks.py). On others exact kernels use high ones alone."""
PIECE = 1024
"""Columns of a piece of a matrix with few rows, where nothing else is said."""


def choose(rows: int, size: int, inputs: int, dtype: torch.dtype, deterministic: bool, gated: bool,
           low: bool = True) -> Product:
    """`size`: outputs, of a gated product after gating. low: tiles of 16 weight rows add as high ones do on this card
    (LOW_TILES)."""
    if deterministic:
        return _fixed_order(rows, size, inputs, dtype, gated, low)
    if rows == 1:
        return _row(size, inputs)
    if rows <= FEW_ROWS and inputs < 8192 and dtype != torch.float32:
        return _few(rows, size, inputs, gated)
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
    if size >= 16384:
        return Product(Way.TILES, 64, width, 64, 4, 6)
    if gated:
        return Product(Way.TILES, 16, width, 256, 4, 3)
    if rows > 32:
        return VENDOR
    return Product(Way.TILES, 16, width, 256, 4, 3) if inputs >= 1024 else Product(Way.TILES, 64, width, 64, 4, 6)


def _quarter(inputs: int) -> int:
    """Columns of a piece that make four of them, whole blocks of 128 each."""
    return -(-inputs // 512) * 128


def piece_of(size: int, inputs: int, gated: bool) -> int:
    """Part of what defines the bits in deterministic mode, so a function of the matrix alone: long rows are cut where
    there are too few of them to keep the memory busy. Else the sum goes through, as in the vendor's products."""
    if gated or inputs <= PIECE:
        return 0
    if inputs >= 8192:
        return -(-inputs // 1024) * 512 if size < 8192 else 0
    return _quarter(inputs) if size <= 2048 else 0


def _few(rows: int, size: int, inputs: int, gated: bool) -> Product:
    """Trials on an H200: tiles as low as can be make the most programs, each with all of its columns on their way at
    once. What the memory bounds is better off with high ones."""
    piece = piece_of(size, inputs, gated)
    width = 8 if rows <= 8 else 16
    if piece and inputs < 8192:
        return Product(Way.ABREAST, 16, width, 128, 4, 3, piece)
    if inputs <= PIECE:
        if size >= 16384:
            return Product(Way.TILES, 16, width, 64, 1, 4)
        if gated:
            return Product(Way.TILES, 16, width, 128, 1, 5)
        return Product(Way.TILES, 16, width, 256, 1, 4) if rows <= 8 else Product(Way.TILES, 16, width, 64, 1, 12)
    if gated or size >= 16384:
        return Product(Way.TILES, 64, 16, 128, 4, 4)
    return Product(Way.TILES, 16, width, 512 if inputs >= 8192 else 256, 1, 3 if inputs >= 8192 else 4, piece)


def is_small(size: int, inputs: int, gated: bool) -> bool:
    """Whether a product with few rows is over before it has used the card: short rows, or ones that are cut, and no
    vocabulary."""
    return size < 16384 and (inputs <= PIECE or (inputs < 2048 and piece_of(size, inputs, gated) > 0))


def vendor_above(size: int, inputs: int, gated: bool) -> int:
    """Rows up to which deterministic products are ours whatever the vendor's do."""
    return SMALL_ROWS if is_small(size, inputs, gated) else SKINNY_ROWS


def _small(rows: int, size: int, inputs: int, gated: bool) -> Product:
    """17 to SMALL_ROWS rows. Trials on an H200 with 576 and 1,536 columns: tiles of few rows side by side, which read
    the weights again from the card's cache, beat one that is as wide as there are rows, up to three times."""
    piece = piece_of(size, inputs, gated)
    if piece and rows <= 128:
        width, columns = (32, 128) if 48 < rows <= 64 else (16, 64 if rows > 64 else 128)
        return Product(Way.ABREAST, 16, width, columns, 4, 3, piece)
    width = 16
    while width < 128 and -(-size // 64) * -(-rows // width) > ONE_EACH:
        width *= 2
    return Product(Way.TILES, 64, width, 64, 4, 6, piece)


def _fixed_order(rows: int, size: int, inputs: int, dtype: torch.dtype, gated: bool, low: bool) -> Product:
    """The pieces of K are the same for every number of rows, and tensor cores add a piece's products in one order, in
    tiles of any size, or of any that one instruction computes."""
    piece = piece_of(size, inputs, gated)
    if dtype == torch.float32:  # without tensor cores an order is a tile's: one for all
        return Product(Way.TILES, 32, 16, 32, 4, 2, piece)
    if rows <= FEW_ROWS and low:
        return _few(rows, size, inputs, gated)
    if rows <= SMALL_ROWS and low and is_small(size, inputs, gated):
        return _small(rows, size, inputs, gated)
    width = min(128, max(16, 1 << (rows - 1).bit_length()))
    apart = 0 < piece < inputs and -(-size // 64) * -(-rows // width) < 264
    if rows > SKINNY_ROWS:
        if apart and rows <= 128 and inputs >= 8192:
            return Product(Way.TILES, 64, 64, 64, 4, 5, piece, True)
        if apart:
            return Product(Way.TILES, 64, width, 64, 4, 4, piece, True)
        return Product(Way.TILES, 128, width, 64, 8, 3, piece)
    if apart:
        return Product(Way.TILES, 64, width, 128, 4, 4 if width <= 32 else 3, piece, True)
    if inputs >= 2048:
        if gated or (size >= 65536 and rows > 32):
            return Product(Way.TILES, 128, width, 64, 4, 4)
        return Product(Way.TILES, 64, width, 128, 4, 5 if width <= 32 else 4, piece)
    if size >= 16384 and width > 32:
        return Product(Way.TILES, 128, width, 64, 8, 3)
    if size >= 16384 or (not gated and inputs < 1024) or not low:
        return Product(Way.TILES, 64, width, 64, 4, 6, piece)
    return Product(Way.TILES, 16, width, 128 if piece else 256, 4, 3, piece)
