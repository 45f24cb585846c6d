"""Runner: turns a Step into flat tensors, runs the model over them and returns the logits that are needed."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paceline.cache.storage import KVStorage
from paceline.engine.rows.sample_rows import row_masks
from paceline.engine.schedule.sequence import PENDING
from paceline.engine.schedule.step import RowGroup, Step
from paceline.kernels.adapted import NOBODY, RowAdapters, adapted, of_rows
from paceline.kernels.interface import Kernels
from paceline.kernels.layout import GroupView, Layout
from paceline.models.forward import Forward
from paceline.models.interface import CausalLM

if TYPE_CHECKING:
    from paceline.engine.execute.graphs.logits_buffer import LogitsBuffer
    from paceline.engine.execute.graphs.prefill import Begun, PrefillGraphs
    from paceline.engine.execute.graphs.seats import DeviceSeats
    from paceline.engine.execute.graphs.verify import Verified, VerifyGraphs

log = logging.getLogger("paceline.engine")


@dataclass(slots=True)
class StepLogits:
    """logits: [R, V] float32, the rows that were asked for, group after group. first[g]: where group g's rows begin
    in it, or -1. hidden: tapped hidden states [N, h] of every row, by layer."""

    logits: torch.Tensor
    first: list[int]
    hidden: dict[int, torch.Tensor]
    verified: list[Verified | None] | None = None
    """Per group what it came to, where the device decided; there are no logits then."""
    logits_buffer: LogitsBuffer | None = None
    """Where the logits of a draft model's captured step lie, for a device that draws from them."""


@dataclass(slots=True)
class Batch:
    """A step laid out flat, ready to run; valid whatever happens to its sequences meanwhile."""

    step: Step
    layout: Layout
    tokens: np.ndarray
    """[N] int64; PENDING ones are filled in when the batch runs."""
    row_seats: np.ndarray
    pending: np.ndarray | None
    on_host: bool = False
    """The layout's tensors lie on the host: for a captured step, which has room of its own on the device."""
    drafted: bool = False
    """It is captured as a step with drafts."""
    adapters: RowAdapters | None = None
    """Where some rows have one; such a step is never captured."""


