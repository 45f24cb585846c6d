"""Key paths: where each row of a step finds its keys, in logical position order.

All rows of a chain read the same path, each up to its own position: the group's block table, read in order. The
rows of a tree share the committed prefix and then follow their own ancestors, so each has a path of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from paceline.kernels.layout import GroupView, Layout
from paceline.kernels.trees import ancestry, depths


@dataclass(slots=True)
class KeyPaths:
    """slots [P, length] int64: slot of logical position j on path p, 0 (the null slot) where the path has none.
    of_row [N] int64: the path each row reads. A row at position p reads entries up to p of its path."""

    slots: torch.Tensor
    of_row: torch.Tensor


def key_paths(layout: Layout, view: GroupView, length: int) -> KeyPaths:
    """Paths of every group, `length` positions long (longer than any position of the step)."""
    size = layout.block_size
    device = view.tables.device
    blocks = -(-length // size)
    tables = view.tables[:, :blocks]
    if tables.shape[1] < blocks:
        tables = torch.nn.functional.pad(tables, (0, blocks - tables.shape[1]))
    chains = (tables[:, :, None] * size + torch.arange(size, device=device)).flatten(1)[:, :length]
    chains = chains.where(tables.repeat_interleave(size, dim=1)[:, :length] > 0, 0)

    counts = [1 if parents is None else len(parents) for parents in layout.parents]
    group_of_path = [group for group, count in enumerate(counts) for _ in range(count)]
    first = [0, *accumulate(counts)]
    of_row: list[int] = []
    for group, (begin, end) in enumerate(zip(layout.offsets, layout.offsets[1:])):
        if layout.parents[group] is None:
            of_row.extend([first[group]] * (end - begin))
        else:
            of_row.extend(range(first[group], first[group + 1]))
    if len(group_of_path) == len(counts) and all(parents is None for parents in layout.parents):
        return KeyPaths(chains, torch.tensor(of_row, device=device))

    slots = chains.index_select(0, torch.tensor(group_of_path, device=device))
    path_ids: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    for group, parents in enumerate(layout.parents):
        if parents is None:
            continue
        start, offset = layout.starts[group], layout.offsets[group]
        # Everything from `start` on is per row: physical order is not logical order inside a tree.
        slots[first[group]:first[group + 1], start:] = 0
        for row, ancestors in enumerate(ancestry(parents)):
            path_ids.extend([first[group] + row] * len(ancestors))
            positions.extend(range(start, start + len(ancestors)))
            rows.extend(offset + ancestor for ancestor in ancestors)
    at = (torch.tensor(path_ids, device=device), torch.tensor(positions, device=device))
    slots[at] = view.slots[torch.tensor(rows, device=device)]
    return KeyPaths(slots, torch.tensor(of_row, device=device))


def seen_positions(layout: Layout) -> list[int]:
    """Up to which position each row sees, which is its own unless Layout.mutual says otherwise; from the host's side of
    the layout: no device read."""
    found: list[int] = []
    for group, (begin, end) in enumerate(zip(layout.offsets, layout.offsets[1:])):
        start, parents = layout.starts[group], layout.parents[group]
        if layout.mutual:
            found.extend([start + end - begin - 1] * (end - begin))
        elif parents is None:
            found.extend(range(start, start + end - begin))
        else:
            found.extend(start + depth for depth in depths(parents))
    return found
