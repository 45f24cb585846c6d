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
_BLOCK = 1 << 18
"""Elements of a row block whose temporaries are made at once."""


class Candidates(NamedTuple):
    """Tokens of several rows, flat: rows one after another, `counts[i]` tokens of row i, ids ascending in a row."""

    counts: Ints
    tokens: Ints
    scores: Floats


def take(x: Tensor, rows: Ints) -> Tensor:
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
    with np.errstate(over="ignore", divide="ignore"):
        scores = values / temperature
    np.clip(scores, -FLOAT_MAX, FLOAT_MAX, out=scores)
    scores += np.float32(0.0)
    return scores


def gather(x: Tensor, temperature: Floats, floor: Doubles) -> Candidates:
    """Exactly the tokens of each row whose score (x / temperature) is at least `floor`; never one at -inf."""
    # Rows are compared before the division, against a floor low enough to miss nothing; the few that pass are then
    # divided and compared for good.
    low = floor * temperature
    low -= np.abs(low) * 1e-6 + np.maximum(temperature, 1.0) * np.float64(3e-45)
    # Rounding to float32 moves by far less than the millionth just taken off.
    low = np.clip(low, -FLOAT_MAX, FLOAT_MAX).astype(np.float32)
    width = x.shape[1]
    if x.is_cpu:
        at = np.flatnonzero(x.numpy() >= low[:, None])
        values = x.numpy().reshape(-1)[at]
    else:
        found = (x >= torch.from_numpy(low).to(x.device)[:, None]).view(-1).nonzero().view(-1)
        values = x.reshape(-1)[found].cpu().numpy()
        at = found.cpu().numpy()
    starts = np.arange(len(x) + 1, dtype=np.int64) * width
    counts = np.diff(np.searchsorted(at, starts)).astype(np.int64)
    row = np.repeat(np.arange(len(x)), counts)
    scores = scaled_flat(values, temperature[row])
    tokens = at - starts[row]
    keep = scores >= floor[row]
    if keep.all():
        return Candidates(counts, tokens, scores)
    counts = np.bincount(row[keep], minlength=len(x)).astype(np.int64)
    return Candidates(counts, tokens[keep], scores[keep])


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
                np.minimum(scores, np.float32(FLOAT_MAX), out=scores)
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
