"""Native kernels against torch: integers bit for bit, floats to 1e-5, and wrong arguments are errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.kernels import cpu
from paceline.measure.machine import inspect_machine

native = cpu.load()
pytestmark = pytest.mark.skipif(native is None, reason="the native kernels are not built here (no C++ compiler)")
ISAS = [] if native is None else native.available_kernels()


def quantised(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int8 values and float32 scales per 32 columns, as the native code rounds."""
    blocks = x.reshape(x.shape[0], -1, 32)
    largest = np.abs(blocks).max(-1)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    return np.rint(blocks * inverse[..., None]).astype(np.int8), (largest / np.float32(127)).astype(np.float32)


def random_blocks(rng: np.random.Generator, kind: str, rows: int, cols: int) -> tuple[np.ndarray, np.ndarray]:
    """Raw rows of a GGUF type, and the float matrix they stand for."""
    count = cols // 32
    scale = (rng.random((rows, count)) * 0.1 + 0.01).astype(np.float16)
    low = (rng.standard_normal((rows, count)) * 0.1).astype(np.float16)
    if kind == "Q8_0":
        values = rng.integers(-127, 128, (rows, count, 32), dtype=np.int8)
        raw = np.concatenate([scale[..., None].view(np.uint8), values.view(np.uint8)], axis=-1)
        return raw.reshape(rows, -1), (values * scale[..., None].astype(np.float32)).reshape(rows, cols)
    nibbles = rng.integers(0, 16, (rows, count, 32), dtype=np.uint8)
    packed = nibbles[..., :16] | nibbles[..., 16:] << 4
    head = [scale[..., None].view(np.uint8)] + ([low[..., None].view(np.uint8)] if kind == "Q4_1" else [])
    minimum = low.astype(np.float32) if kind == "Q4_1" else -8 * scale.astype(np.float32)
    values = nibbles * scale[..., None].astype(np.float32) + minimum[..., None]
    return np.concatenate([*head, packed], axis=-1).reshape(rows, -1), values.reshape(rows, cols).astype(np.float32)


def packed(kind: str, raw: np.ndarray, rows: int, cols: int) -> Any:
    matrix = native.Matrix("q8" if kind == "Q8_0" else "q4", rows, cols)  # type: ignore[union-attr]
    matrix.take_blocks(np.ascontiguousarray(raw), kind, 0)
    return matrix


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), kind=st.sampled_from(["Q4_0", "Q4_1", "Q8_0"]), groups=st.integers(1, 5),
       blocks=st.integers(1, 6), rows=st.integers(1, 11))
def test_linear_agrees_with_the_quantised_product(seed: int, kind: str, groups: int, blocks: int, rows: int) -> None:
    rng = np.random.default_rng(seed)
    raw, weight = random_blocks(rng, kind, groups * 8, blocks * 32)
    matrix = packed(kind, raw, groups * 8, blocks * 32)
    x = rng.standard_normal((rows, blocks * 32)).astype(np.float32)
    q, scale = quantised(x)
    rounded = (q * scale[..., None].astype(np.float64)).reshape(rows, -1)
    expected = rounded @ weight.T.astype(np.float64)
    found = set()
    for isa in ISAS:
        out = np.full((rows, groups * 8), np.nan, dtype=np.float32)
        matrix.linear(x, out, isa)
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
        found.add(out.tobytes())
        for row in range(rows):  # a row alone has the same bits
            one = np.empty((1, groups * 8), dtype=np.float32)
            matrix.linear(x[row:row + 1], one, isa)
            assert one.tobytes() == out[row:row + 1].tobytes()
    assert len(found) == 1, "every instruction set gives the same bits"


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), kind=st.sampled_from(["Q4_0", "Q4_1", "Q8_0", "floats"]),
       groups=st.integers(1, 5), blocks=st.integers(1, 6), rows=st.sampled_from([1, 2, 3, 4, 5, 8, 9, 33]))
def test_rows_with_one_scale_multiply_like_their_own_values(seed: int, kind: str, groups: int, blocks: int,
                                                            rows: int) -> None:
    rng = np.random.default_rng(seed)
    matrix = native.Matrix("i8", groups * 8, blocks * 32)  # type: ignore[union-attr]
    if kind == "floats":
        weight = rng.standard_normal((groups * 8, blocks * 32)).astype(np.float32)
        matrix.take_floats(weight, 0)
    else:
        raw, weight = random_blocks(rng, kind, groups * 8, blocks * 32)
        matrix.take_blocks(np.ascontiguousarray(raw), kind, 0)
    kept = np.empty_like(weight)
    matrix.embed(np.arange(groups * 8), kept)
    step = np.abs(weight).max(-1, keepdims=True) / 127
    assert (np.abs(kept - weight) <= step * 0.501).all(), "rounded to the nearest of 255 levels of its row"
    levels = kept / step
    assert np.allclose(levels, np.rint(levels), atol=1e-3)
    x = rng.standard_normal((rows, blocks * 32)).astype(np.float32)
    q, scale = quantised(x)
    expected = (q * scale[..., None].astype(np.float64)).reshape(rows, -1) @ kept.T.astype(np.float64)
    found = []
    for isa in ISAS:
        out = np.full((rows, groups * 8), np.nan, dtype=np.float32)
        matrix.linear(x, out, isa)
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
        found.append(out.tobytes())
        for row in range(rows):  # a row alone has the same bits
            one = np.empty((1, groups * 8), dtype=np.float32)
            matrix.linear(x[row:row + 1], one, isa)
            assert one.tobytes() == out[row:row + 1].tobytes()
    assert len(set(found)) == 1, "every instruction set gives the same bits"


