"""What changes logits before temperature: penalties, bias and masks, as sparse edits on a copy of the rows they touch.

Rows that no processor touches are not copied. A draft node's ancestors count as output: their few tokens are merged
into the request's sparse counts, so no node ever has a vocabulary-wide table of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.sampling.state import SampleState


@dataclass(slots=True, eq=False)
class SampleRow:
    """One row of logits to sample from: the plain decode of a sequence, or a node of its draft."""

    state: SampleState
    position: int
    """Absolute position (prompt included) of the token being sampled."""
    path: Sequence[int] = ()
    """Draft tokens between the last committed token and this row, in order: they count as output here."""
    mask: Any = None
    """A grammar's say: [V] booleans (torch or numpy), True where a token may come; None: no grammar."""


class Edits:
    """The edits of some rows, collected row by row and applied to all of them at once."""

    __slots__ = ("_allowed", "_banned", "_bias", "_counts", "_masks", "_width", "rows")

    def __init__(self, width: int) -> None:
        self._width = width
        self.rows: list[int] = []
        """Which rows have edits, in the caller's numbering; row i of `apply`'s tensor is rows[i]."""
        self._counts: list[tuple[int, SampleState, NDArray[np.int64], NDArray[np.float32]]] = []
        self._bias: list[tuple[int, SampleState]] = []
        self._banned: list[int] = []
        self._allowed: list[tuple[int, SampleState]] = []
        self._masks: list[tuple[int, Any]] = []

    def collect(self, index: int, row: SampleRow, *, masks: bool = True) -> None:
        """Add what `row` needs, if anything. `masks=False` leaves out bad words, n-grams, allowed ids and grammar."""
        state, path, at = row.state, row.path, len(self.rows)
        touched = False
        if state.counts is not None:
            ids, counts = state.counts.plus(path)
            if len(ids):
                self._counts.append((at, state, ids, counts))
                touched = True
        if len(state.bias_ids):
            self._bias.append((at, state))
            touched = True
        banned = state.banned(path) if masks and (state.bad_words is not None or state.ngrams is not None) else []
        if state.too_early_to_stop(path):
            banned = banned + state.early_stops
        if banned:
            offset = at * self._width
            self._banned.extend(offset + token for token in banned if token < self._width)
            touched = True
        if masks and state.allowed is not None:
            self._allowed.append((at, state))
            touched = True
        if masks and row.mask is not None:
            self._masks.append((at, row.mask))
            touched = True
        if touched:
            self.rows.append(index)

    def apply(self, x: Tensor) -> None:
        """Edit [len(rows), V] raw logits in place, in the order of the contract."""
        flat = x.view(-1)
        if self._counts:
            self._penalise(flat)
        if self._bias:
            at = np.concatenate([row * self._width + state.bias_ids for row, state in self._bias])
            values = np.concatenate([state.bias_values for _, state in self._bias])
            where = _on(flat, at)
            flat[where] = flat[where] + _on(flat, values)
        if self._banned:
            flat[_on(flat, np.array(self._banned, dtype=np.int64))] = -torch.inf
        if self._allowed:
            rows = _on(flat, np.array([row for row, _ in self._allowed], dtype=np.int64))
            where = _on(flat, np.concatenate([row * self._width + state.allowed for row, state in self._allowed
                                              if state.allowed is not None]))
            kept = flat[where]
            x[rows] = -torch.inf
            flat[where] = kept
        for row, mask in self._masks:
            x[row].masked_fill_(~torch.as_tensor(mask, dtype=torch.bool, device=x.device), -torch.inf)

    def _penalise(self, flat: Tensor) -> None:
        lengths = [len(ids) for _, _, ids, _ in self._counts]
        where = _on(flat, np.concatenate([row * self._width + ids for row, _, ids, _ in self._counts]))
        count = _on(flat, np.concatenate([counts for _, _, _, counts in self._counts]))

        def spread(values: list[float]) -> Tensor:
            return _on(flat, np.repeat(np.array(values, dtype=np.float32), lengths))

        states = [state for _, state, _, _ in self._counts]
        values = flat[where]
        if any(state.repetition != 1.0 for state in states):
            repetition = spread([state.repetition for state in states])
            values = torch.where(values > 0, values / repetition, values * repetition)
        if any(state.presence for state in states):
            values = values - spread([state.presence for state in states]) * (count > 0)
        if any(state.frequency for state in states):
            values = values - spread([state.frequency for state in states]) * count
        flat[where] = values


def _on(like: Tensor, values: NDArray[Any]) -> Tensor:
    return torch.from_numpy(values).to(like.device)
