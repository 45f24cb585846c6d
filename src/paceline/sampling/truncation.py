"""top-k, top-p and min-p: which tokens of a row remain.

In the order (best score first, ties to the lowest id) each of the three keeps a prefix, so the support is the
shortest of the prefixes. Rows are looked at through a window below their best score that opens only as far as the
row needs: a few dozen tokens are sorted, not the vocabulary. However wide the window was, the support is the same.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.sampling.dense import Candidates, Doubles, Floats, Ints, exp_sums, gather, select_rows

_WINDOWS = (8.0, 11.0, 15.0, np.inf)
"""How far below the best score to look, in tries. 8 settles top_p .95 for nearly every row of a language model."""

_PADDED = 1 << 20
"""Cells of the padded table that is sorted at once."""

_TOKEN = np.uint64(0xFFFFFFFF)
_PADDING = np.uint64(0xFF800000FFFFFFFF)
"""Sorts last; reads as score -inf."""


class Limits:
    """What each row asks for. `top_k` is the vocabulary size, `top_p` 1 and `log_min_p` -inf where it is off."""

    __slots__ = ("deepest", "has_min_p", "has_top_p", "log_min_p", "nucleus", "top_k", "top_p", "whole_mass")

    def __init__(self, top_k: Ints, top_p: Doubles, log_min_p: Doubles, width: int) -> None:
        self.top_k, self.top_p, self.log_min_p = top_k, top_p, log_min_p
        ranked = top_k < width
        self.nucleus = top_p < 1.0
        self.whole_mass = self.nucleus & ~ranked
        """The mass that top-p shares out is what top-k left: of a row without top-k, all of it."""
        self.deepest = np.where(self.nucleus & ranked, np.inf, -log_min_p)
        """How far below the best score it can be of use to look. min-p alone bounds it; but with top-k and top-p both
        on, the mass needs all of the top k."""
        self.has_top_p, self.has_min_p = bool(self.nucleus.any()), bool((log_min_p > -np.inf).any())

    def at(self, rows: Ints | slice) -> Limits:
        part = Limits.__new__(Limits)
        for name in ("top_k", "top_p", "log_min_p", "nucleus", "whole_mass", "deepest"):
            setattr(part, name, getattr(self, name)[rows])
        part.has_top_p, part.has_min_p = self.has_top_p, self.has_min_p
        return part


def truncate(x: Tensor, temperature: Floats, top: Floats, limits: Limits) -> Candidates:
    """The support of each row of [P, V], best first. `top` is each row's best score (finite)."""
    rows = x.shape[0]
    total = np.empty(rows)
    if limits.has_top_p:
        whole = limits.whole_mass.nonzero()[0]
        if len(whole) == rows:
            total = exp_sums(x, temperature, top)
        elif len(whole):
            total[whole] = exp_sums(select_rows(x, whole), temperature[whole], top[whole])
    deepest = limits.deepest
    best = top.astype(np.float64)
    depth = np.minimum(_WINDOWS[0], deepest)
    sure, kept = _cut(gather(x, temperature, best - depth), top, total, limits, depth >= deepest)
    if sure.all():
        return kept
    found = [(sure.nonzero()[0], kept)]
    left = (~sure).nonzero()[0]
    for window in _WINDOWS[1:]:
        depth = np.minimum(window, deepest[left])
        gathered = gather(select_rows(x, left), temperature[left], best[left] - depth)
        sure, kept = _cut(gathered, top[left], total[left], limits.at(left), depth >= deepest[left])
        found.append((left[sure], kept))
        left = left[~sure]
        if not len(left):
            break
    counts = np.empty(rows, dtype=np.int64)
    for which, kept in found:
        counts[which] = kept.counts
    starts = np.concatenate(([0], np.cumsum(counts)))
    tokens = np.empty(starts[-1], dtype=np.int64)
    scores = np.empty(starts[-1], dtype=np.float32)
    for which, kept in found:
        at = np.repeat(starts[which] - np.cumsum(kept.counts) + kept.counts, kept.counts) + np.arange(len(kept.tokens))
        tokens[at] = kept.tokens
        scores[at] = kept.scores
    return Candidates(counts, tokens, scores)


def _cut(gathered: Candidates, top: Floats, total: Doubles, limits: Limits,
         complete: NDArray[np.bool_]) -> tuple[NDArray[np.bool_], Candidates]:
    """Which rows the gathered tokens settle, and the supports of those.

    `complete` rows were gathered as deep as they can need.
    """
    rows = len(gathered.counts)
    if rows > 1 and rows * int(gathered.counts.max()) > _PADDED:
        half, split = rows // 2, int(gathered.counts[:rows // 2].sum())
        parts = [_cut(Candidates(gathered.counts[r], gathered.tokens[t], gathered.scores[t]),
                      top[r], total[r], limits.at(r), complete[r])
                 for r, t in ((slice(half), slice(split)), (slice(half, None), slice(split, None)))]
        kept = [part for _, part in parts]
        return np.concatenate([sure for sure, _ in parts]), Candidates(
            np.concatenate([part.counts for part in kept]), np.concatenate([part.tokens for part in kept]),
            np.concatenate([part.scores for part in kept]))

    counts = gathered.counts
    tokens, scores = _sorted(gathered)
    size = np.minimum(limits.top_k, counts)
    sure = complete | (counts >= limits.top_k)
    if limits.has_top_p:
        mass = torch.from_numpy(scores - top[:, None]).exp_().double().numpy().cumsum(axis=1)
        # Where top-k is on too, the mass is that of the top k: such a row is settled only once those are all here.
        target = limits.top_p * np.where(limits.whole_mass, total, mass[np.arange(rows), size - 1])
        reaches = mass >= target[:, None]
        sure |= limits.whole_mass & reaches[:, -1]
        first = np.where(reaches[:, -1], reaches.argmax(axis=1) + 1, size)
        size = np.where(limits.nucleus, np.minimum(size, first), size)
    if limits.has_min_p:
        below = scores < (top + limits.log_min_p)[:, None]
        size = np.minimum(size, np.where(below[:, -1], below.argmax(axis=1), counts))
    if not sure.all():
        size, tokens, scores = size[sure], tokens[sure], scores[sure]
    inside = np.arange(scores.shape[1]) < size[:, None]
    return sure, Candidates(size, tokens[inside], scores[inside])


def _sorted(gathered: Candidates) -> tuple[Ints, Floats]:
    """Tokens and scores as [P, longest] tables, best first, ties to the lowest id, padded with scores of -inf."""
    counts, tokens, scores = gathered
    keys = np.full((len(counts), int(counts.max())), _PADDING, dtype=np.uint64)
    # One integer per token: the score's bits, mapped so that better sorts first, above the token id.
    keys[np.arange(keys.shape[1]) < counts[:, None]] = _flipped(scores.view(np.uint32)).astype(np.uint64) << 32 | \
        tokens.astype(np.uint64)
    keys.sort(axis=1)
    ordered = _flipped((keys >> np.uint64(32)).astype(np.uint32)).view(np.float32)
    return (keys & _TOKEN).astype(np.int64), ordered


def _flipped(bits: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Float bits <-> integers that descend as the float ascends (its own inverse; no -0 or NaN among them)."""
    return np.where(bits >> np.uint32(31), bits, bits ^ np.uint32(0x7FFFFFFF))
