"""What follows a captured forward on the device: draws from its logits, and where there are drafts their verification
and the move of accepted paths. Captured by the rows drawn from and by what drawing takes."""

from __future__ import annotations

import torch

from paceline.cache.storage import KVStorage
from paceline.engine.execute.graphs.capture import GraphCapture
from paceline.engine.execute.graphs.logits_buffer import Follows, LogitsBuffer, SampleGraph, nobody_draws
from paceline.engine.execute.graphs.seats import MOST_ROWS, DeviceSeats
from paceline.kernels.device.interface import Compaction, Verifier
from paceline.kernels.device.operands import Controls, PackedDrafts, SampledRows

WIDEST = 128
"""Rows of a draft, its root included."""


class SampleGraphs:
    """Shared by all captured steps of an engine. One stream at a time."""

    def __init__(self, graphs: GraphCapture, seats: DeviceSeats, storage: KVStorage) -> None:
        self.device = graphs.device
        self.seats = seats
        self._graphs = graphs
        self._storage = storage
        self._verifier: Verifier | None = None
        self._compactions: list[Compaction] = []

    def ready(self, logits_buffer: LogitsBuffer, controls: Controls, follows: Follows) -> SampleGraph:
        """What is drawn from these logits, to be replayed behind the forward."""
        found = logits_buffer.captured.get((follows, controls))
        if found is None:
            found = logits_buffer.captured[follows, controls] = self._capture(logits_buffer, controls, follows)
        return found

    def _capture(self, logits_buffer: LogitsBuffer, controls: Controls, follows: Follows) -> SampleGraph:
        self.seats.prepare(controls)
        if follows in (Follows.CHAINS, Follows.TREES) and self._verifier is None:
            self._compactions = [self.seats.kernels.compaction(planes) for planes in self._storage.planes]
            self._verifier = self.seats.kernels.verifier(MOST_ROWS, WIDEST - 1, self.device)
        out: list[torch.Tensor] = []

        def launch() -> None:
            out[:] = self._decide(logits_buffer, controls, follows)

        # A forward may have run already, and launching what is captured must sample nothing.
        kept = logits_buffer.data.clone()
        nobody_draws(logits_buffer.draws)
        try:
            return SampleGraph(out, self._graphs.capture(launch))
        finally:
            logits_buffer.data.copy_(kept)

    def _decide(self, logits_buffer: LogitsBuffer, controls: Controls, follows: Follows) -> list[torch.Tensor]:
        draws, tables = logits_buffer.draws, self.seats.state.tables
        owners = draws.seats.to(torch.int32)
        if follows is Follows.NOTHING:
            return list(self.seats.sampler.several(logits_buffer.logits, SampledRows(owners, draws.positions),
                                                   controls))
        if follows is Follows.NOTED:
            drawn, scores = self.seats.draw(logits_buffer.logits, SampledRows(owners, draws.positions), controls)
            self.seats.kernels.note(drawn, owners, tables, count=controls.edits)
            return [drawn] if scores is None else [drawn, scores]
        assert self._verifier is not None
        above, starts = draws.parents.to(torch.int32), draws.offsets.to(torch.int32)
        drawn, scores = self.seats.draw(logits_buffer.logits,
                                        SampledRows(owners, draws.positions, above, draws.fed), controls)
        packed = PackedDrafts(starts, above, draws.fed, owners, min(logits_buffer.rows, WIDEST))
        verdicts = self._verifier.verify(packed, drawn, tables, count=controls.edits)
        if follows is Follows.TREES:
            for compaction, slots in zip(self._compactions, draws.slots):
                compaction.move(starts, verdicts.accepted, verdicts.rows, slots)
        return [drawn, verdicts.packed] if scores is None else [drawn, verdicts.packed, scores]
