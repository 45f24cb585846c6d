"""Rounded folders in the engine: natively on a CPU, in torch elsewhere, with the same tokens drafted or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Hand
from rounded_models import TEXT, logits, tiny_folder

from paceline import LLM, SamplingParams
from paceline.kernels import cpu
from paceline.kernels.cpu import NativeKernels
from paceline.kernels.packed import OutlierWeight, PackedWeight
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.models.load import Weights, open_checkpoint
from paceline.models.native import NativeDecoder
from paceline.quantize.plan import Job
from paceline.quantize.run import quantize

TOKENS = [5, 9, 200, 31, 7, 7, 120, 64, 3, 18, 250, 90]
FORMS: dict[str, dict[str, Any]] = {
    "int8": {"to": "int8"}, "int4": {"to": "int4"}, "awq": {"to": "awq"},
    "outliers": {"to": "int8", "outliers": 20.0}}
native = pytest.mark.skipif(cpu.load() is None, reason="the native kernels are not built")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("rounded")
    text = root / "text.txt"
    text.write_text(TEXT)
    calm, loud = tiny_folder(root / "calm"), tiny_folder(root / "loud", loud=True)
    for name, options in FORMS.items():
        model = loud if "outliers" in options else calm
        quantize(Job(model=str(model), out=root / name, text=text, calibration_tokens=120, measured_tokens=2,
                     **options), lambda *_: None)
    return {name: root / name for name in FORMS}


def tokens_of(llm: LLM, **options: Any) -> list[int]:
    parameters = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    return llm.generate([TOKENS], parameters, **options)[0].outputs[0].token_ids


def greedy(folder: Path, count: int) -> list[int]:
    tokens = list(TOKENS)
    with open_checkpoint(folder) as checkpoint:
        for _ in range(count):
            tokens.append(int(logits(checkpoint.config, Weights(checkpoint), tokens)[-1].argmax()))
    return tokens[len(TOKENS):]


@pytest.mark.parametrize("form", FORMS)
def test_in_torch_the_tokens_are_those_of_the_expanded_weights(folders: dict[str, Path], form: str) -> None:
    llm = LLM(str(folders[form]), device="cpu", kernels="reference", kv_blocks=64)
    assert tokens_of(llm) == greedy(folders[form], 12)


@native
@pytest.mark.parametrize("keep", [None, "blocks"])
@pytest.mark.parametrize("form", ["int8", "int4", "awq"])
def test_on_a_cpu_they_run_natively_in_the_nearest_form(folders: dict[str, Path], form: str, keep: str | None) -> None:
    llm = LLM(str(folders[form]), device="cpu", kv_blocks=64, kv_dtype="float32", quantization=keep)
    model = llm.engine.model
    assert isinstance(model, NativeDecoder)
    assert model.bits == (4 if keep and form != "int8" else 8)
    with open_checkpoint(folders[form]) as checkpoint:
        exact = logits(checkpoint.config, Weights(checkpoint), TOKENS)
    found = Hand(model, NativeKernels()).run(TOKENS)
    assert (found - exact).norm() < 0.05 * exact.norm()
    assert tokens_of(llm) == tokens_of(llm, speculation={"method": "ngram", "k": 3})


@native
def test_outlier_columns_run_beside_packed_matrices(folders: dict[str, Path]) -> None:
    llm = LLM(str(folders["outliers"]), device="cpu", kv_blocks=64)
    model = llm.engine.model
    assert isinstance(model, Decoder) and llm.engine.kernels.name == "native"
    qkv = model.blocks[0].attention.qkv.weight  # type: ignore[attr-defined]
    assert isinstance(qkv, OutlierWeight) and qkv.columns.tolist() == [3, 17, 40]
    assert isinstance(model.embedding, PackedWeight) and not isinstance(model.embedding, OutlierWeight)
    with open_checkpoint(folders["outliers"]) as checkpoint:
        exact = logits(checkpoint.config, Weights(checkpoint), TOKENS)
        shape = ModelConfig.from_dict(checkpoint.config)
        packed_whole = NativeDecoder(shape, Weights(checkpoint), 64, threads=1)
        weight = torch.cat([checkpoint.tensor(f"model.layers.0.self_attn.{part}_proj.weight") for part in "qkv"])
    # The file's codes come back: what was rounded to a scale a row is in those very steps again.
    assert torch.allclose(qkv.rows(torch.arange(len(weight))), weight, rtol=1e-6, atol=0)
    split, whole = (Hand(each, NativeKernels()).run(TOKENS) for each in (model, packed_whole))
    assert (split - exact).norm() < 0.5 * (whole - exact).norm()
    assert tokens_of(llm) == tokens_of(llm, speculation={"method": "ngram", "k": 3})
