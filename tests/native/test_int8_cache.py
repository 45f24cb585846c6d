"""An int8 cache with scales per token and head: close to float, the same bits always, and wrong planes are errors."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

from engine.test_equality_matrix import PROMPT, Cell, fast_cells, reference, run_cell
from engine.tiny import RandomWeights, tiny_llm
from native.test_native_model import shape
from paceline import SamplingParams
from paceline.errors import ConfigError
from paceline.kernels import cpu
from paceline.models.config import ModelConfig
from paceline.models.native import NativeDecoder
from pairwise import pairwise

pytestmark = pytest.mark.skipif(cpu.load() is None, reason="the native kernels are not built here (no C++ compiler)")
ISAS = [] if cpu.load() is None else cpu.require().available_kernels()


@functools.cache
def int8_model(name: str, threads: int = 1) -> NativeDecoder:
    return NativeDecoder(shape(name), RandomWeights(), 512, threads=threads, kv_dtype=torch.int8)


@pairwise(cell=fast_cells(), name=["llama", "mistral"], style=["greedy", "controlled"])
def test_the_equality_matrix_holds(name: str, style: str, cell: Cell) -> None:
    """Batches, chunks, threads, preemption, a warm prefix cache, trees whose paths are moved, copied blocks."""
    cell = dataclasses.replace(cell, options=cell.options | {"kv_dtype": "int8"})
    run_cell(int8_model(name, cell.threads), style, cell, reference(int8_model(name), style, kv_dtype="int8"))


def prompt_logprobs(config: ModelConfig, prompt: list[int], kernels: str, dtype: torch.dtype) -> torch.Tensor:
    model = NativeDecoder(config, RandomWeights(0.7), 512, threads=1, kernels=kernels, kv_dtype=dtype)
    llm = tiny_llm(model, kv_dtype=str(dtype).removeprefix("torch."))
    out = llm.generate([prompt], SamplingParams(max_tokens=0, prompt_logprobs=0))[0]
    assert out.error is None
    return torch.tensor([entry.raw for entry in out.prompt_logprobs[1:]])


@pytest.mark.parametrize("changes", [{}, {"head_dim": 64}, {"num_key_value_heads": 4},
                                     {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 32}],
                         ids=["d 16", "d 64", "4 kv heads", "8 queries a key head"])
@pytest.mark.parametrize("kernels", ISAS)
def test_it_changes_little(kernels: str, changes: dict[str, Any]) -> None:
    prompt = (PROMPT * 4)[:270]  # more than four tiles of keys
    exact, rounded = (prompt_logprobs(shape("llama", **changes), prompt, kernels, dtype)
                      for dtype in (torch.float32, torch.int8))
    gaps = (exact - rounded).abs()
    # A float16 cache moves these by 0.008 already: any change makes int8 activations round the other way somewhere.
    assert 0 < gaps.max() < 0.1 and gaps.mean() < 0.015, (gaps.max(), gaps.mean())


def test_it_takes_a_quarter_of_the_memory_and_the_scales() -> None:
    held = {dtype: tiny_llm(int8_model("llama"), kv_dtype=dtype).engine.runner.storage.bytes
            for dtype in ("float32", "int8")}
    assert held["int8"] * 16 * 4 == held["float32"] * (16 + 4)


@pytest.mark.parametrize("broken", ["no scales", "half of the scales", "narrow", "double", "strided"])
def test_wrong_scales_are_errors(broken: str) -> None:
    model = NativeDecoder(shape("llama"), RandomWeights(), 64, threads=1, kv_dtype=torch.int8)
    layers, heads = model.config.num_layers, model.config.num_kv_heads
    keys = [torch.zeros(32, heads, model.config.head_dim, dtype=torch.int8) for _ in range(layers)]
    scales = {
        "no scales": [],
        "half of the scales": [torch.zeros(32, heads)],
        "narrow": [torch.zeros(32, heads - 1)] * layers,
        "double": [torch.zeros(32, heads, dtype=torch.float64)] * layers,
        "strided": [torch.zeros(heads, 32).T] * layers,
    }[broken]
    with pytest.raises((ValueError, TypeError, RuntimeError)):
        model._model.bind_cache(keys, keys, scales, scales)


def test_a_float_cache_takes_no_scales_and_an_int8_model_no_floats() -> None:
    with pytest.raises(ConfigError, match="int8, float16 or float32"):
        NativeDecoder(shape("llama"), RandomWeights(), 64, threads=1, kv_dtype=torch.bfloat16)
    float_model = NativeDecoder(shape("llama"), RandomWeights(), 64, threads=1)
    layers, heads, d = float_model.config.num_layers, float_model.config.num_kv_heads, float_model.config.head_dim
    floats, scales = [torch.zeros(32, heads, d)] * layers, [torch.zeros(32, heads)] * layers
    with pytest.raises(ValueError, match="none for others"):
        float_model._model.bind_cache(floats, floats, scales, scales)
    int8 = NativeDecoder(shape("llama"), RandomWeights(), 64, threads=1, kv_dtype=torch.int8)
    with pytest.raises(ValueError, match="another dtype"):
        int8._model.bind_cache(floats, floats, scales, scales)


def test_fewer_scales_than_slots_bound_what_a_step_may_touch() -> None:
    """Slots beyond the shortest plane are refused by the step, not written."""
    llm = tiny_llm(NativeDecoder(shape("llama"), RandomWeights(), 512, threads=1, kv_dtype=torch.int8), kv_dtype="int8")
    storage = llm.engine.runner.storage
    for layer in storage.key_scales:
        storage.key_scales[layer] = storage.key_scales[layer][:16].clone()
    with pytest.raises(ValueError, match=r"does not exist|outside the cache"):
        engine = llm.engine
        engine.add(PROMPT, SamplingParams(max_tokens=1))
        step = engine.scheduler.schedule()
        assert step is not None
        engine.runner.run_batch(engine.batches.of_step(step))
