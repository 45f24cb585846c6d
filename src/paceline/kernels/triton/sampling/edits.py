# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: SIM102 - an if on a constant is settled when the kernel is compiled, one inside it when it runs
"""Penalties, biased tokens and masks on the device: a float32 copy of the rows they act on."""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.kernels.device import columns
from paceline.kernels.triton.sampling.rows import COLUMNS, FLAGS, is_edited, parameter, real

PENALISED = tl.constexpr(columns.PENALISED)
BIASED = tl.constexpr(columns.BIASED)
MASKED = tl.constexpr(columns.MASKED)
REPETITION = tl.constexpr(columns.REPETITION)
PRESENCE = tl.constexpr(columns.PRESENCE)
FREQUENCY = tl.constexpr(columns.FREQUENCY)
LISTED = tl.constexpr(columns.LISTED)
LISTED_EARLY = tl.constexpr(columns.LISTED_EARLY)
EARLY_UNTIL = tl.constexpr(columns.EARLY_UNTIL)
AT_ONCE = tl.constexpr(4)
"""Entries of the list of biased tokens that are looked at together."""


@triton.jit
def count(seat, token, live, table, counts, width):
    """Sampled tokens of penalised seats, one or a block of them, count as output from now on."""
    flags = tl.load(table + seat * COLUMNS + FLAGS, mask=live, other=0)
    counted = live & ((flags & PENALISED) != 0) & (token >= 0)
    tl.atomic_add(counts + seat.to(tl.int64) * width + token, 2, mask=counted, sem="relaxed")


@triton.jit
def penalised(x, tokens, inside, seat, row, table, counts, parents, fed, width, DRAFTS: tl.constexpr):
    """`counts` hold 2 * (times in the output) + (1 if in the prompt). DRAFTS: what was fed at a row below another, and
    at those above it up to the root, counts as output."""
    seen = tl.load(counts + seat.to(tl.int64) * width + tokens, mask=inside, other=0)
    if DRAFTS:
        at = row
        above = tl.load(parents + at)
        while above >= 0:
            seen += tl.where(tokens == tl.load(fed + at), 2, 0)
            at = above.to(tl.int32)
            above = tl.load(parents + at)
    repetition = real(table, seat, REPETITION).to(tl.float32)
    presence = real(table, seat, PRESENCE).to(tl.float32)
    frequency = real(table, seat, FREQUENCY).to(tl.float32)
    count = seen >> 1
    y = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    y = y - tl.where(count > 0, presence, 0.0)
    y = y - frequency * count.to(tl.float32)
    return tl.where(seen > 0, y, x)


@triton.jit
def biased(x, tokens, first, seat, position, table, ids, values, room, BLOCK: tl.constexpr):
    """The seat's list: a finite value is added, -inf takes a token out. Entries name distinct tokens, but a stop
    token that min_tokens keeps out may also have a bias."""
    early = position < parameter(table, seat, EARLY_UNTIL)
    entries = tl.where(early, parameter(table, seat, LISTED_EARLY), parameter(table, seat, LISTED)).to(tl.int32)
    for start in range(0, entries, AT_ONCE):
        entry = start + tl.arange(0, AT_ONCE)
        token = tl.load(ids + seat * room + entry, mask=entry < entries, other=-1)
        here = (token >= first) & (token < first + BLOCK)
        if tl.max(here.to(tl.int32), 0) > 0:
            value = tl.load(values + seat * room + entry, mask=here, other=0.0)
            meets = tokens[:, None] == token[None, :]
            out = tl.max((meets & (value[None, :] == float("-inf"))).to(tl.int32), 1) > 0
            added = x + tl.sum(tl.where(meets, value[None, :], 0.0), 1)
            x = tl.where(out & (x == x), float("-inf"), added)
    return x


@triton.jit
def masked(x, tokens, inside, mask):
    """-inf where a token's bit is not set, except that a NaN stays: the row's error must not be hidden."""
    word = tl.load(mask + tokens // 32, mask=inside, other=0)
    allowed = ((word >> (tokens % 32)) & 1) != 0
    return tl.where(allowed | (x != x), x, float("-inf"))


@triton.jit
def edit_kernel(logits, stride, edited, seats, positions, table, counts, parents, fed, ids, values, room, seat_masks,
                row_masks, row_masked, width, DRAFTS: tl.constexpr, ROW_MASKS: tl.constexpr, BLOCK: tl.constexpr):
    """edited[row] = logits[row] after penalties, bias and masks, for rows that have any; grid (rows, chunks)."""
    row = tl.program_id(0)
    seat = tl.load(seats + row)
    if seat < 0:
        return
    flags = parameter(table, seat, FLAGS)
    if is_edited(flags, row_masked, row, ROW_MASKS) == 0:
        return
    first = tl.program_id(1) * BLOCK
    tokens = first + tl.arange(0, BLOCK)
    inside = tokens < width
    at = row.to(tl.int64)
    x = tl.load(logits + at * stride + tokens, mask=inside, other=float("-inf")).to(tl.float32)
    if (flags & PENALISED) != 0:
        x = penalised(x, tokens, inside, seat, row, table, counts, parents, fed, width, DRAFTS)
    if (flags & BIASED) != 0:
        x = biased(x, tokens, first, seat, tl.load(positions + row), table, ids, values, room, BLOCK)
    words = tl.cdiv(width, 32)
    if (flags & MASKED) != 0:
        x = masked(x, tokens, inside, seat_masks + seat.to(tl.int64) * words)
    if ROW_MASKS:
        if tl.load(row_masked + row) != 0:
            x = masked(x, tokens, inside, row_masks + at * words)
    tl.store(edited + at * width + tokens, x, mask=inside)
