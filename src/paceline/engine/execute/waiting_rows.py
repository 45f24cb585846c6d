"""WaitingRows: rows of the target that a head has yet to take up.

On a CPU what a head keeps of a row costs its weights' way from memory, and several rows hardly more than one: those of
plain steps wait until somebody wants to read what is kept of them, or to move or copy it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from paceline.kernels.layout import GroupView, Layout
from paceline.models.heads.interface import StoredRows

MOST = 256
"""Rows that may wait: what is done once for all of them takes as long as some dozens of rows do, and most prompts are
shorter, whose first token need not wait for it."""


class Taken(NamedTuple):
    """Rows and their streams by tap, [N, h] each."""

    tapped: Mapping[int, torch.Tensor]
    rows: StoredRows


class WaitingRows:
    """Of steps in their order. Only for heads that make what they keep of a row of nothing but its streams and its
    position: rows of many texts become rows of none."""

    def __init__(self) -> None:
        self._steps: list[Taken] = []
        self._count = 0

    @property
    def full(self) -> bool:
        return self._count >= MOST

    def add(self, tapped: Mapping[int, torch.Tensor], rows: StoredRows) -> None:
        self._steps.append(Taken(tapped, rows))
        self._count += len(rows.tokens)

    def take(self) -> Taken | None:
        """All that wait, as rows of one step; None: there are none."""
        steps, self._steps, self._count = self._steps, [], 0
        if len(steps) < 2:
            return steps[0] if steps else None
        # In numpy: torch would share so small a copy out to threads of its own, which ours are in the way of.
        slots = _joined([step.rows.view.slots for step in steps])
        last = _last_writers(slots)
        return Taken({tap: _streams([step.tapped[tap] for step in steps], last) for tap in steps[0].tapped},
                     _rows(steps, slots[last], last))


def _last_writers(slots: np.ndarray) -> np.ndarray | slice:
    """Where several rows have the same slot, a draft that was turned down and the token that came instead, the last of
    them, as if they had been stored in turn."""
    found, behind = np.unique(slots[::-1], return_index=True)
    return slice(None) if len(found) == len(slots) else np.sort(len(slots) - 1 - behind)


def _joined(parts: Sequence[torch.Tensor]) -> np.ndarray:
    return np.concatenate([part.numpy() for part in parts])


def _chosen(parts: Sequence[torch.Tensor], rows: np.ndarray | slice) -> np.ndarray:
    chosen: np.ndarray = _joined(parts)[rows]
    return chosen


def _streams(parts: Sequence[torch.Tensor], rows: np.ndarray | slice) -> torch.Tensor:
    if parts[0].dtype is torch.bfloat16:  # which numpy does not know
        return _streams([part.view(torch.int16) for part in parts], rows).view(torch.bfloat16)
    return torch.from_numpy(_chosen(parts, rows))


def _rows(steps: Sequence[Taken], slots: np.ndarray, chosen: np.ndarray | slice) -> StoredRows:
    """Each of them a text of its own of which nothing else is seen."""
    newest = steps[-1].rows
    tokens = _chosen([step.rows.tokens for step in steps], chosen)
    positions = _chosen([step.rows.layout.positions for step in steps], chosen)
    count = len(slots)
    view = GroupView(torch.zeros((count, 0), dtype=torch.int64), torch.from_numpy(slots), newest.view.window)
    layout = Layout(torch.from_numpy(positions), list(range(count + 1)), positions.tolist(), [None] * count,
                    newest.layout.block_size, [view])
    return StoredRows(torch.from_numpy(tokens), layout, view, newest.before)
