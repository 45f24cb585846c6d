# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Matrix products on the device: one row at a time, and tiles for more.

The order in which an output's K products are added depends on neither the number of rows nor their place. Epilogues:
bias, SiLU of a gate times its up, a residual; in float32, rounded once (or, ROUNDED, after each of them, as where they
are kernels of their own).
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.kernels.triton.overlap_device import fetch, start


@triton.jit
def dot_rows(x, norm, weight, row, other, live, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
             NORMED: tl.constexpr, TWO: tl.constexpr):
    """x [K] times the weight's rows `row` [BLOCK_N], and `other` where TWO -> [BLOCK_N] each, and the sum of x's
    squares where NORMED; x is then multiplied by the norm's weight."""
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    acc2 = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        cells = live[:, None]
        if K % BLOCK_K == 0:
            vector = tl.load(x + k).to(tl.float32)
        else:
            cells = cells & (k < K)[None, :]
            vector = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
        w = tl.load(weight + row[:, None] * K + k[None, :], mask=cells, other=0.0)
        if TWO:
            w2 = tl.load(weight + other[:, None] * K + k[None, :], mask=cells, other=0.0)
        if NORMED:
            squares += vector * vector
            if K % BLOCK_K == 0:
                vector = vector * tl.load(norm + k).to(tl.float32)
            else:
                vector = vector * tl.load(norm + k, mask=k < K, other=0.0).to(tl.float32)
        acc += w.to(tl.float32) * vector[None, :]
        if TWO:
            acc2 += w2.to(tl.float32) * vector[None, :]
    return tl.sum(acc, 1), tl.sum(acc2, 1), tl.sum(squares, 0)


