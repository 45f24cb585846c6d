"""How kernels are launched on a device."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

LINE = 64
"""16-bit values of a cache line."""
WIDE, ROWS, WIDE_ROWS = 2048, 128, 32
"""Up to so many rows kernels overlap, narrow and wide ones. With more of them what starts early takes more from what
still runs than it gains (trials on an H200; narrow ones in the small tiles of choices.py)."""


def overlapped(device: torch.device, rows: int, width: int) -> dict[str, Any]:
    """Arguments for kernels that can start while the one before them still runs (overlap_device), over so many rows of
    so many features. Hopper and later."""
    few = rows <= (WIDE_ROWS if width >= WIDE else ROWS)
    return {"OVERLAP": True, "launch_pdl": True} if few and _can_overlap(device) else {"OVERLAP": False}


def fetched(weight: torch.Tensor) -> int:
    """Columns of each weight row that are fetched ahead, a power of two. Of long rows none: a kernel that takes all the
    memory's time loses by it. Nor of rows that a line of the cache can hold (an adapter's): fetch() counts in lines."""
    inputs = weight.shape[1]
    return 1 << (inputs - 1).bit_length() if LINE < inputs <= 2048 and weight.dtype.itemsize == 2 else 0


@cache
def _can_overlap(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
