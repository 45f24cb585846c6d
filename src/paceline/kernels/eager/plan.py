"""Which rows of a step are attended together, and which blocks and mask each such call needs.

Groups with the same number of rows share a call, padded to the longest context among them; a long prompt chunk is
cut into pieces, each a group of its own that follows the pieces before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

from paceline.kernels.layout import GroupView, Layout
from paceline.kernels.trees import ancestry, depths

PIECE_ROWS = 256
"""Rows of a prompt chunk attended at once: the later keys a piece cannot see are not computed."""
SHARED_ROWS = 32
"""Groups of up to this many rows share a call with others of their size."""
CALL_KEYS = 1 << 16
"""Keys gathered at once, unless one group alone has more."""
CALL_KEYS_FREE = 1 << 12
"""Below this many keys padding is cheaper than another call."""
KEPT_ENTRIES = 1 << 24
"""Up to this many mask entries the plan of a step is kept for its next layers, else made again by each."""


@dataclass(slots=True)
class Piece:
    """Consecutive rows of one group: `rows` rows from row `begin` of the step, after `start` keys."""

    group: int
    begin: int
    rows: int
    start: int
    low: int
    """First key position the piece's first row sees."""
    parents: list[int] | None
    mutual: bool = False

    @property
    def span(self) -> int:
        return self.start + self.rows - self.low


@dataclass(slots=True)
class AttentionCall:
    """One attention call over B pieces of n rows and C keys each."""

    rows: torch.Tensor | None
    """[B * n] int64, or None: all rows of the step in order."""
    pieces: int
    n: int
    blocks: torch.Tensor
    """[B * blocks per piece] int64, the null block beyond a piece's own."""
    mask: torch.Tensor | None
    """[B, 1, n, C], 0 or -inf in q's dtype; None: everything is visible, or exactly the causal half."""
    causal: bool = False
    stale: torch.Tensor | None = None
    """Places among the gathered slots whose content belongs to nobody here."""
    part: slice | None = None
    """The gathered slots to use, where not all."""
    adjacent: tuple[int, int] | None = None
    """First slot and number of slots to read in place, where they need no gathering."""


def plan(layout: Layout, view: GroupView, dtype: torch.dtype) -> Iterable[AttentionCall]:
    """The calls of a step, the same for every layer of a cache group."""
    kept: list[AttentionCall] | None = view.scratch.get("eager.calls")
    if kept is not None:
        return kept
    pieces = list(_pieces(layout, view))
    calls = (_call(batch, layout, view, dtype) for batch in _batches(pieces))
    if sum(piece.rows * piece.span for piece in pieces) > KEPT_ENTRIES:
        return calls
    kept = list(calls)
    view.scratch["eager.calls"] = kept
    return kept


def _pieces(layout: Layout, view: GroupView) -> Iterator[Piece]:
    for group, (begin, end) in enumerate(zip(layout.offsets, layout.offsets[1:])):
        parents = layout.parents[group]
        step = PIECE_ROWS if parents is None and not layout.mutual else max(1, end - begin)
        for row in range(begin, end, step):
            start = layout.starts[group] + row - begin
            rows = min(step, end - row)
            last = start + rows - 1
            """Of the piece; what its first row sees is what all see where they see each other."""
            low = view.first
            if view.window is not None:
                low = max(low, (last if layout.mutual else start) - view.window + 1)
            yield Piece(group, row, rows, start, min(low, last), parents, layout.mutual)


def _batches(pieces: list[Piece]) -> Iterator[list[Piece]]:
    """Pieces that share a call: of one size, with little padding, in the step's order where that is enough."""
    by_rows: dict[int, list[Piece]] = {}
    for piece in pieces:
        if piece.rows > SHARED_ROWS:
            yield [piece]
        else:
            by_rows.setdefault(piece.rows, []).append(piece)
    for same in by_rows.values():
        if _fits(len(same), max(piece.span for piece in same), sum(piece.span for piece in same)):
            yield same
            continue
        batch: list[Piece] = []
        keys = 0
        for piece in sorted(same, key=lambda piece: piece.span):
            if batch and not _fits(len(batch) + 1, piece.span, keys + piece.span):
                yield batch
                batch, keys = [], 0
            batch.append(piece)
            keys += piece.span
        yield batch


def _fits(count: int, longest: int, keys: int) -> bool:
    padded = count * longest
    return padded <= CALL_KEYS_FREE or (padded <= CALL_KEYS and 2 * padded <= 3 * keys)


