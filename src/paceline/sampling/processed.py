"""Processed: the distributions of one call, after every control."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.errors import RequestError
from paceline.sampling.dense import Candidates, Doubles, Floats, Ints, exp_sums, gather, scaled_flat
from paceline.sampling.native import NativeRows
from paceline.sampling.processors import SampleRow

NO_TOKEN = -1
"""Stands where a row has no token: it failed, must stop, or (in `best`) is not greedy."""


class OpenRows(NamedTuple):
    """Rows sampled from their whole support: logits [P, V] and which rows of the call they are."""

    x: Tensor
    rows: Ints


class Processed:
    """One distribution per row. Rows refer to the rows of the `process` call; nothing here changes the logits,
    and the caller must not either while this is in use.

    The distribution of a greedy row is a point mass on its best token (ties to the lowest id).
    """

    __slots__ = (
        "_edited",
        "_edited_at",
        "_scores",
        "_spans",
        "best",
        "errors",
        "logits",
        "native",
        "open",
        "positions",
        "rows",
        "sampled",
        "seeds",
        "stopped",
        "temperature",
        "top",
        "truncated",
        "unmasked",
    )

    def __init__(self, logits: Tensor, rows: Sequence[SampleRow], temperature: Floats, seeds: NDArray[np.uint64],
                 native: NativeRows | None = None) -> None:
        self.logits = logits
        """Raw logits [R, V], float32."""
        self.rows = rows
        self.temperature = temperature
        """[R]; 1 for greedy rows."""
        self.seeds = seeds
        self.positions: Ints = np.array([row.position for row in rows], dtype=np.int64)
        self.native = native
        """Who works out these rows, where it is not numpy; then `open` and `truncated` stay empty."""
        self.sampled: Ints = np.full(len(rows), NO_TOKEN, dtype=np.int64)
        """The token of each row, where native code sampled it."""
        self.errors: dict[int, RequestError] = {}
        """Rows that failed, each for itself."""
        self.stopped: set[int] = set()
        """Rows with an empty support whose request asked to stop there."""
        self.unmasked: set[int] = set()
        """Rows whose masks left nothing and were lifted, as their request asked."""
        self.best: Ints = np.empty(len(rows), dtype=np.int64)
        """The token of each greedy row; NO_TOKEN elsewhere."""
        self.top: Floats = np.empty(len(rows), dtype=np.float32)
        """Best score of each row (of a greedy row, its best logit); NaN where it failed."""
        self.open: list[OpenRows] = []
        """Sampled rows whose support is every token above -inf."""
        self.truncated: list[tuple[Ints, Candidates]] = []
        """Sampled rows that top-k, top-p or min-p cut: which rows, and their supports, best first."""
        self.best.fill(NO_TOKEN)
        self.top.fill(np.nan)
        self._edited: Tensor | None = None
        self._edited_at: dict[int, int] = {}
        self._spans: dict[int, tuple[Ints, Floats]] = {}
        self._scores: Tensor | None = None

    def keep_edited(self, edited: Tensor, rows: Sequence[int]) -> None:
        """Remember that row rows[i] reads edited[i] instead of the raw logits."""
        self._edited = edited
        self._edited_at = {row: at for at, row in enumerate(rows)}

    def logits_of(self, row: int) -> Tensor:
        """[V] logits of a row after penalties, bias and masks, before temperature. A view."""
        if self._edited is not None and row in self._edited_at:
            return self._edited[self._edited_at[row]]
        return self.logits[row]

    def support(self, row: int) -> tuple[Ints, Floats]:
        """Token ids and scores (logit / temperature) of a row's support: best first where it was truncated, else
        by id."""
        self._check(row)
        state = self.rows[row].state
        if state.is_greedy:
            return self.best[row:row + 1], scaled_flat(self.top[row:row + 1], self.temperature[row:row + 1])
        if state.truncates:
            return self._span(row)
        whole = gather(self.logits_of(row)[None], self.temperature[row:row + 1], np.array([-np.inf]))
        return whole.tokens, whole.scores

    def support_size(self, row: int) -> int:
        return len(self.support(row)[0])

    def probs(self, row: int) -> Doubles:
        """[V] probabilities of a row, float64, exactly zero outside the support."""
        tokens, scores = self.support(row)
        weights = np.exp(scores.astype(np.float64) - float(scores.max()))
        probs = np.zeros(self.logits.shape[1])
        probs[tokens] = weights / weights.cumsum()[-1]
        return probs

    def logprob(self, row: int, token: int) -> float:
        """Natural log of a token's probability in a row's distribution; -inf outside the support."""
        self._check(row)
        state, top = self.rows[row].state, float(self.top[row])
        if state.is_greedy:
            return 0.0 if token == self.best[row] else -math.inf
        if state.truncates:
            tokens, scores = self._span(row)
            at = np.flatnonzero(tokens == token)
            if not len(at):
                return -math.inf
            total = np.exp(scores.astype(np.float64) - top).cumsum()[-1]
            return float(scores[at[0]]) - top - math.log(total)
        logits, temperature = self.logits_of(row), self.temperature[row:row + 1]
        value = float(logits[token])
        if value == -math.inf:
            return -math.inf
        score = scaled_flat(np.array([value], dtype=np.float32), temperature)
        return float(score[0]) - top - math.log(exp_sums(logits[None], temperature, self.top[row:row + 1])[0])

    @property
    def scores(self) -> Tensor:
        """[R, V] processed logits / temperature, -inf outside the support and in rows that failed. Made on demand."""
        if self._scores is None:
            device = self.logits.device
            self._scores = torch.full_like(self.logits, -torch.inf)
            for row in range(len(self.rows)):
                if row not in self.errors and row not in self.stopped:
                    tokens, values = self.support(row)
                    self._scores[row, torch.from_numpy(tokens).to(device)] = torch.from_numpy(values).to(device)
        return self._scores

    def processors(self, row: int) -> tuple[str, ...]:
        """Names of the processors that acted on a row, in order."""
        source = self.rows[row]
        return source.state.names(source.path, grammar=source.mask is not None)

    def _span(self, row: int) -> tuple[Ints, Floats]:
        if self.native is not None and row not in self._spans:
            self._spans[row] = self.native.support(row, self.logits_of(row))
        if not self._spans:
            for rows, kept in self.truncated:
                ends = np.cumsum(kept.counts)
                for i, start, end in zip(rows.tolist(), (ends - kept.counts).tolist(), ends.tolist()):
                    self._spans[i] = (kept.tokens[start:end], kept.scores[start:end])
        return self._spans[row]

    def _check(self, row: int) -> None:
        if row in self.errors:
            raise self.errors[row]
        if row in self.stopped:
            raise RequestError("This row has no token left and its request asked to stop: it has no distribution.")
