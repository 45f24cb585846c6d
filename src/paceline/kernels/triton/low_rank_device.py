# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Low-rank additions on the device, for rows of any slots in one launch (as Punica's BGMV and SGMV): shrink, then
expand.

A program has a tile of rows and goes through the slots that are named there, one after the other: each is a product of
the whole tile, of which the slot's own rows are kept. So a row's sums are those of its slot alone, in one order,
whoever is beside it; a tile in which nobody has an adapter does nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.kernels.triton.overlap_device import start


@triton.jit
def named(slots, ranks, n, rows, first):
    """The slot of each row n, -1 where it has none or one of no more than `first` ranks."""
    own = tl.load(slots + n, mask=n < rows, other=-1)
    rank = tl.load(ranks + own, mask=own >= 0, other=0)
    return tl.where(rank > first, own, -1)


@triton.jit(do_not_specialize=["rows"])
def shrink_kernel(x, down, ranks, slots, out, rows, K, x_stride, room, PIECE: tl.constexpr, PIECES: tl.constexpr,
                  APART: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                  PRECISION: tl.constexpr, OVERLAP: tl.constexpr):
    """out [pieces or 1, rows, room] float32 = x [rows, K] times down [slots, room, K] of each row's slot. K is cut into
    PIECES of PIECE columns (a multiple of BLOCK_K), each summed up by itself: APART by a program of its own, for
    expand_kernel to add, else one after the other and added here: the bits are the same. Grid (tiles of rows, blocks of
    ranks, pieces or 1)."""
    start(OVERLAP)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(1) * BLOCK_R
    r = first + tl.arange(0, BLOCK_R)
    own = named(slots, ranks, n, rows, first)
    x_at = x + n.to(tl.int64)[:, None] * x_stride
    slot = tl.max(own, 0)
    while slot >= 0:
        mine = own == slot
        live = (r < tl.load(ranks + slot))[:, None]
        w_at = down + (slot.to(tl.int64) * room + r)[:, None] * K
        y = tl.zeros([BLOCK_R, BLOCK_N], tl.float32)
        for index in range(1 if APART else PIECES):
            begin = (tl.program_id(2) if APART else index) * PIECE
            acc = tl.zeros([BLOCK_R, BLOCK_N], tl.float32)
            for column in range(begin, tl.minimum(begin + PIECE, K), BLOCK_K):
                k = column + tl.arange(0, BLOCK_K)
                inside = (k < K)[None, :]
                v = tl.trans(tl.load(x_at + k[None, :], mask=mine[:, None] & inside, other=0.0))
                w = tl.load(w_at + k[None, :], mask=live & inside, other=0.0)
                acc = tl.dot(w, v, acc, input_precision=PRECISION)
            y += acc
        at = (tl.program_id(2) * rows + n).to(tl.int64) * room
        tl.store(out + at[None, :] + r[:, None], y, mask=mine[None, :] & live)
        own = tl.where(mine, -1, own)
        slot = tl.max(own, 0)


@triton.jit(do_not_specialize=["rows"])
def expand_kernel(hidden, up, ranks, slots, out, rows, size, out_stride, room, PIECES: tl.constexpr,
                  BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, PRECISION: tl.constexpr,
                  OVERLAP: tl.constexpr):
    """out [rows, size] gets up [slots, size, room] of each row's slot times the sum of hidden [PIECES, rows, room].
    Rounded to the factors' type before and after the product, as products of their own are. Grid (tiles of size, tiles
    of rows)."""
    start(OVERLAP)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    own = named(slots, ranks, n, rows, 0)
    slot = tl.max(own, 0)
    while slot >= 0:
        mine = own == slot
        rank = tl.load(ranks + slot)
        w_at = up + (slot.to(tl.int64) * size + m)[:, None] * room
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for first in range(0, rank, BLOCK_R):
            r = first + tl.arange(0, BLOCK_R)
            h = tl.zeros([BLOCK_R, BLOCK_N], tl.float32)
            for piece in tl.static_range(PIECES):
                at = hidden + (piece * rows + n).to(tl.int64)[None, :] * room + r[:, None]
                h += tl.load(at, mask=mine[None, :] & (r < rank)[:, None], other=0.0)
            w = tl.load(w_at + r[None, :], mask=(m < size)[:, None] & (r < rank)[None, :], other=0.0)
            acc = tl.dot(w, h.to(w.dtype), acc, input_precision=PRECISION)
        at = out + n.to(tl.int64)[None, :] * out_stride + m[:, None]
        cells = mine[None, :] & (m < size)[:, None]
        more = acc.to(up.dtype.element_ty).to(tl.float32)
        y = tl.load(at, mask=cells, other=0.0).to(tl.float32) + more
        tl.store(at, y.to(out.dtype.element_ty), mask=cells)
        own = tl.where(mine, -1, own)
        slot = tl.max(own, 0)
