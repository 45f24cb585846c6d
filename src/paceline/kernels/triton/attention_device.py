# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Paged attention on the device: what one tile of queries does with a range of keys, and the two kernels around it.

A tile is up to BLOCK_M (row, head) pairs: consecutive rows of one group times the SHARED query heads of one KV head.
Keys come in blocks of BLOCK_N at absolute positions, in logical order: through the block table up to a row's prefix,
beyond it through its ancestors. Scores are kept in base 2. What a row must not see weighs exactly zero and is loaded
as zero, so neither its neighbours nor foreign slots can reach it.

SPLIT > 0: spans of SPLIT keys are summed up each by itself and then combined in order, whether one program does them
one after the other or each has a program of its own and the last one to finish combines them: the operations and their
order are the same. Else a program sums up whatever keys it was given.

Sums over keys are products, also the sum of the weights: a product on tensor cores adds in an order that depends on
neither the height of the tile nor the warps that share it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.kernels.triton.overlap_device import start
from paceline.kernels.triton.plan import RECORD

_RECORD = tl.constexpr(RECORD)
_FAR = tl.constexpr(1 << 30)


@triton.jit
def sum_keys(weights, PRECISION: tl.constexpr):
    """[M, N] -> [M]."""
    ones = tl.full([weights.shape[1], 16], 1.0, weights.dtype)
    return tl.max(tl.dot(weights, ones, input_precision=PRECISION), 1)  # of equal columns


@triton.jit
def fold(scores, v, v_scale, highest, total, acc, SCALED: tl.constexpr, PRECISION: tl.constexpr):
    """One block of masked scores [M, N] and its values [N, D] into the running softmax."""
    new = tl.maximum(highest, tl.max(scores, 1))
    safe = tl.where(new == float("-inf"), 0.0, new)
    rescale = tl.exp2(highest - safe)
    weights = tl.exp2(scores - safe[:, None])
    total = total * rescale + sum_keys(weights.to(v.dtype), PRECISION)
    acc = acc * rescale[:, None]
    if SCALED:
        weights = weights * v_scale[None, :]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
    return new, total, acc


@triton.jit
def combine(highest, total, acc, more_highest, more_total, more_acc):
    """Two sums over different keys into one; the second may have seen nothing."""
    new = tl.maximum(highest, more_highest)
    safe = tl.where(new == float("-inf"), 0.0, new)
    a = tl.exp2(highest - safe)
    b = tl.exp2(more_highest - safe)
    return new, total * a + more_total * b, acc * a[:, None] + more_acc * b[:, None]


@triton.jit
def next_span(first_key, highest, total, acc, past_highest, past_total, past_acc, SPLIT: tl.constexpr):
    """Before a block of keys: where a span begins, what was found in the one before it goes to what is past. SPLIT 0:
    there are no spans."""
    if SPLIT > 0:  # noqa: SIM102 decided when it is compiled
        if first_key % SPLIT == 0:
            past_highest, past_total, past_acc = combine(past_highest, past_total, past_acc, highest, total, acc)
            highest = tl.full(highest.shape, float("-inf"), tl.float32)
            total = tl.zeros(total.shape, tl.float32)
            acc = tl.zeros(acc.shape, tl.float32)
    return highest, total, acc, past_highest, past_total, past_acc


@triton.jit
def soft_cap(scores, cap):
    """Scores in base 2 and their cap in the same unit: cap * tanh(scores / cap)."""
    return cap * (1.0 - 2.0 / (tl.exp2(scores / cap * 2.8853900817779268) + 1.0))  # 2 / ln 2


