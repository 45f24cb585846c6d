"""The vendor's products: through torch, as fast as prompts get, and in what order they add is nobody's promise.

Where they add as our tiles do can be seen: float32 sums in another order differ in half of the places, and after
rounding to 16 bits still in one of some thousands. So exact kernels use them for shapes where, on this very card, they
gave the bits of ours in millions of places.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton

from paceline.kernels.triton.choices import Product
from paceline.kernels.triton.linear import product
from paceline.kernels.triton.linear_device import add_pieces_kernel

MULTIPLE = 16
"""Exact kernels ask the vendor for multiples of so many rows only, those of captured steps: each number of rows is
another shape, whose bits have to be compared."""
BLOCK = 1024
"""Values a program adds up."""
COMPARED = 6
"""Inputs that are compared for each shape, of ever wilder values, at least."""
PLACES = 1 << 21
"""Outputs that are compared, at least: where there are few of them there are more inputs."""
ALIGNED = 256
"""Bytes: which product the vendor picks may depend on where operands lie."""

Shape = tuple[int, int, int, int, torch.dtype, torch.dtype]


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, weight, bias)


def linear_add(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
               residual: torch.Tensor) -> torch.Tensor:
    """residual + x weight^T + bias, in the residual's place: the sum is part of the product."""
    out = residual.addmm_(x, weight.t())
    return out if bias is None else out.add_(bias)


def _wide(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """In float32, as the sums are: not rounded in between."""
    if x.dtype == torch.float32 or not x.is_cuda:
        return F.linear(x, weight).float()
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


def in_pieces(x: torch.Tensor, weight: torch.Tensor, piece: int, dtype: torch.dtype,
              residual: torch.Tensor | None = None) -> torch.Tensor:
    """x weight^T in `dtype`: `piece` columns, a quarter at least, are summed up by themselves, then added in order; 0:
    all at once. Rounded, then added to the residual, whose place it may take."""
    if not piece:
        out = _wide(x, weight) if dtype != x.dtype else F.linear(x, weight)
        return out if residual is None else residual.add_(out)
    if residual is not None and not residual.is_contiguous():
        raise ValueError("a residual of pieces must be contiguous")
    pieces = [_wide(x[:, first:first + piece], weight[:, first:first + piece])
              for first in range(0, x.shape[1], piece)]
    out = torch.empty(pieces[0].shape, dtype=dtype, device=x.device)
    operands = [*pieces, *[pieces[0]] * (4 - len(pieces))]
    add_pieces_kernel[(triton.cdiv(out.numel(), BLOCK),)](
        *operands, out if residual is None else residual, out, out.numel(), PIECES=len(pieces),
        ADDED=residual is not None, BLOCK=BLOCK, num_warps=4)
    return out


class ComparedShapes:
    """For which shapes in_pieces() has the bits of our tiles. Found out when a shape is first seen, outside of
    captures; inside of one, and without memory for it, the answer is no: either way the bits are the same."""

    def __init__(self, arrived: torch.Tensor) -> None:
        self._arrived = arrived
        self._same: dict[Shape, bool] = {}

    def same(self, x: torch.Tensor, weight: torch.Tensor, how: Product, dtype: torch.dtype) -> bool:
        """Whether the vendor may do what `how` would, into `dtype`."""
        rows, inputs = x.shape
        if rows % MULTIPLE or not x.is_cuda or x.dtype == torch.float32:
            return False
        if not all(one.is_contiguous() and one.data_ptr() % ALIGNED == 0 for one in (x, weight)):
            return False
        shape = rows, weight.shape[0], inputs, how.piece, x.dtype, dtype
        if shape not in self._same:
            if torch.cuda.is_current_stream_capturing():
                return False
            try:
                times = max(COMPARED, -(-PLACES // (rows * weight.shape[0])))
                self._same[shape] = all(self._compare(x, weight, how, dtype, seed) for seed in range(times))
            except torch.OutOfMemoryError:
                self._same[shape] = False
        return self._same[shape]

    def _compare(self, x: torch.Tensor, weight: torch.Tensor, how: Product, dtype: torch.dtype, seed: int) -> bool:
        source = torch.Generator(x.device).manual_seed(seed)
        trial = torch.randn(x.shape, generator=source, device=x.device)
        # From even magnitudes to sums in which a few terms drown the rest.
        wild = 3 * (seed % COMPARED)
        powers = torch.randint(-wild, wild + 1, x.shape, generator=source, dtype=torch.int8, device=x.device)
        trial *= torch.exp2(powers)
        trial = trial.to(x.dtype)
        ours = product(trial, weight, None, how, self._arrived, dtype=dtype, exact=True)
        return torch.equal(ours, in_pieces(trial, weight, how.piece, dtype))
