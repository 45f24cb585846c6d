"""The rows of a DeviceRows that are no padding, as a Layout of the host's."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from paceline.kernels.device.rows import DeviceRows
from paceline.kernels.layout import GroupView, Layout


@dataclass(frozen=True, slots=True)
class LiveRows:
    """Made once per forward and cache group."""

    rows: torch.Tensor
    """[n] int64: which rows of the step these are."""
    layout: Layout
    view: GroupView

    @staticmethod
    def of(rows: DeviceRows, step: Layout, view: GroupView) -> LiveRows:
        """What the device got, and nothing else, says where each row reads: its group's blocks below `prefix`, its
        ancestors from there on."""
        live = (rows.group >= 0).nonzero()[:, 0]
        place = {row: at for at, row in enumerate(live.tolist())}
        groups, positions, prefixes = (part[live].tolist() for part in (rows.group, rows.positions, rows.prefix))
        ancestors = rows.ancestors[live].tolist()
        begins = [at for at, group in enumerate(groups) if not at or group != groups[at - 1]]
        offsets = [*begins, len(groups)]
        starts: list[int] = []
        parents: list[list[int] | None] = []
        for begin, end in pairwise(offsets):
            if prefixes[begin] > positions[begin]:  # a chain
                starts.append(positions[begin] - (end - begin - 1 if step.mutual else 0))
                parents.append(None)
                continue
            start = prefixes[begin]
            starts.append(start)
            paths = [ancestors[at][:positions[at] - start + 1] for at in range(begin, end)]
            parents.append([place[path[-2]] - begin if len(path) > 1 else -1 for path in paths])
        tables = view.tables[[groups[begin] for begin in begins]].long()
        own = GroupView(tables, view.slots[live], view.window, first=view.first)
        layout = Layout(torch.tensor(positions, dtype=torch.int64), offsets, starts, parents, step.block_size, [own],
                        mutual=step.mutual)
        return LiveRows(live, layout, own)
