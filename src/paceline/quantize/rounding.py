"""Weights to integers. Every function gives Codes: what is written is exactly what is read back."""

from __future__ import annotations

import torch

from paceline.models.load.quantised.codes import Codes, Outliers

SMALLEST, LARGEST = 2.0 ** -24, 65504.0
"""A scale in half precision lies between these."""
CUTS = [1.0 - 0.025 * step for step in range(13)]
"""Fractions of a group's largest value that symmetric rounding tries as its end: a rare large weight may cost less
than the coarser steps that reaching it takes."""


def rows_of_int8(weight: torch.Tensor, columns: torch.Tensor | None = None) -> Codes:
    """[out, in] -> 255 levels, symmetric, a float32 scale a row. `columns` [n] stay in floats and do not count."""
    inner = weight.float().clone()
    if columns is not None:
        inner[:, columns] = 0.0
    scales = inner.abs().amax(1, keepdim=True) / 127
    scales = torch.where(scales > 0, scales, 1.0)
    codes = torch.round(inner / scales).clamp(-127, 127).to(torch.int8)
    return Codes(codes, scales, outliers=None if columns is None else Outliers(columns, weight[:, columns]))


def groups_of_int4(weight: torch.Tensor, size: int) -> Codes:
    """[out, in] -> 16 levels around 8 with a half-precision scale for `size` columns, the best of CUTS for each."""
    groups = weight.float().reshape(weight.shape[0], -1, size)
    scales = best_symmetric_scales(groups)
    codes = (_symmetric(groups, scales) + 8).to(torch.uint8)
    return Codes(codes.flatten(1), scales.half(), torch.full(scales.shape, 8, dtype=torch.uint8), bits=4)


def best_symmetric_scales(groups: torch.Tensor) -> torch.Tensor:
    """[out, groups, size] -> [out, groups], as half precision holds them: of CUTS what loses least."""
    largest = groups.abs().amax(2)
    best = torch.full_like(largest, torch.inf)
    scales = torch.zeros_like(largest)
    for cut in CUTS:
        tried = _half(largest * (cut / 7.5))
        error = (_symmetric(groups, tried) * tried[:, :, None] - groups).square().sum(2)
        better = error < best
        best, scales = torch.where(better, error, best), torch.where(better, tried, scales)
    return scales


def zeroed_groups_of_int4(weight: torch.Tensor, size: int) -> Codes:
    """[out, in] -> 16 levels from a group's lowest to its highest value, with a half-precision scale and a whole
    number that stands for zero, for `size` columns."""
    groups = weight.float().reshape(weight.shape[0], -1, size)
    low, high = groups.amin(2).clamp_max(0), groups.amax(2).clamp_min(0)
    scales = _half((high - low) / 15)
    zeros = torch.round(-low / scales).clamp(0, 15)
    codes = (torch.round(groups / scales[:, :, None]) + zeros[:, :, None]).clamp(0, 15)
    return Codes(codes.to(torch.uint8).flatten(1), scales.half(), zeros.to(torch.uint8), bits=4)


def _symmetric(groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return torch.round(groups / scales[:, :, None]).clamp(-8, 7)


def _half(scales: torch.Tensor) -> torch.Tensor:
    """As half precision holds them, in float32; what a group of zeros would get becomes 1."""
    return torch.where(scales > 0, scales, 1.0).clamp(SMALLEST, LARGEST).half().float()
