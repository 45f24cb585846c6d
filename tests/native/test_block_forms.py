"""Every block type of GGUF in packed matrices: which form keeps it, that it keeps every weight, and its products."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from block_files import random_blocks
from hypothesis import given, settings
from hypothesis import strategies as st
from model_files import write_gguf

from paceline import LLM, SamplingParams
from paceline.config import EngineOptions
from paceline.engine.build import keeps_blocks
from paceline.kernels import cpu
from paceline.models.load import open_checkpoint
from paceline.models.load.codes import LAYOUTS
from paceline.models.load.dequant import dequantize
from paceline.models.packing import BITS, BLOCKS, KEEPS, PackingWeights, bits_in_blocks, exact_form

native = cpu.load()
pytestmark = pytest.mark.skipif(native is None, reason="the native kernels are not built here (no C++ compiler)")
ISAS = [] if native is None else native.available_kernels()
FORMS = [(form, kind) for form, kinds in KEEPS.items() for kind in sorted(kinds)]


class Blocks:
    """WeightSource of matrices in blocks, as a file would hold them."""

    def __init__(self, tensors: dict[str, tuple[str, npt.NDArray[np.uint8]]]) -> None:
        self.tensors = tensors

    def has(self, name: str) -> bool:
        return name in self.tensors

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        kind, raw = self.tensors[name]
        return dequantize(raw, kind, shape)

    def blocks(self, name: str, shape: tuple[int, int]) -> tuple[str, npt.NDArray[np.uint8]]:
        return self.tensors[name]


def floats_of(matrix: Any) -> np.ndarray:
    out = np.empty((matrix.rows, matrix.cols), dtype=np.float32)
    matrix.embed(np.arange(matrix.rows), out)
    return out


def rounded(x: np.ndarray) -> np.ndarray:
    """Activations as the native code rounds them, in float64."""
    blocks = x.reshape(x.shape[0], -1, 32)
    largest = np.abs(blocks).max(-1, keepdims=True)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    scale = (largest / np.float32(127)).astype(np.float64)
    return (np.rint(blocks * inverse) * scale).reshape(x.shape)


def test_every_type_that_can_be_read_can_be_packed() -> None:
    assert LAYOUTS.keys() == BLOCKS
    for form in KEEPS:
        assert native is not None and native.Matrix(form, 8, 1024).nbytes * 8 / (8 * 1024) == BITS[form]


@pytest.mark.parametrize(("form", "kind"), FORMS, ids=[f"{kind} in {form}" for form, kind in FORMS])
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), groups=st.integers(1, 3), wide=st.integers(1, 2),
       rows=st.sampled_from([1, 2, 3, 4, 7, 8, 13, 40]))
def test_weights_keep_their_values_and_multiply(form: str, kind: str, seed: int, groups: int, wide: int,
                                                rows: int) -> None:
    assert native is not None
    rng = np.random.default_rng(seed)
    raw = random_blocks(rng, kind, groups * 8, wide * 256)
    matrix = native.Matrix(form, groups * 8, wide * 256)
    matrix.take_blocks(raw, kind, 0)
    weights = dequantize(raw, kind, (groups * 8, wide * 256)).numpy()
    assert floats_of(matrix).tobytes() == weights.tobytes(), "bit for bit"
    x = rng.standard_normal((rows, wide * 256)).astype(np.float32)
    expected = rounded(x) @ weights.T.astype(np.float64)
    products = []
    for isa in ISAS:
        out = np.full((rows, groups * 8), np.nan, dtype=np.float32)
        matrix.linear(x, out, isa)
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
        products.append(out.tobytes())
        for row in range(rows):  # a row alone has the same bits
            one = np.empty((1, groups * 8), dtype=np.float32)
            matrix.linear(x[row:row + 1], one, isa)
            assert one.tobytes() == out[row:row + 1].tobytes()
    assert len(set(products)) == 1, "every instruction set multiplies alike"


@pytest.mark.parametrize("kind", sorted(BLOCKS))
@pytest.mark.parametrize("form", ["i8", "q8"])
def test_rounding_blocks_is_rounding_the_floats_they_stand_for(form: str, kind: str) -> None:
    assert native is not None
    raw = random_blocks(np.random.default_rng(3), kind, 16, 512)
    from_blocks, from_floats = native.Matrix(form, 16, 512), native.Matrix(form, 16, 512)
    from_blocks.take_blocks(raw, kind, 0)
    weights = dequantize(raw, kind, (16, 512)).numpy()
    if form == "q8" and kind in KEEPS["q8"]:
        assert np.array_equal(floats_of(from_blocks), weights)
        return
    from_floats.take_floats(weights, 0)
    assert floats_of(from_blocks).tobytes() == floats_of(from_floats).tobytes()


@pytest.mark.parametrize(("kinds", "form"), [
    ({"Q4_0"}, "q4"), ({"Q4_0", "Q4_1"}, "q4"), ({"Q4_K"}, "q4k"), ({"Q5_0"}, "q8"), ({"IQ4_NL", "Q8_0"}, "q8"),
    ({"Q4_0", "Q8_0"}, "q8"), ({"Q4_K", "Q6_K"}, "q8f"), ({"Q5_1"}, "q8f"), ({"Q4_1", "Q8_0"}, "q8f"),
    ({"Q4_K", "Q5_0"}, "q8f"), ({"Q2_K"}, None), ({"Q4_K", "F16"}, None)])
def test_the_smallest_form_that_keeps_all(kinds: set[str], form: str | None) -> None:
    assert exact_form(kinds) == form


def test_stacked_tensors_of_several_types_and_a_ragged_end_keep_their_values() -> None:
    rng = np.random.default_rng(8)
    kinds = {"q": ("Q4_K", 32), "k": ("Q6_K", 8), "v": ("Q5_K", 13)}
    source = Blocks({name: (kind, random_blocks(rng, kind, rows, 256)) for name, (kind, rows) in kinds.items()})
    want = np.concatenate([source.take(name, (rows, 256)).numpy() for name, (_, rows) in kinds.items()])
    packed = PackingWeights(source, keep_blocks=True).matrix([(name, rows) for name, (_, rows) in kinds.items()], 256)
    assert packed.shape == (53, 256) and packed.bits == 8
    found = packed.rows(torch.arange(53)).numpy()
    assert found.tobytes() == want.tobytes()
    assert not np.any(floats_of(packed.matrix)[53:]), "padding"


def test_a_ragged_middle_is_rounded_and_still_right() -> None:
    rng = np.random.default_rng(9)
    source = Blocks({name: ("Q4_K", random_blocks(rng, "Q4_K", 5, 256)) for name in ("a", "b")})
    packed = PackingWeights(source, keep_blocks=True).matrix([("a", 5), ("b", 5)], 256)
    want = np.concatenate([source.take(name, (5, 256)).numpy() for name in ("a", "b")])
    step = np.abs(want.reshape(10, -1, 32)).max(-1, keepdims=True) / 127
    gaps = np.abs(packed.rows(torch.arange(10)).numpy() - want).reshape(10, -1, 32)
    assert (gaps <= step * 0.51).all() and gaps.any()


def test_layers_of_four_bits_say_so() -> None:
    source = Blocks({"model.layers.0.x": ("Q4_K", random_blocks(np.random.default_rng(1), "Q4_K", 8, 256))})
    for keep_blocks, bits in ((True, 4), (False, 8)):
        packing = PackingWeights(source, keep_blocks)
        packing.matrix([("model.layers.0.x", 8)], 256)
        assert packing.bits == bits


# -- whole models ----------------------------------------------------------------------------------------------------

LAYER = {"attn_q": (256, 256), "attn_k": (128, 256), "attn_v": (128, 256), "attn_output": (256, 256),
         "ffn_gate": (512, 256), "ffn_up": (512, 256), "ffn_down": (256, 512)}


def model_file(path: Path, kinds: dict[str, str], default: str) -> Path:
    """A small Llama in blocks of 256; `kinds`: the types of some tensors, `default` that of the others."""
    rng = np.random.default_rng(4)
    tensors: dict[str, tuple[np.ndarray, str]] = {"output_norm.weight": (np.ones(256, np.float32), "F32")}
    shapes = {"token_embd": (197, 256), **{f"blk.{layer}.{part}": shape for layer in range(2)
                                           for part, shape in LAYER.items()}}
    for name, shape in shapes.items():
        kind = kinds.get(name.rpartition(".")[2], default)
        tensors[f"{name}.weight"] = (random_blocks(rng, kind, *shape), kind)
    for layer in range(2):
        for part in ("attn_norm", "ffn_norm"):
            tensors[f"blk.{layer}.{part}.weight"] = (np.ones(256, np.float32), "F32")
    return write_gguf(path, metadata={"block_count": 2, "embedding_length": 256, "feed_forward_length": 512,
                                      "attention.head_count": 8, "attention.head_count_kv": 4}, tensors=tensors)


MIXES: dict[str, tuple[dict[str, str], str, int]] = {
    "Q4_K_M": ({"token_embd": "Q6_K", "attn_v": "Q6_K", "ffn_down": "Q6_K"}, "Q4_K", 8),
    "Q4_K": ({"token_embd": "Q6_K"}, "Q4_K", 4), "Q5_0": ({"token_embd": "Q8_0"}, "Q5_0", 8),
    "Q5_1": ({}, "Q5_1", 8), "IQ4_NL": ({"token_embd": "Q5_K"}, "IQ4_NL", 8), "Q2_K": ({"ffn_down": "Q3_K"}, "Q2_K", 8)}
PROMPT = list(range(3, 40))


def prompt_scores(llm: LLM) -> torch.Tensor:
    found = llm.generate([PROMPT], SamplingParams(max_tokens=0, prompt_logprobs=0))[0].prompt_logprobs
    return torch.tensor([entry.raw for entry in found[1:]])


@pytest.mark.parametrize("mix", MIXES)
def test_a_file_of_these_types_runs_natively_and_its_blocks_are_kept(tmp_path: Path, mix: str) -> None:
    kinds, default, bits = MIXES[mix]
    path = model_file(tmp_path / "m.gguf", kinds, default)
    options = {"kv_blocks": 64, "block_size": 8, "threads": 1}
    exact = prompt_scores(LLM(str(path), kernels="reference", **options))
    by_row, kept = LLM(str(path), **options), LLM(str(path), quantization="blocks", kv_dtype="float32", **options)
    assert by_row.engine.kernels.name == kept.engine.kernels.name == "native"
    assert (by_row.engine.model.bits, kept.engine.model.bits) == (8, bits)
    assert 0 < (prompt_scores(kept) - exact).abs().mean() < 0.06, "activations are rounded, weights are not"
    assert 0 < (prompt_scores(by_row) - exact).abs().median() < 0.2
    greedy = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    plain = kept.generate([PROMPT], greedy)[0].outputs[0].token_ids
    assert kept.generate([PROMPT], greedy, speculation="ngram")[0].outputs[0].token_ids == plain


def test_blocks_are_kept_for_want_of_memory_only_where_they_take_less(tmp_path: Path,
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.config.available_memory", lambda: 1000)
    assert bits_in_blocks("Q4_K") < 5 < 8 < bits_in_blocks("Q6_K")
    for default, kept in (("Q4_K", True), ("Q6_K", False)):
        with open_checkpoint(model_file(tmp_path / f"{default}.gguf", {}, default)) as checkpoint:
            assert keeps_blocks(EngineOptions(), checkpoint) is kept
