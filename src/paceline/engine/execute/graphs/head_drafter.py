"""HeadDrafter: a trained head as a part of every time of a repeated step. It drafts on the device, from what the steps
before have stored, with the target's noise; the host hears of it when the step is over."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.cache.storage import KVStorage
from paceline.engine.execute.graphs.chances import LEAST_CHANCE
from paceline.engine.execute.graphs.seats import DeviceSeats
from paceline.engine.execute.target_heads import GROUP, TargetHeads
from paceline.kernels.device import columns
from paceline.kernels.device.interface import DeviceKernels
from paceline.kernels.device.lookup import ALWAYS, HIGHEST, LOOK_BACK, head_number, looks_up, most_wanted
from paceline.kernels.device.operands import Controls, SampledRows
from paceline.kernels.device.repeats import Drafts, RepeatInputs
from paceline.kernels.device.rows import DeviceRows
from paceline.kernels.device.seats import SeatTables
from paceline.kernels.layout import GroupView, Layout
from paceline.models.heads.interface import Opened, Pass

NO_MATCH = -1
"""In place of how many tokens had matched: nothing was looked up."""


class HeadDrafter:
    """Nothing in it is decided on the host, so it can be captured. Groups that want something else keep what they
    have, and so do those that want either this or a look-up, and have found something that promises more."""

    def __init__(self, name: str, heads: TargetHeads, storage: KVStorage, blocks: Tensor, seats: DeviceSeats,
                 on_device: DeviceKernels) -> None:
        """`blocks` [groups or more, B] int32: of the groups, under which the planes lie."""
        self._head = heads.heads[name]
        self._number = heads.number(name)
        config = self._head.config
        self._longest = config.max_position_embeddings if config.attends else None
        self._kernels = heads.kernels
        self._planes = heads.planes(name)
        self._block_size = storage.block_size
        self._window = storage.groups[GROUP].window
        self._blocks = blocks
        self._seats = seats
        self._on_device = on_device

    def depth(self, wanted: int) -> int:
        """Tokens that it drafts for who wants so many."""
        most = self._head.config.depth
        return wanted if most is None else min(wanted, most)

    def reach(self, depth: int) -> int:
        """Positions behind a newest token that drafts of so many tokens take, or passes for them write to."""
        own = self.depth(depth)
        return max(own, *(one.first + one.rows - 1 for one in self._head.passes(own)), 0)

    def propose(self, inputs: RepeatInputs, tables: SeatTables, drafts: Drafts, controls: Controls, depth: int) -> None:
        """As DeviceDrafter.propose. `controls`: of the requests of the step; what is drafted above a token is not seen
        by penalties. `depth`: the most tokens to draft for anybody."""
        seats = inputs.seats.clamp(min=0)
        places = tables.lengths.index_select(0, seats).long() - 1
        words = tables.table[:, columns.LOOKUP].index_select(0, seats)
        ends = inputs.ends if self._longest is None else inputs.ends.clamp(max=self._longest)
        room = ends - places
        mine = (inputs.seats >= 0) & (room > 0) & (head_number(words) == self._number)
        places = places.where(mine, 0)
        levels = self.depth(min(depth, drafts.tokens.shape[1]))
        anchors = tables.texts.flatten().index_select(0, seats * tables.texts.shape[1] + places).long()
        before = self._slots(places - 1).where(places > 0, 0)
        passes = [self._layout(one, places, mine, ends) for one in self._head.passes(levels)]
        drafting = self._head.open(Opened(anchors, before, passes, levels), self._planes, self._kernels)
        owners = inputs.seats.where(mine, -1).to(torch.int32)
        wanted = torch.minimum(most_wanted(words), room - 1)
        always = (words & ALWAYS) != 0
        going, reached, found = mine, torch.ones_like(places, dtype=torch.float32), torch.zeros_like(drafts.found)
        promised = torch.zeros_like(reached)
        made: list[tuple[Tensor, Tensor]] = []
        for index in range(levels):
            logits, confidence = drafting.logits(anchors)
            full = self._full(logits, tables.vocab_size)
            rows = SampledRows(owners, places + 1 + index)
            sampled = self._seats.sampler.sample(full, rows, controls).long()
            anchors = sampled.clamp(min=0)
            if confidence is None:
                confidence = torch.exp(full.gather(1, anchors[:, None])[:, 0] - logits.logsumexp(-1))
            reached = reached * confidence.clamp(max=1.0)
            level = _levels(reached).masked_fill(always, HIGHEST)
            going = going & (sampled >= 0) & (index < wanted) & (level > 0)
            found = found + going.to(found.dtype)
            promised = promised + reached.where(going, 0.0)
            made.append((anchors.to(torch.int32), level.to(torch.int32)))
        taken = mine & (~looks_up(words) | (promised > _promised(inputs, drafts)))
        for index, (tokens, level) in enumerate(made):
            drafts.tokens[:, index] = tokens.where(taken, drafts.tokens[:, index])
            drafts.levels[:, index] = level.where(taken, drafts.levels[:, index])
        drafts.found.copy_(found.where(taken, drafts.found))
        drafts.matched.masked_fill_(taken, NO_MATCH)

    def _full(self, logits: Tensor, vocab_size: int) -> Tensor:
        ids = self._head.target_ids
        if ids is None:
            return logits
        return logits.new_full((logits.shape[0], vocab_size), -torch.inf).index_copy_(1, ids, logits)

    def _slots(self, places: Tensor) -> Tensor:
        """[G] or [G, rows] positions -> their slots; those of positions that nobody has mean nothing."""
        by_group = places.clamp(min=0).view(places.shape[0], -1)
        pages = (by_group // self._block_size).clamp(max=self._blocks.shape[1] - 1)
        blocks = self._blocks[:places.shape[0]].gather(1, pages).long()
        return (blocks * self._block_size + by_group % self._block_size).view(places.shape)

    def _layout(self, one: Pass, places: Tensor, mine: Tensor, ends: Tensor) -> Layout:
        """A pass over the same number of rows of each group. Rows at positions that are not reserved are padding."""
        groups, rows, device = places.shape[0], one.rows, places.device
        at = places[:, None] + one.first + torch.arange(rows, device=device)
        on = (mine[:, None] & (at < ends[:, None])).flatten()
        seen = torch.minimum(places + one.first + rows, ends)[:, None].expand(-1, rows) - 1 if one.mutual else at
        shape = self._on_device.decode_shape(groups * rows)
        device_rows = DeviceRows.over(shape, torch.zeros(shape.size, dtype=torch.int32, device=device))
        owner = torch.arange(groups, device=device).repeat_interleave(rows, output_size=groups * rows)
        device_rows.group.copy_(owner.where(on, -1))
        device_rows.positions.copy_(seen.flatten().where(on, -1))
        device_rows.prefix.copy_((seen.flatten() + 1).where(on, 0))
        device_rows.tiles[0].copy_(torch.arange(groups * rows, device=device))
        device_rows.tiles[1].copy_(on)
        view = GroupView(self._blocks[:groups], self._slots(at).flatten().where(on, -1), self._window)
        return Layout(at.flatten().where(on, 0), list(range(0, groups * rows + 1, rows)), [0] * groups, [None] * groups,
                      self._block_size, [view], device_rows, mutual=one.mutual)


def _promised(inputs: RepeatInputs, drafts: Drafts) -> Tensor:
    """[G] how many tokens of what was looked up should be accepted, whether or not they are to be drafted always."""
    most = drafts.tokens.shape[1]
    levels = inputs.levels.index_select(0, drafts.matched.long().clamp(0, LOOK_BACK))[:, :most]
    chances = LEAST_CHANCE ** ((HIGHEST - levels) / (HIGHEST - 1))
    drafted = torch.arange(most, device=levels.device) < drafts.found[:, None]
    return chances.where(drafted & (levels > 0), 0.0).sum(1)


def _levels(reached: Tensor) -> Tensor:
    """How likely a token is to be reached and accepted, as a level (Chances.levels)."""
    level = 1 + (HIGHEST - 1) * (1 - torch.log(reached.clamp(min=1e-9)) / math.log(LEAST_CHANCE))
    return level.long().where(reached >= LEAST_CHANCE, 0)
