"""Pooling: one vector of a prompt's last hidden states, brought together as its rows are computed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

SMALLEST = 1e-12
"""A vector of zeros stays one."""

ROWS_AT_ONCE = 64
"""In float64, which takes memory."""


class Pooling:
    """Rows are added one after the other, in float64: neither chunks nor who else is in a step can change the sum."""

    def __init__(self, kind: str, prompt_len: int, tap: int, norm: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """`kind`: "mean" or "last". `tap`: where the stream is read, `norm`: the final norm, which it goes through."""
        self.tap = tap
        self._kind = kind
        self._prompt_len = prompt_len
        self._norm = norm
        self._taken = 0
        self._sum: np.ndarray | None = None

    def take(self, hidden: torch.Tensor, start: int) -> None:
        """Rows [n, h] of the positions from `start`. After a preemption the same ones may come again."""
        end = start + len(hidden)
        begin = max(start, self._taken if self._kind == "mean" else self._prompt_len - 1)
        if begin >= end:
            return
        rows = self._norm(hidden[begin - start:]).float().cpu().numpy()
        total = np.zeros(rows.shape[1]) if self._sum is None else self._sum
        for first in range(0, len(rows), ROWS_AT_ONCE):
            some = np.concatenate([total[None], rows[first:first + ROWS_AT_ONCE]])
            total = np.add.accumulate(some, axis=0)[-1].copy()
        self._sum = total
        self._taken = end

    def vector(self) -> list[float] | None:
        """Of length 1; None: not all of the prompt has been computed. (A mean and a sum point the same way.)"""
        if self._sum is None or self._taken < self._prompt_len:
            return None
        length = max(float(np.sqrt(np.square(self._sum).sum())), SMALLEST)
        return [float(value) for value in (self._sum / length).astype(np.float32)]
