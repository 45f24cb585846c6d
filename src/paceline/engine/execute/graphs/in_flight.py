"""InFlight: a step that a device is running, or has run, and whose tokens the host has not read yet."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.engine.schedule.step import Step

MOST_REPEATS = 16
"""How often a step may be repeated before the host looks."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a device drew for a group, one token after the other. A negative one, columns.EMPTY or NAN, says why there
    is none; those behind it mean nothing."""

    tokens: list[int]
    scores: Seq[NDArray[np.int32]] | None = None
    """A row for each token (sampling.logprobs.unpacked), where somebody in the step asked."""


class InFlight:
    """Made in front of the launch, where forward and draws are launched apart between the two; drawn() once behind it,
    when the tokens lie in a tensor on the device."""

    def __init__(self, step: Step, device: torch.device) -> None:
        self.step = step
        self._begin: Any = None
        self._end: Any = None
        self._begun = self._ended = time.perf_counter()
        self._tokens: torch.Tensor | None = None
        self._scores: torch.Tensor | None = None
        self._first: list[int] | None = None
        if device.type == "cuda":
            self._begin, self._end = (torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                                      for _ in range(2))
            self._begin.record()

    def drawn(self, tokens: torch.Tensor, first: list[int] | None = None, scores: torch.Tensor | None = None) -> None:
        """tokens [repeats, rows] int32 may be overwritten by the next launch, and so may the scores [rows, ...] of a
        step that runs once. `first`: each group's row among them, -1 where it draws none; None: a row a group."""
        self._first = first
        self._tokens = _fetched(tokens)
        self._scores = None if scores is None else _fetched(scores)
        if self._end is None:
            self._ended = time.perf_counter()
        else:
            self._end.record()

    def read(self) -> list[Sampled]:
        """Per group what was drawn, a token a repeat. Waits for the device."""
        assert self._tokens is not None
        if self._end is not None:
            self._end.synchronize()
        rows: list[list[int]] = self._tokens.numpy().T.tolist()
        scores: NDArray[np.int32] | None = None if self._scores is None else self._scores.numpy()
        first = range(len(rows)) if self._first is None else self._first
        return [Sampled([]) if row < 0 else Sampled(rows[row], None if scores is None else [scores[row]])
                for row in first]

    @property
    def seconds(self) -> float:
        """How long the device took for one repeat, from where this was made; known when the tokens have been read."""
        whole = self._ended - self._begun if self._end is None else float(self._begin.elapsed_time(self._end)) / 1000
        return whole / max(1, self.step.repeat)


def _fetched(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host, under way where the tensor lies on a card."""
    if not tensor.is_cuda:
        return tensor.clone()
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    return copy
