"""Kernels of a step in which some rows have an adapter: products with a weight get those rows' low-rank additions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from paceline.kernels.composed import Composed
from paceline.kernels.interface import Kernels
from paceline.kernels.operands import Heads, KVCache, Norm
from paceline.kernels.packed import Weight

Integers = npt.NDArray[np.int64]
NOBODY = -1
"""Stands for no adapter: the row is the model's own."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """What a linear layer's output gets: up (down x)."""

    down: torch.Tensor
    """[r, K]."""
    up: torch.Tensor
    """[M, r]; scaled already. Outputs that the adapter leaves alone have zeros."""


Additions = Mapping[Weight, LowRank]
"""An adapter as kernels see it: by the weights it adds to. Those it does not name stay as they are."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The rows of one adapter."""

    additions: Additions
    host: Integers
    rows: torch.Tensor | None
    """[n] int64 on the device; None: all rows of the step."""


@dataclass(frozen=True, slots=True)
class RowAdapters:
    """Which of `adapters` each row of a step has."""

    adapters: Sequence[Additions]
    owners: Integers
    """[N] index into `adapters`, or NOBODY."""


def adapted(base: Kernels, rows: RowAdapters | None, device: torch.device) -> Kernels:
    """`base` for a step of these rows; None: as it is.

    A row without an adapter gets what `base` gives it, to the bit, and with a deterministic `base` a row with one gets
    the same bits in any company. The rows of every call are those of the step, in order.
    """
    return base if rows is None else cast(Kernels, _AdaptedKernels(base, rows.adapters, rows.owners, device))


def of_rows(kernels: Kernels, rows: Sequence[int]) -> Kernels:
    """The same for calls that get these rows of the step only."""
    if not isinstance(kernels, _AdaptedKernels):
        return kernels
    return cast(Kernels, kernels.at(np.array(rows, dtype=np.int64)))


class _AdaptedKernels:
    """Implements Kernels: products by themselves, everything else by the base's."""

    def __init__(self, base: Kernels, adapters: Sequence[Additions], owners: Integers, device: torch.device) -> None:
        self._base = base
        self._adapters = adapters
        self._owners = owners
        self._device = device
        self._segments: list[Segment] = []
        for index, additions in enumerate(adapters):
            found = np.flatnonzero(owners == index)
            if len(found):
                whole = len(found) == len(owners)
                self._segments.append(Segment(additions, found, None if whole else self._tensor(found)))
        self._parts: dict[bytes, tuple[torch.Tensor, _AdaptedKernels]] = {}
        """By their rows: steps of a subset of these."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)

    def at(self, rows: Integers) -> _AdaptedKernels:
        return _AdaptedKernels(self._base, self._adapters, self._owners[rows], self._device)

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self._added(self._base.linear(x, weight, bias), x, weight)

    def linear_add(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None,
                   residual: torch.Tensor) -> torch.Tensor:
        return self._added(self._base.linear_add(x, weight, bias, residual), x, weight)

    def head(self, x: torch.Tensor, norm: Norm, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = self._base.head(x, norm, weight, bias)
        return self._added(out, self._base.norm(x, norm), weight) if len(self._touched(weight)) else out

    def project(self, x: torch.Tensor, norm: Norm | None, weight: Weight, bias: torch.Tensor | None, heads: Heads,
                cos: torch.Tensor, sin: torch.Tensor, cache: KVCache, slots: torch.Tensor) -> torch.Tensor:
        if self._composes(weight, "project"):
            return Composed.project(cast(Composed, self), x, norm, weight, bias, heads, cos, sin, cache, slots)
        q = self._base.project(x, norm, weight, bias, heads, cos, sin, cache, slots)
        part = self._part(weight)
        if part is not None:
            # Their keys and values are stored a second time, over those without the additions.
            rows, own = part
            again = own.project(x.index_select(0, rows), norm, weight, bias, heads, cos.index_select(0, rows),
                                sin.index_select(0, rows), cache, slots.index_select(0, rows))
            q.index_copy_(0, rows, again)
        return q

    def gated(self, x: torch.Tensor, norm: Norm | None, weight: Weight, bias: torch.Tensor | None,
              activation: str = "silu") -> torch.Tensor:
        if self._composes(weight, "gated"):
            return Composed.gated(cast(Composed, self), x, norm, weight, bias, activation)
        out = self._base.gated(x, norm, weight, bias, activation)
        part = self._part(weight)
        if part is not None:
            rows, own = part
            out.index_copy_(0, rows, own.gated(x.index_select(0, rows), norm, weight, bias, activation))
        return out

    def _composes(self, weight: Weight, op: str) -> bool:
        """Whether a fused op can be made of plain ones for the whole step: no row may tell. Either all of them have an
        addition, or the base does the same."""
        touched = len(self._touched(weight))
        return touched > 0 and (touched == len(self._owners) or getattr(type(self._base), op) is getattr(Composed, op))

    def _part(self, weight: Weight) -> tuple[torch.Tensor, _AdaptedKernels] | None:
        """The rows that a weight's additions concern, as a step of their own."""
        rows = self._touched(weight)
        if not len(rows):
            return None
        key = rows.tobytes()
        if key not in self._parts:
            self._parts[key] = (self._tensor(rows), self.at(rows))
        return self._parts[key]

    def _touched(self, weight: Weight) -> Integers:
        """Rows, ascending, whose adapter adds to a weight."""
        found = [segment.host for segment in self._segments if weight in segment.additions]
        return np.sort(np.concatenate(found)) if len(found) > 1 else found[0] if found else np.empty(0, dtype=np.int64)

    def _added(self, out: torch.Tensor, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        """`out` with the additions of a weight, in place."""
        for segment in self._segments:
            low = segment.additions.get(weight)
            if low is None:
                continue
            if x.shape[0] != len(self._owners):
                raise RuntimeError(f"a layer with an adapter was given {x.shape[0]} of {len(self._owners)} rows")
            own = x if segment.rows is None else x.index_select(0, segment.rows)
            more = self._base.linear(self._base.linear(own, low.down), low.up).to(out.dtype)
            if segment.rows is None:
                out.add_(more)
            else:
                out.index_copy_(0, segment.rows, out.index_select(0, segment.rows) + more)
        return out

    def _tensor(self, rows: Integers) -> torch.Tensor:
        return torch.from_numpy(rows).to(self._device)
