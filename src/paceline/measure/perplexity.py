"""Perplexity of a text under a model, in any number format a model can be run in: what `bench quality` reports and
`quantize` calibrates with and measures before and after."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.cache.storage import KVStorage
from paceline.errors import ConfigError
from paceline.kernels.cpu import NativeKernels
from paceline.kernels.eager import EagerKernels
from paceline.kernels.interface import Kernels
from paceline.kernels.layout import GroupView, Layout
from paceline.measure.rounding import RoundedKernels, RoundedWeights
from paceline.measure.text_files import read_text
from paceline.models.config import ModelConfig
from paceline.models.forward import Forward
from paceline.models.interface import CausalLM
from paceline.models.load.checkpoint import Checkpoint
from paceline.models.load.weights import Weights
from paceline.models.native import NativeDecoder
from paceline.models.registry import build
from paceline.models.tokenizer import Tokenizer

CHUNK = 256
BLOCK_SIZE = 16
BASELINE = "float32"


@dataclass(frozen=True)
class Format:
    """How a model is run. native: by the native decoder ("int8_channel" is its default, "file" keeps the file's
    blocks, "int8_block" is for files without blocks); otherwise in torch, rounded as rounding.py says."""

    name: str
    native: bool = False
    weights: str = "file"
    activations: int | None = None
    float_down: bool = False
    """The down projection's input stays in float."""
    cache: str = "float32"


class Scorer:
    """One window at a time through a model, with a cache of its own."""

    def __init__(self, model: CausalLM, kernels: Kernels, window: int, cache: torch.dtype = torch.float32,
                 device: str = "cpu") -> None:
        self._device = torch.device(device)
        self._model = model
        self._kernels = kernels
        blocks = -(-window // BLOCK_SIZE)
        groups = model.cache_groups
        self._table = torch.arange(1, blocks + 1, device=self._device)[None]  # block 0 is never used
        self._storage = KVStorage(groups, [blocks + 1] * len(groups), BLOCK_SIZE, cache, self._device)

    def surprise(self, tokens: list[int], chunk: int = CHUNK) -> float:
        """Sum of -log p(token | the tokens before it in this window) over all but the first, in nats."""
        return -sum(float(torch.log_softmax(logits, -1).gather(1, targets[:, None]).double().sum())
                    for logits, targets in self.predictions(tokens, chunk))

    def predictions(self, tokens: list[int], chunk: int = CHUNK) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Some positions after others: logits [N, vocabulary] and the tokens [N] that came, over all but the first."""
        ids = torch.tensor(tokens, device=self._device)
        for begin in range(0, len(tokens), chunk):
            end = min(begin + chunk, len(tokens))
            targets = ids[begin + 1:end + 1]
            if len(targets):
                yield self._logits(ids[begin:end], begin)[:len(targets)], targets

    @torch.inference_mode()
    def _logits(self, ids: torch.Tensor, begin: int) -> torch.Tensor:
        hidden = self._model.forward(ids, self.context(begin, begin + len(ids)))
        return self._model.logits(hidden, self._kernels)

    def context(self, begin: int, end: int) -> Forward:
        """A pass over the tokens begin .. end - 1 of a window whose earlier ones are in the cache."""
        positions = torch.arange(begin, end, device=self._device)
        slots = self._table[0, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        pages = -(-end // BLOCK_SIZE)
        views = [GroupView(self._table[:, :pages].contiguous(), slots, group.window)
                 for group in self._model.cache_groups]
        layout = Layout(positions, [0, end - begin], [begin], [None], BLOCK_SIZE, views)
        storage = self._storage
        return Forward(self._kernels, layout, storage.keys, storage.values, self._model.cache_groups,
                       key_scales=storage.key_scales, value_scales=storage.value_scales)


def windows(tokens: list[int], size: int) -> Iterator[list[int]]:
    """Cut into windows of `size`; a last one of a single token has nothing to predict and is left out."""
    for begin in range(0, len(tokens), size):
        if len(tokens) - begin > 1:
            yield tokens[begin:begin + size]


def perplexity(scorer: Scorer, tokens: list[int], window: int) -> float:
    """exp of the mean surprise over all predicted tokens; every window starts with nothing before it."""
    parts = list(windows(tokens, window))
    return math.exp(sum(map(scorer.surprise, parts)) / sum(len(part) - 1 for part in parts))


def scorer(format: Format, checkpoint: Checkpoint, window: int, threads: int, device: str = "cpu") -> Scorer:
    """`device` is for the formats that run in torch."""
    shape = ModelConfig.from_dict(checkpoint.config)
    weights = Weights(checkpoint, device="cpu" if format.native else device)
    if format.native:
        source = RoundedWeights(weights) if format.weights == "int8_block" else weights  # hides the blocks: floats then
        dtype = getattr(torch, format.cache)
        model = NativeDecoder(shape, source, window, threads=threads, kv_dtype=dtype,
                              keep_blocks=format.weights != "int8_channel")
        return Scorer(model, NativeKernels(), window, dtype)
    widths = frozenset({shape.intermediate_size}) if format.float_down else frozenset[int]()
    plain = format.activations is None and format.cache != "int8"
    kernels = EagerKernels() if plain else RoundedKernels(format.activations, widths, format.cache == "int8")
    dtype = torch.float16 if format.cache == "float16" else torch.float32
    return Scorer(build(shape, RoundedWeights(weights, format.weights), window), kernels, window, dtype, device)


def text_tokens(checkpoint: Checkpoint, path: str | Path, count: int) -> list[int]:
    """The first `count` tokens of a text, in the words of a checkpoint's tokenizer."""
    tokenizer = Tokenizer.from_checkpoint(checkpoint)
    if tokenizer is None:
        raise ConfigError("This model came without a tokenizer: nothing can be measured on a text.")
    tokens = tokenizer.encode(read_text(path), add_special=False)[:count]
    if len(tokens) < 2:
        raise ConfigError(f"{path} has fewer than two tokens: give a longer text.")
    return tokens
