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


def device_decoder(model: CausalLM, kernels: Kernels, storage: KVStorage, tables: Seq[np.ndarray],
                   device: torch.device) -> DeviceDecoder | None:
    """For engines on Triton's kernels; other backends do not lay out their steps on the device."""
    if not kernels.name.startswith("triton"):
        return None
    from paceline.engine.graphs import DeviceDecoder
    from paceline.kernels.triton.backend import TritonKernels

    return DeviceDecoder(model, kernels, storage, tables, device) if isinstance(kernels, TritonKernels) else None


def draws_by_itself(seq: Sequence) -> bool:
    """Whether a device can draw one token of this sequence after another without the host."""
    state, params = seq.state, seq.request.params
    return not (state.needs_processors or state.grammar is not None or seq.emitter.scored or params.interrupt)
