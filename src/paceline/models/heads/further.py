"""Tokens that a head drafts from beside its draft vocabulary, each sequence other ones.

A head that has learned over the whole vocabulary (HeadConfig.whole_vocabulary) can draft any token of the target's, but
where a draft takes no more than milliseconds it has no time to read the rest of the matrix. What is missing from the
draft vocabulary comes mostly from the text itself, and of that there is little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from paceline.kernels import cpu
from paceline.kernels.interface import Kernels
from paceline.kernels.packed import PackedWeight
from paceline.models.packing import LANES

Floats = npt.NDArray[np.float32]
MOST = 256
"""Of a sequence, a multiple of LANES."""


class FurtherTokens:
    """Those of one sequence, the newest MOST, with the rows of the target's head for them."""

    def __init__(self, target: PackedWeight) -> None:
        """`target`: its head."""
        self._target = target
        self._matrix = cpu.require().Matrix("q8", MOST, target.shape[1], spread=True)
        self._ids = np.zeros(MOST, dtype=np.int64)
        self._added = 0
        self.ids = self._ids[:0]
        """The target's."""
        self.weight = PackedWeight(self._matrix, 0, 8)
        """[ids, h]."""

    def add(self, tokens: Iterable[int]) -> None:
        """New ones, in the places of the oldest where there is no room."""
        changed: set[int] = set()
        for token in tokens:
            place = self._added % MOST
            self._ids[place] = token
            changed.add(place // LANES * LANES)
            self._added += 1
        for place in changed:
            rows = self._target.rows(torch.from_numpy(self._ids[place:place + LANES]))
            self._matrix.take_floats(rows.numpy(), place)
        self.ids = self._ids[:self._added]
        self.weight = PackedWeight(self._matrix, len(self.ids), 8)


class Further:
    """Of the lines of a round. In their logits column e, counted from the draft vocabulary on, stands for another token
    in each line; Markov heads have nothing to say of it."""

    def __init__(self, lines: Sequence[FurtherTokens | None], width: int | None = None) -> None:
        """None: a line has none. `width`: columns; None: as many as are needed."""
        self._lines = lines
        self.width = max((len(line.ids) for line in lines if line is not None), default=0) if width is None else width
        self.ids = np.zeros((len(lines), self.width), dtype=np.int64)
        """[S, width] the target's; 0 where a line has fewer tokens."""
        for own, line in zip(self.ids, lines):
            if line is not None:
                own[:len(line.ids)] = line.ids

    def logits(self, hidden: Floats, product: Callable[[Floats, PackedWeight], Floats]) -> Floats:
        """hidden [S, slots, h] -> [S, slots, width] float32; -inf where a line has fewer tokens. product: [slots, h]
        times rows. Line by line, so that nobody's sums depend on the company."""
        # In numpy: for so few numbers torch takes longer to begin an operation than to do it.
        out = np.full((*hidden.shape[:2], self.width), -np.inf, dtype=np.float32)
        for own, line, states in zip(out, self._lines, hidden):
            if line is not None:
                own[:, :len(line.ids)] = product(states, line.weight)
        return out

    def fork(self, lines: Sequence[int]) -> Further:
        """Other lines, each with the tokens of the one that it goes on from."""
        return Further([self._lines[line] for line in lines], self.width)


def linear(kernels: Kernels) -> Callable[[Floats, PackedWeight], Floats]:
    """A product for Further.logits, of what is normed already."""
    return lambda x, weight: kernels.linear(torch.from_numpy(x), weight).numpy()
