"""Verification on the device: the coupled rule for all groups of a step in one launch.

Needs Triton; imported by whoever runs on a CUDA device, and by nobody else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.kernels.triton.sampling.verify import verify_kernel


class Seats(Protocol):
    """The device tables in which emitted tokens are counted (sampling.device.state.DeviceState)."""

    table: Tensor
    counts: Tensor | None
    vocab_size: int


@dataclass(frozen=True, slots=True)
class PackedDrafts:
    """The draft trees of a step, packed: the rows that are drawn from, group after group. A group without a draft is
    its root alone. Padding: groups without rows (equal offsets), rows without a seat."""

    offsets: Tensor
    """[G + 1] int32, first row of each group."""
    parents: Tensor
    """[R] int32, the row above; roots have any number below 0."""
    tokens: Tensor
    """[R] int32 or int64, what each row was fed; a root's is not looked at."""
    seats: Tensor
    """[R] int32; the root's counts."""
    widest: int
    """Rows of the largest group, or more. Part of a graph's identity."""


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Views of the verifier's buffer: the next call overwrites them. int32."""

    accepted: Tensor
    """[G] drafts that stand; -1 for padding."""
    bonus: Tensor
    """[G] 1: nothing had been drafted where the last token came from; 0: it corrects a draft."""
    tokens: Tensor
    """[G, room] the accepted drafts and one more token (negative where it cannot be drawn), then -1."""
    rows: Tensor
    """[G, room] the row each of those tokens was drawn at, then -1: the root, then the accepted rows."""
    packed: Tensor
    """All four in one piece, for one copy: accepted, bonus, tokens, rows, one after the other."""


class DeviceVerifier:
    """Walks up to `groups` drafts at a time, down to `depth` accepted tokens each. One stream at a time."""

    def __init__(self, groups: int, depth: int, device: torch.device) -> None:
        self._room = depth + 1
        self._packed = torch.empty(groups * (2 + 2 * self._room), dtype=torch.int32, device=device)

    def verify(self, drafts: PackedDrafts, drawn: Tensor, seats: Seats, *, count: bool = False) -> Verdicts:
        """`drawn` [R]: what the target draws after each row (negative: nothing). `count`: what is emitted counts in
        what penalised seats draw from now on. Capturable; nothing is read back."""
        groups, room = drafts.offsets.shape[0] - 1, self._room
        packed = self._packed[:groups * (2 + 2 * room)]
        accepted, bonus = packed[:2 * groups].view(2, groups)
        tokens, rows = packed[2 * groups:].view(2, groups, room)
        # One warp: its threads read and write in step.
        verify_kernel[(groups,)](
            drafts.offsets, drafts.parents, drafts.tokens, drawn, drafts.seats, accepted, bonus, tokens, rows, room,
            seats.table, seats.table if seats.counts is None else seats.counts, seats.vocab_size,
            COUNT=count and seats.counts is not None, ROWS=max(2, 1 << (drafts.widest - 1).bit_length()), num_warps=1)
        return Verdicts(accepted, bonus, tokens, rows, packed)