@pytest.mark.parametrize("form", ["q8", "q8f", "i8"])
@pytest.mark.parametrize("weight", [-128, -127, 127])
@pytest.mark.parametrize("activation", [-1.0, 1.0])
def test_the_largest_bytes_overflow_nowhere(form: str, weight: int, activation: float) -> None:
    """Sums of 16 bits, and bytes whose sign an offset takes, are at their limits: all weights and activations are."""
    raw = np.full((8, 4, 34), weight, dtype=np.int8).view(np.uint8)
    raw[..., :2] = np.array([1.0], dtype=np.float16).view(np.uint8)
    matrix = native.Matrix(form, 8, 128)  # type: ignore[union-attr]
    matrix.take_blocks(raw.reshape(8, -1), "Q8_0", 0)
    kept = np.empty((1, 128), dtype=np.float32)
    matrix.embed(np.array([3]), kept)
    for isa in ISAS:
        for rows in range(1, 10):
            out = np.empty((rows, 8), dtype=np.float32)
            matrix.linear(np.full((rows, 128), 127 * activation, dtype=np.float32), out, isa)
            np.testing.assert_allclose(out, 127 * activation * kept.sum(), rtol=1e-6, err_msg=f"{isa}, {rows} rows")


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_embedding_rows_come_back_exactly(kind: str) -> None:
    raw, weight = random_blocks(np.random.default_rng(3), kind, 24, 96)
    out = np.empty((4, 96), dtype=np.float32)
    packed(kind, raw, 24, 96).embed(np.array([23, 0, 9, 9]), out)
    np.testing.assert_allclose(out, weight[[23, 0, 9, 9]], rtol=1e-6, atol=1e-7)


def test_floats_are_packed_to_within_half_a_step() -> None:
    weight = np.random.default_rng(5).standard_normal((16, 64)).astype(np.float32)
    matrix = native.Matrix("q8", 16, 64)  # type: ignore[union-attr]
    matrix.take_floats(weight, 0)
    out = np.empty((16, 64), dtype=np.float32)
    matrix.embed(np.arange(16), out)
    step = np.abs(weight.reshape(16, 2, 32)).max(-1) / 127
    assert (np.abs(out - weight).reshape(16, 2, 32) <= step[..., None] * 0.51 + 1e-6).all()


def test_a_processor_with_vnni_runs_the_kernels_for_it() -> None:
    wanted = {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni"}
    missing = wanted - set(inspect_machine().instruction_sets)
    if missing:
        pytest.skip(f"this processor is not known to have {', '.join(sorted(missing))}")
    assert ISAS == ["avx512vnni", "avx2", "portable"]


def test_wrong_arguments_are_errors() -> None:
    assert native is not None
    with pytest.raises(ValueError, match="eights"):
        native.Matrix("q8", 7, 64)
    with pytest.raises(ValueError, match="unknown format"):
        native.Matrix("q3", 8, 64)
    matrix = native.Matrix("q4", 8, 64)
    with pytest.raises(ValueError, match="too short"):
        matrix.take_blocks(np.zeros((8, 10), dtype=np.uint8), "Q4_0", 0)
    with pytest.raises(ValueError, match="do not fit"):
        matrix.take_blocks(np.zeros((8, 68), dtype=np.uint8), "Q8_0", 0)
    with pytest.raises(ValueError, match="cannot be packed"):
        matrix.take_blocks(np.zeros((8, 68), dtype=np.uint8), "IQ2_XS", 0)
    with pytest.raises(ValueError, match="inside the matrix"):
        matrix.take_blocks(np.zeros((16, 40), dtype=np.uint8), "Q4_1", 0)
    for wrong in (np.zeros((2, 32), dtype=np.float32), np.zeros((2, 64)), np.zeros((64, 2), dtype=np.float32).T):
        with pytest.raises((ValueError, TypeError)):
            matrix.linear(wrong, np.zeros((2, 8), dtype=np.float32))
    with pytest.raises(ValueError, match="no row"):
        matrix.embed(np.array([8]), np.zeros((1, 64), dtype=np.float32))
    with pytest.raises(ValueError, match="cannot run on this machine"):
        matrix.linear(np.zeros((1, 64), dtype=np.float32), np.zeros((1, 8), dtype=np.float32), "sve9")
