"""StepGraphs: all that is captured for one engine's steps, and what it shares."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch

from paceline.cache.storage import KVStorage
from paceline.engine.execute.graphs.capture import GraphCapture
from paceline.engine.execute.graphs.decode import DecodeGraphs
from paceline.engine.execute.graphs.forward import ForwardGraphs
from paceline.engine.execute.graphs.logits_buffer import LogitsBuffers
from paceline.engine.execute.graphs.memory import GraphMemory, Use
from paceline.engine.execute.graphs.prefill import PrefillGraphs
from paceline.engine.execute.graphs.sample import SampleGraphs
from paceline.engine.execute.graphs.seats import DeviceSeats
from paceline.engine.execute.graphs.verify import VerifyGraphs
from paceline.engine.execute.target_heads import TargetHeads
from paceline.kernels.interface import Kernels
from paceline.kernels.low_rank import AdapterSlots
from paceline.models.interface import CausalLM


class StepGraphs:
    def __init__(self, model: CausalLM, kernels: Kernels, storage: KVStorage, tables: Seq[np.ndarray],
                 device: torch.device, adapters: AdapterSlots, heads: TargetHeads) -> None:
        """`tables`: the cache's block tables by seat. The kernels have a `device`, model and heads are capturable."""
        assert kernels.device is not None
        self.device = device
        self.memory = GraphMemory()
        self._capture = capture = GraphCapture(device)
        vocab_size = model.config.vocab_size
        self.seats = DeviceSeats(tables[0].shape[0], tables[0].shape[1] * storage.block_size + 1, vocab_size,
                                 device, kernels.device)
        self.samples = SampleGraphs(capture, self.seats, storage)
        buffers = LogitsBuffers(vocab_size, len(tables), device)
        self.decode = DecodeGraphs(model, kernels, storage, tables, capture, self.seats, adapters, heads)
        prompts = ForwardGraphs(model, kernels, storage, tables, capture, buffers, adapters,
                                self.seats.state.tables, sampled_rows_only=True, heads=heads)
        drafts = ForwardGraphs(model, kernels, storage, tables, capture, buffers, adapters, heads=heads)
        self.prefill = PrefillGraphs(prompts, self.samples)
        self.verify = VerifyGraphs(drafts)
        self.memory.held(Use.DECODE, self.decode.release)
        self.memory.held(Use.PREFILL, prompts.release)
        self.memory.held(Use.VERIFY, drafts.release)

    @property
    def captures(self) -> int:
        """How often something was captured so far."""
        return self._capture.count


def step_graphs(model: CausalLM, kernels: Kernels, storage: KVStorage, tables: Seq[np.ndarray],
                device: torch.device, adapters: AdapterSlots, heads: TargetHeads) -> StepGraphs | None:
    """None: the backend does not run whole steps on a device, or nothing of the model's can be captured."""
    if kernels.device is None or not (model.capturable and heads.capturable):
        return None
    return StepGraphs(model, kernels, storage, tables, device, adapters, heads)


def draft_graphs(model: CausalLM, kernels: Kernels, storage: KVStorage, tables: Seq[np.ndarray],
                 device: torch.device, memory: GraphMemory, adapters: AdapterSlots) -> VerifyGraphs | None:
    """Forwards of a model that drafts. None: as above."""
    if kernels.device is None or not model.capturable:
        return None
    buffers = LogitsBuffers(model.config.vocab_size, len(tables), device)
    forwards = ForwardGraphs(model, kernels, storage, tables, GraphCapture(device), buffers, adapters)
    memory.held(Use.DRAFT, forwards.release)
    memory.held(Use.DRAFT_SAMPLES, forwards.release_samples)
    return VerifyGraphs(forwards)
