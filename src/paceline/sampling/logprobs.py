"""Log-probabilities of tokens: raw (before any processor) and processed, with ranks and the best alternatives."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.errors import StepError
from paceline.request import TokenLogprob
from paceline.sampling.dense import Doubles, Floats, Ints, exp_sums, row_max, select_rows
from paceline.sampling.processed import Processed
from paceline.sampling.truncation import Limits, truncate

_AT_ONCE = 64
"""Rows worked on together: bounds the temporaries for a long prompt."""


def token_logprobs(logits: Tensor, processed: Processed, rows: Sequence[int], tokens: Sequence[int],
                   tops: Sequence[int]) -> list[TokenLogprob]:
    """Scores of tokens[i] at row rows[i] of a pipeline call, with the tops[i] best alternatives.

    `logits` are that call's raw logits [R, V]; a row may come more than once. For a greedy row the processed
    distribution is a point mass: 0 for its token.
    """
    index = torch.tensor(list(rows), dtype=torch.int64, device=logits.device)
    width = logits.shape[1]
    found = _raw(logits[index].float(), list(tokens), np.array([min(top, width) for top in tops], dtype=np.int64))
    for score, row in zip(found, rows):
        score.processed = processed.logprob(row, score.token)
    return found


def prompt_logprobs(logits: Tensor, targets: Sequence[int], top: int) -> list[TokenLogprob]:
    """Scores of targets[i] under raw logits [i] of [n, V], with the `top` best. No processor acts on a prompt:
    `processed` equals `raw`."""
    found: list[TokenLogprob] = []
    top = min(top, logits.shape[1])
    for at in range(0, len(targets), _AT_ONCE):
        part = list(targets[at:at + _AT_ONCE])
        found += _raw(logits[at:at + len(part)].float(), part, np.full(len(part), top, dtype=np.int64))
    return found


def best_tokens(logits: Tensor, count: int, top: int | None) -> list[TokenLogprob]:
    """The `count` likeliest tokens under the one row `logits` [V], best first, ties to the lowest id; fewer where fewer
    are possible at all. Each knows the `top` best of them (None: nobody asked)."""
    x = logits.float()[None].contiguous()
    best, norm = _scale(x)
    width = min(max(count, top or 0), x.shape[1])
    found = _alternatives(x, best, norm, np.array([width]))[0]
    alternatives = {} if top is None else dict(islice(found.items(), top))
    return [TokenLogprob(token, raw, raw, rank, alternatives)
            for rank, (token, raw) in enumerate(islice(found.items(), count), 1)]


def unpacked(row: NDArray[np.int32], token: int, top: int) -> TokenLogprob:
    """What a device says of the token it sampled (kernels.device.interface.Sampler.logprobs), with the `top` best."""
    number = (len(row) - 3) // 2
    reals = row.view(np.float32)
    best = zip(row[3:3 + min(top, number)].tolist(), reals[3 + number:].tolist())
    return TokenLogprob(token, float(reals[0]), float(reals[1]), int(row[2]),
                        {alternative: raw for alternative, raw in best if alternative >= 0})


def _scale(x: Tensor) -> tuple[Floats, Doubles]:
    """The best logit of each row of x [n, V], and what to take off its logits to get log-probabilities."""
    best = row_max(x)
    if np.isnan(best).any():
        raise StepError("The model produced NaN logits; check the weights and the data type it runs in.")
    best = np.clip(best, np.finfo(np.float32).min, np.finfo(np.float32).max)
    return best, best.astype(np.float64) + np.log(exp_sums(x, np.ones(len(best), dtype=np.float32), best))


def _raw(x: Tensor, tokens: list[int], tops: Ints) -> list[TokenLogprob]:
    """Scores under the softmax of each row of x [n, V]; `processed` is filled in as if nothing had acted. `tops` are
    at most V."""
    x = x.contiguous()
    best, norm = _scale(x)
    at = torch.tensor(tokens, dtype=torch.int64, device=x.device)[:, None]
    own = x.gather(1, at)
    rank = _rank(x, at, own)
    values = own[:, 0].cpu().numpy().astype(np.float64) - norm
    best_of = _alternatives(x, best, norm, tops)
    return [TokenLogprob(token, raw, raw, position, top)
            for token, raw, position, top in zip(tokens, values.tolist(), rank.tolist(), best_of)]


def _rank(x: Tensor, at: Tensor, own: Tensor) -> Ints:
    """1 + how many tokens come before, in the order best first, ties to the lowest id."""
    if not x.is_cpu:
        ahead = (x > own) | ((x == own) & (torch.arange(x.shape[1], device=x.device) < at))
        return ahead.sum(dim=1).cpu().numpy() + 1
    ranks = np.empty(len(x), dtype=np.int64)
    for i, (row, token, value) in enumerate(zip(x.numpy(), at[:, 0].tolist(), own[:, 0].tolist())):
        ranks[i] = 1 + np.count_nonzero(row > value) + np.count_nonzero(row[:token] == value)
    return ranks


def _alternatives(x: Tensor, best: Floats, norm: Doubles, tops: Ints) -> list[dict[int, float]]:
    found: list[dict[int, float]] = [{} for _ in tops]
    rows = np.flatnonzero(tops)
    if not len(rows):
        return found
    ones = np.ones(len(rows))
    kept = truncate(select_rows(x, rows), ones.astype(np.float32), best[rows],
                    Limits(tops[rows], ones, -np.inf * ones, x.shape[1]))
    ends = np.cumsum(kept.counts)
    values = kept.scores.astype(np.float64) - np.repeat(norm[rows], kept.counts)
    for row, start, end in zip(rows.tolist(), (ends - kept.counts).tolist(), ends.tolist()):
        found[row] = dict(zip(kept.tokens[start:end].tolist(), values[start:end].tolist()))
    return found
