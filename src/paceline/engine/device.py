"""Whether an engine decodes on its device by itself, and which sequences can."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np
import torch

from paceline.cache.storage import KVStorage
from paceline.engine.sequence import Sequence
from paceline.kernels.interface import Kernels
from paceline.models.interface import CausalLM

if TYPE_CHECKING:
    from paceline.engine.graphs import DeviceDecoder
    from paceline.engine.mixed_graphs import MixedGraphs


def captured_steps(model: CausalLM, kernels: Kernels, storage: KVStorage, tables: Seq[np.ndarray],
                   device: torch.device) -> tuple[DeviceDecoder, MixedGraphs] | None:
    """For engines on Triton's kernels; other backends do not lay out their steps on the device. Experts are chosen on
    the host, so of mixtures nothing can be captured."""
    if not kernels.name.startswith("triton") or model.config.num_experts:
        return None
    from paceline.engine.graphs import DeviceDecoder, Graphs
    from paceline.engine.mixed_graphs import MixedGraphs
    from paceline.kernels.triton.backend import TritonKernels

    if not isinstance(kernels, TritonKernels):
        return None
    graphs = Graphs(device)
    return DeviceDecoder(model, kernels, storage, tables, graphs), MixedGraphs(model, kernels, storage, tables, graphs)


def draws_by_itself(seq: Sequence) -> bool:
    """Whether a device can draw one token of this sequence after another without the host."""
    state, params = seq.state, seq.request.params
    structured = state.grammar is not None or params.structure is not None
    return not (state.needs_processors or structured or seq.emitter.scored or params.interrupt)
