"""Kernels of a step in which some rows have an adapter: products with a weight get those rows' low-rank additions."""

from __future__ import annotations

from typing import Any, cast

import torch

from paceline.kernels.composed import Composed
from paceline.kernels.interface import Kernels
from paceline.kernels.low_rank import AdapterSlots, RowSlots
from paceline.kernels.operands import Heads, KVCache, Norm
from paceline.kernels.packed import Weight


def adapted(base: Kernels, adapters: AdapterSlots, rows: torch.Tensor | None) -> Kernels:
    """`base` for a step whose rows have these slots [N] int64, where the step runs; None: as it is.

    With a deterministic `base` a row without an adapter gets what that gives it, to the bit, and a row with one the
    same bits in any company. The rows of every call are those of the step, in order.
    """
    return base if rows is None else cast(Kernels, _AdaptedKernels(base, adapters, RowSlots(rows)))


def of_rows(kernels: Kernels, rows: torch.Tensor) -> Kernels:
    """The same for calls that get these rows of the step only, [n] int64."""
    return cast(Kernels, kernels.at(rows)) if isinstance(kernels, _AdaptedKernels) else kernels


def slots_of(kernels: Kernels) -> torch.Tensor | None:
    """Which adapter each row of a step has, [n] int64; None: none has one."""
    return kernels.slots if isinstance(kernels, _AdaptedKernels) else None


class _AdaptedKernels:
    """Implements Kernels: products by themselves, everything else by the base's. What a backend fuses with a product
    has the bits of the plain operations (Kernels), so where some row may have an addition all rows get those."""

    def __init__(self, base: Kernels, adapters: AdapterSlots, rows: RowSlots) -> None:
        self._base = base
        self._adapters = adapters
        self._rows = rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)

    @property
    def slots(self) -> torch.Tensor:
        return self._rows.slots

    def at(self, rows: torch.Tensor) -> _AdaptedKernels:
        return _AdaptedKernels(self._base, self._adapters, self._rows.at(rows))

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self._added(self._base.linear(x, weight, bias), x, weight)

    def gate_up(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self._added(self._base.gate_up(x, weight, bias), x, weight)

    def linear_add(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None,
                   residual: torch.Tensor) -> torch.Tensor:
        return self._added(self._base.linear_add(x, weight, bias, residual), x, weight)

    def head(self, x: torch.Tensor, norm: Norm, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = self._base.head(x, norm, weight, bias)
        return out if self._adapters.get(weight) is None else self._added(out, self._base.norm(x, norm), weight)

    def project(self, x: torch.Tensor, norm: Norm | None, weight: Weight, bias: torch.Tensor | None, heads: Heads,
                cos: torch.Tensor, sin: torch.Tensor, cache: KVCache, slots: torch.Tensor) -> torch.Tensor:
        if self._adapters.get(weight) is None:
            return self._base.project(x, norm, weight, bias, heads, cos, sin, cache, slots)
        return Composed.project(cast(Composed, self), x, norm, weight, bias, heads, cos, sin, cache, slots)

    def gated(self, x: torch.Tensor, norm: Norm | None, weight: Weight, bias: torch.Tensor | None,
              activation: str = "silu") -> torch.Tensor:
        if self._adapters.get(weight) is None:
            return self._base.gated(x, norm, weight, bias, activation)
        return Composed.gated(cast(Composed, self), x, norm, weight, bias, activation)

    def _added(self, out: torch.Tensor, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        low = self._adapters.get(weight)
        if low is None:
            return out
        if x.shape[0] != len(self._rows.slots):
            raise RuntimeError(f"a layer with an adapter was given {x.shape[0]} of {len(self._rows.slots)} rows")
        return self._base.add_low_rank(out, x, low, self._rows)
