"""The few operations that look at whole rows of the vocabulary. Everything after them works on flat candidate lists.

Each answer for a row depends on that row alone: reductions over a row run in an order fixed by the vocabulary size,
never by the number of rows or threads. On the CPU they are numpy's (its comparisons and argmax are several times
faster than torch's there and visit one row at a time); elsewhere torch's, on the device, and only candidates travel.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ints = NDArray[np.int64]

FLOAT_MAX = float(np.finfo(np.float32).max)
_MOST, _LEAST, _ZERO, _ONE = (np.float32(value) for value in (FLOAT_MAX, -FLOAT_MAX, 0.0, 1.0))
_BLOCK = 1 << 17
"""Elements of a row block whose temporaries are made at once."""


class Candidates(NamedTuple):
    """Tokens of several rows, flat: rows one after another, `counts[i]` tokens of row i, ids ascending in a row."""

    counts: Ints
    tokens: Ints
    scores: Floats


def select_rows(x: Tensor, rows: Ints) -> Tensor:
    """x[rows] for ascending distinct rows: x itself when that is all of them, else a copy."""
    if len(rows) == x.shape[0]:
        return x
    return x[torch.from_numpy(rows).to(x.device)]


def row_max(x: Tensor) -> Floats:
    """Largest value of each row of [P, V]; NaN where the row holds one."""
    if x.is_cpu:
        top: Floats = x.numpy().max(axis=1)
        return top
    return x.amax(dim=1).cpu().numpy()


def row_argmax(x: Tensor) -> tuple[Ints, Floats]:
    """Lowest index of the largest value of each row, and the value; NaN counts as largest."""
    if x.is_cpu:
        values = x.numpy()
        best: Ints = values.argmax(axis=1)
        return best, values[np.arange(len(best)), best]
    top, at = x.max(dim=1)
    return at.cpu().numpy(), top.cpu().numpy()


def scaled(x: Tensor, temperature: Floats) -> Tensor:
    """Scores of whole rows: x / temperature, kept finite where x is; -inf stays out of the support."""
    scores = x / torch.from_numpy(temperature).to(x.device)[:, None]
    overflow = torch.isinf(scores) & (x != -torch.inf)
    return torch.where(overflow, scores.clamp(-FLOAT_MAX, FLOAT_MAX), scores) + 0.0


def scaled_flat(values: Floats, temperature: Floats) -> Floats:
    """The same scores for flat values above -inf. Adding zero turns -0 into 0: equal scores get equal bits."""
    with np.errstate(over="ignore"):
        scores = values / temperature
    np.minimum(scores, _MOST, out=scores)
    np.maximum(scores, _LEAST, out=scores)
    scores += _ZERO
    return scores


def _low(temperature: Floats, floor: Doubles) -> Floats:
    """A floor for logits that lets every score of at least `floor` pass, and little else. Above -inf."""
    low = floor * temperature
    # Rounding it to float32 moves it by far less than the millionth taken off.
    low -= np.abs(low) * 1e-6 + np.maximum(temperature, _ONE) * 3e-45
    low[floor <= -FLOAT_MAX] = -FLOAT_MAX  # scores end there, however far below it a logit would take them
    return np.minimum(np.maximum(low, -FLOAT_MAX), FLOAT_MAX).astype(np.float32)


def roughly_at_least(x: Tensor, temperature: Floats, floor: Doubles) -> int:
    """How many tokens of the one row x [1, V] have a score of about `floor` or more."""
    low = _low(temperature, floor)
    return int(np.count_nonzero(x.numpy() >= low)) if x.is_cpu else int((x >= float(low[0])).sum())


def values_at(x: Tensor, tokens: Ints) -> Floats:
    """Logits of some tokens of the one row x [1, V]."""
    if x.is_cpu:
        values: Floats = x.numpy()[0, tokens]
        return values
    return x[0, torch.from_numpy(tokens).to(x.device)].cpu().numpy()


def gather(x: Tensor, temperature: Floats, floor: Doubles) -> Candidates:
    """Exactly the tokens of each row whose score (x / temperature) is at least `floor`; never one at -inf."""
    # Rows are compared before the division; the few tokens that pass are divided and compared for good.
    low = _low(temperature, floor)
    rows, width = x.shape
    if x.is_cpu:
        whole = x.numpy()
        at = (whole >= low[:, None]).reshape(-1).nonzero()[0]
        values = whole.reshape(-1)[at]
    else:
        found = (x >= torch.from_numpy(low).to(x.device)[:, None]).view(-1).nonzero().view(-1)
        values = x.reshape(-1)[found].cpu().numpy()
        at = found.cpu().numpy()
    if rows == 1:
        scores = scaled_flat(values, temperature)
        keep = scores >= floor
        if not keep.all():
            at, scores = at[keep], scores[keep]
        return Candidates(np.array([len(at)]), at, scores)
    starts = np.arange(rows + 1) * width
    ends = at.searchsorted(starts)
    counts = ends[1:] - ends[:-1]
    row = np.arange(rows).repeat(counts)
    scores = scaled_flat(values, temperature[row])
    tokens = at - starts[row]
    keep = scores >= floor[row]
    if not keep.all():
        counts = np.bincount(row[keep], minlength=rows)
        tokens, scores = tokens[keep], scores[keep]
    return Candidates(counts, tokens, scores)


def exp_sums(x: Tensor, temperature: Floats, top: Floats) -> Doubles:
    """Sum of exp(score - top) over each whole row, exp in float32, sums in float64. `top` is the row's best score."""
    rows, width = x.shape
    total = np.empty(rows, dtype=np.float64)
    step = max(1, _BLOCK // width)
    for at in range(0, rows, step):
        part = slice(at, at + step)
        if x.is_cpu:
            with np.errstate(over="ignore"):
                scores = x[part].numpy() / temperature[part, None]
                if (top[part] == _MOST).any():
                    np.minimum(scores, _MOST, out=scores)
                scores -= top[part, None]
            weights = torch.from_numpy(scores).exp_()
            # Converted first: a sum that converts on the way is buffered in blocks that ignore where a row begins.
            total[part] = weights.double().numpy().sum(axis=1)
        else:
            weights = scaled(x[part], temperature[part]).sub_(torch.from_numpy(top[part]).to(x.device)[:, None])
            total[part] = _folded_sum(weights.exp_().double()).cpu().numpy()
    return total


def _folded_sum(x: Tensor) -> Tensor:
    """Row sums by adding the upper half onto the lower until one column is left: elementwise, so always one order."""
    width = x.shape[1]
    while width > 1:
        half = (width + 1) // 2
        x[:, :width - half] += x[:, half:width]
        width = half
    return x[:, 0]
