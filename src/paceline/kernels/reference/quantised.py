"""8-bit caches: codes with a float32 scale a token and head."""

from __future__ import annotations

import torch

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
"""The code that a head's largest value becomes."""


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes where it holds 8-bit floats: torch moves those about on few devices."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def quantised(k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype, slots: torch.Tensor,
              scales: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of k and v [N, H_kv, d] in `dtype`; writes their scales to the slots [N] of `scales` [slots, H_kv]."""
    codes = []
    for x, plane in zip((k, v), scales, strict=True):
        wide = x.float()
        scale = wide.abs().amax(-1) / LARGEST[dtype]
        ratio = wide / scale.where(scale > 0, 1)[..., None]
        codes.append((ratio.round() if dtype == torch.int8 else ratio).to(dtype))
        plane.index_copy_(0, slots, scale)
    return codes[0], codes[1]
