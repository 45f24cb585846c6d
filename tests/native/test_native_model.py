"""The native decoder: torch's logits up to rounding of activations, and the promise to the bit, trees included."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from engine.test_equality_matrix import PROMPT, STYLES, Cell, fast_cells, reference, run_cell
from engine.tiny import BASE, SHAPES, RandomWeights, tiny_llm
from paceline import SamplingParams
from paceline.kernels import cpu
from paceline.models.config import ModelConfig
from paceline.models.forward import Forward
from paceline.models.native import NativeDecoder, unsupported
from paceline.models.registry import build
from pairwise import pairwise

pytestmark = pytest.mark.skipif(cpu.load() is None, reason="the native kernels are not built here (no C++ compiler)")
WIDE: dict[str, Any] = BASE | {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
NATIVE = ("llama", "mistral", "qwen2", "qwen3")


def shape(name: str, **changes: Any) -> ModelConfig:
    return ModelConfig.from_dict(WIDE | SHAPES[name] | changes)


@functools.cache
def native_model(name: str, threads: int = 1, kernels: str = "") -> NativeDecoder:
    return NativeDecoder(shape(name), RandomWeights(), 512, threads=threads, kernels=kernels)


@pairwise(cell=fast_cells(), name=NATIVE, style=list(STYLES))
def test_the_equality_matrix_holds(name: str, style: str, cell: Cell) -> None:
    run_cell(native_model(name, cell.threads), style, cell, reference(native_model(name), style))


@pytest.mark.parametrize("kernels", [] if cpu.load() is None else cpu.require().available_kernels())
@pytest.mark.parametrize("name", NATIVE)
def test_logits_are_torchs_up_to_the_rounding_of_weights_and_activations(name: str, kernels: str) -> None:
    exact = tiny_llm(build(shape(name), RandomWeights(0.7), 512), kernels="reference")
    rounded = tiny_llm(NativeDecoder(shape(name), RandomWeights(0.7), 512, threads=2, kernels=kernels))
    assert rounded.engine.kernels.name == "native"
    want = exact.generate([PROMPT], SamplingParams(max_tokens=0, prompt_logprobs=0))[0].prompt_logprobs
    got = rounded.generate([PROMPT], SamplingParams(max_tokens=0, prompt_logprobs=0))[0].prompt_logprobs
    gaps = torch.tensor([abs(a.raw - b.raw) for a, b in zip(want[1:], got[1:])])
    assert gaps.mean() < 0.02 and gaps.max() < 0.15, gaps


def test_half_precision_cache_changes_little() -> None:
    scores = []
    for dtype in (torch.float32, torch.float16):
        model = NativeDecoder(shape("llama"), RandomWeights(0.7), 512, threads=1, kv_dtype=dtype)
        llm = tiny_llm(model, kv_dtype=str(dtype).removeprefix("torch."))
        scores.append(llm.generate([PROMPT], SamplingParams(max_tokens=0, prompt_logprobs=0))[0].prompt_logprobs)
    gaps = torch.tensor([abs(a.raw - b.raw) for a, b in zip(scores[0][1:], scores[1][1:])])
    assert 0 < gaps.max() < 0.1 and gaps.mean() < 0.01


def test_taps_and_layer_ranges_equal_the_whole_run() -> None:
    model = native_model("llama")
    llm = tiny_llm(model)
    engine = llm.engine
    engine.add(PROMPT, SamplingParams(max_tokens=1))
    step = engine.scheduler.schedule()
    assert step is not None
    whole = engine.runner.run_batch(engine.batches.of_step(step), frozenset({0, 1, 2, 3}))
    assert sorted(whole.hidden) == [0, 1, 2, 3]
    plain = engine.runner.run_batch(engine.batches.of_step(step))
    assert torch.equal(whole.logits, plain.logits)
    assert not torch.equal(whole.hidden[1], whole.hidden[2])
    # What enters a layer is what comes of running those before it; around what is skipped as well.
    batch = engine.batches.of_step(step)
    storage = engine.storage
    for skip in (frozenset(), frozenset({(1, "attn"), (1, "mlp")})):
        everything = Forward(engine.kernels, batch.layout, storage.keys, storage.values, model.cache_groups,
                             frozenset({0, 1, 2, 3}), skip=skip)
        model.forward(torch.from_numpy(batch.tokens), everything)
        stream = model.embed(torch.from_numpy(batch.tokens))
        for layer in range(3):
            assert torch.equal(everything.tapped[layer], stream)
            part = Forward(engine.kernels, batch.layout, storage.keys, storage.values, model.cache_groups,
                           frozenset({layer}), skip=skip)
            stream = model.layers(stream, part, layer, layer + 1)
            assert torch.equal(part.tapped[layer], everything.tapped[layer]) and len(part.tapped) == 1
        assert torch.equal(everything.tapped[3], stream)


def test_taps_that_are_not_there_are_refused() -> None:
    model = native_model("llama")
    llm = tiny_llm(model)
    llm.generate([PROMPT], SamplingParams(max_tokens=1))
    row, table = np.zeros(1, dtype=np.int64), np.ones((1, 1), dtype=np.int64)
    start = np.array([0, 1], dtype=np.int64)
    hidden = np.zeros((1, model.config.hidden_size), dtype=np.float32)

    def run(taps: list[int], tapped: list[np.ndarray]) -> None:
        model._model.run(hidden, row, start, row, None, 8, [table], [row + 8], [0], 1, 2, False, taps, tapped)

    run([1, 2], [hidden.copy(), hidden.copy()])
    for taps, tapped in (([0], [hidden.copy()]), ([3], [hidden.copy()]), ([1], []), ([1], [hidden[:, 1:].copy()])):
        with pytest.raises(ValueError, match="tap"):
            run(taps, tapped)


def test_shapes_that_stay_in_torch_say_why() -> None:
    assert unsupported(shape("llama")) is None
    assert "head" in (unsupported(ModelConfig.from_dict(BASE | SHAPES["llama"])) or "")
    assert "mixtral" in (unsupported(ModelConfig.from_dict(WIDE | SHAPES["mixtral"])) or "")
