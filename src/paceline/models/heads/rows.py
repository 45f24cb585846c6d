"""Where the token that a row follows lies: what a head has kept of it is read there."""

from __future__ import annotations

import torch

from paceline.kernels.device.rows import DeviceRows
from paceline.kernels.layout import GroupView, Layout


def slots_before(layout: Layout, view: GroupView) -> torch.Tensor:
    """[N] int64: the slot of each row's parent, 0 for the first token of a text and for padding. Where the rows are
    kept on the device, from those alone."""
    if layout.device is not None:
        return _on_device(layout.device, layout.block_size, view)
    counts = torch.tensor([end - begin for begin, end in zip(layout.offsets, layout.offsets[1:])], dtype=torch.int64)
    groups = torch.repeat_interleave(torch.arange(len(counts)), counts).to(view.tables.device)
    found = _through_tables(view.tables, groups, layout.positions - 1, layout.block_size)
    for (begin, end), parents in zip(zip(layout.offsets, layout.offsets[1:]), layout.parents):
        if parents is not None and end - begin > 1:
            above = torch.tensor(parents[1:], dtype=torch.int64, device=view.slots.device) + begin
            found[begin + 1:end] = view.slots[above].to(found.dtype)
    return found


def _on_device(rows: DeviceRows, block_size: int, view: GroupView) -> torch.Tensor:
    at, prefix = rows.positions.long() - 1, rows.prefix.long()
    found = _through_tables(view.tables, rows.group.long().clamp(min=0), at, block_size)
    if not rows.shape.depth:
        return found
    drafted = at >= prefix
    above = rows.ancestors.long().gather(1, (at - prefix).clamp(0, rows.shape.depth - 1)[:, None])[:, 0]
    return torch.where(drafted, view.slots.long()[above], found)


def _through_tables(tables: torch.Tensor, groups: torch.Tensor, at: torch.Tensor, block_size: int) -> torch.Tensor:
    place = at.clamp(min=0)
    slots = tables[groups, place // block_size].long() * block_size + place % block_size
    return slots.where(at >= 0, 0)