@triton.jit
def page_slots(table, j, inside, BLOCK_SIZE: tl.constexpr, WHOLE: tl.constexpr = False):
    if WHOLE:
        page = tl.load(table + j // BLOCK_SIZE)
    else:
        page = tl.load(table + j // BLOCK_SIZE, mask=inside, other=0)
    return page.to(tl.int64) * BLOCK_SIZE + j % BLOCK_SIZE


@triton.jit
def load_block(cache, scales, slots, inside, head, stride, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
               BLOCK_D: tl.constexpr, SCALED: tl.constexpr, dtype: tl.constexpr, WHOLE: tl.constexpr = False):
    """[N, D] of one head in `dtype`, and its scales [N] (where there are none: the slots, unused). WHOLE: all of the
    block is `inside`."""
    d = tl.arange(0, BLOCK_D)
    at = cache + slots[:, None] * stride + head * DIM + d[None, :]
    if WHOLE and BLOCK_D == DIM:
        block = tl.load(at)
    elif BLOCK_D == DIM:
        block = tl.load(at, mask=inside[:, None], other=0.0)
    else:
        block = tl.load(at, mask=inside[:, None] & (d < DIM)[None, :], other=0.0)
    scale = slots
    if SCALED:
        scale = tl.load(scales + slots * KV_HEADS + head, mask=inside, other=0.0)
    return block.to(dtype), scale


@triton.jit
def walk(q, pos, lowest, begin, end, highest, total, acc, past_highest, past_total, past_acc, table, keys, values,
         key_scales, value_scales, head, stride, scale, window, cap, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
         BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, SPLIT: tl.constexpr,
         FIRST: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr,
         WHOLE: tl.constexpr = False):
    """Keys begin .. end - 1 of the block table, the same for all rows of the tile. pos [M]: -1 where there is no row;
    `lowest`: the lowest position of the tile; keys below FIRST are seen by no row. WHOLE: blocks that all rows see,
    every key of them."""
    for first_key in range(begin, end, BLOCK_N):
        highest, total, acc, past_highest, past_total, past_acc = next_span(
            first_key, highest, total, acc, past_highest, past_total, past_acc, SPLIT)
        j = first_key + tl.arange(0, BLOCK_N)
        inside = j < end
        if FIRST > 0:
            inside = inside & (j >= FIRST)
        if WINDOW:
            inside = inside & (j > lowest - window)
        slots = page_slots(table, j, inside, BLOCK_SIZE, WHOLE)
        k, k_scale = load_block(keys, key_scales, slots, inside, head, stride, KV_HEADS, DIM, BLOCK_D, SCALED, q.dtype,
                                WHOLE)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if SCALED:
            scores = scores * k_scale[None, :]
        if CAPPED:
            scores = soft_cap(scores, cap)
        if not WHOLE:
            seen = inside[None, :] & (j[None, :] <= pos[:, None])
            if WINDOW:
                seen = seen & (j[None, :] > pos[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        v, v_scale = load_block(values, value_scales, slots, inside, head, stride, KV_HEADS, DIM, BLOCK_D, SCALED,
                                q.dtype, WHOLE)
        highest, total, acc = fold(scores, v, v_scale, highest, total, acc, SCALED, PRECISION)
    return highest, total, acc, past_highest, past_total, past_acc


@triton.jit
def path_slots(table, slots, ancestors, row, j, prefix, inside, DEPTH: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Where one row of a tree finds the keys at positions j."""
    committed = page_slots(table, j, inside & (j < prefix), BLOCK_SIZE)
    drafted = inside & (j >= prefix)
    ancestor = tl.load(ancestors + row * DEPTH + (j - prefix), mask=drafted, other=0)
    return tl.where(drafted, tl.load(slots + ancestor, mask=drafted, other=0).to(tl.int64), committed)


@triton.jit
def walk_paths(q, of_row, pos, first, rows, begin, end, highest, total, acc, past_highest, past_total, past_acc, table,
               slots, positions, prefixes, ancestors, keys, values, key_scales, value_scales, head, stride, scale,
               window, cap, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
               BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, DEPTH: tl.constexpr, SPLIT: tl.constexpr,
               FIRST: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, SCALED: tl.constexpr,
               PRECISION: tl.constexpr):
    """The same where each row has keys of its own. One row after the other gets its scores and its values; the
    others' weights are zero then, which changes no bit of theirs."""
    for first_key in range(begin, end, BLOCK_N):
        highest, total, acc, past_highest, past_total, past_acc = next_span(
            first_key, highest, total, acc, past_highest, past_total, past_acc, SPLIT)
        j = first_key + tl.arange(0, BLOCK_N)
        scores = tl.full([BLOCK_M, BLOCK_N], float("-inf"), tl.float32)
        for r in range(rows):
            inside = j <= tl.load(positions + first + r)
            if FIRST > 0:
                inside = inside & (j >= FIRST)
            if WINDOW:
                inside = inside & (j > tl.load(positions + first + r) - window)
            at = path_slots(table, slots, ancestors, first + r, j, tl.load(prefixes + first + r), inside, DEPTH,
                            BLOCK_SIZE)
            k, k_scale = load_block(keys, key_scales, at, inside, head, stride, KV_HEADS, DIM, BLOCK_D, SCALED, q.dtype)
            own = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            if SCALED:
                own = own * k_scale[None, :]
            if CAPPED:
                own = soft_cap(own, cap)
            scores = tl.where((of_row == r)[:, None] & inside[None, :], own, scores)

        new = tl.maximum(highest, tl.max(scores, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        rescale = tl.exp2(highest - safe)
        weights = tl.exp2(scores - safe[:, None])
        total = total * rescale + sum_keys(weights.to(q.dtype), PRECISION)
        acc = acc * rescale[:, None]
        highest = new
        for r in range(rows):
            inside = j <= tl.load(positions + first + r)
            if FIRST > 0:
                inside = inside & (j >= FIRST)
            if WINDOW:
                inside = inside & (j > tl.load(positions + first + r) - window)
            at = path_slots(table, slots, ancestors, first + r, j, tl.load(prefixes + first + r), inside, DEPTH,
                            BLOCK_SIZE)
            v, v_scale = load_block(values, value_scales, at, inside, head, stride, KV_HEADS, DIM, BLOCK_D, SCALED,
                                    q.dtype)
            mine = tl.where((of_row == r)[:, None], weights, 0.0)
            if SCALED:
                mine = mine * v_scale[None, :]
            acc = tl.dot(mine.to(v.dtype), v, acc, input_precision=PRECISION)
    return highest, total, acc, past_highest, past_total, past_acc


@triton.jit(do_not_specialize=["table_stride", "height", "window"])
def split_kernel(q, keys, values, key_scales, value_scales, out, items, count, tables, slots, positions, prefixes,
                 ancestors, results, extremes, arrived, q_stride, out_stride, stride, table_stride, height, scale,
                 window, cap, KV_HEADS: tl.constexpr, SHARED: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
                 BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, DEPTH: tl.constexpr,
                 SPLIT: tl.constexpr, REDUCE_M: tl.constexpr, AHEAD: tl.constexpr, FIRST: tl.constexpr,
                 WINDOW: tl.constexpr, CAPPED: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr,
                 OVERLAP: tl.constexpr):
    """Programs take the work list's items in turn, each for every KV head. Who finishes a tile's last item combines
    them all; `arrived` [tiles * KV heads] is left at zero."""
    start(OVERLAP)
    work = tl.load(count) * KV_HEADS
    for w in range(tl.program_id(0), work, tl.num_programs(0)):
        item = w // KV_HEADS
        head = w % KV_HEADS
        record = items + item * _RECORD
        first = tl.load(record)
        rows = tl.load(record + 1)
        group = tl.load(record + 2)
        begin = tl.load(record + 3)
        end = tl.load(record + 4)
        shared = tl.load(record + 5)
        pieces = tl.load(record + 6)
        piece = tl.load(record + 7)
        cells_from = tl.load(record + 8)
        tile = tl.load(record + 9)

        m = tl.arange(0, BLOCK_M)
        d = tl.arange(0, BLOCK_D)
        of_row = m // SHARED
        live = of_row < rows
        place = (first + of_row).to(tl.int64)
        across = (head * SHARED + m % SHARED) * DIM
        cells = live[:, None] & (d < DIM)[None, :]
        query = tl.load(q + (place * q_stride + across)[:, None] + d[None, :], mask=cells, other=0.0)
        pos = tl.load(positions + first + of_row, mask=live, other=-1)
        lowest = tl.min(tl.where(live, pos, _FAR), 0)
        table = tables + group.to(tl.int64) * table_stride

        highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        past_highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        past_total = tl.zeros([BLOCK_M], tl.float32)
        past_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        highest, total, acc, past_highest, past_total, past_acc = walk(
            query, pos, lowest, begin, tl.minimum(end, shared), highest, total, acc, past_highest, past_total, past_acc,
            table, keys, values, key_scales, value_scales, head, stride, scale, window, cap, KV_HEADS, DIM, BLOCK_D,
            BLOCK_N, BLOCK_SIZE, SPLIT, FIRST, WINDOW, CAPPED, SCALED, PRECISION)
        if DEPTH > 0:
            highest, total, acc, past_highest, past_total, past_acc = walk_paths(
                query, of_row, pos, first, rows, tl.maximum(begin, shared), end, highest, total, acc, past_highest,
                past_total, past_acc, table, slots, positions, prefixes, ancestors, keys, values, key_scales,
                value_scales, head, stride, scale, window, cap, KV_HEADS, DIM, BLOCK_D, BLOCK_M, BLOCK_N, BLOCK_SIZE,
                DEPTH, SPLIT, FIRST, WINDOW, CAPPED, SCALED, PRECISION)
        if SPLIT > 0:
            highest, total, acc = combine(past_highest, past_total, past_acc, highest, total, acc)

        if pieces == 1:
            mixed = acc / tl.where(live, total, 1.0)[:, None]
            tl.store(out + (place * out_stride + across)[:, None] + d[None, :], mixed.to(out.dtype.element_ty),
                     mask=cells)
        else:
            cell = (cells_from + piece * rows + of_row).to(tl.int64) * (KV_HEADS * SHARED) + head * SHARED + m % SHARED
            tl.store(extremes + cell, highest, mask=live)
            tl.store(extremes + height + cell, total, mask=live)
            tl.store(results + cell[:, None] * DIM + d[None, :], acc, mask=cells)
            tl.debug_barrier()  # all threads have written before one of them says so
            ticket = arrived + tile * KV_HEADS + head
            if tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == pieces - 1:
                tl.store(ticket, 0)
                gather(results, extremes, out, cells_from, pieces, first, rows, head, out_stride, height, KV_HEADS,
                       SHARED, DIM, BLOCK_D, REDUCE_M, AHEAD)


@triton.jit
def gather(results, extremes, out, cells_from, pieces, first, rows, head, out_stride, height, KV_HEADS: tl.constexpr,
           SHARED: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, REDUCE_M: tl.constexpr,
           AHEAD: tl.constexpr):
    """The pieces of a tile in order, AHEAD of them loaded at once; REDUCE_M: room for the tile's pairs."""
    m = tl.arange(0, REDUCE_M)
    d = tl.arange(0, BLOCK_D)
    of_row = m // SHARED
    live = of_row < rows
    highest = tl.full([REDUCE_M], float("-inf"), tl.float32)
    total = tl.zeros([REDUCE_M], tl.float32)
    acc = tl.zeros([REDUCE_M, BLOCK_D], tl.float32)
    for base in range(0, pieces, AHEAD):
        for more in tl.static_range(AHEAD):
            there = live & (m * 0 + base + more < pieces)
            cell = (cells_from + (base + more) * rows + of_row).to(tl.int64) * (KV_HEADS * SHARED) \
                + head * SHARED + m % SHARED
            # Written by other programs: around the cache of this processor.
            part_highest = tl.load(extremes + cell, mask=there, other=float("-inf"), cache_modifier=".cg")
            part_total = tl.load(extremes + height + cell, mask=there, other=0.0, cache_modifier=".cg")
            part = tl.load(results + cell[:, None] * DIM + d[None, :], mask=there[:, None] & (d < DIM)[None, :],
                           other=0.0, cache_modifier=".cg")
            highest, total, acc = combine(highest, total, acc, part_highest, part_total, part)
    mixed = acc / tl.where(live, total, 1.0)[:, None]
    place = (first + of_row).to(tl.int64) * out_stride + (head * SHARED + m % SHARED) * DIM
    tl.store(out + place[:, None] + d[None, :], mixed.to(out.dtype.element_ty),
             mask=live[:, None] & (d < DIM)[None, :])


@triton.jit(do_not_specialize=["table_stride", "count", "window"])
def chunk_kernel(q, keys, values, key_scales, value_scales, out, chunks, group_of_row, positions, tables, q_stride,
                 out_stride, stride, table_stride, count, scale, window, cap, KV_HEADS: tl.constexpr,
                 SHARED: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
                 BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, SPLIT: tl.constexpr, FIRST: tl.constexpr,
                 WINDOW: tl.constexpr, CAPPED: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr,
                 OVERLAP: tl.constexpr):
    """Grid (KV heads, chunks): all keys of one tile of a chain; the last chunks, which have most, start first."""
    start(OVERLAP)
    head = tl.program_id(0)
    tile = count - 1 - tl.program_id(1)
    first = tl.load(chunks + tile)
    rows = tl.load(chunks + count + tile)
    if rows > 0:
        m = tl.arange(0, BLOCK_M)
        d = tl.arange(0, BLOCK_D)
        of_row = m // SHARED
        live = of_row < rows
        place = (first + of_row).to(tl.int64)
        across = (head * SHARED + m % SHARED) * DIM
        cells = live[:, None] & (d < DIM)[None, :]
        query = tl.load(q + (place * q_stride + across)[:, None] + d[None, :], mask=cells, other=0.0)
        lowest = tl.load(positions + first)
        pos = tl.where(live, lowest + of_row, -1)
        end = lowest + rows
        begin = 0
        if WINDOW:
            begin = tl.maximum(lowest - window + 1, 0) // BLOCK_N * BLOCK_N
        table = tables + tl.load(group_of_row + first).to(tl.int64) * table_stride

        highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        past_highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        past_total = tl.zeros([BLOCK_M], tl.float32)
        past_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        masked_from = begin
        if not WINDOW and FIRST == 0:
            # Blocks before all rows, most of a prompt's, are not masked, which changes no bit.
            masked_from = tl.maximum(begin, tl.minimum(end, (lowest + 1) // BLOCK_N * BLOCK_N))
            highest, total, acc, past_highest, past_total, past_acc = walk(
                query, pos, lowest, begin, masked_from, highest, total, acc, past_highest, past_total, past_acc, table,
                keys, values, key_scales, value_scales, head, stride, scale, window, cap, KV_HEADS, DIM, BLOCK_D,
                BLOCK_N, BLOCK_SIZE, SPLIT, FIRST, WINDOW, CAPPED, SCALED, PRECISION, WHOLE=True)
        highest, total, acc, past_highest, past_total, past_acc = walk(
            query, pos, lowest, masked_from, end, highest, total, acc, past_highest, past_total, past_acc, table, keys,
            values, key_scales, value_scales, head, stride, scale, window, cap, KV_HEADS, DIM, BLOCK_D, BLOCK_N,
            BLOCK_SIZE, SPLIT, FIRST, WINDOW, CAPPED, SCALED, PRECISION)
        if SPLIT > 0:
            highest, total, acc = combine(past_highest, past_total, past_acc, highest, total, acc)
        mixed = acc / tl.where(live, total, 1.0)[:, None]
        tl.store(out + (place * out_stride + across)[:, None] + d[None, :], mixed.to(out.dtype.element_ty), mask=cells)