def _call(pieces: list[Piece], layout: Layout, view: GroupView, dtype: torch.dtype) -> AttentionCall:
    device = view.tables.device
    n = pieces[0].rows
    rows = None
    if sum(piece.rows for piece in pieces) != layout.rows or any(a.begin > b.begin for a, b in pairwise(pieces)):
        rows = torch.tensor([row for piece in pieces for row in range(piece.begin, piece.begin + n)], device=device)
    if len(pieces) == 1:
        return _single(pieces[0], rows, layout, view, dtype)

    size = layout.block_size
    bases = [piece.low // size for piece in pieces]
    ends = [-(-(piece.start + n) // size) for piece in pieces]
    width = max(end - base for base, end in zip(bases, ends))
    columns = torch.tensor(bases, device=device)[:, None] + torch.arange(width, device=device)
    tables = view.tables[torch.tensor([piece.group for piece in pieces], device=device)]
    blocks = tables.gather(1, columns.clamp(max=tables.shape[1] - 1))
    blocks.masked_fill_(columns >= torch.tensor(ends, device=device)[:, None], 0)
    stale = [index * width * size + position - base * size
             for index, (piece, base, end) in enumerate(zip(pieces, bases, ends))
             for position in (*range(base * size, view.first), *range(piece.start + n, end * size))]
    positions = torch.tensor(bases, device=device)[:, None] * size + torch.arange(width * size, device=device)
    hidden = _hidden(pieces, positions, view)
    return AttentionCall(rows, len(pieces), n, blocks.flatten(), _mask(hidden, dtype),
                         stale=torch.tensor(stale, device=device) if stale else None)


def _single(piece: Piece, rows: torch.Tensor | None, layout: Layout, view: GroupView,
            dtype: torch.dtype) -> AttentionCall:
    """A piece of its own needs no padding, and no copy when its blocks lie side by side in the pool."""
    size = layout.block_size
    base, end = piece.low // size, -(-(piece.start + piece.rows) // size)
    blocks = view.tables[piece.group, base:end]
    skip = piece.low - base * size
    call = AttentionCall(rows, 1, piece.rows, blocks, None, part=slice(skip, skip + piece.span))
    if blocks.device.type == "cpu":
        ids = blocks.tolist()
        if all(b == a + 1 for a, b in pairwise(ids)):
            call.adjacent = (ids[0] * size + skip, piece.span)
    if piece.rows == 1 or piece.mutual:
        return call
    if piece.parents is None and piece.span == piece.rows and (view.window is None or view.window >= piece.rows):
        call.causal = True
        return call
    positions = torch.arange(piece.low, piece.low + piece.span, device=blocks.device)[None]
    call.mask = _mask(_hidden([piece], positions, view), dtype)
    return call


def _mask(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[B, n, C] bool -> [B, 1, n, C] to add to the scores."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)[:, None]


def _hidden(pieces: list[Piece], positions: torch.Tensor, view: GroupView) -> torch.Tensor:
    """positions [B, C] physical, of the gathered keys -> [B, n, C] bool: what each row must not see."""
    device, window = positions.device, view.window
    starts = torch.tensor([piece.start for piece in pieces], device=device)[:, None, None]
    own = starts + torch.arange(pieces[0].rows, device=device)[:, None]
    if pieces[0].mutual:
        own = own.amax(1, keepdim=True).expand_as(own)
    keys = positions[:, None]
    hidden = keys > own
    if window is not None:
        hidden |= keys <= own - window
    for index, piece in enumerate(pieces):
        if piece.parents is not None:
            hidden[index] = _tree_hidden(piece, piece.parents, positions[index], window)
    if view.first:
        hidden |= keys < view.first
    return hidden


def _tree_hidden(piece: Piece, parents: list[int], positions: torch.Tensor, window: int | None) -> torch.Tensor:
    """[n, C] bool of one tree: a row sees the prefix, its ancestors and itself, within the window."""
    device = positions.device
    related = torch.zeros((piece.rows, piece.rows), dtype=torch.bool)
    for row, path in enumerate(ancestry(parents)):
        related[row, path] = True
    depth = torch.tensor(depths(parents), device=device)
    drafted = (positions - piece.start).clamp(0, piece.rows - 1)
    """Which row of the tree a key is, where it is one."""
    beyond = positions >= piece.start + piece.rows
    hidden = (positions >= piece.start) & ~related.to(device)[:, drafted] | beyond
    if window is not None:
        logical = positions.where(positions < piece.start, piece.start + depth[drafted])
        hidden |= logical <= (piece.start + depth)[:, None] - window
    return hidden