@triton.jit
def row_kernel(x, norm, weight, bias, residual, out, size, eps, K: tl.constexpr, BLOCK_N: tl.constexpr,
               BLOCK_K: tl.constexpr, NORMED: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr,
               ADDED: tl.constexpr, FETCHED: tl.constexpr, OVERLAP: tl.constexpr):
    """out [size] of one row x [K]. NORMED: x is normed on the way, by scaling the sum. GATED: the weight has 2 * size
    rows, gates first."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = n < size
    row = n.to(tl.int64)
    fetch(weight, row, live, 0, K, FETCHED, OVERLAP)
    if GATED:
        fetch(weight, row + size, live, 0, K, FETCHED, OVERLAP)
    start(OVERLAP)
    y, up, squares = dot_rows(x, norm, weight, row, row + size, live, K, BLOCK_N, BLOCK_K, NORMED, GATED)
    if NORMED:
        root = tl.sqrt(squares / K + eps)
        y = y / root
        up = up / root
    if BIASED:
        y += tl.load(bias + n, mask=live, other=0.0).to(tl.float32)
    if GATED:
        if BIASED:
            up += tl.load(bias + size + n, mask=live, other=0.0).to(tl.float32)
        y = y / (1.0 + tl.exp(-y)) * up
    if ADDED:
        y += tl.load(residual + n, mask=live, other=0.0).to(tl.float32)
    tl.store(out + n, y.to(out.dtype.element_ty), mask=live)


@triton.jit
def row_project_kernel(x, norm, weight, bias, q_out, keys, values, slots, cos, sin, key_stride, value_stride, eps,
                       K: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
                       BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NORMED: tl.constexpr, BIASED: tl.constexpr,
                       FETCHED: tl.constexpr, OVERLAP: tl.constexpr):
    """Kernels.project for one row, after the norm or with it: a program computes features i and i + DIM / 2 of a head,
    which turn together."""
    HALF: tl.constexpr = DIM // 2
    pair = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = pair < (HEADS + 2 * KV_HEADS) * HALF
    head = pair // HALF
    i = pair % HALF
    n = head * DIM + i
    row = n.to(tl.int64)
    fetch(weight, row, live, 0, K, FETCHED, OVERLAP)
    fetch(weight, row + HALF, live, 0, K, FETCHED, OVERLAP)
    start(OVERLAP)
    a, b, squares = dot_rows(x, norm, weight, row, row + HALF, live, K, BLOCK_N, BLOCK_K, NORMED, True)
    if NORMED:
        root = tl.sqrt(squares / K + eps)
        a = a / root
        b = b / root
    if BIASED:
        a += tl.load(bias + n, mask=live, other=0.0).to(tl.float32)
        b += tl.load(bias + n + HALF, mask=live, other=0.0).to(tl.float32)
    turns = head < HEADS + KV_HEADS
    first = a * tl.load(cos + i) + b * tl.load(sin + i)
    second = b * tl.load(cos + i + HALF) + a * tl.load(sin + i + HALF)
    first = tl.where(turns, first, a)
    second = tl.where(turns, second, b)

    is_q = live & (head < HEADS)
    tl.store(q_out + n, first.to(q_out.dtype.element_ty), mask=is_q)
    tl.store(q_out + n + HALF, second.to(q_out.dtype.element_ty), mask=is_q)
    slot = tl.load(slots).to(tl.int64)
    write = live & (row * 0 + slot >= 0)  # padding has no slot
    is_k = write & (head >= HEADS) & turns
    key = keys + slot * key_stride + (n - HEADS * DIM)
    tl.store(key, first.to(keys.dtype.element_ty), mask=is_k)
    tl.store(key + HALF, second.to(keys.dtype.element_ty), mask=is_k)
    is_v = write & (head >= HEADS + KV_HEADS)
    value = values + slot * value_stride + (n - (HEADS + KV_HEADS) * DIM)
    tl.store(value, first.to(values.dtype.element_ty), mask=is_v)
    tl.store(value + HALF, second.to(values.dtype.element_ty), mask=is_v)


@triton.jit
def products(x, weight, m, other, live, n, rows, K, x_stride, first, last, PIECE: tl.constexpr, BLOCK_M: tl.constexpr,
             BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, TWO: tl.constexpr,
             PRECISION: tl.constexpr):
    """Weight rows m, and `other` where TWO, times rows n of x over columns first .. last - 1: [BLOCK_M, BLOCK_N] each.
    PIECE > 0, a multiple of BLOCK_K: so many columns are summed up by themselves, then added in order."""
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc2 = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    past = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    past2 = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    w_at = weight + m.to(tl.int64)[:, None] * K
    other_at = weight + other.to(tl.int64)[:, None] * K
    x_at = x + n.to(tl.int64)[:, None] * x_stride
    for column in range(first, last, BLOCK_K):
        if PIECE > 0:  # noqa: SIM102 decided when it is compiled
            if column % PIECE == 0:
                past += acc
                acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
                if TWO:
                    past2 += acc2
                    acc2 = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        k = column + tl.arange(0, BLOCK_K)
        w_cells = live[:, None]
        x_cells = (n < rows)[:, None]
        if not EVEN:
            w_cells = w_cells & (k < K)[None, :]
            x_cells = x_cells & (k < K)[None, :]
        v = tl.trans(tl.load(x_at + k[None, :], mask=x_cells, other=0.0))
        acc = tl.dot(tl.load(w_at + k[None, :], mask=w_cells, other=0.0), v, acc, input_precision=PRECISION)
        if TWO:
            acc2 = tl.dot(tl.load(other_at + k[None, :], mask=w_cells, other=0.0), v, acc2, input_precision=PRECISION)
    if PIECE > 0:
        acc = past + acc
        acc2 = past2 + acc2
    return acc, acc2


@triton.jit
def rounded(y, like, ROUNDED: tl.constexpr):
    """As stored where `like` points to and read again, as the vendor's products are."""
    return y.to(like.dtype.element_ty).to(tl.float32) if ROUNDED else y


