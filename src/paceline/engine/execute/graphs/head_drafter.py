"""HeadDrafter: a trained head as a part of every time of a repeated step. It drafts on the device, from what the steps
before have stored, with the target's noise; the host hears of it when the step is over."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.cache.storage import KVStorage
from paceline.engine.execute.graphs.seats import DeviceSeats
from paceline.engine.execute.target_heads import GROUP, TargetHeads
from paceline.kernels.device.head_rounds import HeadRound, RoundScope
from paceline.kernels.device.interface import DeviceKernels
from paceline.kernels.device.operands import Controls, SampledRows
from paceline.kernels.device.repeats import Drafts, RepeatInputs
from paceline.kernels.device.seats import SeatTables
from paceline.kernels.layout import GroupView, Layout
from paceline.models.heads.interface import Opened, Pass, Round


class HeadDrafter:
    """Nothing in it is decided on the host, so it can be captured. Groups that want something else keep what they
    have, and so do those that want either this or a look-up, and have found something that promises more."""

    def __init__(self, name: str, heads: TargetHeads, storage: KVStorage, blocks: Tensor, seats: DeviceSeats,
                 on_device: DeviceKernels) -> None:
        """`blocks` [groups or more, B] int32: of the groups, under which the planes lie."""
        self._head = heads.heads[name]
        config = self._head.config
        longest = config.max_position_embeddings if config.attends else None
        self._scope = RoundScope(heads.number(name), longest, blocks, storage.block_size)
        self._kernels = heads.kernels
        self._planes = heads.planes(name)
        self._window = config.sees(storage.groups[GROUP].window)
        self._seats = seats
        self._rounds = on_device.head_rounds(blocks.shape[0], blocks.device)

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
        rounds, levels = self._rounds, self.depth(min(depth, drafts.tokens.shape[1]))
        opened = rounds.open(inputs, tables, self._scope, levels)
        passes = [self._layout(one, opened) for one in self._head.passes(levels)]
        drafting = self._head.open(Opened(opened.previous, opened.before, passes, levels), self._planes, self._kernels)
        # Where something truncates or edits what the target samples from, drafts are sampled just as it does.
        draws = rounds.draws and not (controls.truncation or controls.edits)
        for level in range(levels):
            if draws:
                rounds.draw(opened, level, drafting.slot(opened.previous), self._head.target_ids, tables)
            else:
                self._sample(opened, level, drafting, tables.vocab_size, controls)
        rounds.close(opened, inputs, tables, drafts)

    def _sample(self, opened: HeadRound, level: int, drafting: Round, vocab_size: int, controls: Controls) -> None:
        logits, chances = drafting.logits(opened.previous)
        full, ids = logits, self._head.target_ids
        if ids is not None:
            full = logits.new_full((logits.shape[0], vocab_size), -torch.inf).index_copy_(1, ids, logits)
        rows = SampledRows(opened.owners, opened.places + 1 + level)
        sampled = self._seats.sampler.sample(full, rows, controls).long()
        if chances is None:
            chances = torch.exp(full.gather(1, sampled.clamp(min=0)[:, None])[:, 0] - logits.logsumexp(-1))
        opened.note(level, sampled, chances)

    def _layout(self, one: Pass, opened: HeadRound) -> Layout:
        groups = len(opened.places)
        laid = self._rounds.lay_out(opened, self._scope, one.first, one.rows, one.mutual)
        view = GroupView(self._scope.blocks[:groups], laid.slots, self._window)
        return Layout(laid.positions, list(range(0, groups * one.rows + 1, one.rows)), [0] * groups, [None] * groups,
                      self._scope.block_size, [view], laid.rows, mutual=one.mutual)
