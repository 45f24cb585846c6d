"""The quickened interpreter computes what Triton means: every operator, between tensors and numbers, in any shape."""

from __future__ import annotations

import operator

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

OPERATORS = ["add", "sub", "mul", "lt", "le", "gt", "ge", "eq", "ne"]
BITS = ["and_", "or_", "xor", "lshift"]


@triton.jit
def every_operator(left, right, out, rows: tl.constexpr, columns: tl.constexpr, whole: tl.constexpr):
    """`out[n]`: the n-th operator of a column and a row, then of blocks and numbers on either side, then of bits."""
    row, column = tl.arange(0, rows)[:, None], tl.arange(0, columns)[None, :]
    cell = row * columns + column
    x, y = tl.load(left + row), tl.load(right + column)
    size: tl.constexpr = rows * columns
    tl.store(out + cell, x + y)
    tl.store(out + size + cell, x - y)
    tl.store(out + 2 * size + cell, x * y)
    tl.store(out + 3 * size + cell, x < y)
    tl.store(out + 4 * size + cell, x <= y)
    tl.store(out + 5 * size + cell, x > y)
    tl.store(out + 6 * size + cell, x >= y)
    tl.store(out + 7 * size + cell, x == y)
    tl.store(out + 8 * size + cell, x != y)
    tl.store(out + 9 * size + cell, (3 - (2 * (1 + x))) + y * 0)
    tl.store(out + 10 * size + cell, ((x - 1) * 2 + 3 < 4) & (y != 1))
    if whole:
        tl.store(out + 11 * size + cell, x & y)
        tl.store(out + 12 * size + cell, x | y)
        tl.store(out + 13 * size + cell, x ^ y)
        tl.store(out + 14 * size + cell, x << (y & 3))


@triton.jit
def mixed(numbers, wide, out, size: tl.constexpr):
    """Operands of different types, which are Triton's own business, and scalars with blocks."""
    at = tl.arange(0, size)
    first = tl.load(numbers)
    tl.store(out + at, tl.load(numbers + at) + tl.load(wide + at))
    tl.store(out + size + at, tl.load(wide + at) * 0.5 + first)
    tl.store(out + 2 * size + at, first + first * at)


@triton.jit
def shapes_that_do_not_fit(out):
    tl.store(out + tl.arange(0, 4), tl.arange(0, 4) + tl.arange(0, 8))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.float64], ids=str)
def test_every_operator_is_that_of_the_language(device, dtype):
    left = torch.tensor([-3, 0, 1, 7], device=device).to(dtype)
    right = torch.tensor([-3, 1, 2, 1, 0, 7, 5, 3], device=device).to(dtype)
    whole = not dtype.is_floating_point
    out = torch.full((15, 4, 8), 99, dtype=dtype, device=device)
    every_operator[(1,)](left, right, out, 4, 8, whole)
    x, y = left[:, None], right[None, :]
    expected = [getattr(operator, name)(x, y) for name in OPERATORS]
    expected += [3 - 2 * (1 + x) + y * 0, ((x - 1) * 2 + 3 < 4) & (y != 1)]
    if whole:
        expected += [getattr(operator, name)(x, y & 3 if name == "lshift" else y) for name in BITS]
    for found, right_answer in zip(out, expected, strict=False):
        assert torch.equal(found, right_answer.to(dtype))
    assert whole or bool((out[11:] == 99).all())


def test_32_bits_wrap_around_and_truth_values_combine(device):
    """The generator of noise counts on it."""
    left = torch.tensor([2**32 - 1, 5, 2**31, 0], dtype=torch.uint32, device=device)
    right = torch.tensor([1, 2**32 - 3, 2**31, 1] * 2, dtype=torch.uint32, device=device)
    out = torch.zeros(15, 4, 8, dtype=torch.uint32, device=device)
    every_operator[(1,)](left, right, out, 4, 8, True)
    x, y = left.long()[:, None], right.long()[None, :]
    for place, value in enumerate([x + y, x - y, x * (y & 0xFFFF) + ((x * (y >> 16)) << 16), x < y]):
        assert torch.equal(out[place].long(), value.long() & 0xFFFFFFFF)


def test_operands_of_different_types_and_scalars_with_blocks(device):
    numbers = torch.tensor([5, -2, 7, 1], dtype=torch.int32, device=device)
    wide = torch.tensor([0.25, 2.5, -1.0, 9.0], device=device)
    out = torch.zeros(3, 4, device=device)
    mixed[(1,)](numbers, wide, out, 4)
    at = torch.arange(4, device=device)
    assert torch.equal(out, torch.stack([numbers + wide, wide * 0.5 + 5, (5 + 5 * at).float()]))


def test_shapes_that_do_not_fit_are_an_error_still(device):
    with pytest.raises(Exception, match="incompatible dimensions"):
        shapes_that_do_not_fit[(1,)](torch.zeros(8, dtype=torch.int32, device=device))
