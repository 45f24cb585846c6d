"""Quantised safetensors: every format's formula to the bit, what native code makes of it, and refusals by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_files import write_folder
from quantised_files import awq, compressed_config, compressed_int8, compressed_packed, gptq

from paceline.errors import ModelFormatError
from paceline.models.load import Weights, open_checkpoint
from paceline.models.load.dequant import dequantize
from paceline.models.load.quantised.awq import pack, unpack
from paceline.models.load.quantised.codes import pack_low_first, unpack_low_first

MODULE = "model.layers.0.mlp.down_proj"
NAME = MODULE + ".weight"
Made = tuple[dict[str, torch.Tensor], np.ndarray]
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}


def reshaped(made: Made, *shape: int) -> Made:
    """With the scales in another shape."""
    parts, weight = made
    return parts | {"weight_scale": parts["weight_scale"].reshape(shape)}, weight


CASES: dict[str, tuple[Callable[[], Made], dict[str, Any]]] = {
    "awq": (lambda: awq(16, 96, 32), AWQ),
    "awq, older keys": (lambda: awq(16, 64, 32), {"quant_method": "awq", "w_bit": 4, "q_group_size": 32}),
    "awq, a group a row": (lambda: awq(8, 64, 64), AWQ | {"group_size": -1}),
    "gptq": (lambda: gptq(16, 96, 32), GPTQ),
    "gptq symmetric": (lambda: gptq(16, 96, 32, symmetric=True), GPTQ),
    "gptq of the second version": (lambda: gptq(16, 96, 32, version=2), GPTQ | {"checkpoint_format": "gptq_v2"}),
    "gptq in order of activation": (lambda: gptq(16, 96, 32, act_order=True), GPTQ | {"desc_act": True}),
    "gptq of 8 bits": (lambda: gptq(16, 64, 16, bits=8), GPTQ | {"bits": 8, "group_size": 16}),
    "int8 per channel": (lambda: compressed_int8(6, 40), compressed_config()),
    "int8 per tensor": (lambda: compressed_int8(6, 40, None), compressed_config(strategy="tensor")),
    "int8 per channel, scales in a row": (lambda: reshaped(compressed_int8(6, 40), 6), compressed_config()),
    "int8 per tensor, the scale in a matrix": (lambda: reshaped(compressed_int8(6, 40, None), 1, 1),
                                               compressed_config(strategy="tensor")),
    "int8 in groups, with zero points": (lambda: compressed_int8(6, 40, 5, symmetric=False),
                                         compressed_config(strategy="group", group_size=8)),
    "int4 in whole bytes": (lambda: compressed_int8(6, 64, 2, bits=4),
                            compressed_config(4, strategy="group", group_size=32)),
    "int4 in whole bytes, with zero points": (lambda: compressed_int8(6, 64, 2, bits=4, symmetric=False),
                                              compressed_config(4, strategy="group", group_size=32)),
    "packed int4": (lambda: compressed_packed(6, 64, 32), compressed_config(4, "pack-quantized", strategy="group")),
    "packed int4, zero points, a width that leaves a word part empty": (
        lambda: compressed_packed(6, 36, 12, symmetric=False), compressed_config(4, "pack-quantized")),
    "packed int8": (lambda: compressed_packed(6, 36, 36, bits=8), compressed_config(8, "pack-quantized")),
}


def folder_of(path: Path, parts: dict[str, torch.Tensor], config: Any) -> Path:
    tensors = {f"{MODULE}.{part}": tensor for part, tensor in parts.items()}
    tensors["model.norm.weight"] = torch.ones(4, dtype=torch.float16)
    return write_folder(path / "m", {"model_type": "llama", "quantization_config": config}, [tensors])


@pytest.mark.parametrize("case", CASES)
def test_a_matrix_is_what_its_formula_says(tmp_path: Path, case: str) -> None:
    make, config = CASES[case]
    parts, expected = make()
    with open_checkpoint(folder_of(tmp_path, parts, config)) as checkpoint:
        assert sorted(checkpoint.names()) == sorted([NAME, "model.norm.weight"])
        assert checkpoint.has(NAME) and not checkpoint.has(f"{MODULE}.scales")
        assert checkpoint.shape(NAME) == expected.shape and checkpoint.rounded
        assert torch.equal(checkpoint.tensor(NAME), torch.from_numpy(expected))
        assert torch.equal(checkpoint.tensor(NAME, torch.bfloat16), torch.from_numpy(expected).to(torch.bfloat16))
        assert torch.equal(checkpoint.tensor("model.norm.weight"), torch.ones(4))
        weights = Weights(checkpoint)
        assert torch.equal(weights.take(NAME, expected.shape), torch.from_numpy(expected))
        assert weights.unused() == ["model.norm.weight"]


def test_eight_bit_floats_and_bitsandbytes(tmp_path: Path) -> None:
    values = torch.randn(6, 8).to(torch.float8_e4m3fn)
    scale = torch.rand(6, 1)
    config = compressed_config(8, "float-quantized", type="float")
    checkpoint = open_checkpoint(folder_of(tmp_path / "f", {"weight": values, "weight_scale": scale,
                                                            "input_scale": torch.ones(1)}, config))
    expected = torch.stack([torch.stack([values[o, i].float() * scale[o, 0] for i in range(8)]) for o in range(6)])
    assert torch.equal(checkpoint.tensor(NAME), expected)
    codes, largest = torch.randint(-127, 128, (6, 8), dtype=torch.int8), torch.rand(6)
    parts = {"weight": codes, "SCB": largest, "weight_format": torch.zeros((), dtype=torch.uint8)}
    checkpoint = open_checkpoint(folder_of(tmp_path / "b", parts, {"quant_method": "bitsandbytes",
                                                                   "load_in_8bit": True}))
    assert torch.allclose(checkpoint.tensor(NAME), codes * largest[:, None] / 127, rtol=1e-6)
    assert NAME in checkpoint.names() and f"{MODULE}.SCB" not in checkpoint.names()


@pytest.mark.parametrize(("case", "kind"), [("gptq symmetric", "Q4_0"), ("packed int4", "Q4_0"), ("awq", "Q4_1"),
                                            ("awq, a group a row", "Q4_1"), ("gptq", "Q4_1")])
def test_four_bits_in_groups_become_native_blocks(tmp_path: Path, case: str, kind: str) -> None:
    make, config = CASES[case]
    checkpoint = open_checkpoint(folder_of(tmp_path, make()[0], config))
    found = checkpoint.packed(NAME)
    assert found is not None and found[0] == kind


@pytest.mark.parametrize("case", CASES)
def test_blocks_are_the_matrix_that_is_read_in_floats(tmp_path: Path, case: str) -> None:
    make, config = CASES[case]
    parts, expected = make()
    checkpoint = open_checkpoint(folder_of(tmp_path, parts, config))
    kind, rows = checkpoint.packed(NAME) or ("", None)
    if rows is None:
        return
    off = (dequantize(rows, kind, expected.shape) - checkpoint.tensor(NAME)).abs().max()
    # Of Q4_1 a block's lowest value is one half-precision number, at most 15 times the largest scale.
    assert off <= (0 if kind == "Q4_0" else 15 * 0.2 * 2.0 ** -11)


@pytest.mark.parametrize("case", ["gptq in order of activation", "gptq of 8 bits", "int8 per channel",
                                  "int4 in whole bytes"])
def test_what_blocks_cannot_hold_is_left_to_floats(tmp_path: Path, case: str) -> None:
    make, config = CASES[case]
    checkpoint = open_checkpoint(folder_of(tmp_path, make()[0], config))
    assert checkpoint.packed(NAME) is None and checkpoint.packed("model.norm.weight") is None


def test_scales_beyond_half_precision_are_left_to_floats(tmp_path: Path) -> None:
    parts, _ = compressed_packed(6, 64, 32)
    parts["weight_scale"] = torch.full((6, 2), 1e-30)
    checkpoint = open_checkpoint(folder_of(tmp_path, parts, CASES["packed int4"][1]))
    assert checkpoint.packed(NAME) is None
    assert checkpoint.tensor(NAME).abs().max() > 0


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("axis", [0, 1])
def test_packing_is_the_inverse_of_unpacking(bits: int, axis: int) -> None:
    values = torch.randint(0, 2 ** bits, (16, 24), dtype=torch.uint8)
    assert torch.equal(unpack_low_first(pack_low_first(values, bits, axis), bits, axis), values)
    four = values & 15
    assert torch.equal(unpack(pack(four)), four)


# -- refusals --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("config", "named"), [
    ({"quant_method": "hqq"}, "quant_method 'hqq'"),
    ({"bits": 4}, "quant_method None"),
    ({"quant_method": ["awq"]}, "quant_method ['awq']"),
    (compressed_config() | {"config_groups": [1]}, "config_groups [1]"),
    (compressed_config() | {"sparsity_config": "dense"}, "sparsity_config 'dense'"),
    (AWQ | {"bits": 3}, "bits 3"),
    (AWQ | {"version": "gemv"}, "version 'gemv'"),
    (AWQ | {"zero_point": False}, "zero_point False"),
    (AWQ | {"group_size": 0}, "group_size 0"),
    (AWQ | {"group_size": "many"}, "group_size 'many'"),
    (GPTQ | {"bits": 3}, "bits 3"),
    (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
    (GPTQ | {"is_marlin_format": True}, "is_marlin_format"),
    (GPTQ | {"dynamic": {"layer.0": {"bits": 8}}}, "'dynamic'"),
    (compressed_config(form="nvfp4-pack-quantized"), "format 'nvfp4-pack-quantized'"),
    (compressed_config(2), "num_bits 2"),
    (compressed_config(strategy="block"), "strategy 'block'"),
    (compressed_config() | {"config_groups": {}}, "0 kinds of weights"),
    (compressed_config() | {"config_groups": {"a": {"targets": "fc", "weights": {"num_bits": 8}}}}, "targets 'fc'"),
    (compressed_config() | {"config_groups": {"a": {"targets": ["re:("], "weights": {"num_bits": 8}}}}, "no pattern"),
    (compressed_config() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "4 bits"),
])
def test_an_unknown_quantisation_is_named_with_what_is_read(tmp_path: Path, config: dict[str, Any],
                                                             named: str) -> None:
    with pytest.raises(ModelFormatError) as refused:
        open_checkpoint(folder_of(tmp_path, awq(8, 32, 32)[0], config))
    assert named in str(refused.value) and "config.json" in str(refused.value)
    assert "awq (4 bits, version gemm)" in str(refused.value) and "compressed-tensors" in str(refused.value)


@pytest.mark.parametrize(("case", "part", "value", "named"), [
    ("awq", "scales", torch.ones(2, 16), "scales"), ("awq", "qzeros", torch.ones(3, 3, dtype=torch.int32), "qzeros"),
    ("awq", "qweight", torch.ones(96, 2), "qweight"), ("awq", "qweight", torch.ones(96), "qweight"),
    ("awq", "qweight", torch.ones(90, 2, dtype=torch.int32), "groups of 32"),
    ("gptq", "g_idx", torch.full((96,), 3, dtype=torch.int32), "g_idx"),
    ("gptq", "g_idx", torch.zeros(95, dtype=torch.int32), "g_idx"),
    ("gptq", "qzeros", torch.zeros(1, 2, dtype=torch.int32), "qzeros"),
    ("int8 per channel", "weight_scale", torch.ones(5, 1), "weight_scale"),
    ("int8 per channel", "weight_scale", torch.ones(6, 7), "weight_scale"),
    ("int4 in whole bytes", "weight_scale", torch.ones(6, 4), "weight_scale.* groups of 32"),
    ("int4 in whole bytes", "weight_scale", torch.ones(6, 1), "weight_scale.* groups of 32"),
    ("int8 per channel", "weight", torch.ones(6, 40, dtype=torch.int32), "weight"),
    ("packed int4", "weight_shape", torch.tensor([6, 72]), "weight_shape"),
    ("packed int4", "weight_g_idx", torch.full((64,), 2), "weight_g_idx"),
])
def test_parts_that_do_not_fit_are_named(tmp_path: Path, case: str, part: str, value: torch.Tensor,
                                         named: str) -> None:
    make, config = CASES[case]
    checkpoint = open_checkpoint(folder_of(tmp_path, {**make()[0], part: value}, config))
    with pytest.raises(ModelFormatError, match=named):
        checkpoint.tensor(NAME)


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    parts, _ = awq(16, 96, 32)
    del parts["qzeros"]
    with pytest.raises(ModelFormatError, match=rf"'{MODULE}\.qzeros' is missing"):
        open_checkpoint(folder_of(tmp_path, parts, AWQ)).tensor(NAME)
