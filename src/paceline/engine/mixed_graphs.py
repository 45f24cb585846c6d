"""Steps of prompt chunks and decoded tokens, captured for some numbers of rows: one replay instead of hundreds of
launches, each of which takes the host longer than a small model takes the device."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from paceline.cache.storage import KVStorage
from paceline.engine.captured import Captured, CapturedForward
from paceline.engine.cuda_graphs import Graphs
from paceline.engine.graphs import power
from paceline.engine.launched import Launched
from paceline.engine.runner import Batch, logit_rows
from paceline.engine.seats import DeviceSeats, drawing, send
from paceline.engine.step import RowGroup, Step
from paceline.kernels.triton.backend import TritonKernels
from paceline.kernels.triton.rows import DeviceRows
from paceline.kernels.triton.stepping_device import fill_kernel, note_kernel
from paceline.models.interface import CausalLM
from paceline.sampling.device.sampler import Rows
from paceline.sampling.device.state import Controls
from paceline.sampling.masks import Mask

ROWS = (16, 32, 64, 128, 256, 384, *range(512, 2561, 128), *range(2816, 8193, 256))
"""Close together, because rows of padding are computed like others; captured when first needed. Multiples of 128: the
vendor's products are no faster in between, and slower at some numbers."""
LOGIT_ROWS = (1, 8, 64, 256, 512)
BLOCK = 256


@dataclass(slots=True)
class _Inputs:
    """What a step reads, in one flat int64 tensor of the device that is filled before each replay."""

    data: torch.Tensor
    rows: int
    views: int

    @staticmethod
    def size(rows: int, views: int, logits: int) -> int:
        return (3 + views) * rows + 3 * logits

    @property
    def by_row(self) -> torch.Tensor:
        """[3 + views, rows]: tokens, positions for the rotary tables, seats, slots of each cache group."""
        return self.data[:(3 + self.views) * self.rows].view(3 + self.views, self.rows)

    @property
    def by_logit(self) -> torch.Tensor:
        """[3, logits]: rows that need logits, the seats that draw from them (-1: the host does), the positions of
        what they draw."""
        return self.data[(3 + self.views) * self.rows:].view(3, -1)


