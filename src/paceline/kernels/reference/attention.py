"""Paged attention for chains and trees, in logical position order.

The key axis is cut into tiles of 64 at absolute positions. A row visits the tiles that hold a key it may see, in
order, and keeps a running maximum, a running sum and a running result (online softmax). What happens in a tile is
one matrix product of a fixed shape for each (row, KV head); positions the row must not see read the null slot and
weigh exactly zero. So the bits depend on the row's own keys alone: not on its neighbours, not on how the prompt was
cut, not on whether a key came from a committed block or from an ancestor in a tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from paceline.kernels.layout import GroupView, Layout
from paceline.kernels.operands import values_in_keys
from paceline.kernels.paths import key_paths, seen_positions
from paceline.kernels.reference.ordered import exp, ordered_sum
from paceline.kernels.reference.products import bmm

TILE = 64
"""Keys a tile."""
CHUNK_BYTES = 16 << 20
"""Keys, and values, gathered at once for one tile of several rows."""
KEPT_ENTRIES = 1 << 22
"""Up to this many (row, position) pairs the plan of a step is kept for its next layers, else made again by each."""


@dataclass(slots=True)
class KeyTile:
    """The rows that visit one tile of 64 positions together."""

    rows: torch.Tensor
    """[n] int64, rows of the step."""
    slots: torch.Tensor
    """[n * 64] int64, the null slot where hidden."""
    hidden: torch.Tensor
    """[n, 1, 1, 64] bool: positions the row must not see."""


def attend(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, layout: Layout, view: GroupView,
           scale: float, scales: tuple[torch.Tensor, torch.Tensor] | None = None, softcap: float = 0.0) -> torch.Tensor:
    """q [N, H, d], caches [slots, H_kv, d] -> [N, H, d_v]; the contract is Kernels.attend."""
    key_scales, value_scales = (None, None) if scales is None else scales
    rows, heads, dim = q.shape
    _, kv_heads, width = v_cache.shape
    latent = values_in_keys(k_cache, v_cache)
    queries = q.float().reshape(rows, kv_heads, heads // kv_heads, dim) * scale
    # A single row is multiplied by another routine, which adds in another order: a head would see how many share its
    # keys, of which ranks may hold some each.
    shared = max(2, heads // kv_heads)
    if shared > heads // kv_heads:
        queries = F.pad(queries, (0, 0, 0, shared - heads // kv_heads))
    highest = queries.new_full((rows, kv_heads, shared), -torch.inf)
    total = queries.new_zeros((rows, kv_heads, shared))
    result = queries.new_zeros((rows, kv_heads, shared, width))

    for tile in _plan(layout, view, 4 * kv_heads * dim):
        n = tile.rows.shape[0]
        keys = _gather(k_cache, tile.slots, n, key_scales)
        values = keys[..., :width] if latent else _gather(v_cache, tile.slots, n, value_scales)
        query = queries[tile.rows].view(n * kv_heads, shared, dim)
        scores = bmm(query, keys.transpose(1, 2)).view(n, kv_heads, shared, TILE)
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(tile.hidden, -torch.inf)
        old = highest[tile.rows]
        new = torch.maximum(old, scores.amax(-1))
        weights = exp(scores - new[..., None])
        rescale = exp(old - new)
        added = bmm(weights.view(n * kv_heads, shared, TILE), values).view(n, kv_heads, shared, width)
        highest[tile.rows] = new
        total[tile.rows] = total[tile.rows] * rescale + ordered_sum(weights)
        result[tile.rows] = result[tile.rows] * rescale[..., None] + added
    result = (result / total[..., None])[:, :, :heads // kv_heads]
    return result.reshape(rows, heads, width).to(q.dtype)


def _gather(cache: torch.Tensor, slots: torch.Tensor, rows: int, scales: torch.Tensor | None) -> torch.Tensor:
    """[n * 64] slots -> [n * H_kv, 64, d] float32, contiguous: the product's memory layout is part of its shape."""
    _, kv_heads, dim = cache.shape
    gathered = cache.index_select(0, slots).float()
    if scales is not None:
        gathered = gathered * scales.index_select(0, slots)[..., None]
    gathered = gathered.view(rows, TILE, kv_heads, dim)
    return gathered.transpose(1, 2).reshape(rows * kv_heads, TILE, dim)


def _plan(layout: Layout, view: GroupView, key_bytes: int) -> Iterable[KeyTile]:
    """The tiles of a step, the same for every layer of a cache group."""
    kept: list[KeyTile] | None = view.scratch.get("reference.tiles")
    if kept is not None:
        return kept
    positions = seen_positions(layout)
    tiles = _tiles(layout, view, positions, key_bytes)
    if sum(positions) + len(positions) * TILE > KEPT_ENTRIES:
        return tiles
    kept = list(tiles)
    view.scratch["reference.tiles"] = kept
    return kept


def _tiles(layout: Layout, view: GroupView, positions: list[int], key_bytes: int) -> Iterator[KeyTile]:
    window = view.window or max(positions) + 1
    # The first and the last tile each row visits. Tiles wholly before its window would add exact zeros.
    first = [max(view.first, position - window + 1) // TILE for position in positions]
    last = [position // TILE for position in positions]
    count = max(last) + 1
    paths = key_paths(layout, view, count * TILE)
    chunk = max(1, CHUNK_BYTES // (TILE * key_bytes))
    offsets = torch.arange(TILE, device=view.tables.device)
    seen = torch.tensor(positions, device=view.tables.device)
    for index in range(count):
        visiting = [row for row in range(len(positions)) if first[row] <= index <= last[row]]
        key_positions = index * TILE + offsets
        for begin in range(0, len(visiting), chunk):
            rows = torch.tensor(visiting[begin:begin + chunk], device=view.tables.device)
            own = seen[rows][:, None]
            hidden = (key_positions > own) | (key_positions <= own - window)
            if view.first:
                hidden |= key_positions < view.first
            slots = paths.slots[:, index * TILE:(index + 1) * TILE][paths.of_row[rows]].masked_fill(hidden, 0)
            yield KeyTile(rows, slots.flatten(), hidden[:, None, None, :])
