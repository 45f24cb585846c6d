"""Packed GGUF blocks to torch tensors. Each value is computed in float32 exactly as the format defines it."""

from __future__ import annotations

import warnings

import numpy as np
import numpy.typing as npt
import torch

from paceline.errors import ModelFormatError
from paceline.models.load.codes import LAYOUTS

_CHUNK = 1 << 19
"""Weights expanded at a time: 2 MB of float32, so that the intermediate results stay near the cores."""

_FLOATS: dict[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

SUPPORTED: tuple[str, ...] = (*_FLOATS, *LAYOUTS)


def _as_tensor(packed: npt.NDArray[np.uint8]) -> torch.Tensor:
    with warnings.catch_warnings():
        # The map is read-only and torch warns about it; nothing here writes to the source.
        warnings.simplefilter("ignore")
        return torch.from_numpy(packed)


def check_supported(type_name: str, tensor: str) -> None:
    """Raises ModelFormatError unless `dequantize` can expand `type_name`."""
    if type_name not in SUPPORTED:
        raise ModelFormatError(f"tensor '{tensor}' is stored as {type_name}, which this version cannot read; use a "
                               f"file with {', '.join(SUPPORTED)} (Q8_0, Q6_K and Q4_K are good choices).")


def dequantize(packed: npt.NDArray[np.uint8], type_name: str, shape: tuple[int, ...], *,
               dtype: torch.dtype = torch.float32, name: str = "") -> torch.Tensor:
    """Expand `packed` [rows, bytes per row] to a new tensor of `shape` and `dtype`. `name` is for the error."""
    check_supported(type_name, name)
    source = _as_tensor(packed)
    if type_name in _FLOATS:
        if source.data_ptr() % _FLOATS[type_name].itemsize:
            source = source.clone()
        return source.reshape(-1).view(_FLOATS[type_name]).reshape(shape).to(dtype, copy=True)
    layout = LAYOUTS[type_name]
    blocks = source.reshape(-1, layout.size)
    out = torch.empty((len(blocks), layout.elements), dtype=dtype)
    step = _CHUNK // layout.elements
    for start in range(0, len(blocks), step):
        out[start:start + step] = layout.read(blocks[start:start + step]).floats()
    return out.reshape(shape)
