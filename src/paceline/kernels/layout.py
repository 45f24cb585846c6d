"""How a ragged step looks to a kernel: flat rows, row groups, block tables, tree parents.

A step is N rows in G groups. A group belongs to one sequence; its rows follow `start` committed tokens.
Row i of a group has a parent row in the same group (chain: i - 1); row 0 follows the committed prefix.
Logical position = start + depth. The row's KV is written to the slot of PHYSICAL position start + i, so a
chain's slots equal its positions and a tree's are compacted after verification.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.kernels.device.rows import DeviceRows


@dataclass(slots=True)
class GroupView:
    """One cache group as this step sees it."""

    tables: torch.Tensor
    """[G, B] block ids in logical order, NULL_BLOCK where nothing is held; int64, for device kernels also int32."""
    slots: torch.Tensor
    """[N] slot (block * block_size + offset) each row's KV is written to; int64, for device kernels also int32, and
    there -1 in rows that are padding."""
    window: int | None = None
    scratch: dict[str, Any] = field(default_factory=dict)
    """What a kernel derives once per forward and reuses in every layer (key slots, masks, work lists)."""
    first: int = 0
    """Positions below this one hold nothing and are seen by no row (draft heads that keep nothing of a text's first
    token)."""


@dataclass(slots=True)
class Layout:
    """The shape of one step. Host lists and device tensors say the same thing; kernels take what suits them."""

    positions: torch.Tensor
    """[N] int64 logical positions."""
    offsets: list[int]
    """[G + 1] row offsets of the groups."""
    starts: list[int]
    """[G] committed tokens before each group's first row."""
    parents: list[list[int] | None]
    """[G] parent row within the group (-1 for row 0), or None for a chain."""
    block_size: int
    views: list[GroupView] = field(default_factory=list)
    """One per cache group of the model."""
    device: DeviceRows | None = None
    """The rows as device kernels read them, where someone keeps them (captured steps); else made when needed."""
    mutual: bool = False
    """Rows of a group see each other whatever their order (block drafters): each attends as the last one of its group
    does. There are no trees then."""

    @property
    def rows(self) -> int:
        return self.offsets[-1]
