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
from paceline.engine.execute.graphs.memory import GraphMemory
from paceline.engine.execute.graphs.prefill import PrefillGraphs
from paceline.engine.execute.graphs.sample import SampleGraphs
from paceline.engine.execute.graphs.seats import DeviceSeats
from paceline.engine.execute.graphs.verify import VerifyGraphs
from paceline.kernels.interface import Kernels
from paceline.kernels.triton.backend import TritonKernels
from paceline.models.interface import CausalLM


class StepGraphs:
    def __init__(self, model: CausalLM, kernels: TritonKernels, storage: KVStorage, tables: Seq[np.ndarray],
                 device: torch.device) -> None:
        """`tables`: the cache's block tables by seat."""
        self.device = device
        self.memory = GraphMemory()
        capture, vocab_size = GraphCapture(device), model.config.vocab_size
        self.seats = DeviceSeats(tables[0].shape[0], vocab_size, device)
        self.samples = SampleGraphs(capture, self.seats, storage)
        buffers = LogitsBuffers(vocab_size, len(tables), device)
        self.decode = DecodeGraphs(model, kernels, storage, tables, capture, self.seats)
        self.prefill = PrefillGraphs(ForwardGraphs(model, kernels, storage, tables, capture, buffers,
                                                   self.seats.state.last_tokens, drawn_rows_only=True), self.samples)
        self.verify = VerifyGraphs(ForwardGraphs(model, kernels, storage, tables, capture, buffers))

    def of_draft_model(self, model: CausalLM, kernels: Kernels, storage: KVStorage,
                       tables: Seq[np.ndarray]) -> VerifyGraphs | None:
        """Forwards of another model, which drafts; None: nothing of it can be captured."""
        if not isinstance(kernels, TritonKernels) or not capturable(model):
            return None
        buffers = LogitsBuffers(model.config.vocab_size, len(tables), self.device)
        return VerifyGraphs(ForwardGraphs(model, kernels, storage, tables, GraphCapture(self.device), buffers))


def step_graphs(model: CausalLM, kernels: Kernels, storage: KVStorage, tables: Seq[np.ndarray],
                device: torch.device) -> StepGraphs | None:
    """None: the backend does not lay out steps on a device, or nothing of the model's can be captured."""
    if not isinstance(kernels, TritonKernels) or not capturable(model):
        return None
    return StepGraphs(model, kernels, storage, tables, device)


def capturable(model: CausalLM) -> bool:
    """Experts are chosen on the host, and attention over latent caches is planned there: nothing of either can be
    captured."""
    return not model.config.num_experts and all(group.latent is None for group in model.cache_groups)
