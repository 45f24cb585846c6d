"""Batch: rows of several owners laid out flat, as a model's forward reads them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from paceline.cache.transfers import BlockCopy, SlotMove
from paceline.engine.schedule.sequence import PENDING
from paceline.engine.schedule.step import RowGroup, Rows, Step
from paceline.kernels.groups import CacheGroup
from paceline.kernels.layout import GroupView, Layout
from paceline.kernels.low_rank import NOBODY


@dataclass(slots=True)
class Batch:
    """Ready to run; valid whatever happens to its owners meanwhile."""

    layout: Layout
    """Its tensors lie on the host."""
    tokens: np.ndarray
    """[N] int64; PENDING ones are filled in when the batch runs."""
    row_seats: np.ndarray
    """[N] int64: the block table of each row."""
    wanted: list[int]
    """Rows whose logits are needed."""
    first: list[int]
    """Each group's first place among those, or -1."""
    moves: Seq[SlotMove] = ()
    """Of what the cache holds, then copies: to be carried out before the rows run."""
    copies: Seq[BlockCopy] = ()
    adapters: np.ndarray | None = None
    """[N] int64, the slot of each row's adapter or NOBODY; None: no row has one."""
    pending: bool = False
    """Some tokens are PENDING."""

    @property
    def rows(self) -> int:
        return self.layout.rows

    def fill_pending(self, groups: Seq[RowGroup]) -> None:
        """All steps before this one are committed: what was PENDING is the newest token of its sequence."""
        for group, offset in zip(groups, self.layout.offsets) if self.pending else ():
            if self.tokens[offset] == PENDING:
                self.tokens[offset] = group.seq.tokens[-1]


@dataclass(slots=True)
class StepLogits:
    """logits: [R, V] float32, the rows that were asked for, group after group. first[g]: where group g's rows begin
    in it, or -1. hidden: tapped hidden states [N, h] of every row, by layer."""

    logits: torch.Tensor
    first: list[int]
    hidden: dict[int, torch.Tensor]


class BatchBuilder:
    """Lays rows out by the block tables of one cache, as they stand at the moment."""

    def __init__(self, tables: Seq[np.ndarray], groups: Seq[CacheGroup], block_size: int) -> None:
        """`tables`: per cache group the block tables by seat, which the cache's manager keeps."""
        self._tables = tables
        self._windows = [group.window for group in groups]
        self._block_size = block_size

    def of_step(self, step: Step) -> Batch:
        return self.build(step.groups, step.moves, step.copies)

    def build(self, groups: Seq[Rows], moves: Seq[SlotMove] = (), copies: Seq[BlockCopy] = ()) -> Batch:
        """Vectorised over rows: the host's time per row is what small models die of."""
        starts = [group.start for group in groups]
        parents = [group.parents for group in groups]
        known = [token for group in groups for token in group.tokens]
        tokens = np.array(known, dtype=np.int64)
        seats = np.array([group.seq.allocation.seat for group in groups], dtype=np.int64)
        physical = np.array(starts, dtype=np.int64)
        row_seats = seats
        if len(tokens) == len(groups):
            offsets = list(range(len(groups) + 1))
            furthest = max(starts)
        else:
            lengths = [len(group.tokens) for group in groups]
            offsets = [0, *accumulate(lengths)]
            furthest = max(start + length for start, length in zip(starts, lengths)) - 1
            physical = np.repeat(physical - np.array(offsets[:-1]), lengths) + np.arange(offsets[-1])
            row_seats = np.repeat(seats, lengths)
        positions = physical
        for index, tree in enumerate(parents):
            if tree is not None:
                positions = positions.copy() if positions is physical else positions
                positions[offsets[index]:offsets[index + 1]] = _tree_positions(starts[index], tree)

        size = self._block_size
        pages = physical // size
        places = physical - pages * size
        width = furthest // size + 1
        views = [GroupView(torch.from_numpy(table[seats, :width]),
                           torch.from_numpy(table[row_seats, pages] * size + places), window)
                 for table, window in zip(self._tables, self._windows)]
        layout = Layout(torch.from_numpy(positions), offsets, starts, parents, size, views)
        return Batch(layout, tokens, row_seats, *_logit_rows(groups, offsets), moves, copies,
                     _row_adapters(groups, offsets), PENDING in known)


def slot_of(adapter: Any) -> int:
    """Where kernels find an adapter; None: the model as it is."""
    return NOBODY if adapter is None else int(adapter.slot)


def _row_adapters(groups: Seq[Rows], offsets: Seq[int]) -> np.ndarray | None:
    if all(group.seq.adapter is None for group in groups):
        return None
    return np.repeat(np.array([slot_of(group.seq.adapter) for group in groups], dtype=np.int64), np.diff(offsets))


def _logit_rows(groups: Seq[Rows], offsets: Seq[int]) -> tuple[list[int], list[int]]:
    """Row indices that need logits, and each group's first place among them (-1: none)."""
    if offsets[-1] == len(groups) and not any(group.logits_from for group in groups):
        everything = list(range(len(groups)))  # the steady state: one row per group
        return everything, everything
    rows: list[int] = []
    first: list[int] = []
    for group, offset, end in zip(groups, offsets, offsets[1:]):
        begin = offset + group.logits_from
        first.append(len(rows) if begin < end else -1)
        rows.extend(range(begin, end))
    return rows, first


def _tree_positions(start: int, parents: Seq[int]) -> list[int]:
    positions: list[int] = []
    for parent in parents:
        positions.append(start if parent < 0 else positions[parent] + 1)
    return positions
