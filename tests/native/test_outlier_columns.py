"""Packed matrices with columns in floats beside them: the same product, finer steps, a row's bits its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_files import write_folder

from paceline.errors import ModelFormatError
from paceline.kernels import cpu
from paceline.kernels.cpu import NativeKernels
from paceline.kernels.packed import OutlierWeight, PackedWeight, plain
from paceline.kernels.reference import ReferenceKernels
from paceline.models.load import Weights, open_checkpoint
from paceline.models.packing import PackingWeights
from paceline.models.translate import TRANSPOSED, StoredLayout, translate

pytestmark = pytest.mark.skipif(cpu.load() is None, reason="the native kernels are not built")
COLUMNS = torch.tensor([2, 33, 60])
GENERATOR = torch.Generator().manual_seed(4)
WEIGHT = torch.randn(24, 64, generator=GENERATOR)
LOUD = torch.randn(11, 64, generator=GENERATOR).index_fill(1, COLUMNS, 40.0)


def packed(weight: torch.Tensor) -> PackedWeight:
    matrix = cpu.require().Matrix("i8", 24, 64)
    matrix.take_floats(weight.numpy(), 0)
    return PackedWeight(matrix, 24, 8)


def split() -> OutlierWeight:
    inner = packed(WEIGHT.index_fill(1, COLUMNS, 0.0))
    return OutlierWeight(inner.matrix, 24, 8, COLUMNS, WEIGHT[:, COLUMNS].contiguous())


def test_columns_in_floats_are_exact_and_the_others_rounded() -> None:
    whole = plain(split())
    assert torch.equal(whole[:, COLUMNS], WEIGHT[:, COLUMNS])
    assert (whole - WEIGHT).abs().max() <= WEIGHT.abs().max() / 254 * 1.001


def test_large_inputs_no_longer_coarsen_the_steps_of_the_others() -> None:
    exact = LOUD.double() @ WEIGHT.double().T
    fine = (NativeKernels().linear(LOUD, split()) - exact).norm()
    rough = (NativeKernels().linear(LOUD, packed(WEIGHT)) - exact).norm()
    assert fine < 0.2 * rough


def test_every_backend_multiplies_with_them_and_bits_do_not_depend_on_neighbours() -> None:
    weight, bias = split(), torch.randn(24, generator=GENERATOR)
    close = ReferenceKernels().linear(LOUD, weight, bias)
    for threads in (1, 2):
        kernels = NativeKernels(threads)
        got = kernels.linear(LOUD, weight, bias)
        assert torch.allclose(got, close, atol=0.05 * float(close.abs().max()))
        for row in range(len(LOUD)):
            assert torch.equal(kernels.linear(LOUD[row:row + 1], weight, bias)[0], got[row])


def under_another_name(folder: Path, layout: StoredLayout | None = None) -> PackingWeights:
    """A file's `h.0.up` with outlier columns, taken as model.layers.0.up."""
    parts = {"weight": torch.ones(24, 64, dtype=torch.int8), "weight_scale": torch.ones(24, 1),
             "outlier_columns": COLUMNS, "outlier_weight": WEIGHT[:, COLUMNS].contiguous()}
    write_folder(folder, {"quantization_config": {"quant_method": "int8-outliers", "bits": 8}},
                 [{f"h.0.up.{part}": tensor for part, tensor in parts.items()}])
    weights = PackingWeights(Weights(open_checkpoint(folder)), split_outliers=True)
    source = translate(weights, {"model.layers.": "h."}, {} if layout is None else {"up.weight": layout})
    assert isinstance(source, PackingWeights)
    return source


def test_columns_in_floats_are_found_under_a_familys_own_names(tmp_path: Path) -> None:
    weight = under_another_name(tmp_path / "m").matrix([("model.layers.0.up.weight", 24)], 64)
    assert isinstance(weight, OutlierWeight) and torch.equal(weight.columns, COLUMNS)
    assert torch.equal(plain(weight)[:, COLUMNS], WEIGHT[:, COLUMNS])


def test_columns_in_floats_of_a_matrix_that_is_rearranged_are_refused_by_name(tmp_path: Path) -> None:
    source = under_another_name(tmp_path / "m", TRANSPOSED)
    with pytest.raises(ModelFormatError, match=r"'h\.0\.up\.weight' keeps outlier columns"):
        source.matrix([("model.layers.0.up.weight", 64)], 24)
