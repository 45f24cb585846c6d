"""Launched: a step that a device is running, or has run, and whose tokens the host has not read yet."""

from __future__ import annotations

import time
from typing import Any

import torch

from paceline.engine.step import Step

MOST_REPEATS = 16
"""How often a step may be repeated before the host looks."""


class Launched:
    """Made in front of the launch; drawn() once behind it, when the tokens lie in a tensor on the device."""

    def __init__(self, step: Step, device: torch.device) -> None:
        self.step = step
        self._begin: Any = None
        self._end: Any = None
        self._begun = self._ended = time.perf_counter()
        self._tokens: torch.Tensor | None = None
        self._first: list[int] | None = None
        if device.type == "cuda":
            self._begin, self._end = (torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                                      for _ in range(2))
            self._begin.record()

    def drawn(self, tokens: torch.Tensor, first: list[int] | None = None) -> None:
        """tokens [repeats, rows] int32 may be overwritten by the next launch. `first`: each group's row among them,
        -1 where it draws none; None: a row a group."""
        self._first = first
        if self._end is None:
            self._tokens = tokens.clone()
            self._ended = time.perf_counter()
            return
        self._tokens = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        self._tokens.copy_(tokens, non_blocking=True)
        self._end.record()

    def read(self) -> list[list[int]]:
        """Per group the tokens drawn, one a repeat; -1 where none could be. Waits for the device."""
        assert self._tokens is not None
        if self._end is not None:
            self._end.synchronize()
        rows: list[list[int]] = self._tokens.numpy().T.tolist()
        return rows if self._first is None else [rows[row] if row >= 0 else [] for row in self._first]

    @property
    def seconds(self) -> float:
        """How long the device took for one repeat; known when the tokens have been read."""
        whole = self._ended - self._begun if self._end is None else float(self._begin.elapsed_time(self._end)) / 1000
        return whole / max(1, self.step.repeat)
