"""DraftRunner: a model that drafts, over its cache; captured where it can be, else kernel by kernel."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from paceline.cache.storage import KVStorage
from paceline.cache.transfers import BlockCopy, SlotMove
from paceline.engine.execute.executor import bring_into_place
from paceline.engine.execute.graphs.logits_buffer import LogitsBuffer
from paceline.engine.execute.graphs.memory import GraphMemory, Use
from paceline.engine.execute.graphs.verify import VerifyGraphs
from paceline.engine.execute.model_runner import ModelRunner
from paceline.engine.rows.batch import BatchBuilder
from paceline.engine.schedule.step import Rows
from paceline.models.interface import CausalLM


@dataclass(frozen=True, slots=True)
class DraftLogits:
    """[R, V] float32 of the rows that were asked for, group after group."""

    logits: torch.Tensor
    buffer: LogitsBuffer | None = None
    """Where they lie, for a device that samples from them."""


class DraftRunner:
    def __init__(self, runner: ModelRunner, builder: BatchBuilder, graphs: VerifyGraphs | None = None,
                 memory: GraphMemory | None = None) -> None:
        """`graphs`: what is captured of this model, if anything is; there may not be `memory` for it."""
        self._runner = runner
        self._builder = builder
        self._graphs = graphs
        self._memory = memory or GraphMemory()

    @property
    def model(self) -> CausalLM:
        return self._runner.model

    @property
    def storage(self) -> KVStorage:
        return self._runner.storage

    def apply(self, moves: Seq[SlotMove], copies: Seq[BlockCopy]) -> None:
        """Carry out what the cache needs before the model reads it. Raises StepDropped."""
        bring_into_place(self._runner.storage, moves, copies)

    @torch.inference_mode()
    def run_rows(self, groups: Seq[Rows]) -> DraftLogits:
        batch, graphs = self._builder.build(groups), self._graphs
        if graphs is not None and graphs.takes(groups, batch.rows):
            ready = self._memory.attempt(Use.DRAFT, lambda: graphs.ready(batch))
            if ready is not None:
                buffer = graphs.launch(ready, batch)
                return DraftLogits(buffer.logits[:len(batch.wanted)], buffer)
        return DraftLogits(self._runner.forward(batch).logits)