class MixedGraphs:
    """Runs steps without trees, taps or drafts."""

    def __init__(self, model: CausalLM, kernels: TritonKernels, storage: KVStorage, tables: Seq[np.ndarray],
                 graphs: Graphs, seats: DeviceSeats) -> None:
        self._forward = CapturedForward(model, kernels, storage, tables, graphs.device)
        self._graphs = graphs
        self._seats = seats
        self._captured: dict[tuple[int, int, Controls | None], Captured[_Inputs]] = {}

    def takes(self, groups: Seq[RowGroup], rows: int) -> bool:
        """Whether a step of these groups, which has so many rows, can be replayed."""
        if rows > ROWS[-1] or len(groups) > self._seats.most_rows:
            return False
        return all(group.draft is None and group.parents is None and group.logits_from >= len(group.tokens) - 1
                   for group in groups)

    @torch.inference_mode()
    def run(self, batch: Batch, wanted: list[int]) -> torch.Tensor:
        """Logits [len(wanted), V] float32 of these rows, overwritten by the next call; its tokens are all known."""
        captured = self._filled(batch, wanted, None)
        captured.replay()
        return captured.out[0][:len(wanted)]

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Launched | None:
        """Run a step that draws its tokens by itself. None: there is no memory for it, and nothing was done. Once its
        moves have begun a lack of memory is an error: they must not be carried out twice."""
        try:
            filled = self._ready(batch)
        except torch.OutOfMemoryError:
            return None
        self._forward.storage.apply(batch.step.moves, batch.step.copies)
        return self._drawn(batch.step, *filled)

    @torch.inference_mode()
    def draw(self, batch: Batch, masks: Seq[Mask | None]) -> Launched:
        """The same for a step whose moves and copies have been carried out. `masks`: what the host bars at each row
        that is drawn from."""
        return self._drawn(batch.step, *self._ready(batch, masks))

    def _ready(self, batch: Batch, masks: Seq[Mask | None] = ()) -> tuple[Captured[_Inputs], int, list[int]]:
        """The captured step, filled; how many rows draw; each group's first of them."""
        groups = batch.step.groups
        controls = self._seats.take(drawing(groups), masks)
        wanted, first = logit_rows(groups, batch.layout.offsets)
        return self._filled(batch, wanted, controls), len(wanted), first

    def _drawn(self, step: Step, captured: Captured[_Inputs], count: int, first: list[int]) -> Launched:
        launched = Launched(step, self._graphs.device)
        captured.replay()
        count = max(1, count)
        tokens, *scores = captured.out
        launched.drawn(tokens[None, :count], first, scores[0][:count] if scores else None)
        return launched

    def _filled(self, batch: Batch, wanted: list[int], controls: Controls | None) -> Captured[_Inputs]:
        """The captured step that takes this one, with its inputs on their way."""
        layout = batch.layout
        count, drawn, views = layout.rows, len(wanted), len(layout.views)
        captured = self._for(count, drawn, controls)
        rows, logits = captured.inputs.rows, captured.inputs.by_logit.shape[1]
        data = np.zeros(_Inputs.size(rows, views, logits), dtype=np.int64)
        by_row = data[:(3 + views) * rows].reshape(3 + views, rows)
        by_row[0, :count] = batch.tokens
        by_row[1, :count] = layout.positions.numpy()
        by_row[2, :count] = batch.row_seats
        for slots, view in zip(by_row[3:], layout.views):
            slots[:count] = view.slots.numpy()
            slots[count:] = -1
        by_logit = data[(3 + views) * rows:].reshape(3, logits)
        by_logit[0, :drawn] = wanted
        by_logit[1] = -1
        if controls is not None:
            by_logit[1, :drawn] = batch.row_seats[wanted]
            by_logit[2, :drawn] = by_row[1, wanted] + 1
        send(data, captured.inputs.data)
        self._forward.fill(captured.rows, layout)
        return captured

    def captures(self, most_rows: int) -> list[Callable[[], object]]:
        """What captures a step for each number of rows up to `most_rows`, with few and with many tokens drawn, the
        largest first: the others find its memory."""
        sizes = [rows for rows in reversed(ROWS) if rows <= max(most_rows, ROWS[0])]
        return [partial(self._for, rows, min(drawn, rows), Controls())
                for rows in sizes for drawn in (self._seats.most_rows, LOGIT_ROWS[1])]

    def _for(self, count: int, drawn: int, controls: Controls | None) -> Captured[_Inputs]:
        """The step for so many rows and tokens drawn."""
        rows = next(size for size in ROWS if size >= count)
        logits = min(next(size for size in LOGIT_ROWS if size >= drawn), self._seats.most_rows)
        captured = self._captured.get((rows, logits, controls))
        if captured is None:
            captured = self._captured[rows, logits, controls] = self._capture(rows, logits, controls)
        return captured

    def _capture(self, rows: int, logits: int, controls: Controls | None) -> Captured[_Inputs]:
        forward, device, views = self._forward, self._graphs.device, self._forward.views
        place = forward.room(forward.kernels.mixed_shape(rows, min(rows, forward.most_groups), forward.heads,
                                                         forward.dtype))
        size = _Inputs.size(rows, views, logits)
        inputs = _Inputs(torch.zeros(size, dtype=torch.int64, device=device), rows, views)
        inputs.by_row[3:].fill_(-1)
        inputs.by_logit[1].fill_(-1)
        if controls is not None:
            self._seats.prepare(controls)
        out: list[torch.Tensor] = []

        def launch() -> None:
            out[:] = self._step(inputs, place, controls)

        return Captured(place, inputs, out, self._graphs.capture(launch))

    def _step(self, inputs: _Inputs, place: DeviceRows, controls: Controls | None) -> list[torch.Tensor]:
        """Logits, or with controls the tokens drawn [logits] int32, and their scores where somebody asks."""
        forward, rows = self._forward, inputs.rows
        tokens, positions, seats, *slots = inputs.by_row
        state = self._seats.state
        last = state.last_tokens
        fill_kernel[(-(-rows // BLOCK),)](tokens, seats, last, rows, BLOCK=BLOCK)
        wanted, owners, draws = inputs.by_logit
        hidden = forward.hidden(tokens, positions, slots, place, leaving=wanted)
        logits = forward.model.logits(hidden, forward.kernels)
        if controls is None:
            return [logits]
        drawn, scores = self._seats.draw(logits, Rows(owners.to(torch.int32), draws), controls)
        note_kernel[(1,)](drawn, owners, last, len(wanted), state.table, state.counts, state.vocab_size,
                          COUNT=controls.edits, BLOCK=power(len(wanted)))
        return [drawn] if scores is None else [drawn, scores]
