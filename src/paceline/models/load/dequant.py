"""Packed GGUF blocks to torch tensors. Each value is computed in float32 exactly as the format defines it."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from paceline.errors import ModelFormatError

_CHUNK_BLOCKS = 16384
"""Blocks expanded at a time: 2 MB of float32, so that the intermediate results stay near the cores."""


def _as_tensor(packed: npt.NDArray[np.uint8]) -> torch.Tensor:
    with warnings.catch_warnings():
        # The map is read-only and torch warns about it; nothing here writes to the source.
        warnings.simplefilter("ignore")
        return torch.from_numpy(packed)


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 at byte `start` of each block, as float32 [n, 1]."""
    return blocks[:, start:start + 2].contiguous().view(torch.float16).to(torch.float32)


def _nibbles(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Sixteen bytes of each block as [n, 32] float32 from 0 to 15: the low halves first, then the high ones."""
    codes = blocks[:, start:start + 16]
    return torch.cat((codes & 15, codes >> 4), dim=1).to(torch.float32)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].view(torch.int8).to(torch.float32).mul_(_half(blocks, 0))


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks, 2).sub_(8.0).mul_(_half(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks, 4).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


_BLOCKS: dict[str, tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = {
    "Q8_0": (34, _q8_0), "Q4_0": (18, _q4_0), "Q4_1": (20, _q4_1),
}
_FLOATS: dict[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

SUPPORTED: tuple[str, ...] = (*_FLOATS, *_BLOCKS)


def check_supported(type_name: str, tensor: str) -> None:
    """Raises ModelFormatError unless `dequantize` can expand `type_name`."""
    if type_name not in SUPPORTED:
        raise ModelFormatError(f"tensor '{tensor}' is stored as {type_name}, which this version cannot read; use a "
                               f"file with {', '.join(SUPPORTED)} (Q8_0 or Q4_1 are good choices).")


def dequantize(packed: npt.NDArray[np.uint8], type_name: str, shape: tuple[int, ...], *,
               dtype: torch.dtype = torch.float32, name: str = "") -> torch.Tensor:
    """Expand `packed` [rows, bytes per row] to a new tensor of `shape` and `dtype`. `name` is for the error."""
    check_supported(type_name, name)
    source = _as_tensor(packed)
    if type_name in _FLOATS:
        if source.data_ptr() % _FLOATS[type_name].itemsize:
            source = source.clone()
        return source.reshape(-1).view(_FLOATS[type_name]).reshape(shape).to(dtype, copy=True)
    size, expand = _BLOCKS[type_name]
    blocks = source.reshape(-1, size)
    out = torch.empty((len(blocks), 32), dtype=dtype)
    for start in range(0, len(blocks), _CHUNK_BLOCKS):
        out[start:start + _CHUNK_BLOCKS] = expand(blocks[start:start + _CHUNK_BLOCKS])
    return out.reshape(shape)
