"""Between a captured forward and the draws behind it: logits, and who draws from which of them.

The two are captured apart: forwards by the rows of a step, draws by the rows that are drawn from and by what drawing
takes. So neither is captured anew for the other's sake, and the host may say what it bars while the forward runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.engine.execute.graphs.seats import send
from paceline.kernels.device.operands import Controls


class Follows(Enum):
    """What becomes of the tokens that a device draws."""

    NOTHING = "nothing"
    """They are a draft's: with their siblings, tokens [1 + further, R] and scores of each."""
    NOTED = "noted"
    """They are their seats' newest, and counted."""
    CHAINS = "chains"
    """Drafts are verified by them: chains."""
    TREES = "trees"
    """Drafts are verified by them and accepted paths moved into place."""


@dataclass(frozen=True, slots=True)
class Draws:
    """Views into flat int64 memory, numpy's on the host or torch's on the device, for so many rows to draw from."""

    wanted: Any
    """[R] rows of the step whose logits are needed."""
    seats: Any
    """[R] who draws there; -1: nobody, it is padding."""
    positions: Any
    """[R] of what is drawn."""
    parents: Any
    """[R] the draw above it in its draft; -1: none."""
    fed: Any
    """[R] the token that the row was fed."""
    slots: Any
    """[cache groups, R] where its keys and values lie."""
    offsets: Any
    """[R + 1] the first draw of each group of a step with drafts."""

    @staticmethod
    def size(rows: int, views: int) -> int:
        return (6 + views) * rows + 1

    @staticmethod
    def over(data: Any, rows: int, views: int) -> Draws:
        by_row = data[:(5 + views) * rows].reshape(5 + views, rows)
        wanted, seats, positions, parents, fed = by_row[:5]
        return Draws(wanted, seats, positions, parents, fed, by_row[5:], data[(5 + views) * rows:])


def nobody_draws(draws: Draws) -> None:
    """Make all of them padding."""
    draws.seats[:] = draws.parents[:] = -1
    draws.offsets[:] = 0


@dataclass(frozen=True, slots=True)
class SampleGraph:
    """What follows a forward on the device, ready to be replayed."""

    out: list[torch.Tensor]
    """[R] int32 what was drawn (but see Follows.NOTHING); with drafts Verdicts.packed; the scores of what was drawn,
    where the controls ask for them. Overwritten by the next replay."""
    replay: Callable[[], None]


class LogitsBuffer:
    """Where forwards leave the logits of some rows and draws find them."""

    def __init__(self, logits: torch.Tensor, views: int) -> None:
        """`logits` [R, V] float32."""
        self.rows = rows = logits.shape[0]
        self.logits = logits
        self.data = torch.zeros(Draws.size(rows, views), dtype=torch.int64, device=logits.device)
        self.draws = Draws.over(self.data, rows, views)
        self.captured: dict[tuple[Follows, Controls], SampleGraph] = {}
        """What draws from them. Kept here, so that it goes where they go: with a draft model that nobody uses."""
        nobody_draws(self.draws)

    def let_draw(self, drawing: NDArray[np.int64]) -> None:
        """[2, R]: `seats` and `positions` of the draws to come, instead of those the forward was told of."""
        send(drawing.reshape(-1), self.data[self.rows:3 * self.rows])


class LogitsBuffers:
    """Those of one model by their rows, made when first needed. Its steps run one after the other, so their logits lie
    in the same memory, if the largest comes first. Another model's do not: an engine that schedules ahead reads the
    target's logits after its draft models have run."""

    def __init__(self, vocab_size: int, views: int, device: torch.device) -> None:
        self._memory = torch.empty((0, vocab_size), dtype=torch.float32, device=device)
        self._views = views
        self._made: dict[int, LogitsBuffer] = {}

    def of(self, rows: int) -> LogitsBuffer:
        found = self._made.get(rows)
        if found is None:
            if rows > len(self._memory):  # those that exist keep what they were captured with
                self._memory = self._memory.new_zeros((rows, self._memory.shape[1]))
            found = self._made[rows] = LogitsBuffer(self._memory[:rows], self._views)
        return found
