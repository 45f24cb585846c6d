# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Attention over a latent cache on the device: one key of RANK + ROPE features a token for all heads, whose first RANK
are its value.

A program takes one row and BLOCK_H of its heads, which share every key, so it needs no neighbours to keep tensor cores
busy. Keys are found as in attention_device: through the block table up to a row's prefix, beyond it through its
ancestors. Spans of SPLIT keys are summed up each by itself and then combined in order. A row has some `cells` to keep
what is found in its last spans: those are summed up side by side (span_kernel), the ones before them one after the
other by the program that combines all (latent_kernel). The bits are the same, and no other row has a part in them.

Nothing here is planned on the host: a row's position says how many spans it has, and programs without any end at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.kernels.triton.attention_device import combine, fold, page_slots, path_slots, soft_cap


@triton.jit
def spans_of(pos, cells, window, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr):
    """Of a row: its first key, its first span, the first one that has a cell, and the end of them."""
    begin = pos * 0
    if WINDOW:
        begin = tl.maximum(pos + 1 - window, 0) // BLOCK_N * BLOCK_N
    first = begin // SPLIT
    end = tl.cdiv(pos + 1, SPLIT)
    return begin, first, tl.maximum(first, end - cells), end


@triton.jit
def load_queries(q, row, h, q_stride, HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
                 BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr):
    """The two parts of a row's queries for heads h: [H, R] and [H, P]."""
    r = tl.arange(0, BLOCK_R)
    p = tl.arange(0, BLOCK_P)
    live = (h < HEADS)[:, None]
    own = q + row.to(tl.int64) * q_stride + h[:, None] * (RANK + ROPE)
    return tl.load(own + r[None, :], mask=live & (r < RANK)[None, :], other=0.0), \
        tl.load(own + RANK + p[None, :], mask=live & (p < ROPE)[None, :], other=0.0)


@triton.jit
def walk_span(latent, turned, cache, slots, table, ancestors, row, pos, prefix, begin, span, stride, scale, window, cap,
              RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr,
              BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, SPLIT: tl.constexpr,
              DEPTH: tl.constexpr, FIRST: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
              PRECISION: tl.constexpr):
    """The keys of one span that one row sees -> highest score, sum of weights [H], sum of weighted values [H, R].
    latent [H, R], turned [H, P]: the two parts of its queries."""
    r = tl.arange(0, BLOCK_R)
    p = tl.arange(0, BLOCK_P)
    highest = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_R], tl.float32)
    end = tl.minimum(span * SPLIT + SPLIT, pos + 1)
    for first_key in range(tl.maximum(span * SPLIT, begin), end, BLOCK_N):
        j = first_key + tl.arange(0, BLOCK_N)
        inside = j < end
        if FIRST > 0:
            inside = inside & (j >= FIRST)
        if WINDOW:
            inside = inside & (j > pos - window)
        if DEPTH > 0:
            at = path_slots(table, slots, ancestors, row, j, prefix, inside, DEPTH, BLOCK_SIZE)
        else:
            at = page_slots(table, j, inside, BLOCK_SIZE)
        token = cache + at[:, None] * stride
        value = tl.load(token + r[None, :], mask=inside[:, None] & (r < RANK)[None, :], other=0.0).to(latent.dtype)
        key = tl.load(token + RANK + p[None, :], mask=inside[:, None] & (p < ROPE)[None, :], other=0.0).to(latent.dtype)
        scores = tl.dot(latent, tl.trans(value), input_precision=PRECISION)
        scores = tl.dot(turned, tl.trans(key), scores, input_precision=PRECISION) * scale
        if CAPPED:
            scores = soft_cap(scores, cap)
        scores = tl.where(inside[None, :], scores, float("-inf"))
        highest, total, acc = fold(scores, value, at, highest, total, acc, False, PRECISION)
    return highest, total, acc


