# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Rounds of trained heads: who takes part, the rows of a pass, tokens drawn from a draft vocabulary, what is kept."""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.kernels.device import columns, head_rounds, lookup
from paceline.kernels.triton.overlap_device import start
from paceline.kernels.triton.sampling.noise import gumbel, quad_words
from paceline.kernels.triton.sampling.rows import (
    COLUMNS,
    FLAGS,
    LOWEST,
    NOT_A_NUMBER,
    TEMPERATURE,
    key_of,
    scaled,
    token_of,
)
from paceline.kernels.triton.stepping_device import newest

LOOKUP = tl.constexpr(columns.LOOKUP)
SEED = tl.constexpr(columns.SEED)
GREEDY = tl.constexpr(columns.GREEDY)
HEAD = tl.constexpr(lookup.HEAD)
ALWAYS = tl.constexpr(lookup.ALWAYS)
HIGHEST = tl.constexpr(lookup.HIGHEST)
LOOK_BACK = tl.constexpr(lookup.LOOK_BACK)
MOST_DRAFTED = tl.constexpr(lookup.MOST_DRAFTED)
LEAST_CHANCE = tl.constexpr(lookup.LEAST_CHANCE)
LOG_LEAST = tl.constexpr(lookup.LOG_LEAST)
NO_MATCH = tl.constexpr(head_rounds.NO_MATCH)

PROBABILITY, SURENESS, KNOWN = (tl.constexpr(kind) for kind in range(3))
"""How the chance of a token is told."""


