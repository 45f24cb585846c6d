"""SteppedHeadRounds: HeadRounds in a few lines of torch each."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.kernels.device import columns
from paceline.kernels.device.head_rounds import NO_MATCH, DraftSlot, HeadRound, PassRows, RoundScope
from paceline.kernels.device.lookup import (
    ALWAYS,
    HIGHEST,
    LEAST_CHANCE,
    LOG_LEAST,
    LOOK_BACK,
    head_number,
    looks_up,
    most_wanted,
)
from paceline.kernels.device.repeats import Drafts, RepeatInputs
from paceline.kernels.device.rows import DeviceRows, RowsShape
from paceline.kernels.device.seats import SeatTables


class SteppedHeadRounds:
    """What each op promises is on HeadRounds."""

    draws = False

    def open(self, inputs: RepeatInputs, tables: SeatTables, scope: RoundScope, levels: int) -> HeadRound:
        opened = HeadRound.of(len(inputs.seats), levels, inputs.seats.device)
        seats = inputs.seats.clamp(min=0)
        places = tables.lengths.index_select(0, seats).long() - 1
        opened.ends.copy_(inputs.ends if scope.longest is None else inputs.ends.clamp(max=scope.longest))
        mine = (inputs.seats >= 0) & (opened.ends > places) & (head_number(_words(inputs, tables)) == scope.number)
        opened.owners.copy_(inputs.seats.where(mine, -1))
        opened.places.copy_(places.where(mine, 0))
        opened.previous.copy_(tables.texts[seats, opened.places])
        opened.before.copy_(_slots(opened.places - 1, scope).where(opened.places > 0, 0))
        return opened

    def lay_out(self, opened: HeadRound, scope: RoundScope, first: int, rows: int, mutual: bool) -> PassRows:
        groups, device = len(opened.places), opened.places.device
        at = opened.places[:, None] + first + torch.arange(rows, device=device)
        on = ((opened.owners[:, None] >= 0) & (at < opened.ends[:, None])).flatten()
        seen = at
        if mutual:
            seen = torch.minimum(opened.places + first + rows, opened.ends)[:, None].expand(-1, rows) - 1
        shape = RowsShape.bucket(groups * rows, 1, 0)
        laid = DeviceRows.over(shape, torch.zeros(shape.size, dtype=torch.int32, device=device))
        laid.group.copy_(torch.arange(groups, device=device).repeat_interleave(rows).where(on, -1))
        laid.positions.copy_(seen.flatten().where(on, -1))
        laid.prefix.copy_((seen.flatten() + 1).where(on, 0))
        laid.tiles[0].copy_(torch.arange(groups * rows, device=device))
        laid.tiles[1].copy_(on)
        return PassRows(at.flatten().where(on, 0), _slots(at, scope).flatten().where(on, -1), laid)

    def draw(self, opened: HeadRound, level: int, slot: DraftSlot, ids: Tensor | None, tables: SeatTables) -> None:
        raise NotImplementedError("tokens are sampled as the target's are")

    def close(self, opened: HeadRound, inputs: RepeatInputs, tables: SeatTables, drafts: Drafts) -> None:
        words, mine = _words(inputs, tables), opened.owners >= 0
        count = opened.tokens.shape[1]
        reached = opened.chances.clamp(max=1.0).cumprod(1)
        levels = _levels(reached).masked_fill(((words & ALWAYS) != 0)[:, None], HIGHEST)
        wanted = torch.minimum(most_wanted(words), opened.ends - opened.places - 1)
        going = (opened.tokens >= 0) & (torch.arange(count, device=words.device) < wanted[:, None]) & (levels > 0)
        going = (going & mine[:, None]).cumprod(1).bool()
        promised = reached.where(going, 0.0).sum(1)
        taken = mine & (~looks_up(words) | (promised > _promised(inputs, drafts)))
        drafts.tokens[:, :count] = opened.tokens.clamp(min=0).where(taken[:, None], drafts.tokens[:, :count])
        drafts.levels[:, :count] = levels.int().where(taken[:, None], drafts.levels[:, :count])
        drafts.found.copy_(going.sum(1).where(taken, drafts.found))
        drafts.matched.masked_fill_(taken, NO_MATCH)


def _words(inputs: RepeatInputs, tables: SeatTables) -> Tensor:
    return tables.table[:, columns.LOOKUP].index_select(0, inputs.seats.clamp(min=0))


def _slots(places: Tensor, scope: RoundScope) -> Tensor:
    """[G] or [G, rows] positions -> their slots; those of positions that nobody has mean nothing."""
    by_group = places.clamp(min=0).view(places.shape[0], -1)
    pages = (by_group // scope.block_size).clamp(max=scope.blocks.shape[1] - 1)
    blocks = scope.blocks[:places.shape[0]].gather(1, pages).long()
    return (blocks * scope.block_size + by_group % scope.block_size).view(places.shape)


def _promised(inputs: RepeatInputs, drafts: Drafts) -> Tensor:
    """[G] how many tokens of what was looked up should be accepted, whether or not they are to be drafted always."""
    most = drafts.tokens.shape[1]
    levels = inputs.levels.index_select(0, drafts.matched.long().clamp(0, LOOK_BACK))[:, :most]
    chances = LEAST_CHANCE ** ((HIGHEST - levels) / (HIGHEST - 1))
    drafted = torch.arange(most, device=levels.device) < drafts.found[:, None]
    return chances.where(drafted & (levels > 0), 0.0).sum(1)


def _levels(reached: Tensor) -> Tensor:
    """How likely a token is to be reached and accepted, as a level (Chances.levels)."""
    level = 1 + (HIGHEST - 1) * (1 - torch.log(reached.clamp(min=1e-9)) / LOG_LEAST)
    return level.long().where(reached >= LEAST_CHANCE, 0)
