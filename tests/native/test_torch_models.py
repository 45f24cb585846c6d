"""Models whose forward is written in torch, on native linear layers and attention: Mixtral, and what may come."""

from __future__ import annotations

import dataclasses
import functools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_files import write_folder, write_gguf
from paged_steps import CASES, TREE, Group, attend, make

from engine.test_equality_matrix import PROMPT, STYLES, Cell, fast_cells, params, reference, run_cell
from engine.tiny import BASE, SHAPES, RandomWeights, tiny_llm
from native.test_native_kernels import packed, quantised, random_blocks
from native.test_native_model import shape
from paceline import LLM, SamplingParams
from paceline.errors import ConfigError
from paceline.kernels import cpu
from paceline.kernels.cpu import NativeKernels
from paceline.kernels.packed import PackedWeight, plain
from paceline.kernels.reference import ReferenceKernels
from paceline.measure.rounding import RoundedWeights
from paceline.models.config import ModelConfig
from paceline.models.packing import PackingWeights
from paceline.models.registry import build
from pairwise import each

pytestmark = pytest.mark.skipif(cpu.load() is None, reason="the native kernels are not built here (no C++ compiler)")
ISAS = [] if cpu.load() is None else cpu.require().available_kernels()
REFERENCE = ReferenceKernels()


def packed_model(config: ModelConfig, gain: float = 1.5) -> Any:
    return build(config, PackingWeights(RandomWeights(gain)), 512)


# -- whole models ----------------------------------------------------------------------------------------------------

@functools.cache
def mixtral() -> Any:
    return packed_model(shape("mixtral"))


def test_native_kernels_run_it_and_are_deterministic_unasked() -> None:
    kernels = tiny_llm(mixtral(), deterministic=False).engine.kernels
    assert isinstance(kernels, NativeKernels) and kernels.deterministic


# Two threads that share the machine's cores with other tests wait for one another at each product: a cell in every run.
CELLS = [pytest.param(cell, marks=pytest.mark.full) if cell.threads > 1 else cell for cell in fast_cells()]


@each(cell=[*CELLS, Cell("batch 8, 2 threads", batch=8, threads=2)], style=list(STYLES))
def test_the_equality_matrix_holds(style: str, cell: Cell) -> None:
    run_cell(mixtral(), style, cell, reference(mixtral(), style))


@pytest.mark.parametrize("name", [
    "gpt_neox", *(pytest.param(name, marks=pytest.mark.full)
                  for name in ("deepseek_v2", "deepseek_v3", "gemma2", "gemma3", "gpt2", "olmo2", "phi3", "qwen3_moe",
                               "shared_keys"))])
@pytest.mark.parametrize("cell", [cell for cell in fast_cells() if cell.name in ("batch 8", "oracle-tree")],
                         ids=lambda cell: cell.name)
def test_cells_of_the_matrix_for_other_families(name: str, cell: Cell) -> None:
    model = packed_family(name)
    run_cell(model, "seeded", cell, reference(model, "seeded"))


@functools.cache
def packed_family(name: str) -> Any:
    return packed_model(shape(name, tie_word_embeddings=False))