@triton.jit
def finish(y, up, bias, residual, out, m, n, size, rows, GATED: tl.constexpr, BIASED: tl.constexpr, ADDED: tl.constexpr,
           ROUNDED: tl.constexpr):
    """Epilogue of a tile y [BLOCK_M, BLOCK_N] and, where GATED, of its ups."""
    cells = (m < size)[:, None] & (n < rows)[None, :]
    y = rounded(y, out, ROUNDED)
    up = rounded(up, out, ROUNDED)
    if BIASED:
        y = rounded(y + tl.load(bias + m, mask=m < size, other=0.0).to(tl.float32)[:, None], out, ROUNDED)
    if GATED:
        if BIASED:
            more = tl.load(bias + size + m, mask=m < size, other=0.0).to(tl.float32)[:, None]
            up = rounded(up + more, out, ROUNDED)
        y = y / (1.0 + tl.exp(-y)) * up
    at = n.to(tl.int64)[None, :] * size + m[:, None]
    if ADDED:
        y += tl.load(residual + at, mask=cells, other=0.0).to(tl.float32)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=cells)


@triton.jit(do_not_specialize=["rows"])
def tile_kernel(x, weight, bias, residual, out, partial, arrived, rows, size, K, x_stride, PIECE: tl.constexpr,
                PIECES: tl.constexpr, APART: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                BLOCK_K: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr,
                ADDED: tl.constexpr, ROUNDED: tl.constexpr, PRECISION: tl.constexpr, FETCHED: tl.constexpr,
                OVERLAP: tl.constexpr):
    """out [rows, size] = x [rows, K] times weight [size, K]. The weight's rows are the M of the product, so tensor
    cores are full however few rows there are. EVEN: BLOCK_K divides K. ROUNDED: between the product and what follows.

    With PIECES > 1, K is cut into pieces of PIECE columns, each summed up by itself, then added in order: one after
    the other in one program, or (APART) each by a program of its own, where the last to finish adds them: the bits
    are the same. Grid (tiles of size, tiles of rows, pieces or 1); partial [pieces, rows, size, or twice that] float32.
    """
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = m < size
    piece = tl.program_id(2)
    fetch(weight, m, live, piece * PIECE, K, FETCHED, OVERLAP)
    if GATED:
        fetch(weight, m + size, live, piece * PIECE, K, FETCHED, OVERLAP)
    start(OVERLAP)
    if not APART:
        y, up = products(x, weight, m, m + size, live, n, rows, K, x_stride, 0, K, PIECE, BLOCK_M, BLOCK_N, BLOCK_K,
                         EVEN, GATED, PRECISION)
        finish(y, up, bias, residual, out, m, n, size, rows, GATED, BIASED, ADDED, ROUNDED)
    else:
        y, up = products(x, weight, m, m + size, live, n, rows, K, x_stride, piece * PIECE,
                         tl.minimum(piece * PIECE + PIECE, K), 0, BLOCK_M, BLOCK_N, BLOCK_K, EVEN, GATED, PRECISION)
        PARTS: tl.constexpr = 2 if GATED else 1
        cells = (m < size)[:, None] & (n < rows)[None, :]
        at = partial + n[None, :] * (size * PARTS) + m[:, None]
        tl.store(at + piece * (rows * size * PARTS), y, mask=cells)
        if GATED:
            tl.store(at + piece * (rows * size * PARTS) + size, up, mask=cells)
        tl.debug_barrier()  # all threads have written before one of them says so
        ticket = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(arrived + ticket, 1, sem="acq_rel", scope="gpu") == PIECES - 1:
            tl.store(arrived + ticket, 0)
            y = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for other in tl.static_range(PIECES):
                # Written by other programs: around the cache of this processor.
                there = at + other * (rows * size * PARTS)
                y += tl.load(there, mask=cells, other=0.0, cache_modifier=".cg")
                if GATED:
                    up += tl.load(there + size, mask=cells, other=0.0, cache_modifier=".cg")
            finish(y, up, bias, residual, out, m, n, size, rows, GATED, BIASED, ADDED, ROUNDED)


