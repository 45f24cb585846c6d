# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Attention over a latent cache on the device: one key of RANK + ROPE features a token for all heads, whose first RANK
are its value.

A program takes one row and BLOCK_H of its heads, which share every key, so it needs no neighbours to keep tensor cores
busy. Keys are found as in attention_device: through the block table up to a row's prefix, beyond it through its
ancestors. Spans of SPLIT keys are summed up each by itself and then combined in order, side by side by programs of
their own (APART) or one after the other in one program: the bits are the same, and no other row has a part in them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.kernels.triton.attention_device import combine, fold, page_slots, path_slots, soft_cap


@triton.jit
def walk_latents(latent, turned, cache, slots, table, ancestors, row, pos, prefix, begin, end, stride, scale, window,
                 cap, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr,
                 BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, DEPTH: tl.constexpr,
                 WINDOW: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr):
    """Keys begin .. end - 1 of one row -> highest score, sum of weights [H], sum of weighted values [H, R].
    latent [H, R], turned [H, P]: the two parts of its queries."""
    r = tl.arange(0, BLOCK_R)
    p = tl.arange(0, BLOCK_P)
    highest = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_R], tl.float32)
    for first_key in range(begin, end, BLOCK_N):
        j = first_key + tl.arange(0, BLOCK_N)
        inside = j < end
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


@triton.jit(do_not_specialize=["table_stride", "first", "splits", "window"])
def latent_kernel(q, cache, out, results, extremes, tables, slots, group_of_row, positions, prefixes, ancestors,
                  q_stride, stride, table_stride, first, splits, scale, window, cap, HEADS: tl.constexpr,
                  RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr,
                  BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, SPLIT: tl.constexpr,
                  APART: tl.constexpr, DEPTH: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
                  PRECISION: tl.constexpr):
    """Rows from `first` on. Grid (rows, blocks of heads, spans or 1) -> out [N, HEADS, RANK], or (APART) results
    [rows, spans, HEADS, RANK] float32 and extremes [2, rows, spans, HEADS], for gather_latents_kernel."""
    row = first + tl.program_id(0)
    pos = tl.load(positions + row)
    if pos >= 0:
        h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
        r = tl.arange(0, BLOCK_R)
        p = tl.arange(0, BLOCK_P)
        live = h < HEADS
        cells = live[:, None] & (r < RANK)[None, :]
        own = q + row.to(tl.int64) * q_stride + h[:, None] * (RANK + ROPE)
        latent = tl.load(own + r[None, :], mask=cells, other=0.0)
        turned = tl.load(own + RANK + p[None, :], mask=live[:, None] & (p < ROPE)[None, :], other=0.0)
        table = tables + tl.load(group_of_row + row).to(tl.int64) * table_stride
        prefix = tl.load(prefixes + row)
        end = pos + 1
        begin = end * 0
        if WINDOW:
            begin = tl.maximum(end - window, 0) // BLOCK_N * BLOCK_N
        if APART:
            span = tl.program_id(2)
            highest, total, acc = walk_latents(
                latent, turned, cache, slots, table, ancestors, row, pos, prefix, tl.maximum(span * SPLIT, begin),
                tl.minimum(span * SPLIT + SPLIT, end), stride, scale, window, cap, RANK, ROPE, BLOCK_H, BLOCK_R,
                BLOCK_P, BLOCK_N, BLOCK_SIZE, DEPTH, WINDOW, CAPPED, PRECISION)
            cell = (tl.program_id(0).to(tl.int64) * splits + span) * HEADS + h
            tl.store(extremes + cell, highest, mask=live)
            tl.store(extremes + tl.num_programs(0).to(tl.int64) * splits * HEADS + cell, total, mask=live)
            tl.store(results + cell[:, None] * RANK + r[None, :], acc, mask=cells)
        else:
            highest = tl.full([BLOCK_H], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_H], tl.float32)
            acc = tl.zeros([BLOCK_H, BLOCK_R], tl.float32)
            for span in range(begin // SPLIT, tl.cdiv(end, SPLIT)):
                more_highest, more_total, more = walk_latents(
                    latent, turned, cache, slots, table, ancestors, row, pos, prefix, tl.maximum(span * SPLIT, begin),
                    tl.minimum(span * SPLIT + SPLIT, end), stride, scale, window, cap, RANK, ROPE, BLOCK_H, BLOCK_R,
                    BLOCK_P, BLOCK_N, BLOCK_SIZE, DEPTH, WINDOW, CAPPED, PRECISION)
                highest, total, acc = combine(highest, total, acc, more_highest, more_total, more)
            mixed = acc / tl.where(live, total, 1.0)[:, None]
            at = (row.to(tl.int64) * HEADS + h)[:, None] * RANK + r[None, :]
            tl.store(out + at, mixed.to(out.dtype.element_ty), mask=cells)


@triton.jit(do_not_specialize=["first", "splits", "window"])
def gather_latents_kernel(results, extremes, out, positions, first, splits, window, HEADS: tl.constexpr,
                          RANK: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
                          SPLIT: tl.constexpr, WINDOW: tl.constexpr):
    """Rows from `first` on. Grid (rows, blocks of heads): the spans of a row in order."""
    row = first + tl.program_id(0)
    pos = tl.load(positions + row)
    if pos >= 0:
        h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
        r = tl.arange(0, BLOCK_R)
        live = h < HEADS
        cells = live[:, None] & (r < RANK)[None, :]
        highest = tl.full([BLOCK_H], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_H], tl.float32)
        acc = tl.zeros([BLOCK_H, BLOCK_R], tl.float32)
        begin = pos * 0
        if WINDOW:
            begin = tl.maximum(pos + 1 - window, 0) // BLOCK_N * BLOCK_N
        for span in range(begin // SPLIT, tl.cdiv(pos + 1, SPLIT)):
            cell = (tl.program_id(0).to(tl.int64) * splits + span) * HEADS + h
            part_highest = tl.load(extremes + cell, mask=live, other=float("-inf"))
            part_total = tl.load(extremes + tl.num_programs(0).to(tl.int64) * splits * HEADS + cell, mask=live,
                                 other=0.0)
            part = tl.load(results + cell[:, None] * RANK + r[None, :], mask=cells, other=0.0)
            highest, total, acc = combine(highest, total, acc, part_highest, part_total, part)
        mixed = acc / tl.where(live, total, 1.0)[:, None]
        at = (row.to(tl.int64) * HEADS + h)[:, None] * RANK + r[None, :]
        tl.store(out + at, mixed.to(out.dtype.element_ty), mask=cells)
