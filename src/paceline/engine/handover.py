"""Between a captured forward and the draws behind it: logits, and who draws from which of them.

The two are captured apart: forwards by the rows of a step, draws by the rows that are drawn from and by what drawing
takes. So neither is captured anew for the other's sake, and the host may say what it bars while the forward runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.engine.seats import send


@dataclass(frozen=True, slots=True)
class Draws:
    """Views into flat int64 memory, numpy's on the host or torch's on the device, for so many rows to draw from."""

    wanted: Any
    """[R] rows of the step whose logits are needed."""
    seats: Any
    """[R] who draws there; -1: nobody, it is padding or the host draws."""
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


class Handover:
    """Where forwards leave the logits of `rows` rows and draws find them."""

    def __init__(self, rows: int, vocab_size: int, views: int, device: torch.device) -> None:
        self.rows = rows
        self.logits = torch.zeros(rows, vocab_size, dtype=torch.float32, device=device)
        self.data = torch.zeros(Draws.size(rows, views), dtype=torch.int64, device=device)
        self.draws = Draws.over(self.data, rows, views)
        nobody_draws(self.draws)

    def let_draw(self, drawing: NDArray[np.int64]) -> None:
        """[2, R]: `seats` and `positions` of the draws to come, where the forward was told of none."""
        send(drawing.reshape(-1), self.data[self.rows:3 * self.rows])


class Handovers:
    """Those of an engine by their rows, made when first needed. Steps run one after the other, so any two forwards and
    draws of as many rows share one."""

    def __init__(self, vocab_size: int, views: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._views = views
        self._device = device
        self._made: dict[int, Handover] = {}

    def of(self, rows: int) -> Handover:
        found = self._made.get(rows)
        if found is None:
            found = self._made[rows] = Handover(rows, self._vocab_size, self._views, self._device)
        return found