class RoundedByRow:
    """The layers' matrices rounded to 8 bits with a scale a row, in floats; not the router, which is never packed."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._rounded = RoundedWeights(source, "int8_channel")

    def has(self, name: str) -> bool:
        return bool(self._source.has(name))

    def take(self, name: str, size: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        packed = name.startswith("model.layers.") and not name.endswith("gate.weight") and size[-1] % 32 == 0
        return (self._rounded if packed else self._source).take(name, size, dtype)


def prompt_scores(model: Any, **options: Any) -> torch.Tensor:
    out = tiny_llm(model, **options).generate([PROMPT], SamplingParams(max_tokens=0, prompt_logprobs=0))[0]
    assert out.error is None
    return torch.tensor([entry.raw for entry in out.prompt_logprobs[1:]])


@pytest.mark.parametrize("config", [
    shape("mixtral"),
    shape("qwen3"),
    ModelConfig.from_dict(BASE | SHAPES["mixtral"]),  # heads of 8 and a feed-forward of 48: torch runs those parts
    shape("gemma2", norm_offset=0.0),  # capped scores: torch attends
    *(pytest.param(shape(name, norm_offset=0.0), marks=pytest.mark.full)
      for name in ("gemma3", "gpt2", "gpt_neox", "olmo2", "phi3", "qwen3_moe")),
], ids=["mixtral", "qwen3", "odd widths", "gemma2", "gemma3", "gpt2", "gpt_neox", "olmo2", "phi3", "qwen3_moe"])
def test_logits_are_torchs_up_to_the_rounding_of_weights_and_activations(config: ModelConfig) -> None:
    """Of weights in blocks against the floats; of weights with a scale a row against floats rounded in the same way and
    with all experts chosen: a row near a tie of the router would be another row."""
    every = dataclasses.replace(config, experts_per_token=config.num_experts)
    cases = ((config, RandomWeights(0.7), True), (every, RoundedByRow(RandomWeights(0.7)), False))
    for shaped, source, keep_blocks in cases:
        want = prompt_scores(build(shaped, source, 512), kernels="reference")
        for dtype in ("float32", "float16"):
            ours = build(shaped, PackingWeights(RandomWeights(0.7), keep_blocks), 512)
            gaps = (prompt_scores(ours, kv_dtype=dtype) - want).abs()
            assert 0 < gaps.mean() < 0.03 and gaps.max() < 0.2, gaps


def test_the_router_stays_in_floats_and_everything_else_is_packed() -> None:
    block = mixtral().blocks[0]
    assert isinstance(block.mlp.router.scores.weight, torch.Tensor)
    linears = [block.attention.qkv, block.attention.out, block.mlp.experts[3].gate_up, block.mlp.experts[3].down,
               mixtral().head]
    assert all(isinstance(linear.weight, PackedWeight) for linear in linears)
    assert mixtral().bits == 8


# -- from files ------------------------------------------------------------------------------------------------------

def test_native_kernels_may_be_asked_for_whatever_the_architecture(tmp_path: Path) -> None:
    config = shape("mixtral")
    wide, experts = config.intermediate_size, [f"block_sparse_moe.experts.{i}" for i in range(4)]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (97, 64), "model.norm.weight": (64,)}
    for layer in range(config.num_layers):
        parts = {"input_layernorm": (64,), "post_attention_layernorm": (64,), "self_attn.q_proj": (64, 64),
                 "self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64), "self_attn.o_proj": (64, 64),
                 "block_sparse_moe.gate": (4, 64)}
        for expert in experts:
            parts |= {f"{expert}.w1": (wide, 64), f"{expert}.w2": (64, wide), f"{expert}.w3": (wide, 64)}
        shapes |= {f"model.layers.{layer}.{name}.weight": size for name, size in parts.items()}
    tensors = {name: RandomWeights().take(name, size) for name, size in shapes.items()}
    raw = BASE | SHAPES["mixtral"] | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16,
                                      "architectures": ["MixtralForCausalLM"]}
    folder = write_folder(tmp_path / "mixtral", raw, [tensors])
    options = {"kv_blocks": 64, "block_size": 8, "threads": 2}
    native, plain_llm = LLM(str(folder), kernels="native", **options), LLM(str(folder), **options)
    assert (native.engine.kernels.name, plain_llm.engine.kernels.name) == ("native", "eager")
    assert native.generate([PROMPT], params("greedy"))[0].outputs[0].token_ids == reference(mixtral(), "greedy")[0]
    with pytest.raises(ConfigError, match="int8"):
        LLM(str(folder), kernels="native", kv_dtype="int8", **options)


def test_files_with_blocks_run_natively_by_themselves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rng = np.random.default_rng(4)

    def tensor(*size: int) -> np.ndarray:
        return (rng.standard_normal(size) * (0.15 if len(size) > 1 else 1)).astype(np.float32)

    shapes = {"attn_norm": ((64,), "F32"), "ffn_norm": ((64,), "F32"), "attn_q": ((64, 64), "Q4_0"),
              "attn_k": ((32, 64), "Q4_0"), "attn_v": ((32, 64), "Q4_0"), "attn_output": ((64, 64), "Q4_1"),
              "ffn_gate_inp": ((4, 64), "F32"), "ffn_gate_exps": ((4, 96, 64), "Q4_0"),
              "ffn_up_exps": ((4, 96, 64), "Q4_0"), "ffn_down_exps": ((4, 64, 96), "Q4_1")}
    tensors = {f"blk.{layer}.{name}.weight": (tensor(*size), kind)
               for layer in range(2) for name, (size, kind) in shapes.items()}
    tensors |= {"token_embd.weight": (tensor(97, 64), "Q8_0"), "output_norm.weight": (tensor(64), "F32")}
    path = write_gguf(tmp_path / "m.gguf", metadata={
        "block_count": 2, "embedding_length": 64, "feed_forward_length": 96, "expert_count": 4,
        "expert_used_count": 2}, tensors=tensors)
    caplog.set_level(logging.INFO, "paceline.engine")
    options = {"kv_blocks": 64, "block_size": 8}
    llm, kept = LLM(str(path), **options), LLM(str(path), quantization="blocks", **options)
    assert llm.engine.kernels.name == kept.engine.kernels.name == "native"
    assert (llm.engine.model.bits, kept.engine.model.bits) == (8, 4)
    assert "mixtral" in caplog.text
    exact = LLM(str(path), kernels="reference", **options)
    ask = SamplingParams(max_tokens=0, prompt_logprobs=0)
    rounded, blocks, want = (torch.tensor([entry.raw for entry in one.generate([PROMPT], ask)[0].prompt_logprobs[1:]])
                             for one in (llm, kept, exact))
    assert 0 < (blocks - want).abs().mean() < 0.05
    assert 0 < (rounded - want).abs().median() < 0.06
    assert not torch.equal(rounded, blocks)


# -- attention -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("case", sorted(CASES))
@pytest.mark.parametrize("window", [None, 1, 10])
def test_attention_is_the_references(case: str, window: int | None, isa: str) -> None:
    step = make(CASES[case], window=window)
    torch.testing.assert_close(attend(NativeKernels(2, isa), step), attend(REFERENCE, step), atol=1e-5, rtol=0)


@st.composite
def groups(draw: st.DrawFn) -> list[Group]:
    found = []
    for seed in range(draw(st.integers(1, 5))):
        rows = draw(st.integers(1, 12))
        tree = [-1, *(draw(st.integers(0, row - 1)) for row in range(1, rows))] if draw(st.booleans()) else None
        found.append(Group(draw(st.integers(0, 200)), rows, tree, seed))
    return found


@settings(max_examples=40, deadline=None)
@given(what=groups(), window=st.sampled_from([None, 1, 7, 64, 100]), block_size=st.sampled_from([1, 4, 16]),
       heads=st.sampled_from([(1, 1, 16), (6, 2, 32), (16, 1, 16), (4, 4, 80)]), half=st.booleans())
def test_attention_over_random_layouts(what: list[Group], window: int | None, block_size: int,
                                       heads: tuple[int, int, int], half: bool) -> None:
    step = make(what, heads=heads[0], kv_heads=heads[1], dim=heads[2], block_size=block_size, window=window)
    if half:
        step.keys, step.values = step.keys.half(), step.values.half()
    got = attend(NativeKernels(2), step)
    torch.testing.assert_close(got, attend(REFERENCE, step), atol=1e-5, rtol=0)
    step.layout.views[0].scratch.clear()
    assert torch.equal(attend(NativeKernels(1), step), got)
    begin = 0
    for place, group in enumerate(what):  # a group alone, elsewhere in the cache, has the same bits
        alone = make([group], heads=heads[0], kv_heads=heads[1], dim=heads[2], block_size=8, window=window, place=place)
        if half:
            alone.keys, alone.values = alone.keys.half(), alone.values.half()
        assert torch.equal(attend(NativeKernels(1), alone), got[begin:begin + group.rows])
        begin += group.rows


def test_shapes_native_attention_does_not_know_are_left_to_the_reference() -> None:
    for heads, kv_heads, dim in ((4, 4, 8), (34, 2, 16)):
        step = make(CASES["everything"], heads=heads, kv_heads=kv_heads, dim=dim)
        assert torch.equal(attend(NativeKernels(), step), attend(REFERENCE, step))


def arguments() -> dict[str, Any]:
    """Of a right call of Workers.attend."""
    step = make([Group(13, len(TREE), TREE)])
    view = step.layout.views[0]
    return {"q": step.q.numpy(), "keys": step.keys.numpy(), "values": step.values.numpy(),
            "positions": step.layout.positions.numpy(), "offsets": np.array([0, 9]), "starts": np.array([13]),
            "parents": np.array(TREE), "block_size": 4, "table": view.tables.numpy(), "slots": view.slots.numpy(),
            "window": 0, "scale": 0.25, "out": np.zeros((9, 6, 16), dtype=np.float32)}


def wrong_arguments() -> list[tuple[str, Any]]:
    right = arguments()
    far, deep = right["positions"] + 1, right["positions"].copy()
    deep[8] += 1  # its depth in the tree is 1, its number in the group 8
    return [("q", right["q"].astype(np.float64)), ("q", right["q"][:8]), ("q", right["q"][:, :5]),
            ("q", right["q"][:, :, ::2]), ("q", right["q"][0]), ("out", right["out"][:8]),
            ("out", right["out"].astype(np.float16)), ("out", right["out"].swapaxes(0, 1)),
            ("keys", right["keys"].astype(np.float64)), ("keys", right["keys"].astype(np.float16)),
            ("keys", np.zeros(right["keys"].shape, dtype=np.int8)), ("keys", right["keys"][:4]),
            ("keys", right["keys"][:, :1]),
            ("values", right["values"][:, :, :8]), ("values", right["values"][::2]), ("positions", far),
            ("positions", deep), ("positions", right["positions"].astype(np.int32)), ("positions", far[:3]),
            ("offsets", np.array([0, 8])), ("offsets", np.array([0, 12, 9])), ("offsets", np.array([0])),
            ("starts", np.array([-1])), ("starts", np.array([1 << 62])), ("parents", np.array(TREE[::-1])),
            ("parents", np.array(TREE[:3])), ("parents", TREE), ("block_size", 0), ("block_size", 1 << 20),
            ("table", right["table"] + 1000), ("table", right["table"] - 1000), ("table", right["table"][:, :2]),
            ("table", right["table"][0]), ("slots", right["slots"] + 100000), ("slots", right["slots"] - 100000),
            ("slots", right["slots"][:4]), ("window", -1), ("window", None), ("scale", "much"), ("mutual", True),
            ("first", -1)]


@pytest.mark.parametrize(("name", "value"), wrong_arguments() if ISAS else [])
def test_wrong_attention_arguments_are_errors(name: str, value: Any) -> None:
    workers = cpu.require().Workers(1)
    workers.attend(**arguments())
    with pytest.raises((ValueError, TypeError, RuntimeError)):
        workers.attend(**(arguments() | {name: value}))


# -- linear layers ---------------------------------------------------------------------------------------------------

@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), kind=st.sampled_from(["Q4_0", "Q4_1", "Q8_0"]), lanes=st.integers(1, 5),
       blocks=st.integers(1, 6), rows=st.integers(1, 11), dropped=st.integers(0, 7), bias=st.booleans())
def test_linear_agrees_with_the_quantised_product(seed: int, kind: str, lanes: int, blocks: int, rows: int,
                                                  dropped: int, bias: bool) -> None:
    rng = np.random.default_rng(seed)
    out = lanes * 8 - dropped
    raw, weight = random_blocks(rng, kind, lanes * 8, blocks * 32)
    matrix = PackedWeight(packed(kind, raw, lanes * 8, blocks * 32), out, 4)
    x = rng.standard_normal((rows, blocks * 32)).astype(np.float32)
    added = rng.standard_normal(out).astype(np.float32) if bias else np.zeros(out, dtype=np.float32)
    q, scale = quantised(x)
    expected = (q * scale[..., None].astype(np.float64)).reshape(rows, -1) @ weight[:out].T.astype(np.float64) + added
    for threads in (1, 2):
        for isa in ISAS:
            kernels = NativeKernels(threads, isa)
            got = kernels.linear(torch.from_numpy(x), matrix, torch.from_numpy(added) if bias else None)
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
            for row in range(rows):
                one = kernels.linear(torch.from_numpy(x[row:row + 1]), matrix, torch.from_numpy(added))
                assert torch.equal(one[0], got[row])
    np.testing.assert_allclose(plain(matrix), weight[:out], rtol=1e-6, atol=1e-7)


def test_tensors_are_multiplied_as_the_reference_does_and_packed_weights_by_every_backend() -> None:
    x, weight = torch.randn(5, 64), torch.randn(16, 64)
    assert torch.equal(NativeKernels().linear(x, weight), REFERENCE.linear(x, weight))
    matrix = cpu.require().Matrix("q8", 16, 64)
    matrix.take_floats(weight.numpy(), 0)
    held = PackedWeight(matrix, 16, 8)
    assert torch.equal(REFERENCE.linear(x, held), REFERENCE.linear(x, plain(held)))


def test_wrong_linear_arguments_are_errors() -> None:
    native = cpu.require()
    workers, matrix, out = native.Workers(1), native.Matrix("q8", 8, 64), np.zeros((2, 8), dtype=np.float32)
    for x in (np.zeros((2, 32), dtype=np.float32), np.zeros((2, 64)), np.zeros((64, 2), dtype=np.float32).T,
              np.zeros((3, 64), dtype=np.float32), np.zeros(64, dtype=np.float32)):
        with pytest.raises((ValueError, TypeError)):
            workers.linear(matrix, x, out)
    with pytest.raises((ValueError, TypeError)):
        workers.linear(None, np.zeros((2, 64), dtype=np.float32), out)


def test_threads_are_at_least_one_and_at_most_the_cores() -> None:
    native = cpu.require()
    assert 1 <= native.Workers(10_000).threads < 10_000
    with pytest.raises(ValueError, match="at least 1"):
        native.Workers(0)
    with pytest.raises(ValueError, match="cannot run on this machine"):
        native.Workers(1, "sve9")
