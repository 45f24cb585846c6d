"""Between a captured forward and the sampling after it: logits, and who samples from which of them.

The two are captured apart: forwards by the rows of a step, sampling by the rows that are sampled from and by what it
takes. So neither is captured anew for the other's sake, and the host may say what it masks while the forward runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.engine.execute.graphs.moment import Moment
from paceline.engine.execute.graphs.seats import send
from paceline.kernels.device.operands import Controls


class AfterSampling(Enum):
    """What becomes of the tokens that a device samples."""

    NOTHING = "nothing"
    """They are a draft's: with their siblings, tokens [1 + further, R] and scores of each."""
    NOTED = "noted"
    """They are their seats' newest, and counted."""
    CHAINS = "chains"
    """Drafts are verified by them: chains."""
    TREES = "trees"
    """Drafts are verified by them and accepted paths moved into place."""


@dataclass(frozen=True, slots=True)
class SampleInputs:
    """For R rows to sample from: views into flat int64 memory, numpy's on the host or torch's on the device."""

    wanted: Any
    """[R] rows of the step whose logits are needed."""
    seats: Any
    """[R] who samples there; -1: nobody, it is padding."""
    positions: Any
    """[R] of what is sampled."""
    parents: Any
    """[R] the one of these rows above it in its draft; -1: none."""
    fed: Any
    """[R] the token that the row was fed."""
    slots: Any
    """[cache groups, R] where its keys and values lie."""
    offsets: Any
    """[R + 1] the first of these rows of each group of a step with drafts."""

    @staticmethod
    def size(rows: int, views: int) -> int:
        return (6 + views) * rows + 1

    @staticmethod
    def over(data: Any, rows: int, views: int) -> SampleInputs:
        by_row = data[:(5 + views) * rows].reshape(5 + views, rows)
        wanted, seats, positions, parents, fed = by_row[:5]
        return SampleInputs(wanted, seats, positions, parents, fed, by_row[5:], data[(5 + views) * rows:])


def pad_all(inputs: SampleInputs) -> None:
    """Make all rows padding."""
    inputs.seats[:] = inputs.parents[:] = -1
    inputs.offsets[:] = 0


@dataclass(frozen=True, slots=True)
class SampleGraph:
    """What follows a forward on the device, ready to be replayed."""

    out: list[torch.Tensor]
    """[R] int32 what was sampled (but see AfterSampling.NOTHING); with drafts Verdicts.packed; the scores of what was
    sampled, where the controls ask for them. Overwritten by the next replay."""
    replay: Callable[[], None]


class LogitsBuffer:
    """Where forwards leave the logits of some rows and sampling finds them."""

    def __init__(self, logits: torch.Tensor, views: int) -> None:
        """`logits` [R, V] float32."""
        self.rows = rows = logits.shape[0]
        self.logits = logits
        self.data = torch.zeros(SampleInputs.size(rows, views), dtype=torch.int64, device=logits.device)
        self.inputs = SampleInputs.over(self.data, rows, views)
        self.captured: dict[tuple[AfterSampling, Controls], SampleGraph] = {}
        """What samples from them. Kept here, so that it goes where they go: with a draft model that nobody uses."""
        self.began: Moment | None = None
        """When the forward that filled it last began."""
        pad_all(self.inputs)

    def set_sampled(self, rows: NDArray[np.int64]) -> None:
        """[2, R]: `seats` and `positions` to sample for next, instead of those that came with the forward."""
        send(rows.reshape(-1), self.data[self.rows:3 * self.rows])


class LogitsBuffers:
    """Those of one model by their rows, made when first needed and gone with the last forward that uses them. Its steps
    run one after the other, so their logits lie in the same memory, if the largest comes first. Another model's do not:
    an engine that schedules ahead reads the target's logits after its draft models have run."""

    def __init__(self, vocab_size: int, views: int, device: torch.device) -> None:
        self._vocab = vocab_size
        self._views = views
        self._device = device
        self._made: WeakValueDictionary[int, LogitsBuffer] = WeakValueDictionary()

    def of(self, rows: int) -> LogitsBuffer:
        found = self._made.get(rows)
        if found is None:
            largest = max(self._made.values(), key=lambda buffer: buffer.rows, default=None)
            if largest is not None and rows < largest.rows:
                logits = largest.logits[:rows]
            else:  # those that exist keep what they were captured with
                logits = torch.zeros((rows, self._vocab), dtype=torch.float32, device=self._device)
            found = self._made[rows] = LogitsBuffer(logits, self._views)
        return found