@triton.jit
def add_pieces_kernel(first, second, third, fourth, residual, out, count, PIECES: tl.constexpr, ADDED: tl.constexpr,
                      BLOCK: tl.constexpr):
    """out [count] = the pieces, float32, in order, rounded, and onto the residual; as tile_kernel does (ROUNDED)."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    y = tl.zeros([BLOCK], tl.float32) + tl.load(first + i, mask=i < count, other=0.0)
    if PIECES > 1:
        y += tl.load(second + i, mask=i < count, other=0.0)
    if PIECES > 2:
        y += tl.load(third + i, mask=i < count, other=0.0)
    if PIECES > 3:
        y += tl.load(fourth + i, mask=i < count, other=0.0)
    y = y.to(out.dtype.element_ty)
    if ADDED:
        y = (y.to(tl.float32) + tl.load(residual + i, mask=i < count, other=0.0).to(tl.float32)).to(y.dtype)
    tl.store(out + i, y, mask=i < count)


@triton.jit(do_not_specialize=["rows"])
def abreast_kernel(x, weight, bias, residual, out, rows, size, K, x_stride, PIECE: tl.constexpr, BLOCK_M: tl.constexpr,
                   BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BIASED: tl.constexpr, ADDED: tl.constexpr,
                   ROUNDED: tl.constexpr, PRECISION: tl.constexpr, FETCHED: tl.constexpr, OVERLAP: tl.constexpr):
    """tile_kernel of few rows with up to four pieces, each with a warp of the program. The bits are the same."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = m < size
    fetch(weight, m, live, 0, K, FETCHED, OVERLAP)
    start(OVERLAP)
    begin = tl.arange(0, 4) * PIECE
    acc = tl.zeros([4, BLOCK_M, BLOCK_N], tl.float32)
    w_at = weight + m.to(tl.int64)[None, :, None] * K + begin[:, None, None]
    x_at = x + n.to(tl.int64)[None, None, :] * x_stride + begin[:, None, None]
    for column in range(0, PIECE, BLOCK_K):
        k = column + tl.arange(0, BLOCK_K)
        inside = (k < PIECE)[None, :] & (begin[:, None] + k[None, :] < K)
        w = tl.load(w_at + k[None, None, :], mask=live[None, :, None] & inside[:, None, :], other=0.0)
        v = tl.load(x_at + k[None, :, None], mask=(n < rows)[None, None, :] & inside[:, :, None], other=0.0)
        acc = tl.dot(w, v, acc, input_precision=PRECISION)
    even, odd = tl.split(tl.permute(tl.reshape(acc, [2, 2, BLOCK_M, BLOCK_N]), [0, 2, 3, 1]))
    first, third = tl.split(tl.permute(even, [1, 2, 0]))
    second, fourth = tl.split(tl.permute(odd, [1, 2, 0]))
    y = tl.zeros([BLOCK_M, BLOCK_N], tl.float32) + first + second + third + fourth
    finish(y, y, bias, residual, out, m, n, size, rows, False, BIASED, ADDED, ROUNDED)


@triton.jit(do_not_specialize=["rows"])
def by_head_kernel(x, weight, out, rows, size, K, x_stride, head_stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                   BLOCK_K: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr):
    """out [rows, heads, size] = x [rows, heads, K] times weight [heads, size, K], head by head. Grid (tiles of size,
    tiles of rows, heads)."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    head = tl.program_id(2)
    live = m < size
    y, _ = products(x + head.to(tl.int64) * head_stride, weight + head.to(tl.int64) * size * K, m, m, live, n, rows, K,
                    x_stride, 0, K, 0, BLOCK_M, BLOCK_N, BLOCK_K, EVEN, False, PRECISION)
    at = (n.to(tl.int64)[None, :] * tl.num_programs(2) + head) * size + m[:, None]
    tl.store(out + at, y.to(out.dtype.element_ty), mask=live[:, None] & (n < rows)[None, :])
