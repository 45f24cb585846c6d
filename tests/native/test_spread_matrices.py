"""Matrices whose blocks are spread before they are rounded, and columns that make up for the errors of others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from native.test_native_kernels import quantised, random_blocks
from paceline.kernels import cpu
from paceline.measure.rounding import spread
from paceline.models.load.compensation import shares

native = cpu.load()
pytestmark = pytest.mark.skipif(native is None, reason="the native kernels are not built here (no C++ compiler)")
ISAS = [] if native is None else native.available_kernels()


def spread_rows(x: np.ndarray) -> np.ndarray:
    return spread(torch.from_numpy(x.astype(np.float32))).numpy()


def kept(matrix, rows: int, cols: int) -> np.ndarray:
    out = np.empty((rows, cols), dtype=np.float32)
    matrix.embed(np.arange(rows), out)
    return out


def product(matrix, x: np.ndarray, isa: str = "") -> np.ndarray:
    out = np.full((len(x), matrix.rows), np.nan, dtype=np.float32)
    matrix.linear(x, out, isa)
    return out


def steps_of(spread_weight: np.ndarray, form: str) -> np.ndarray:
    """The step of every weight."""
    size = spread_weight.shape[1] if form == "i8" else 32
    steps = np.abs(spread_weight.reshape(len(spread_weight), -1, size)).max(-1) / 127
    return np.repeat(steps, size, axis=1)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), form=st.sampled_from(["i8", "q8"]),
       kind=st.sampled_from(["Q4_1", "Q8_0", "floats"]), groups=st.integers(1, 4), blocks=st.integers(1, 5),
       rows=st.sampled_from([1, 2, 3, 4, 5, 9, 33]))
def test_they_multiply_like_their_own_values(seed: int, form: str, kind: str, groups: int, blocks: int,
                                             rows: int) -> None:
    rng = np.random.default_rng(seed)
    matrix = native.Matrix(form, groups * 8, blocks * 32, spread=True)  # type: ignore[union-attr]
    if kind == "floats":
        weight = rng.standard_normal((groups * 8, blocks * 32)).astype(np.float32)
        matrix.take_floats(weight, 0)
    else:
        raw, weight = random_blocks(rng, kind, groups * 8, blocks * 32)
        matrix.take_blocks(np.ascontiguousarray(raw), kind, 0)
    found, wanted = spread_rows(kept(matrix, *weight.shape)), spread_rows(weight)
    assert (np.abs(found - wanted) <= steps_of(wanted, form) * 0.51 + 1e-6).all(), "half a step of what was spread"
    x = rng.standard_normal((rows, blocks * 32)).astype(np.float32)
    q, scale = quantised(spread_rows(x))
    expected = (q * scale[..., None].astype(np.float64)).reshape(rows, -1) @ found.T.astype(np.float64)
    outs = [product(matrix, x, isa) for isa in ISAS]
    for out in outs:
        # Values halfway between two levels may go either way: spreading here and there differs in the last bit.
        slack = np.abs(found).max() * scale.max() * 2
        np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max() + slack)
        assert len({row.tobytes() for row in (out, outs[0])}) == 1, "every instruction set gives the same bits"
    for row in range(rows):
        assert product(matrix, x[row:row + 1]).tobytes() == outs[0][row:row + 1].tobytes()


def test_an_outlier_costs_its_block_less() -> None:
    """An input as models have them: one feature a hundred times the others."""
    rng = np.random.default_rng(1)
    weight = rng.standard_normal((64, 96)).astype(np.float32)
    x = rng.standard_normal((16, 96)).astype(np.float32)
    x[:, 40] *= 100.0
    exact = x.astype(np.float64) @ weight.T.astype(np.float64)
    errors = {}
    for spreads in (False, True):
        matrix = native.Matrix("i8", 64, 96, spread=spreads)  # type: ignore[union-attr]
        matrix.take_floats(weight, 0)
        errors[spreads] = np.abs(product(matrix, x) - exact).mean()
    assert errors[True] < 0.75 * errors[False]


@pytest.mark.parametrize("form", ["i8", "q8"])
def test_columns_make_up_for_errors_as_computed_plainly(form: str) -> None:
    rng = np.random.default_rng(2)
    weight = rng.standard_normal((8, 64)).astype(np.float32)
    passing = (rng.standard_normal((2, 32, 32)) * 0.3).astype(np.float32)
    matrix = native.Matrix(form, 8, 64, spread=True)  # type: ignore[union-attr]
    matrix.take_floats(weight, 0, passing)
    left = spread_rows(weight).astype(np.float64)
    steps = steps_of(left, form)
    if form == "q8":
        # Scales are kept in half precision, of blocks spread without the factor that spread() has.
        steps = (steps * 32 ** -0.5).astype(np.float16).astype(np.float64) * 32 ** 0.5
    for column in range(64):
        step = steps[:, column]
        rounded = np.clip(np.rint(left[:, column] / step), -127, 127) * step
        error = left[:, column] - rounded
        left[:, column] = rounded
        behind = slice(column + 1, column // 32 * 32 + 32)
        left[:, behind] -= error[:, None] * passing[column // 32, column % 32, behind.start % 32 or 32:]
    found = spread_rows(kept(matrix, 8, 64))
    assert (np.abs(found - left) < 1e-4).mean() > 0.97, "but for what lies halfway between two levels"


def test_made_up_for_errors_cost_outputs_less() -> None:
    """Inputs that go together within a block: shares from them leave less of the error in the outputs."""
    rng = np.random.default_rng(3)
    weight = rng.standard_normal((64, 64)).astype(np.float32)
    x = (rng.standard_normal((400, 4)) @ rng.standard_normal((4, 64)) + 0.05 * rng.standard_normal((400, 64)))
    x = x.astype(np.float32)
    blocks = torch.from_numpy(spread_rows(x)).reshape(400, 2, 32).transpose(0, 1)
    passing = shares(blocks.transpose(1, 2) @ blocks)
    exact = x.astype(np.float64) @ weight.T.astype(np.float64)
    errors = []
    for known in (None, passing):
        matrix = native.Matrix("i8", 64, 64, spread=True)  # type: ignore[union-attr]
        matrix.take_floats(weight, 0, known)
        errors.append(np.abs(x @ kept(matrix, 64, 64).T - exact).mean())
    assert errors[1] < 0.5 * errors[0]


def test_wrong_arguments_are_errors() -> None:
    assert native is not None
    for form in ("q4", "q4k", "q8f"):
        with pytest.raises(ValueError, match="spread"):
            native.Matrix(form, 8, 256, spread=True)
    weight = np.zeros((8, 64), dtype=np.float32)
    with pytest.raises(ValueError, match="passing"):
        native.Matrix("i8", 8, 64).take_floats(weight, 0, np.zeros((1, 32, 32), dtype=np.float32))
    with pytest.raises(ValueError, match="i8 and q8"):
        native.Matrix("q4", 8, 64).take_blocks(np.zeros((8, 40), dtype=np.uint8), "Q4_1", 0,
                                               np.zeros((2, 32, 32), dtype=np.float32))
