"""Runs a text through a model layer by layer and keeps what enters each layer's projections."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from paceline.bench.quality import Scorer, windows
from paceline.errors import ConfigError
from paceline.kernels.eager import EagerKernels
from paceline.kernels.packed import Weight, plain
from paceline.models.interface import CausalLM
from paceline.quantize.sites import Site, sites

WINDOW = 512
SAMPLES = 512
"""Rows of an input that are kept, evenly spread over the text."""


@dataclass(frozen=True)
class Inputs:
    """What a site sees of the text."""

    rows: torch.Tensor
    """[at most SAMPLES, in]: some of them."""
    mean: torch.Tensor
    """[in]: mean of |x| over all rows."""
    peak: torch.Tensor
    """[in]: largest |x| over all rows."""
    weight: torch.Tensor
    """[out, in]: what they are multiplied with, all consumers stacked."""


class Listener(EagerKernels):
    """Keeps the operands of every linear layer since `calls` was last emptied."""

    name = "listener"

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[torch.Tensor, Weight]] = []

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        self.calls.append((x, weight))
        return super().linear(x, weight, bias)


@torch.inference_mode()
def layer_inputs(model: CausalLM, tokens: list[int], device: str = "cpu") -> Iterator[list[tuple[Site, Inputs]]]:
    """Layer after layer, the inputs of its sites on `tokens`, in windows that know nothing of one another. Only one
    layer's are in memory at a time."""
    listener = Listener()
    scorer = Scorer(model, listener, min(WINDOW, len(tokens)), device=device)
    parts = list(windows(tokens, WINDOW))
    if not parts:
        raise ConfigError("The text for calibration has fewer than two tokens: give a longer one.")
    hidden = [model.embed(torch.tensor(part, device=device)) for part in parts]
    share = -(-SAMPLES // len(parts))
    for layer in range(model.config.num_layers):
        heard: list[list[tuple[torch.Tensor, Weight]]] = []
        for index, part in enumerate(parts):
            listener.calls = []
            # A window's rows all come in one call, so its own keys and values are all that the cache has to hold.
            hidden[index] = model.layers(hidden[index], scorer.context(0, len(part)), layer, layer + 1)
            heard.append(listener.calls)
        found = sites(model.config, layer)
        if any(len(calls) != len(found) for calls in heard):
            raise ConfigError(f"A layer of {model.config.model_type} has other projections than calibration knows.")
        yield [(site, _inputs([calls[number] for calls in heard], share)) for number, site in enumerate(found)]


def _inputs(calls: list[tuple[torch.Tensor, Weight]], share: int) -> Inputs:
    rows = [x.float() for x, _ in calls]
    count = sum(len(x) for x in rows)
    return Inputs(torch.cat([x[::max(1, len(x) // share)] for x in rows]),
                  torch.stack([x.abs().sum(0) for x in rows]).sum(0) / count,
                  torch.stack([x.abs().amax(0) for x in rows]).amax(0), plain(calls[0][1]).float())
