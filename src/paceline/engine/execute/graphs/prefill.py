"""Steps of prompt chunks and decoded tokens, captured for some numbers of rows: two replays instead of hundreds of
launches, each of which takes the host longer than a small model takes the device."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial

import torch

from paceline.engine.execute.graphs.forward import Captured, ForwardGraphs
from paceline.engine.execute.graphs.in_flight import InFlight
from paceline.engine.execute.graphs.logits_buffer import Follows, LogitsBuffer, SampleGraph
from paceline.engine.execute.graphs.sample import SampleGraphs
from paceline.engine.execute.graphs.seats import drawing
from paceline.engine.execute.runner import Batch, logit_rows
from paceline.engine.schedule.step import RowGroup
from paceline.kernels.device.operands import Controls
from paceline.sampling.masks import Mask

ROWS = (16, 32, 64, 128, 256, 384, *range(512, 2561, 128), *range(2816, 8193, 256))
"""Close together, because rows of padding are computed like others; captured when first needed. Multiples of 128: the
vendor's products are no faster in between, and slower at some numbers."""
FEW, SMALL = 8, 256
"""Rows drawn from: up to FEW; more in a step of up to SMALL rows: perhaps all of them; in a larger one as many as there
are seats: logits that nobody wants cost little beside a prompt."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A step whose forward was launched and whose tokens are still to be drawn."""

    batch: Batch
    logits_buffer: LogitsBuffer
    drawn: int
    """Rows that are drawn from."""
    first: list[int]
    """Each group's first of them, or -1."""

    @property
    def logits(self) -> torch.Tensor:
        """Of those rows."""
        return self.logits_buffer.logits[:self.drawn]


class PrefillGraphs:
    """Runs steps without trees, taps or drafts."""

    def __init__(self, forward: ForwardGraphs, draws: SampleGraphs) -> None:
        self._forward = forward
        self._draws = draws
        self._most_drawn = draws.seats.most_rows
        kernels, groups = forward.on_device, forward.most_groups
        self._shapes = {rows: kernels.prefill_shape(rows, min(rows, groups), forward.heads, forward.dtype)
                        for rows in ROWS}

    def takes(self, groups: Seq[RowGroup], rows: int) -> bool:
        """Whether a step of these groups, which has so many rows, can be replayed."""
        if rows > ROWS[-1] or len(groups) > self._most_drawn:
            return False
        return all(group.draft is None and group.parents is None and group.logits_from >= len(group.tokens) - 1
                   for group in groups)

    @torch.inference_mode()
    def run(self, batch: Batch, wanted: Seq[int], first: list[int]) -> Begun:
        """Launch the forward of a step whose moves and copies have been carried out, and whose tokens are all known.
        `wanted`, `first`: logit_rows. Its logits are overwritten by the next one."""
        return self._begin(self._for(batch.layout.rows, len(wanted)), batch, wanted, first)

    @torch.inference_mode()
    def begin(self, batch: Batch) -> Begun | None:
        """The forward of a step whose tokens the device knows; `draw` comes behind it. None: there is no memory for
        it, and nothing was done. Once its moves have begun a lack of memory is an error: they must not be carried out
        twice."""
        wanted, first = logit_rows(batch.step.groups, batch.layout.offsets)
        try:
            forward = self._for(batch.layout.rows, len(wanted))
        except torch.OutOfMemoryError:
            return None
        self._forward.storage.apply(batch.step.moves, batch.step.copies)
        return self._begin(forward, batch, wanted, first)

    @torch.inference_mode()
    def draw(self, begun: Begun, masks: Seq[Mask | None] = ()) -> InFlight | None:
        """Draw behind a forward, while that is running. `masks`: what the host bars at each row that is drawn from, if
        anything. None: there is no memory for it, and nothing was drawn. Behind the draw a lack of memory is an error:
        what was drawn is counted."""
        step, draws = begun.batch.step, self._draws
        try:
            draw = draws.ready(begun.logits_buffer, draws.seats.take(drawing(step.groups), masks), Follows.NOTED)
        except torch.OutOfMemoryError:
            return None
        launched = InFlight(step, draws.device)
        draw.replay()
        count = max(1, begun.drawn)
        tokens, *scores = draw.out
        launched.drawn(tokens[None, :count], begun.first, scores[0][:count] if scores else None)
        return launched

    def captures(self, most_rows: int) -> list[Callable[[], object]]:
        """What captures a forward for each number of rows up to `most_rows`, with few and with many tokens drawn, the
        largest first: the others find its memory; then the draws, plain and truncated."""
        sizes = [rows for rows in reversed(ROWS) if rows <= max(most_rows, ROWS[0])]
        forwards = list(dict.fromkeys((rows, self._room(rows, drawn)) for rows in sizes for drawn in (rows, FEW)))
        draws = {drawn: (rows, drawn) for rows, drawn in forwards}.values()
        return [*(partial(self._for, *pair) for pair in forwards),
                *(partial(self._draws_of, *pair, Controls(truncation=truncation))
                  for pair in draws for truncation in (False, True))]

    def _begin(self, forward: Captured, batch: Batch, wanted: Seq[int], first: list[int]) -> Begun:
        return Begun(batch, self._forward.run(forward, batch, wanted), len(wanted), first)

    def _draws_of(self, rows: int, drawn: int, controls: Controls) -> SampleGraph:
        return self._draws.ready(self._for(rows, drawn).logits_buffer, controls, Follows.NOTED)

    def _for(self, count: int, drawn: int) -> Captured:
        """The forward for so many rows and tokens drawn."""
        rows = next(size for size in ROWS if size >= count)
        return self._forward.ready(self._shapes[rows], self._room(rows, drawn))

    def _room(self, rows: int, drawn: int) -> int:
        """How many rows are drawn from in the captured step of `rows` rows that this is to run in."""
        return min(FEW if drawn <= FEW else rows if rows <= SMALL else self._most_drawn, self._most_drawn)
