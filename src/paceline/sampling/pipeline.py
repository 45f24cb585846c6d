"""From raw logits to tokens: one pipeline for plain decoding and for the verification of drafts.

The order is part of the contract:

    raw logits (float32) -> [raw logprobs] -> repetition, presence, frequency penalties -> logit bias
    -> bad words, no-repeat n-grams, allowed ids, min_tokens, grammar -> temperature -> top-k -> top-p -> min-p
    -> [processed logprobs] -> sample

The answer for a row is bitwise the same whatever the other rows of the call are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.errors import EmptySupportError, RequestError, StepError
from paceline.sampling.choice import choose
from paceline.sampling.dense import Ints, row_argmax, row_max, scaled_flat, select_rows
from paceline.sampling.native import NativeRows
from paceline.sampling.processed import NO_TOKEN, OpenRows, Processed
from paceline.sampling.processors import Edits, SampleRow
from paceline.sampling.state import SampleState
from paceline.sampling.truncation import Limits, truncate

__all__ = ["Pipeline", "Processed", "SampleRow"]

_GREEDY, _TRUNCATED, _OPEN = range(3)
_TABLES = 4


class _Table:
    """Parameters of a list of states as arrays. Built when the list changes, not at every step."""

    __slots__ = ("edited", "every", "kind", "limits", "native", "seeds", "states", "temperature", "whole")

    def __init__(self, states: list[SampleState], width: int, native: Any = None, sampler: Any = None) -> None:
        self.states = states
        self.temperature = np.array([state.temperature for state in states], dtype=np.float32)
        self.seeds = np.array([state.seed for state in states], dtype=np.uint64)
        self.kind = np.array([_GREEDY if s.is_greedy else _TRUNCATED if s.truncates else _OPEN for s in states],
                             dtype=np.int64)
        self.limits = Limits(
            np.array([state.top_k for state in states], dtype=np.int64),
            np.array([state.params.top_p for state in states], dtype=np.float64),
            np.array([math.log(s.params.min_p) if s.params.min_p > 0.0 else -math.inf for s in states],
                     dtype=np.float64), width)
        self.edited = [i for i, state in enumerate(states) if state.needs_processors]
        """Rows that may have edits."""
        self.every = np.arange(len(states))
        self.whole = self.groups(self.every)
        self.native = None if native is None else NativeRows(
            native, sampler, self.kind, self.temperature, self.limits.top_k, self.limits.top_p, self.limits.log_min_p,
            self.seeds)

    def groups(self, rows: Ints) -> list[tuple[int, Ints]]:
        """`rows` by kind, ascending inside a kind."""
        return [(kind, members) for kind in (_GREEDY, _TRUNCATED, _OPEN)
                if len(members := rows[self.kind[rows] == kind])]


class Pipeline:
    """Turns logits into distributions and tokens. Holds nothing but parameter tables of the last few calls."""

    __slots__ = ("_native", "_sampler", "_tables", "vocab_size")

    def __init__(self, vocab_size: int, native: Any = None) -> None:
        """`native`: the module that samples logits on the CPU (sampling.native.load); None: numpy does."""
        self.vocab_size = vocab_size
        self._native = native
        self._sampler = None if native is None else native.Sampler(vocab_size)
        self._tables: list[_Table] = []

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
        """One token per row; raises the error of the first row that has one. For callers without mixed fates."""
        processed = self.process(logits, rows)
        for row in sorted(processed.errors):
            raise processed.errors[row]
        return choose(processed)

    def choose(self, processed: Processed) -> list[int]:
        """The coupled sample of every row; NO_TOKEN (-1) for rows in `errors` or `stopped`."""
        return choose(processed)

    def process(self, logits: Tensor, rows: Sequence[SampleRow]) -> Processed:
        """The distribution of each row of raw logits [R, V]. Logits are read, never written; a row that cannot be
        sampled gets an entry in `errors` (or `stopped`) and disturbs no other."""
        if logits.ndim != 2 or logits.shape != (len(rows), self.vocab_size):
            raise ValueError(f"expected logits [{len(rows)}, {self.vocab_size}], got {list(logits.shape)}")
        if logits.requires_grad or logits.dtype is not torch.float32 or not logits.is_contiguous():
            logits = logits.detach().to(torch.float32).contiguous()
        table = self._table([row.state for row in rows])
        processed = Processed(logits, rows, table.temperature, table.seeds, table.native if logits.is_cpu else None)
        if not len(rows):
            return processed
        edits = self._collect(rows, table)
        if edits is None:
            self._distribute(processed, table, table.every, logits, table.every)
            return processed
        changed = np.array(edits.rows, dtype=np.int64)
        others = np.delete(table.every, changed)
        self._distribute(processed, table, others, logits, others)
        edited = self._edit(processed, edits, changed)
        processed.keep_edited(edited, edits.rows)
        self._distribute(processed, table, changed, edited, np.arange(len(changed)))
        return processed

    def _distribute(self, processed: Processed, table: _Table, rows: Ints, x: Tensor, at: Ints) -> None:
        """Work out the distributions of `rows` (ascending) from their edited logits x[at]."""
        if processed.native is not None:
            _sample(processed, processed.native, table.kind, rows, x, at)
            return
        for kind, members in table.whole if rows is table.every else table.groups(rows):
            self._reduce(processed, table, kind, members, select_rows(x, at[np.searchsorted(rows, members)]))

    def _table(self, states: list[SampleState]) -> _Table:
        for table in self._tables:
            # Compares identities: states have no equality of their own.
            if table.states == states:
                return table
        table = _Table(states, self.vocab_size, self._native, self._sampler)
        self._tables = [table, *self._tables[:_TABLES - 1]]
        return table

    def _collect(self, rows: Sequence[SampleRow], table: _Table) -> Edits | None:
        masked = [i for i, row in enumerate(rows) if row.mask is not None]
        if not masked and not table.edited:
            return None
        edits = Edits(self.vocab_size)
        for i in sorted({*masked, *table.edited}) if masked else table.edited:
            edits.collect(i, rows[i])
        return edits if edits.rows else None

    def _edit(self, processed: Processed, edits: Edits, rows: Ints) -> Tensor:
        """A copy [len(rows), V] of the rows' logits with the edits applied.

        A NaN stays one even where a mask would have hidden it. Rows left without a token whose request would rather
        go without its masks are edited again without them.
        """
        edited = processed.logits[torch.from_numpy(rows).to(processed.logits.device)]
        broken = np.isnan(row_max(edited))
        edits.apply(edited)
        if broken.any():
            edited[torch.from_numpy(broken).to(edited.device)] = torch.nan
        for at in np.flatnonzero(row_max(edited) == -np.inf).tolist():
            row = int(rows[at])
            if processed.rows[row].state.params.on_empty_support == "unmasked":
                again = Edits(self.vocab_size)
                again.collect(row, processed.rows[row], masks=False)
                edited[at] = processed.logits[row]
                if again.rows:
                    again.apply(edited[at:at + 1])
                processed.unmasked.add(row)
        return edited

    def _reduce(self, processed: Processed, table: _Table, kind: int, rows: Ints, x: Tensor) -> None:
        """Work out the distributions of rows of one kind from their edited logits x [P, V]."""
        temperature, limits = table.temperature, table.limits
        if len(rows) < len(temperature):
            temperature, limits = temperature[rows], limits.at(rows)
        if kind == _GREEDY:
            best, top = row_argmax(x)
        else:
            best, top = rows, row_max(x)
        good = top > -np.inf
        if not good.all():
            for row, value in zip(rows[~good].tolist(), top[~good].tolist()):
                _refuse(processed, row, value)
            kept = np.flatnonzero(good)
            if not len(kept):
                return
            rows, best, top, x = rows[kept], best[kept], top[kept], select_rows(x, kept)
            temperature, limits = temperature[kept], limits.at(kept)
        if kind == _GREEDY:
            processed.best[rows], processed.top[rows] = best, top
            return
        top = scaled_flat(top, temperature)
        processed.top[rows] = top
        if kind == _TRUNCATED:
            processed.truncated.append((rows, truncate(x, temperature, top, limits)))
        else:
            processed.open.append(OpenRows(x, rows))


def _sample(processed: Processed, native: NativeRows, kind: Ints, rows: Ints, x: Tensor, at: Ints) -> None:
    """Sample `rows` from logits x[at] in one native call; supports are worked out where somebody asks for them."""
    sampled, top = processed.sampled, processed.top
    native.sample(x, at, rows, processed.positions, sampled, top)
    for row in rows[sampled[rows] == NO_TOKEN].tolist():
        _refuse(processed, row, float(top[row]))
        top[row] = np.nan
    greedy = rows[kind[rows] == _GREEDY]
    processed.best[greedy] = sampled[greedy]


def _refuse(processed: Processed, row: int, top: float) -> None:
    """Record why a row whose largest logit is NaN or -inf has no distribution."""
    error = no_token(processed.rows[row].state, processed.rows[row].position, not_a_number=math.isnan(top))
    if error is None:
        processed.stopped.add(row)
    else:
        processed.errors[row] = error


def no_token(state: SampleState, position: int, *, not_a_number: bool) -> RequestError | None:
    """What becomes of a request that has no token for a position, because of a NaN or because nothing is left: an
    error, or None where it asked to stop there."""
    if not_a_number:
        return StepError(
            f"The model produced NaN logits at position {position}; check the weights and the data type it runs in.")
    if state.params.on_empty_support == "stop":
        return None
    return EmptySupportError(
        f"No token is left to sample at position {position}: loosen bad_words, no_repeat_ngram_size, "
        f"allowed_token_ids, min_tokens{_structure(state)} or logit_bias, or set on_empty_support to 'stop' or "
        "'unmasked'.",
        "on_empty_support")


def _structure(state: SampleState) -> str:
    name = state.params.structure
    return "" if name is None else f", {name}"
