"""Runs a text through a model layer by layer and keeps what enters each layer's projections."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch

from paceline.errors import ConfigError
from paceline.kernels.eager import EagerKernels
from paceline.kernels.packed import Weight, plain
from paceline.measure.perplexity import Scorer, windows
from paceline.models.interface import CausalLM
from paceline.quantize.sites import Site, sites

WINDOW = 512
SAMPLES = 256
"""Rows of an input that are kept, evenly spread over the text."""


class Inputs:
    """What a site sees of the text."""

    def __init__(self, x: torch.Tensor, weight: torch.Tensor) -> None:
        self.x = x
        """[tokens, in]."""
        self.weight = weight
        """[out, in]: what they are multiplied with, all consumers stacked."""

    @cached_property
    def rows(self) -> torch.Tensor:
        """At most SAMPLES of the tokens, evenly spread."""
        return self.x[::-(-len(self.x) // SAMPLES)]

    @cached_property
    def mean(self) -> torch.Tensor:
        """[in]: of |x| over all tokens."""
        return self.x.abs().mean(0)

    @cached_property
    def peak(self) -> torch.Tensor:
        """[in]: the largest |x|."""
        return self.x.abs().amax(0)

    @cached_property
    def gram(self) -> torch.Tensor:
        """[in, in]: the sum of x^T x, which is all that a squared error of the outputs depends on."""
        return self.x.T @ self.x


class RecordingKernels(EagerKernels):
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
    recording = RecordingKernels()
    scorer = Scorer(model, recording, min(WINDOW, len(tokens)), device=device)
    parts = list(windows(tokens, WINDOW))
    if not parts:
        raise ConfigError("The text for calibration has fewer than two tokens: give a longer one.")
    hidden = [model.embed(torch.tensor(part, device=device)) for part in parts]
    for layer in range(model.config.num_layers):
        heard: list[list[tuple[torch.Tensor, Weight]]] = []
        for index, part in enumerate(parts):
            recording.calls = []
            # A window's rows all come in one call, so its own keys and values are all that the cache has to hold.
            hidden[index] = model.layers(hidden[index], scorer.context(0, len(part)), layer, layer + 1)
            heard.append(recording.calls)
        found = sites(model.config, layer)
        if any(len(calls) != len(found) for calls in heard):
            raise ConfigError(f"A layer of {model.config.model_type} has other projections than calibration knows.")
        yield [(site, Inputs(torch.cat([calls[number][0].float() for calls in heard]),
                             plain(heard[0][number][1]).float())) for number, site in enumerate(found)]
