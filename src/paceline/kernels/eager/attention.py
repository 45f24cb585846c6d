"""Paged attention in a few large calls: gather the keys of many groups, then one scaled_dot_product_attention.

Groups with the same number of rows share a call, padded to the longest context among them; a long prompt chunk is
cut into pieces, each a group of its own that follows the pieces before it. Keys are taken in physical order (a
tree's own rows come after its prefix) and a mask says who sees what; padding reads the null block, so that nothing
foreign, not even a NaN, can reach a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F

from paceline.kernels.layout import GroupView, Layout
from paceline.kernels.paths import ancestry, depths

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

    @property
    def span(self) -> int:
        return self.start + self.rows - self.low


@dataclass(slots=True)
class Call:
    """One attention call over B pieces of n rows and up to C keys each."""

    rows: torch.Tensor | None
    """[B * n] int64, or None: all rows of the step in order."""
    slots: torch.Tensor
    """[B * C] int64."""
    pieces: int
    n: int
    mask: torch.Tensor | None
    """[B, 1, n, C], 0 or -inf in q's dtype; None: everything is visible, or exactly the causal half."""
    causal: bool


def attend(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, layout: Layout, view: GroupView,
           scale: float) -> torch.Tensor:
    """q [N, H, d], caches [slots, H_kv, d] -> [N, H, d]; the contract is Kernels.attend."""
    out: torch.Tensor | None = None
    for call in _plan(layout, view, q.dtype):
        if call.rows is None:
            return _call(call, q, k_cache, v_cache, scale)
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        out.index_copy_(0, call.rows, _call(call, q.index_select(0, call.rows), k_cache, v_cache, scale))
    return torch.empty_like(q) if out is None else out


def _call(call: Call, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale: float) -> torch.Tensor:
    """q [B * n, H, d] of this call -> the same shape."""
    _, heads, dim = q.shape
    kv_heads = k_cache.shape[1]
    pieces, n = call.pieces, call.n
    keys = k_cache.index_select(0, call.slots).view(pieces, -1, kv_heads, dim).transpose(1, 2)
    values = v_cache.index_select(0, call.slots).view(pieces, -1, kv_heads, dim).transpose(1, 2)
    if keys.dtype != q.dtype:
        keys, values = keys.to(q.dtype), values.to(q.dtype)
    if n == 1:
        # The heads that share a KV head take the place of rows: no copy, and the keys are read once for all.
        query = q.reshape(pieces, kv_heads, heads // kv_heads, dim)
        return F.scaled_dot_product_attention(query, keys, values, call.mask, scale=scale).reshape(-1, heads, dim)
    query = q.reshape(pieces, n, heads, dim).transpose(1, 2)
    out = F.scaled_dot_product_attention(query, keys, values, call.mask, is_causal=call.causal, scale=scale,
                                         enable_gqa=heads != kv_heads)
    return out.transpose(1, 2).reshape(-1, heads, dim)


def _plan(layout: Layout, view: GroupView, dtype: torch.dtype) -> Iterable[Call]:
    """The calls of a step, the same for every layer of a cache group."""
    kept: list[Call] | None = view.scratch.get("eager.calls")
    if kept is not None:
        return kept
    pieces = list(_pieces(layout, view.window))
    calls = (_make_call(batch, layout, view, dtype) for batch in _batches(pieces))
    if sum(piece.rows * piece.span for piece in pieces) > KEPT_ENTRIES:
        return calls
    kept = list(calls)
    view.scratch["eager.calls"] = kept
    return kept


def _pieces(layout: Layout, window: int | None) -> Iterator[Piece]:
    for group, (begin, end) in enumerate(zip(layout.offsets, layout.offsets[1:])):
        parents = layout.parents[group]
        step = PIECE_ROWS if parents is None else max(1, end - begin)
        for row in range(begin, end, step):
            start = layout.starts[group] + row - begin
            low = 0 if window is None else max(0, start - window + 1)
            yield Piece(group, row, min(step, end - row), start, low, parents)


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


def _make_call(pieces: list[Piece], layout: Layout, view: GroupView, dtype: torch.dtype) -> Call:
    device = view.tables.device
    n = pieces[0].rows
    length = max(piece.span for piece in pieces)
    everything = sum(piece.rows for piece in pieces) == layout.rows
    in_order = all(a.begin < b.begin for a, b in pairwise(pieces))
    rows = None
    if not (everything and in_order):
        rows = torch.tensor([row for piece in pieces for row in range(piece.begin, piece.begin + n)], device=device)

    lows, starts, spans, groups = torch.tensor(
        [[piece.low for piece in pieces], [piece.start for piece in pieces], [piece.span for piece in pieces],
         [piece.group for piece in pieces]], device=device).unsqueeze(-1).unbind(0)
    offsets = torch.arange(length, device=device)
    positions = lows + offsets
    tables = view.tables[groups[:, 0]]
    columns = (positions // layout.block_size).clamp_(max=tables.shape[1] - 1)
    slots = tables.gather(1, columns) * layout.block_size + positions % layout.block_size
    padded = any(piece.span != length for piece in pieces)
    if padded:
        slots.masked_fill_(offsets >= spans, 0)

    simple = all(piece.parents is None for piece in pieces)
    window = view.window
    if n == 1:
        hidden = (offsets >= spans)[:, None] if padded else None
        return Call(rows, slots.flatten(), len(pieces), 1, _mask(hidden, dtype), False)
    if simple and not padded and length == n and (window is None or window >= n):
        return Call(rows, slots.flatten(), len(pieces), n, None, True)
    own = (starts + torch.arange(n, device=device))[:, :, None]
    hidden = positions[:, None] > own
    if window is not None:
        hidden |= positions[:, None] <= own - window
    for index, piece in enumerate(pieces):
        if piece.parents is not None:
            hidden[index] = _tree_hidden(piece, length, window, device)
    return Call(rows, slots.flatten(), len(pieces), n, _mask(hidden, dtype), False)


def _mask(hidden: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """[B, n, C] bool -> [B, 1, n, C] to add to the scores."""
    if hidden is None:
        return None
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
    return mask[:, None]


def _tree_hidden(piece: Piece, length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """[n, C] bool of one tree: a row sees the prefix, its ancestors and itself, within the window."""
    parents = piece.parents or []
    prefix = piece.start - piece.low
    hidden = torch.ones((piece.rows, length), dtype=torch.bool)
    hidden[:, :prefix] = False
    for row, path in enumerate(ancestry(parents)):
        hidden[row, [prefix + ancestor for ancestor in path]] = False
    if window is not None:
        depth = torch.tensor(depths(parents))
        keys = torch.cat((torch.arange(piece.low, piece.start), piece.start + depth))
        hidden[:, :len(keys)] |= keys <= (piece.start + depth)[:, None] - window
    return hidden.to(device)
