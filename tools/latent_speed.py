"""Latent attention (MLA) beside grouped-query attention in models of the same size: a decode step, a prompt chunk, and
the cache's bytes.

Both models are random, dense, in float32 and alike but for attention; the other one's feed-forward is a little wider,
so that both have as many weights. A step is timed over caches that are filled with numbers, not with a prompt: one
thread, its processor time, runs of both in turn, because the machine may be busy with other things.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from paceline.bench.report import Row, document, emit, json_argument, say
from paceline.cache.storage import KVStorage, bytes_per_token
from paceline.kernels import select
from paceline.kernels.interface import Kernels
from paceline.kernels.layout import GroupView, Layout
from paceline.models.config import ModelConfig
from paceline.models.forward import Forward
from paceline.models.interface import CausalLM
from paceline.models.registry import build

BLOCK_SIZE = 16
CHUNK = 256
"""Rows of a prompt's chunk."""
COMMON: dict[str, Any] = {"vocab_size": 1024, "hidden_size": 1024, "num_attention_heads": 16,
                          "max_position_embeddings": 8192, "tie_word_embeddings": True}
MLA: dict[str, Any] = COMMON | {
    "model_type": "deepseek_v2", "kv_lora_rank": 256, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64,
    "q_lora_rank": None, "intermediate_size": 2816}
GQA: dict[str, Any] = COMMON | {"model_type": "llama", "num_key_value_heads": 8, "intermediate_size": 2912}


class RandomWeights:
    """Small numbers of any shape, and how many there were."""

    def __init__(self) -> None:
        self.taken = 0
        self._source = torch.Generator().manual_seed(0)

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        tensor = torch.randn(shape, generator=self._source) * 0.02
        self.taken += tensor.numel()
        return tensor + 1.0 if name.endswith("norm.weight") else tensor

    def has(self, name: str) -> bool:
        return True


class Subject:
    """A model over a cache of its own, in which `most` tokens of `sequences` sequences have been."""

    def __init__(self, raw: dict[str, Any], layers: int, kernels: Kernels, sequences: int, most: int) -> None:
        weights = RandomWeights()
        config = ModelConfig.from_dict(raw | {"num_hidden_layers": layers})
        self.model: CausalLM = build(config, weights, config.max_position_embeddings)
        self.weights = weights.taken
        self._kernels = kernels
        self._blocks = -(-most // BLOCK_SIZE)
        groups = self.model.cache_groups
        self.storage = KVStorage(groups, [1 + sequences * self._blocks] * len(groups), BLOCK_SIZE, torch.float32,
                                 torch.device("cpu"))
        for planes in self.storage.planes:
            for plane in planes:
                plane[BLOCK_SIZE:].normal_()

    @torch.inference_mode()
    def step(self, sequences: int, start: int, rows: int) -> float:
        """Processor seconds of a step of `rows` rows after `start` tokens in each sequence, and its logits."""
        layout = self._layout(sequences, start, rows)
        tokens = torch.arange(sequences * rows) % 997
        last = torch.arange(1, sequences + 1) * rows - 1
        storage = self.storage
        begin = time.thread_time()
        context = Forward(self._kernels, layout, storage.keys, storage.values, self.model.cache_groups)
        self.model.logits(self.model.forward(tokens, context)[last], self._kernels)
        return time.thread_time() - begin

    def _layout(self, sequences: int, start: int, rows: int) -> Layout:
        tables = 1 + torch.arange(sequences * self._blocks).view(sequences, -1)
        positions = torch.arange(start, start + rows)
        slots = tables[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        used = tables[:, :(start + rows - 1) // BLOCK_SIZE + 1]
        views = [GroupView(used, slots.flatten()) for _ in self.model.cache_groups]
        return Layout(positions.repeat(sequences), list(range(0, sequences * rows + 1, rows)), [start] * sequences,
                      [None] * sequences, BLOCK_SIZE, views)


def compare(mla: Subject, gqa: Subject, sequences: int, start: int, rows: int, repeats: int) -> Row:
    """Both in turn; the row's numbers are medians, and its note the median of the ratios run by run."""
    what = "decode" if rows == 1 else f"prompt chunk of {rows}"
    case = f"{what}, {sequences} x {start} tokens before"
    say(f"latent: {case}")
    pairs = [(mla.step(sequences, start, rows), gqa.step(sequences, start, rows)) for _ in range(repeats + 1)][1:]
    ratios = sorted(other / own for own, other in pairs)
    own, other = (1e3 * statistics.median(column) for column in zip(*pairs))
    note = f"ratios run by run: median {statistics.median(ratios):.2f}, from {ratios[0]:.2f} to {ratios[-1]:.2f}"
    return Row(case, "ms", own, {"gqa": other}, higher_is_better=False, note=note)


def run(layers: int = 4, contexts: Sequence[int] = (128, 1024, 4096), batch: int = 4, repeats: int = 7,
        deterministic: bool = False) -> dict[str, Any]:
    torch.set_num_threads(1)
    kernels = select(deterministic, torch.device("cpu"))
    most = max(contexts) + CHUNK
    mla, gqa = (Subject(raw, layers, kernels, batch, most) for raw in (MLA, GQA))
    latent = ModelConfig.from_dict(MLA | {"num_hidden_layers": layers}).latent
    assert latent is not None
    formula = layers * latent.width * 4
    found = bytes_per_token(mla.model.cache_groups, torch.float32)
    rows = [
        Row("weights", "M", mla.weights / 1e6, {"gqa": gqa.weights / 1e6}),
        Row("cache a token", "bytes", found, {"gqa": bytes_per_token(gqa.model.cache_groups, torch.float32)},
            higher_is_better=False,
            note=f"by the formula {layers} layers x ({latent.rank} + {latent.rope_dim}) x 4 bytes = {formula}")]
    shapes = [(sequences, start, 1) for sequences in (1, batch) for start in contexts] + [(1, contexts[0], CHUNK)]
    rows += [compare(mla, gqa, *shape, repeats) for shape in shapes]
    return document(rows, layers=layers, batch=batch, repeats=repeats, kernels=kernels.name)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tools/latent_speed.py", description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--deterministic", action="store_true")
    json_argument(parser)
    arguments = parser.parse_args()
    result = run(arguments.layers, batch=arguments.batch, repeats=arguments.repeats,
                 deterministic=arguments.deterministic)
    emit(result, arguments.json)


if __name__ == "__main__":
    main()