@triton.jit
def slot_of(blocks, stride, width, group, at, mask, BLOCK_SIZE: tl.constexpr):
    """Of positions of groups, where the mask says."""
    page = tl.minimum(at // BLOCK_SIZE, width - 1)
    return tl.load(blocks + group * stride + page, mask=mask, other=0).to(tl.int64) * BLOCK_SIZE + at % BLOCK_SIZE


@triton.jit
def open_kernel(seats, ends, table, texts, room, lengths, blocks, blocks_stride, blocks_width, number, longest, owners,
                places, ends_out, previous, before, groups, BLOCK_SIZE: tl.constexpr, GROUPS: tl.constexpr):
    """One program."""
    g = tl.arange(0, GROUPS)
    there = g < groups
    seat, place, _ = newest(seats, ends, lengths, g, groups)
    end = tl.minimum(tl.load(ends + g, mask=there, other=0), longest)
    words = tl.load(table + seat * COLUMNS + LOOKUP, mask=seat >= 0, other=0)
    mine = (seat >= 0) & (place < end) & (words // HEAD == number)
    at = tl.where(mine, place, 0).to(tl.int64)
    follows = mine & (at > 0)
    slot = slot_of(blocks, blocks_stride, blocks_width, g, tl.maximum(at - 1, 0), follows, BLOCK_SIZE)
    tl.store(owners + g, tl.where(mine, seat, -1).to(tl.int32), mask=there)
    tl.store(places + g, at, mask=there)
    tl.store(ends_out + g, end, mask=there)
    tl.store(previous + g, tl.load(texts + seat * room + at, mask=mine, other=0).to(tl.int64), mask=there)
    tl.store(before + g, tl.where(follows, slot, 0), mask=there)


@triton.jit
def lay_out_kernel(owners, places, ends, blocks, blocks_stride, blocks_width, first, group_of_row, seen_positions,
                   prefix, tiles, positions, slots, count, PER_GROUP: tl.constexpr, MUTUAL: tl.constexpr,
                   BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr):
    """Grid (blocks of rows), of `count` rows in all, PER_GROUP a group."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < count
    group = row // PER_GROUP
    end = tl.load(ends + group, mask=there, other=0)
    begin = tl.load(places + group, mask=there, other=0) + first
    at = begin + row % PER_GROUP
    on = there & (tl.load(owners + group, mask=there, other=-1) >= 0) & (at < end)
    seen = at
    if MUTUAL:
        seen = tl.minimum(begin + PER_GROUP, end) - 1
    slot = slot_of(blocks, blocks_stride, blocks_width, group, at, on, BLOCK_SIZE)
    tl.store(group_of_row + row, tl.where(on, group, -1), mask=there)
    tl.store(seen_positions + row, tl.where(on, seen, -1).to(tl.int32), mask=there)
    tl.store(prefix + row, tl.where(on, seen + 1, 0).to(tl.int32), mask=there)
    tl.store(tiles + row, row, mask=there)
    tl.store(tiles + count + row, on.to(tl.int32), mask=there)
    tl.store(positions + row, tl.where(on, at, 0), mask=there)
    tl.store(slots + row, tl.where(on, slot, -1), mask=there)


@triton.jit
def sureness(hidden, hidden_stride, weight, bias, first, last, g, on, size, RANK: tl.constexpr, SLICE: tl.constexpr,
             SEES_TOKEN: tl.constexpr, TILE: tl.constexpr, STRIPE: tl.constexpr):
    """What the confidence head says of groups g [TILE], before the sigmoid."""
    sure = tl.zeros((TILE,), tl.float32) + tl.load(bias).to(tl.float32)
    for begin in range(0, size, STRIPE):
        column = begin + tl.arange(0, STRIPE)
        seen = tl.load(hidden + g.to(tl.int64)[:, None] * hidden_stride + column[None, :],
                       mask=on[:, None] & (column < size)[None, :], other=0.0).to(tl.float32)
        sure += tl.sum(seen * tl.load(weight + column, mask=column < size, other=0.0).to(tl.float32)[None, :], 1)
    if SEES_TOKEN:
        for begin in tl.static_range(0, RANK, SLICE):
            r = begin + tl.arange(0, SLICE)
            of_token = tl.load(weight + size + r, mask=r < RANK, other=0.0).to(tl.float32)
            seen = tl.load(first + last[:, None] * RANK + r[None, :], mask=on[:, None] & (r < RANK)[None, :],
                           other=0.0).to(tl.float32)
            sure += tl.sum(seen * of_token[None, :], 1)
    return sure


@triton.jit
def told(drafted, CHANCE: tl.constexpr):
    """Whose chance is written when all have come: of a head that says how sure it is, who has drafted nothing."""
    return (drafted == 0) if CHANCE == SURENESS else (drafted == drafted)


@triton.jit
def draw_kernel(logits, stride, first, second, ids, hidden, hidden_stride, sure_weight, sure_bias, known, owners,
                places, previous, table, best, tops, sums, arrived, tokens_out, chances_out, levels, level, groups,
                width, size, RANK: tl.constexpr, SLICE: tl.constexpr, IDS: tl.constexpr, CHANCE: tl.constexpr,
                SEES_TOKEN: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
                STRIPE: tl.constexpr, OVERLAP: tl.constexpr):
    """A token for each group; grid (chunks of the draft vocabulary, tiles of groups). What a token before adds is a
    product of TILE rows, which tensor cores make of one row in no more time.

    best [groups] int64 starts as LOWEST and arrived [tiles] int32 as 0; whoever comes last leaves them so, and writes
    the token, its chance, and what the next level goes on from. Keys are of draft ids, which ascend as the target's.
    """
    start(OVERLAP)
    tile = tl.program_id(1)
    g = tile * TILE + tl.arange(0, TILE)
    seat = tl.load(owners + g, mask=g < groups, other=-1)
    if tl.max(seat, 0) < 0:  # nothing but padding
        return
    on = seat >= 0
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = on[:, None] & (token < width)[None, :]
    x = tl.load(logits + g.to(tl.int64)[:, None] * stride + token[None, :], mask=inside,
                other=float("-inf")).to(tl.float32)
    last = tl.load(previous + g, mask=on, other=0)
    at = g * levels + level
    if CHANCE == SURENESS:  # noqa: SIM102 decided when it is compiled
        if tl.program_id(0) == 0:  # not by whoever comes last: everybody would wait for it
            sure = sureness(hidden, hidden_stride, sure_weight, sure_bias, first, last, g, on, size, RANK, SLICE,
                            SEES_TOKEN, TILE, STRIPE)
            tl.store(chances_out + at, 1.0 / (1.0 + tl.exp(-sure)), mask=on)
    for begin in tl.static_range(0, RANK, SLICE):
        r = begin + tl.arange(0, SLICE)
        of_last = tl.load(first + last[:, None] * RANK + r[None, :], mask=on[:, None] & (r < RANK)[None, :], other=0.0)
        of_next = tl.load(second + token[None, :] * RANK + r[:, None],
                          mask=(r < RANK)[:, None] & (token < width)[None, :], other=0.0)
        x = tl.dot(of_last, of_next, x, input_precision="ieee")
    alive = inside & (x > float("-inf"))
    flags = tl.load(table + seat * COLUMNS + FLAGS, mask=on, other=GREEDY)
    greedy = (flags & GREEDY) != 0
    score = x
    if tl.min(greedy.to(tl.int32), 0) == 0:
        temperature = tl.load(table + seat * COLUMNS + TEMPERATURE, mask=on & (greedy == 0), other=0)
        temperature = tl.where(greedy, 1.0, temperature.to(tl.float64, bitcast=True).to(tl.float32))
        seed = tl.load(table + seat * COLUMNS + SEED, mask=on, other=0)
        position = tl.load(places + g, mask=on, other=0) + 1 + level
        named = token.to(tl.int64)
        if IDS:
            named = tl.load(ids + token, mask=token < width, other=0)
        w0, w1, w2, w3 = quad_words((named >> 2)[None, :], seed[:, None], position[:, None])
        which = (named & 3)[None, :]
        bits = tl.where(which < 2, tl.where(which == 0, w0, w1), tl.where(which == 2, w2, w3))
        drawn = scaled(x, temperature[:, None]) + gumbel(bits)
        score = tl.where(greedy[:, None], x, drawn)
    found = tl.max(tl.where(x != x, NOT_A_NUMBER, tl.where(alive, key_of(score, token[None, :]), LOWEST)), 1)
    tl.atomic_max(best + g, found, mask=on, sem="relaxed")
    if CHANCE == PROBABILITY:
        top = tl.max(tl.where(alive, x, float("-inf")), 1)
        total = tl.sum(tl.where(alive, tl.exp(x - tl.where(top == float("-inf"), 0.0, top)[:, None]), 0.0), 1)
        tl.store(tops + g * CHUNKS + tl.program_id(0), top, mask=on)
        tl.store(sums + g * CHUNKS + tl.program_id(0), total, mask=on)
    tl.debug_barrier()  # all warps have told what they found before one of them says so
    if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(arrived + tile, 0)
        won = tl.atomic_xchg(best + g, tl.full((TILE,), LOWEST, tl.int64), mask=on, sem="acq_rel")
        drafted = on & (won > LOWEST) & (won < NOT_A_NUMBER)
        winner = tl.where(drafted, token_of(won), 0)
        name = winner.to(tl.int64)
        if IDS:
            name = tl.load(ids + winner, mask=drafted, other=0)
        chance = tl.zeros((TILE,), tl.float32)
        if CHANCE == KNOWN:
            chance = tl.load(known + g, mask=on, other=0.0)
        elif CHANCE == PROBABILITY:
            own = tl.load(logits + g.to(tl.int64) * stride + winner, mask=drafted, other=0.0).to(tl.float32)
            for begin in tl.static_range(0, RANK, SLICE):
                r = begin + tl.arange(0, SLICE)
                mask = drafted[:, None] & (r < RANK)[None, :]
                own += tl.sum(tl.load(first + last[:, None] * RANK + r[None, :], mask=mask, other=0.0).to(tl.float32)
                              * tl.load(second + winner[:, None] * RANK + r[None, :], mask=mask,
                                        other=0.0).to(tl.float32), 1)
            chunk = tl.arange(0, CHUNKS)
            there = on[:, None] & (chunk < tl.num_programs(0))[None, :]
            top_of = tl.load(tops + g[:, None] * CHUNKS + chunk[None, :], mask=there, other=float("-inf"),
                             volatile=True)
            sum_of = tl.load(sums + g[:, None] * CHUNKS + chunk[None, :], mask=there, other=0.0, volatile=True)
            top = tl.max(top_of, 1)
            top = tl.where(top == float("-inf"), 0.0, top)
            total = tl.sum(sum_of * tl.exp(top_of - top[:, None]), 1)
            chance = tl.exp(own - top) / tl.where(total > 0.0, total, 1.0)
        tl.store(tokens_out + at, tl.where(drafted, name, -1).to(tl.int32), mask=g < groups)
        # How sure the head is was told before.
        tl.store(chances_out + at, tl.where(drafted, chance, 0.0), mask=(g < groups) & told(drafted, CHANCE))
        tl.store(previous + g, name, mask=drafted)


@triton.jit
def level_of(reached, always):
    """As Chances.levels has it."""
    level = 1.0 + (HIGHEST - 1) * (1.0 - tl.log(tl.maximum(reached, 1e-9)) / LOG_LEAST)
    return tl.where(always, HIGHEST, tl.where(reached >= LEAST_CHANCE, level.to(tl.int32), 0))


@triton.jit
def close_kernel(table, levels_in, owners, places, ends, tokens, chances, drafts, levels_out, found, matched,
                 groups, LEVELS: tl.constexpr, MOST: tl.constexpr, GROUPS: tl.constexpr):
    """One program."""
    g = tl.arange(0, GROUPS)
    there = g < groups
    seat = tl.load(owners + g, mask=there, other=-1)
    mine = seat >= 0
    words = tl.load(table + seat * COLUMNS + LOOKUP, mask=mine, other=0)
    always = (words & ALWAYS) != 0
    room = tl.load(ends + g, mask=mine, other=0) - tl.load(places + g, mask=mine, other=0) - 1
    wanted = tl.minimum((words >> 16) & 255, room)
    going = mine
    count = tl.zeros((GROUPS,), tl.int32)
    reached = tl.full((GROUPS,), 1.0, tl.float32)
    promised = tl.zeros((GROUPS,), tl.float32)
    for index in range(LEVELS):
        reached *= tl.minimum(tl.load(chances + g * LEVELS + index, mask=mine, other=0.0), 1.0)
        drafted = tl.load(tokens + g * LEVELS + index, mask=mine, other=-1) >= 0
        going = going & drafted & (index < wanted) & (level_of(reached, always) > 0)
        count += going.to(tl.int32)
        promised += tl.where(going, reached, 0.0)
    looked_up = tl.load(found + g, mask=mine, other=0)
    match = tl.minimum(tl.maximum(tl.load(matched + g, mask=mine, other=0), 0), LOOK_BACK)
    other = tl.zeros((GROUPS,), tl.float32)
    for index in range(MOST):
        level = tl.load(levels_in + match * MOST_DRAFTED + index, mask=mine, other=0)
        chance = tl.exp((level - HIGHEST).to(tl.float32) * (-LOG_LEAST / (HIGHEST - 1)))
        other += tl.where((index < looked_up) & (level > 0), chance, 0.0)
    taken = mine & (((words & 0xFFFF) == 0) | (promised > other))
    reached = tl.full((GROUPS,), 1.0, tl.float32)
    for index in range(LEVELS):
        reached *= tl.minimum(tl.load(chances + g * LEVELS + index, mask=mine, other=0.0), 1.0)
        token = tl.load(tokens + g * LEVELS + index, mask=mine, other=0)
        tl.store(drafts + g * MOST + index, tl.maximum(token, 0), mask=taken)
        tl.store(levels_out + g * MOST + index, level_of(reached, always), mask=taken)
    tl.store(found + g, count, mask=taken)
    tl.store(matched + g, tl.full((GROUPS,), NO_MATCH, tl.int32), mask=taken)