class Runner:
    """Owns the device side: model, cache tensors, and each seat's last sampled token."""

    def __init__(self, model: CausalLM, kernels: Kernels, storage: KVStorage, tables: Seq[np.ndarray],
                 device: torch.device) -> None:
        self.model = model
        self.kernels = kernels
        self.storage = storage
        self._tables = tables
        self._device = device
        self._block_size = storage.block_size
        self._last_token = np.zeros(tables[0].shape[0], dtype=np.int64)
        self._windows = [group.window for group in model.cache_groups]
        self.graphs: PrefillGraphs | None = None
        """Captured steps, where the engine has some."""
        self.drafts: VerifyGraphs | None = None
        """Captured steps with drafts; of a model that drafts, all its steps."""
        self.seats: DeviceSeats | None = None
        """Where captured steps draw."""

    def remember(self, seat: int, token: int) -> None:
        """The newest token of a seat: what PENDING stands for in a step that was scheduled ahead."""
        self._last_token[seat] = token

    def run(self, step: Step, taps: frozenset[int] = frozenset()) -> StepLogits:
        return self.execute(self.prepare(step, on_device=bool(taps)), taps)

    def execute(self, batch: Batch, taps: frozenset[int] = frozenset()) -> StepLogits:
        out = self._execute(batch, taps)
        if self.seats is not None and out.verified is None:
            self.seats.forget(batch.step.groups)
        return out

    @torch.inference_mode()
    def _execute(self, batch: Batch, taps: frozenset[int]) -> StepLogits:
        self.storage.apply(batch.step.moves, batch.step.copies)
        layout = batch.layout
        tokens = batch.tokens
        if batch.pending is not None:
            tokens[batch.pending] = self._last_token[batch.row_seats[batch.pending]]
        rows, first = logit_rows(batch.step.groups, layout.offsets)
        if batch.drafted and self.drafts is not None:
            try:
                return self._drafted(self.drafts, batch, rows, first)
            except torch.OutOfMemoryError:
                self._give_up_drafts(batch)
        elif batch.on_host and self.graphs is not None:
            try:
                return self._mixed(self.graphs, self.drafts, batch, rows, first)
            except torch.OutOfMemoryError:
                self.give_up_captures(batch)
        if batch.on_host:
            self._to_device(layout)
        storage = self.storage
        kernels = adapted(self.kernels, batch.adapters, self._device)
        context = Forward(kernels, layout, storage.keys, storage.values, self.model.cache_groups, taps,
                          key_scales=storage.key_scales, value_scales=storage.value_scales)
        hidden = self.model.forward(self._tensor(tokens), context)
        if len(rows) < layout.rows:
            hidden = hidden[torch.tensor(rows, dtype=torch.int64, device=self._device)]
            kernels = of_rows(kernels, rows)
        logits = self.model.logits(hidden, kernels)
        return StepLogits(logits, first, context.tapped)

    def _drafted(self, drafts: VerifyGraphs, batch: Batch, rows: list[int], first: list[int]) -> StepLogits:
        groups = batch.step.groups
        decided = drafts.verifies(groups)
        ran = drafts.run(batch, rows, decided)
        masks = row_masks(groups) if decided else None  # while the device computes
        if masks is not None:
            try:
                return StepLogits(torch.empty(0), first, {}, drafts.verify(batch, ran, masks))
            except torch.OutOfMemoryError:  # the host decides from the logits
                self._give_up_drafts(batch)
        return StepLogits(ran.logits[:len(rows)], first, {}, logits_buffer=ran)

    def _mixed(self, graphs: PrefillGraphs, drafts: VerifyGraphs | None, batch: Batch, rows: list[int],
               first: list[int]) -> StepLogits:
        begun, groups = graphs.run(batch, rows, first), batch.step.groups
        masks = row_masks(groups) if drafts is not None and drafts.verifies(groups) else None
        if drafts is not None and masks is not None:
            launched = graphs.draw(begun, masks)
            if launched is not None:
                return StepLogits(torch.empty(0), first, {}, [drafts.plain(own) for own in launched.read()])
            self.give_up_captures(batch)
        return StepLogits(begun.logits, first, {})

    def undrawn(self, begun: Begun) -> StepLogits:
        """What the host decides of a step whose forward a device was launched with, to draw from by itself."""
        if self.seats is not None:
            self.seats.forget(begun.batch.step.groups)
        return StepLogits(begun.logits, begun.first, {})

    def _give_up_drafts(self, batch: Batch) -> None:
        log.warning("no memory to capture a step of %d rows: steps with drafts are launched kernel by kernel from now "
                    "on, which is slower; give the cache fewer kv_blocks", batch.layout.rows)
        self.drafts = None

    def give_up_captures(self, batch: Batch) -> None:
        """There was no memory to capture a step."""
        log.warning("no memory to capture a step of %d rows: steps are launched kernel by kernel from now on, which is "
                    "slower; give the cache fewer kv_blocks", batch.layout.rows)
        self.graphs = None

    def prepare(self, step: Step, on_device: bool = False) -> Batch:
        """Flat tokens and the step's layout, read off the block tables as they stand now. Vectorised over rows: the
        host's time per row is what small models die of. `on_device`: also where a captured step would do."""
        groups = step.groups
        starts = [group.start for group in groups]
        parents = [group.parents for group in groups]
        known = [token for group in groups for token in group.tokens]
        seats = np.array([group.seq.allocation.seat for group in groups], dtype=np.int64)
        tokens = np.array(known, dtype=np.int64)
        physical = np.array(starts, dtype=np.int64)
        row_seats = seats
        if len(known) == len(groups):
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

        adapters = row_adapters(groups, offsets)
        on_device = on_device or adapters is not None
        drafted = not on_device and self.drafts is not None and self.drafts.takes(groups, offsets[-1])
        captured = drafted or (not on_device and self.graphs is not None and self.graphs.takes(groups, offsets[-1]))
        tensor = torch.from_numpy if captured else self._tensor
        size = self._block_size
        pages = physical // size
        places = physical - pages * size
        width = furthest // size + 1
        views = [GroupView(tensor(table[seats, :width]), tensor(table[row_seats, pages] * size + places), window)
                 for table, window in zip(self._tables, self._windows)]
        layout = Layout(tensor(positions), offsets, starts, parents, size, views)
        pending = tokens == PENDING if PENDING in known else None
        return Batch(step, layout, tokens, row_seats, pending, captured, drafted, adapters)

    def _to_device(self, layout: Layout) -> None:
        layout.positions = layout.positions.to(self._device)
        for view in layout.views:
            view.tables, view.slots = view.tables.to(self._device), view.slots.to(self._device)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.to(self._device, non_blocking=True)


def row_adapters(groups: Seq[RowGroup], offsets: Seq[int]) -> RowAdapters | None:
    """Which rows of a step have which adapter; None: none has any."""
    named: dict[Any, None] = {group.seq.adapter: None for group in groups if group.seq.adapter is not None}
    if not named:
        return None
    places = {adapter: index for index, adapter in enumerate(named)}
    owners = np.repeat([places.get(group.seq.adapter, NOBODY) for group in groups], np.diff(offsets))
    return RowAdapters([adapter.additions for adapter in named], owners)


def logit_rows(groups: Seq[RowGroup], offsets: Seq[int]) -> tuple[list[int], list[int]]:
    """Row indices that need logits, and each group's first place among them (-1: none)."""
    if offsets[-1] == len(groups) and not any(group.logits_from for group in groups):
        everything = list(range(len(groups)))  # the steady state: a row a group
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
