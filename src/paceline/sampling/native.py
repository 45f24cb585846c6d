"""The native sampler (native/sampler.h): whole rows to tokens in one call, where the library is built.

It reads what numpy's path reads and follows the same rules, but its exponentials and logarithms are its own: between
the two a sample may differ where two tokens are equal to the last bits. So one of them decides for a whole pipeline,
never one for some rows and the other for others.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paceline.kernels import cpu
from paceline.sampling.dense import Doubles, Floats, Ints


def load() -> Any | None:
    """The extension module, for Pipeline(native=...); None where it was not built, or from sources that are older."""
    module = cpu.load()
    return module if hasattr(module, "Sampler") else None


class NativeRows:
    """A native sampler with the parameters of a list of rows: what stays the same while the list does."""

    __slots__ = ("_sampler", "_table")

    def __init__(self, module: Any, sampler: Any, kind: Ints, temperature: Floats, top_k: Ints, top_p: Doubles,
                 log_min_p: Doubles, seeds: NDArray[np.uint64]) -> None:
        self._sampler = sampler
        self._table = module.SampleTable(kind, temperature, top_k, top_p, log_min_p, seeds)

    def sample(self, x: Tensor, at: Ints, rows: Ints, positions: Ints, tokens: Ints, top: Floats) -> None:
        """Sample row rows[i] of the list from logits x[at[i]], into tokens[rows[i]] and its best score into
        top[rows[i]]: token -1 and a score of NaN or -inf where there is none to sample."""
        self._sampler.sample(self._table, x.numpy(), at, rows, positions, tokens, top)

    def support(self, row: int, logits: Tensor) -> tuple[Ints, Floats]:
        """Tokens and scores that top-k, top-p and min-p left of a row's logits [V], best first."""
        tokens, scores = self._sampler.support(self._table, row, logits.numpy())
        return tokens, scores

