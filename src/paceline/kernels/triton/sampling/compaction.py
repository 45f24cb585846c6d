# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Accepted paths move to where the next step expects them: a tree's KV was written row by row, and is read by depth."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_WORD = 4
_BLOCK = 512


@triton.jit
def compact_kernel(planes, offsets, accepted, path, room, slots, BLOCK: tl.constexpr):
    """planes [P, 2] int64: address and 32-bit words a slot of each plane; slots [rows]: where each row's KV lies.
    Grid (groups, P). The d-th accepted row of a group moves to the slot of the group's d-th row.

    In place and in order of depth: parents come before children, so the d-th accepted row is never before the d-th
    row, and no slot is overwritten before it was read. Each word of a plane is moved by one thread.
    """
    group = tl.program_id(0)
    plane = tl.program_id(1)
    first = tl.load(offsets + group)
    words = tl.load(planes + plane * 2 + 1)
    base = tl.load(planes + plane * 2).to(tl.pointer_type(tl.int32))
    for depth in range(1, tl.load(accepted + group) + 1):
        row = tl.load(path + group * room + depth)
        if row != first + depth:
            source = base + tl.load(slots + row).to(tl.int64) * words
            target = base + tl.load(slots + first + depth).to(tl.int64) * words
            for start in range(0, words.to(tl.int32), BLOCK):
                at = start + tl.arange(0, BLOCK)
                tl.store(target + at, tl.load(source + at, mask=at < words), mask=at < words)


class TritonCompaction:
    """Implements device.interface.Compaction: no list of moves comes from the host."""

    def __init__(self, planes: Sequence[Tensor]) -> None:
        table = []
        for plane in planes:
            size = plane[0].numel() * plane.element_size()
            if not plane.is_contiguous() or size % _WORD or plane.data_ptr() % _WORD:
                raise ValueError(f"a cache plane must be contiguous and hold whole 32-bit words a slot, got {size} "
                                 "bytes a slot")
            table.append((plane.data_ptr(), size // _WORD))
        self._kept = tuple(planes)
        self._planes = torch.tensor(table, dtype=torch.int64, device=planes[0].device)

    def move(self, offsets: Tensor, accepted: Tensor, rows: Tensor, slots: Tensor) -> None:
        compact_kernel[(accepted.shape[0], len(self._kept))](
            self._planes, offsets, accepted, rows, rows.shape[1], slots, BLOCK=_BLOCK, num_warps=4)
