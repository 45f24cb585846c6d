"""Forwards of rows that the host lays out, captured: room for their rows, their block tables on the device, and the
model over both."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from paceline.cache.storage import KVStorage
from paceline.engine.execute.graphs.capture import CapturedSteps, GraphCapture
from paceline.engine.execute.graphs.logits_buffer import LogitsBuffer, LogitsBuffers, SampleInputs, pad_all
from paceline.engine.execute.graphs.moment import Moment
from paceline.engine.execute.graphs.seats import send
from paceline.engine.execute.target_heads import TargetHeads, no_heads
from paceline.engine.rows.batch import Batch
from paceline.engine.schedule.step import RowGroup
from paceline.kernels.adapted import adapted
from paceline.kernels.device.packing import pack
from paceline.kernels.device.rows import DeviceRows, RowsShape
from paceline.kernels.device.seats import SeatTables
from paceline.kernels.interface import Kernels
from paceline.kernels.layout import GroupView, Layout
from paceline.kernels.low_rank import NOBODY, AdapterSlots
from paceline.models.forward import Forward
from paceline.models.interface import CausalLM, activations, attention_heads


@dataclass(frozen=True, slots=True)
class ForwardGraph:
    """A forward with room for so many rows."""

    rows: DeviceRows
    inputs: torch.Tensor
    """[4 + views, rows] int64: tokens, positions for the rotary tables, seats, slots of adapters, slots of each cache
    group (-1: padding); then SampleInputs. Filled before each replay."""
    blank: np.ndarray
    """What they are while all rows are padding."""
    logits_buffer: LogitsBuffer
    """Where its logits go."""
    replay: Callable[[], None]


class ForwardGraphs:
    """One model over one cache. One stream at a time: its tables are those of the step that was filled in last."""

    def __init__(self, model: CausalLM, kernels: Kernels, storage: KVStorage, tables: Seq[np.ndarray],
                 graphs: GraphCapture, buffers: LogitsBuffers, adapters: AdapterSlots,
                 seat_tables: SeatTables | None = None, sampled_rows_only: bool = False,
                 heads: TargetHeads | None = None) -> None:
        """`tables`: the cache's block tables by seat. `seat_tables`: whose newest tokens stand for those that
        the host does not know. `sampled_rows_only`: the other rows end with the last layer's attention, for steps of
        prompts; all that is needed of those are keys and values, unless `heads`, which keep something of every row,
        read what leaves the last layer."""
        assert kernels.device is not None
        self._model = model
        self.kernels = kernels
        self.on_device = kernels.device
        self.storage = storage
        self.heads = attention_heads(model.config)
        self.dtype = activations(model, graphs.device)
        self.most_groups, width = tables[0].shape
        self.longest = width * storage.block_size
        """Tokens of a text that the block tables have room for."""
        self.adapters = adapters
        self.captured: CapturedSteps[tuple[RowsShape, int], ForwardGraph] = CapturedSteps(adapters)
        self._graphs = graphs
        self._buffers = buffers
        self._seat_tables = seat_tables
        self._heads = heads or no_heads(storage, kernels)
        self._sampled_rows_only = sampled_rows_only and model.config.num_layers not in self._heads.taps
        self._tables = [torch.zeros((self.most_groups, width), dtype=torch.int32, device=graphs.device)
                        for _ in tables]

    def ready(self, shape: RowsShape, sampled: int, with_adapters: bool) -> ForwardGraph:
        """One with this room, whose logits are those of up to `sampled` rows. `with_adapters`: some may have
        one."""
        return self.captured.find((shape, sampled), with_adapters, lambda: self._capture(shape, sampled, with_adapters))

    def release(self) -> None:
        """Let go of all that is captured, and of its logits' buffers with what samples from them."""
        self.captured.clear()

    def release_samples(self) -> None:
        """The latter alone."""
        for graph in self.captured.values():
            graph.logits_buffer.captured.clear()

    @torch.inference_mode()
    def launch(self, captured: ForwardGraph, batch: Batch, groups: Seq[RowGroup] = ()) -> LogitsBuffer:
        """`groups`: those of a step with drafts that are verified next."""
        wanted, layout, views = batch.wanted, batch.layout, len(self._tables)
        rows = captured.rows.shape.rows
        count, sampled = layout.rows, len(wanted)
        data = captured.blank.copy()
        by_row = data[:(4 + views) * rows].reshape(4 + views, rows)
        by_row[0, :count] = batch.tokens
        by_row[1, :count] = layout.positions.numpy()
        by_row[2, :count] = batch.row_seats
        by_row[3, :count] = NOBODY if batch.adapters is None else batch.adapters
        for slots, view in zip(by_row[4:], layout.views):
            slots[:count] = view.slots.numpy()
        to_sample = SampleInputs.over(data[(4 + views) * rows:], captured.logits_buffer.rows, views)
        rows_sampled = np.array(wanted, dtype=np.int64)
        to_sample.wanted[:sampled] = rows_sampled
        to_sample.seats[:sampled] = batch.row_seats[rows_sampled]
        to_sample.positions[:sampled] = by_row[1, rows_sampled] + 1
        if groups:
            to_sample.fed[:sampled] = by_row[0, rows_sampled]
            to_sample.slots[:, :sampled] = by_row[4:, rows_sampled]
            _place_drafts(groups, to_sample)
        send(data, captured.inputs)
        send(pack(layout, captured.rows.shape), captured.rows.data)
        for table, view in zip(self._tables, layout.views):
            height, pages = view.tables.shape
            send(view.tables.numpy().astype(np.int32), table[:height, :pages])
        captured.logits_buffer.began = Moment(self._graphs.device)
        captured.replay()
        return captured.logits_buffer

    def _capture(self, shape: RowsShape, sampled: int, with_adapters: bool) -> ForwardGraph:
        """Captured while all rows are padding."""
        device, views = self._graphs.device, len(self._tables)
        rows = DeviceRows.over(shape, torch.zeros(shape.size, dtype=torch.int32, device=device))
        rows.group.fill_(-1)
        rows.positions.fill_(-1)
        logits_buffer = self._buffers.of(sampled)
        blank = np.zeros((4 + views) * shape.rows + len(logits_buffer.data), dtype=np.int64)
        blank[3 * shape.rows:(4 + views) * shape.rows] = -1
        pad_all(SampleInputs.over(blank[(4 + views) * shape.rows:], sampled, views))
        inputs = torch.from_numpy(blank).to(device, copy=True)
        by_row = inputs[:(4 + views) * shape.rows].view(4 + views, shape.rows)
        to_sample = inputs[(4 + views) * shape.rows:]
        return ForwardGraph(rows, inputs, blank, logits_buffer, self._graphs.capture(
            lambda: self._step(by_row, to_sample, rows, logits_buffer, with_adapters)))

    def _step(self, by_row: torch.Tensor, to_sample: torch.Tensor, rows: DeviceRows,
              logits_buffer: LogitsBuffer, with_adapters: bool) -> None:
        model, storage = self._model, self.storage
        tokens, positions, seats, adapters, *slots = by_row
        if self._seat_tables is not None:
            self.on_device.fill(tokens, seats, self._seat_tables)
        wanted = to_sample[:logits_buffer.rows]
        layout = Layout(positions, [0, len(tokens)], [0], [None], storage.block_size,
                        [GroupView(table, own, group.window)
                         for own, table, group in zip(slots, self._tables, model.cache_groups)], rows)
        context = Forward(
            adapted(self.kernels, self.adapters, adapters if with_adapters else None), layout, storage.keys,
            storage.values, model.cache_groups, self._heads.taps,
            leaving=wanted if self._sampled_rows_only else None,
            key_scales=storage.key_scales, value_scales=storage.value_scales)
        hidden = model.forward(tokens, context)
        self._heads.store(tokens, context)
        if not self._sampled_rows_only:
            hidden = hidden.index_select(0, wanted)
            context.keep(wanted)
        logits_buffer.logits.copy_(model.logits(hidden, context.kernels))
        logits_buffer.data.copy_(to_sample)


def _place_drafts(groups: Seq[RowGroup], inputs: SampleInputs) -> None:
    """Where each group's rows begin, and which row each hangs below."""
    place = first = 0
    for group in groups:
        size = len(group.tokens) - group.logits_from
        if not size:
            continue
        if size > 1:
            above = group.parents if group.parents is not None else range(-1, size - 1)
            inputs.parents[first:first + size] = [parent if parent < 0 else first + parent for parent in above]
        place += 1
        first += size
        inputs.offsets[place] = first
    inputs.offsets[place + 1:] = first
