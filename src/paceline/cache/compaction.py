"""Accepted paths move to where the next step reads them, on the device: no list of moves comes from the host.

Needs Triton; imported by whoever runs on a CUDA device, and by nobody else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.kernels.triton.sampling.compaction import compact_kernel

_WORD = 4
_BLOCK = 512


class PathCompaction:
    """Moves the KV of accepted rows within the planes of one cache group: keys and values of its layers, and their
    scales where there are any."""

    def __init__(self, planes: Sequence[Tensor]) -> None:
        """`planes`: contiguous, first axis slots; they must stay where they are."""
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
        """The d-th accepted row of each group goes to the slot of the group's d-th row. Capturable.

        offsets [G + 1] as in PackedDrafts; accepted [G] and rows [G, room] as in Verdicts; slots [R]: where the KV of
        each row was written, in the order of the rows (int32 or int64).
        """
        compact_kernel[(accepted.shape[0], len(self._kept))](
            self._planes, offsets, accepted, rows, rows.shape[1], slots, BLOCK=_BLOCK, num_warps=4)
