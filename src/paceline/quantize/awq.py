"""AWQ: inputs that are large get finer steps. A column of the weights is multiplied by a scale before it is rounded,
and what makes the input is divided by it, so that the product stays what it was. How far to go is searched."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from paceline.quantize.calibrate import Inputs
from paceline.quantize.rounding import zeroed_groups_of_int4
from paceline.quantize.sites import Site

STEPS = 20
"""Exponents tried: 0 (plain rounding), 1 / STEPS, ..."""


@dataclass
class Folds:
    """Per tensor, what its columns are multiplied and its rows (a vector's elements) divided by."""

    columns: dict[str, torch.Tensor] = field(default_factory=dict)
    rows: dict[str, torch.Tensor] = field(default_factory=dict)

    def add(self, site: Site, scales: torch.Tensor) -> None:
        """`scales` [in] of a site's input."""
        for consumer in site.consumers:
            self.columns[f"{consumer}.weight"] = scales
        own = scales
        if site.head_dim:
            own = scales.reshape(-1, site.repeats, site.head_dim)[:, 0].reshape(-1)
        self.rows[f"{site.producer}.weight"] = own
        self.rows[f"{site.producer}.bias"] = own

    def touches(self, name: str) -> bool:
        return name in self.columns or name in self.rows

    def apply(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor with its scales, in float32."""
        out = tensor.float()
        if name in self.columns:
            out = out * self.columns[name].to(out.device)
        if name in self.rows:
            rows = self.rows[name].to(out.device)
            out = out / (rows if out.dim() == 1 else rows[:, None])
        return out


def search(site: Site, inputs: Inputs, group_size: int) -> tuple[torch.Tensor, float, float]:
    """(scales [in], the output's squared error with plain rounding, and with the scales). The scales are the mean
    |input| to the power that gives the least error; the power 0 is among those tried, so it is never worse."""
    mean = shared_by_heads(site, inputs.mean).clamp_min(1e-4)
    best = torch.ones_like(mean)
    plain = least = output_error(inputs, best, group_size)
    for step in range(1, STEPS):
        tried = mean ** (step / STEPS)
        tried = tried / (tried.max() * tried.min()).sqrt()
        error = output_error(inputs, tried, group_size)
        if error < least:
            best, least = tried, error
    return best, plain, least


def output_error(inputs: Inputs, scales: torch.Tensor, group_size: int) -> float:
    """Of the columns rounded as `scales` stretch them."""
    return error_of(inputs, zeroed_groups_of_int4(inputs.weight * scales, group_size).floats() / scales)


def error_of(inputs: Inputs, rounded: torch.Tensor) -> float:
    """Sum of squares of x (W - rounded)^T over the sampled rows."""
    return float((inputs.rows @ (inputs.weight - rounded).T).square().sum(dtype=torch.float64))


def shared_by_heads(site: Site, values: torch.Tensor) -> torch.Tensor:
    """[in] -> the same, averaged over the heads that one head of the producer makes: they can only have one scale."""
    if not site.head_dim:
        return values
    heads = values.reshape(-1, site.repeats, site.head_dim)
    return heads.mean(1, keepdim=True).expand_as(heads).reshape(-1)
