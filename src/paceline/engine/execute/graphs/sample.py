"""What follows a captured forward on the device: sampling from its logits, and where there are drafts verifying them
and moving accepted paths. Captured by the rows sampled from and by what sampling takes."""

from __future__ import annotations

import torch

from paceline.cache.storage import KVStorage
from paceline.engine.execute.graphs.capture import GraphCapture
from paceline.engine.execute.graphs.logits_buffer import AfterSampling, LogitsBuffer, SampleGraph, pad_all
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

    def ready(self, logits_buffer: LogitsBuffer, controls: Controls, after: AfterSampling) -> SampleGraph:
        """What samples from these logits, to be replayed after the forward."""
        found = logits_buffer.captured.get((after, controls))
        if found is None:
            found = logits_buffer.captured[after, controls] = self._capture(logits_buffer, controls, after)
        return found

    def _capture(self, logits_buffer: LogitsBuffer, controls: Controls, after: AfterSampling) -> SampleGraph:
        self.seats.prepare(controls)
        if after in (AfterSampling.CHAINS, AfterSampling.TREES) and self._verifier is None:
            self._compactions = [self.seats.kernels.compaction(planes) for planes in self._storage.planes]
            self._verifier = self.seats.kernels.verifier(MOST_ROWS, WIDEST - 1, self.device)
        out: list[torch.Tensor] = []

        def launch() -> None:
            out[:] = self._decide(logits_buffer, controls, after)

        # A forward may have run already, and launching what is captured must sample nothing.
        kept = logits_buffer.data.clone()
        pad_all(logits_buffer.inputs)
        try:
            return SampleGraph(out, self._graphs.capture(launch))
        finally:
            logits_buffer.data.copy_(kept)

    def _decide(self, logits_buffer: LogitsBuffer, controls: Controls, after: AfterSampling) -> list[torch.Tensor]:
        inputs, tables = logits_buffer.inputs, self.seats.state.tables
        owners = inputs.seats.to(torch.int32)
        if after is AfterSampling.NOTHING:
            return list(self.seats.sampler.several(logits_buffer.logits, SampledRows(owners, inputs.positions),
                                                   controls))
        if after is AfterSampling.NOTED:
            sampled, scores = self.seats.sample(logits_buffer.logits, SampledRows(owners, inputs.positions), controls)
            self.seats.kernels.note(sampled, owners, tables, count=controls.edits)
            return [sampled] if scores is None else [sampled, scores]
        assert self._verifier is not None
        above, starts = inputs.parents.to(torch.int32), inputs.offsets.to(torch.int32)
        sampled, scores = self.seats.sample(logits_buffer.logits,
                                            SampledRows(owners, inputs.positions, above, inputs.fed), controls)
        packed = PackedDrafts(starts, above, inputs.fed, owners, min(logits_buffer.rows, WIDEST))
        verdicts = self._verifier.verify(packed, sampled, tables, count=controls.edits)
        if after is AfterSampling.TREES:
            for compaction, slots in zip(self._compactions, inputs.slots):
                compaction.move(starts, verdicts.accepted, verdicts.rows, slots)
        return [sampled, verdicts.packed] if scores is None else [sampled, verdicts.packed, scores]