@triton.jit(do_not_specialize=["table_stride", "cells", "window"])
def span_kernel(q, cache, results, extremes, tables, slots, group_of_row, positions, prefixes, ancestors, q_stride,
                stride, table_stride, cells, scale, window, cap, HEADS: tl.constexpr, RANK: tl.constexpr,
                ROPE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
                BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, SPLIT: tl.constexpr, DEPTH: tl.constexpr,
                FIRST: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr):
    """Grid (rows, blocks of heads, programs): the spans of a row that have cells, in turn -> results [rows, cells,
    HEADS, RANK] float32 and extremes [2, rows, cells, HEADS], for latent_kernel."""
    row = tl.program_id(0)
    pos = tl.load(positions + row)
    if pos >= 0:
        begin, _, apart, end = spans_of(pos, cells, window, BLOCK_N, SPLIT, WINDOW)
        first = apart + tl.program_id(2)
        if first < end:
            h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
            r = tl.arange(0, BLOCK_R)
            live = h < HEADS
            table = tables + tl.load(group_of_row + row).to(tl.int64) * table_stride
            prefix = tl.load(prefixes + row)
            for span in range(first, end, tl.num_programs(2)):
                # Each time anew: kept in shared memory they would leave no room there for what is stored.
                latent, turned = load_queries(q, row, h, q_stride, HEADS, RANK, ROPE, BLOCK_R, BLOCK_P)
                highest, total, acc = walk_span(
                    latent, turned, cache, slots, table, ancestors, row, pos, prefix, begin, span, stride, scale,
                    window, cap, RANK, ROPE, BLOCK_H, BLOCK_R, BLOCK_P, BLOCK_N, BLOCK_SIZE, SPLIT, DEPTH, FIRST,
                    WINDOW, CAPPED, PRECISION)
                cell = (row.to(tl.int64) * cells + span - apart) * HEADS + h
                tl.store(extremes + cell, highest, mask=live)
                tl.store(extremes + tl.num_programs(0).to(tl.int64) * cells * HEADS + cell, total, mask=live)
                tl.store(results + cell[:, None] * RANK + r[None, :], acc, mask=live[:, None] & (r < RANK)[None, :])


@triton.jit(do_not_specialize=["table_stride", "cells", "window"])
def latent_kernel(q, cache, out, results, extremes, tables, slots, group_of_row, positions, prefixes, ancestors,
                  q_stride, stride, table_stride, cells, scale, window, cap, HEADS: tl.constexpr, RANK: tl.constexpr,
                  ROPE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
                  BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, SPLIT: tl.constexpr, DEPTH: tl.constexpr,
                  FIRST: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
                  CELLS: tl.constexpr, WHOLE: tl.constexpr):
    """Grid (rows, blocks of heads) -> out [N, HEADS, RANK]: the spans of a row in order. CELLS: there are some; WHOLE:
    for all spans that a row can have, so that none is summed up here."""
    row = tl.program_id(0)
    pos = tl.load(positions + row)
    if pos >= 0:
        h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
        r = tl.arange(0, BLOCK_R)
        live = h < HEADS
        filled = live[:, None] & (r < RANK)[None, :]
        highest = tl.full([BLOCK_H], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_H], tl.float32)
        acc = tl.zeros([BLOCK_H, BLOCK_R], tl.float32)
        begin, first, apart, end = spans_of(pos, cells, window, BLOCK_N, SPLIT, WINDOW)
        if not WHOLE:
            latent, turned = load_queries(q, row, h, q_stride, HEADS, RANK, ROPE, BLOCK_R, BLOCK_P)
            table = tables + tl.load(group_of_row + row).to(tl.int64) * table_stride
            prefix = tl.load(prefixes + row)
            for span in range(first, apart):
                more_highest, more_total, more = walk_span(
                    latent, turned, cache, slots, table, ancestors, row, pos, prefix, begin, span, stride, scale,
                    window, cap, RANK, ROPE, BLOCK_H, BLOCK_R, BLOCK_P, BLOCK_N, BLOCK_SIZE, SPLIT, DEPTH, FIRST,
                    WINDOW, CAPPED, PRECISION)
                highest, total, acc = combine(highest, total, acc, more_highest, more_total, more)
        if CELLS:
            for span in range(apart, end):
                cell = (row.to(tl.int64) * cells + span - apart) * HEADS + h
                part_highest = tl.load(extremes + cell, mask=live, other=float("-inf"))
                part_total = tl.load(extremes + tl.num_programs(0).to(tl.int64) * cells * HEADS + cell, mask=live,
                                     other=0.0)
                part = tl.load(results + cell[:, None] * RANK + r[None, :], mask=filled, other=0.0)
                highest, total, acc = combine(highest, total, acc, part_highest, part_total, part)
        mixed = acc / tl.where(live, total, 1.0)[:, None]
        at = (row.to(tl.int64) * HEADS + h)[:, None] * RANK + r[None, :]
        tl.store(out + at, mixed.to(out.dtype.element_ty), mask=filled)


@triton.jit
def store_kernel(k, cache, slots, k_stride, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows): what is cached of each row to its slot; padding has none."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    i = tl.arange(0, BLOCK)
    values = tl.load(k + row * k_stride + i, mask=i < WIDTH, other=0.0)
    tl.store(cache + slot * stride + i, values.to(cache.dtype.element_ty), mask=(i < WIDTH) & (i * 0 + slot >= 0))
