"""Perplexity of a text under each number format, and what it loses against the file's weights in float32."""

from __future__ import annotations

import argparse
import gzip
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.bench.report import Row, document, emit, json_argument, say
from paceline.bench.rounding import RoundedKernels, RoundedWeights
from paceline.cache.storage import KVStorage
from paceline.engine.build import choose_device
from paceline.errors import ConfigError, PacelineError
from paceline.kernels.cpu import NativeKernels
from paceline.kernels.cpu import load as native_library
from paceline.kernels.eager import EagerKernels
from paceline.kernels.interface import Kernels
from paceline.kernels.layout import GroupView, Layout
from paceline.models.config import ModelConfig
from paceline.models.forward import Forward
from paceline.models.interface import CausalLM
from paceline.models.load.checkpoint import Checkpoint
from paceline.models.load.opening import open_checkpoint
from paceline.models.load.resolve import resolve
from paceline.models.load.weights import Weights
from paceline.models.native import NativeDecoder, unsupported
from paceline.models.registry import build
from paceline.models.tokenizer import Tokenizer

WINDOW = 1024
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


ENGINES = (
    Format(BASELINE),
    Format("native", native=True, weights="int8_channel", cache="int8"),
    Format("native, float16 cache", native=True, weights="int8_channel", cache="float16"),
    Format("native, float32 cache", native=True, weights="int8_channel"),
    Format("native, the file's blocks", native=True, cache="int8"),
    Format("native, the file's blocks, float32 cache", native=True),
    Format("native, int8 blocks, float32 cache", native=True, weights="int8_block"),
)
_SIZES = ((32, "32"), (64, "64"), (128, "128"), (0, "row"))
GATE = (
    *(Format(f"{weights}, float activations", weights=weights)
      for weights in ("int8_channel", "int8_block", "int4_block")),
    *(Format(f"file, int8 per {size}", activations=number) for number, size in _SIZES),
    *(Format(f"{weights}, int8 per {size}", weights=weights, activations=number) for weights, number, size in (
        ("int8_channel", 32, "32"), ("int8_channel", 0, "row"), ("int8_block", 32, "32"), ("int4_block", 32, "32"))),
    *(Format(f"{weights}, int8 per {size}, float down", weights=weights, activations=number, float_down=True)
      for weights, number, size in (("file", 32, "32"), ("file", 0, "row"), ("int8_channel", 0, "row"))),
    Format("file, float activations, float16 cache", cache="float16"),
    Format("file, float activations, int8 cache", cache="int8"),
)


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

    @torch.inference_mode()
    def surprise(self, tokens: list[int], chunk: int = CHUNK) -> float:
        """Sum of -log p(token | the tokens before it in this window) over all but the first, in nats."""
        total = 0.0
        ids = torch.tensor(tokens, device=self._device)
        for begin in range(0, len(tokens), chunk):
            end = min(begin + chunk, len(tokens))
            hidden = self._model.forward(ids[begin:end], self.context(begin, end))
            targets = ids[begin + 1:end + 1]
            if len(targets):
                logits = self._model.logits(hidden[:len(targets)], self._kernels)
                total -= float(torch.log_softmax(logits, -1).gather(1, targets[:, None]).double().sum())
        return total

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


def read_text(path: str | Path) -> str:
    """UTF-8; .gz is unpacked."""
    try:
        raw = Path(path).read_bytes()
        return (gzip.decompress(raw) if str(path).endswith(".gz") else raw).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read {path} as text ({error}): give a UTF-8 file, plain or .gz.") from None


def run(text: str | Path, model: str | None = None, tokens: int = 20000, window: int = WINDOW,
        gate_windows: int = 6, threads: int | None = None, device: str = "cpu") -> dict[str, Any]:
    """Engines on `tokens` tokens; the rounded formats on the first gate_windows windows (0: not at all). Each loss is
    against float32 on the same tokens. `device` runs what is in torch."""
    threads = threads or torch.get_num_threads()
    device = str(choose_device(device))
    found: list[tuple[Row, float]] = []
    with open_checkpoint(resolve(model)) as checkpoint:
        tokenizer = Tokenizer.from_checkpoint(checkpoint)
        if tokenizer is None:
            raise ConfigError("This model came without a tokenizer: its perplexity on a text cannot be measured.")
        ids = tokenizer.encode(read_text(text), add_special=False)[:tokens]
        if len(ids) < 2:
            raise ConfigError(f"{text} has fewer than two tokens: give a longer text.")
        reason = unsupported(ModelConfig.from_dict(checkpoint.config))
        if native_library() is None:
            reason = "the native kernels are not built"
        engines = [format for format in ENGINES if not format.native or reason is None]
        if reason is not None:
            say(f"quality: native formats are left out: {reason}")
        short = ids[:gate_windows * window]
        for formats, some in ((engines, ids), ((ENGINES[0], *GATE) if len(short) > 1 else (), short)):
            baseline = 0.0
            for format in formats:
                value = perplexity(scorer(format, checkpoint, min(window, len(some)), threads, device), some, window)
                baseline = baseline or value
                loss = 100 * (value / baseline - 1)
                say(f"quality: {format.name}: {value:.4f} ({loss:+.2f} %) on {len(some)} tokens")
                found.append((Row(format.name, "perplexity", value, higher_is_better=False,
                                  note=f"{loss:+.2f} % on {len(some)} tokens"), loss))
    result = document([row for row, _ in found], model=model or "default", tokens=len(ids), window=window,
                      gate_windows=gate_windows, device=device)
    for row, (_, loss) in zip(result["rows"], found):
        row["loss_percent"] = loss
    return result


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m paceline.bench.quality", description=__doc__)
    parser.add_argument("--text", required=True, help="UTF-8 text to score, plain or .gz")
    parser.add_argument("--model", default=None)
    parser.add_argument("--tokens", type=int, default=20000)
    parser.add_argument("--gate-windows", type=int, default=6, help="windows for the formats tried in torch; 0: none")
    parser.add_argument("--device", default="cpu", help="of the formats that run in torch")
    json_argument(parser)
    arguments = parser.parse_args()
    try:
        result = run(arguments.text, arguments.model, arguments.tokens, gate_windows=arguments.gate_windows,
                     device=arguments.device)
    except PacelineError as problem:
        raise SystemExit(f"error: {problem}") from None
    emit(result, arguments.json)


if __name__ == "__main__":
    main()
