"""Decoding on the device by itself: a step of one row per sequence, captured once for each number of rows, is replayed
several times before the host looks at the tokens."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial

import numpy as np
import torch

from paceline.cache.storage import KVStorage
from paceline.engine.execute.graphs.capture import GraphCapture
from paceline.engine.execute.graphs.in_flight import MOST_REPEATS, RepeatedInFlight
from paceline.engine.execute.graphs.seats import DeviceSeats, send
from paceline.engine.schedule.sequence import Sequence
from paceline.engine.schedule.step import RowGroup, Step
from paceline.kernels.device.operands import Controls, SampledRows
from paceline.kernels.device.rows import DeviceRows
from paceline.kernels.interface import Kernels
from paceline.kernels.layout import GroupView, Layout
from paceline.models.forward import Forward
from paceline.models.interface import CausalLM

BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)


class DecodeGraphs:
    """Runs steps that Scheduler.schedule(repeat) made."""

    def __init__(self, model: CausalLM, kernels: Kernels, storage: KVStorage, tables: Seq[np.ndarray],
                 graphs: GraphCapture, seats: DeviceSeats) -> None:
        """`tables`: the cache's block tables by seat, which the scheduler keeps."""
        assert kernels.device is not None
        self._model = model
        self._kernels = kernels
        self._on_device = kernels.device
        self._storage = storage
        self._host_tables = tables
        self._device = device = graphs.device
        self._seats = seats
        self.most_rows = seats.most_rows
        width = tables[0].shape[1]
        self._tables = [torch.zeros((self.most_rows, width), dtype=torch.int32, device=device) for _ in tables]
        self._out = torch.zeros((MOST_REPEATS, self.most_rows), dtype=torch.int32, device=device)
        self._captured: dict[tuple[int, Controls], DecodeGraph] = {}
        self._graphs = graphs

    def ready(self, running: Seq[Sequence]) -> None:
        """Capture what the running sequences need, if it is not there yet."""
        self._for(len(running), self._seats.seat_all(running))

    @torch.inference_mode()
    def launch(self, step: Step) -> RepeatedInFlight:
        groups, repeat = step.groups, step.repeat
        self._storage.apply(step.moves, step.copies)
        captured = self._for(len(groups), self._seats.seat_all([group.seq for group in groups]))
        self._upload(captured, groups, repeat)
        in_flight = RepeatedInFlight(repeat, self._device)
        for _ in range(repeat):
            captured.replay()
        in_flight.sampled(self._out[:repeat, :len(groups)])
        return in_flight

    def _upload(self, captured: DecodeGraph, groups: Seq[RowGroup], repeat: int) -> None:
        count, rows = len(groups), captured.rows
        inputs = np.zeros(3 * rows + 1, dtype=np.int64)
        tokens, positions, seats = inputs[:-1].reshape(3, rows)
        positions[count:] = -1
        tokens[:count] = [group.tokens[0] for group in groups]
        positions[:count] = [group.start for group in groups]
        seats[:count] = [group.seq.allocation.seat for group in groups]
        send(inputs, captured.inputs)
        pages = (int(positions[:count].max()) + repeat - 1) // self._storage.block_size + 1
        for host, table in zip(self._host_tables, self._tables):
            send(host[seats[:count], :pages].astype(np.int32), table[:count, :pages])

    def captures(self) -> list[Callable[[], object]]:
        """What captures a step for each number of rows, plain and with truncated sampling, the largest first: the
        others find its memory."""
        return [partial(self._for, min(rows, self.most_rows), Controls(truncation=truncation))
                for rows in reversed(BUCKETS) if rows <= power(self.most_rows) for truncation in (False, True)]

    def _for(self, count: int, controls: Controls) -> DecodeGraph:
        rows = min(next(bucket for bucket in BUCKETS if bucket >= count), self.most_rows)
        found = self._captured.get((rows, controls))
        if found is None:
            found = self._captured[rows, controls] = self._capture(rows, controls)
        return found

    def _capture(self, rows: int, controls: Controls) -> DecodeGraph:
        self._seats.prepare(controls)
        inputs = torch.zeros(3 * rows + 1, dtype=torch.int64, device=self._device)
        inputs[rows:2 * rows] = -1
        replay = self._graphs.capture(lambda: self._step(rows, inputs, controls))  # all rows are padding
        inputs[3 * rows] = 0
        return DecodeGraph(rows, inputs, replay)

    def _step(self, rows: int, inputs: torch.Tensor, controls: Controls) -> None:
        """One step of the rows in `inputs`, which become those of the step after it."""
        model, kernels, storage, device = self._model, self._kernels, self._storage, self._device
        shape = self._on_device.decode_shape(rows)
        layout_rows = DeviceRows.over(shape, torch.empty(shape.size, dtype=torch.int32, device=device))
        rope, positions = torch.empty((2, rows), dtype=torch.int64, device=device)
        seats = torch.empty(rows, dtype=torch.int32, device=device)
        tables = self._seats.state.tables
        views = []
        for group, table in zip(model.cache_groups, self._tables):
            slots = torch.empty(rows, dtype=torch.int64, device=device)
            self._on_device.begin(inputs, table, tables.last_tokens, layout_rows, slots, rope, positions, seats,
                                  storage.block_size)
            views.append(GroupView(table[:rows], slots, group.window))
        layout = Layout(rope, list(range(rows + 1)), [0] * rows, [None] * rows, storage.block_size, views, layout_rows)
        context = Forward(kernels, layout, storage.keys, storage.values, model.cache_groups,
                          key_scales=storage.key_scales, value_scales=storage.value_scales)
        logits = model.logits(model.forward(inputs[:rows], context), kernels)
        sampled, _ = self._seats.sample(logits, SampledRows(seats, positions), controls)
        self._on_device.end(inputs, sampled, self._out, tables, count=controls.edits)


class DecodeGraph:
    """A step of `rows` rows, ready to be replayed on what its inputs hold."""

    __slots__ = ("inputs", "replay", "rows")

    def __init__(self, rows: int, inputs: torch.Tensor, replay: Callable[[], None]) -> None:
        self.rows = rows
        self.inputs = inputs
        self.replay = replay


def power(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << (n - 1).bit_length()
