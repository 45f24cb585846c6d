"""Steps of prompt chunks and decoded tokens, captured for some numbers of rows: two replays instead of hundreds of
launches, each of which takes the host longer than a small model takes the device."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial

from paceline.engine.execute.graphs.forward import ForwardGraph, ForwardGraphs
from paceline.engine.execute.graphs.logits_buffer import AfterSampling, LogitsBuffer, SampleGraph
from paceline.engine.execute.graphs.sample import SampleGraphs
from paceline.engine.rows.batch import Batch
from paceline.engine.schedule.step import RowGroup
from paceline.kernels.device.operands import Controls

ROWS = (16, 32, 64, 128, 256, 384, *range(512, 2561, 128), *range(2816, 8193, 256))
"""Close together, because rows of padding are computed like others; captured when first needed. Multiples of 128: the
vendor's products are no faster in between, and slower at some numbers."""
FEW, SMALL = 8, 256
"""Rows sampled from: up to FEW; more in a step of up to SMALL rows: perhaps all of them; in a larger one as many as
there are seats: logits that nobody wants cost little beside a prompt."""


class PrefillGraphs:
    """Runs steps without trees, taps or drafts."""

    def __init__(self, forward: ForwardGraphs, samples: SampleGraphs) -> None:
        self._forward = forward
        self._samples = samples
        self._most_sampled = samples.seats.most_rows
        kernels, groups = forward.on_device, forward.most_groups
        self._shapes = {rows: kernels.prefill_shape(rows, min(rows, groups), forward.heads, forward.dtype)
                        for rows in ROWS}

    def takes(self, groups: Seq[RowGroup], rows: int) -> bool:
        """Whether a step of these groups, which has so many rows, can be replayed."""
        if rows > ROWS[-1] or len(groups) > self._most_sampled:
            return False
        return all(group.draft is None and group.parents is None and group.logits_from >= len(group.tokens) - 1
                   for group in groups)

    def ready(self, batch: Batch) -> ForwardGraph:
        """The forward that has room for this batch, captured if it is not there yet."""
        return self._for(batch.rows, len(batch.wanted), batch.adapters is not None)

    def launch(self, forward: ForwardGraph, batch: Batch) -> LogitsBuffer:
        """Launch what is ready for this batch, whose moves and copies have been carried out. The logits are overwritten
        by the next one. PENDING tokens are their seats' newest."""
        return self._forward.launch(forward, batch)

    def captures(self, most_rows: int) -> list[Callable[[], object]]:
        """What captures a forward for each number of rows up to `most_rows`, with few and with many rows sampled
        from, the largest first: the others find its memory; then the samples, plain and truncated. Forwards with
        adapters too where there are some."""
        sizes = [rows for rows in reversed(ROWS) if rows <= max(most_rows, ROWS[0])]
        forwards = list(dict.fromkeys((rows, self._room(rows, sampled)) for rows in sizes for sampled in (rows, FEW)))
        samples = {sampled: (rows, sampled) for rows, sampled in forwards}.values()
        return [*(partial(self._for, *pair, with_adapters) for pair in forwards
                  for with_adapters in ((False, True) if self._forward.adapters.layout else (False,))),
                *(partial(self._samples_of, *pair, Controls(truncation=truncation))
                  for pair in samples for truncation in (False, True))]

    def _samples_of(self, rows: int, sampled: int, controls: Controls) -> SampleGraph:
        return self._samples.ready(self._for(rows, sampled, False).logits_buffer, controls, AfterSampling.NOTED)

    def _for(self, count: int, sampled: int, with_adapters: bool) -> ForwardGraph:
        """The forward for so many rows, so many of them sampled from."""
        rows = next(size for size in ROWS if size >= count)
        return self._forward.ready(self._shapes[rows], self._room(rows, sampled), with_adapters)

    def _room(self, rows: int, sampled: int) -> int:
        """How many rows are sampled from in the captured step of `rows` rows that this is to run in."""
        return min(FEW if sampled <= FEW else rows if rows <= SMALL else self._most_sampled, self._most_sampled)
