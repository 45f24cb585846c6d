"""Who sits where, as a device knows it: what its sampler needs of each running sequence, and its newest token."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch

from paceline.engine.sequence import Sequence
from paceline.engine.step import RowGroup
from paceline.sampling.device.sampler import DeviceSampler
from paceline.sampling.device.state import Controls, DeviceState, Seated

MOST_ROWS = 512
"""Sequences that draw in one step on the device, at most."""


class DeviceSeats:
    """Shared by all captured steps of an engine. Steps run in the order in which they are launched, so one may read
    what the one before it draws."""

    def __init__(self, seats: int, vocab_size: int, device: torch.device) -> None:
        self.most_rows = min(seats, MOST_ROWS)
        self.state = DeviceState(seats, vocab_size, device)
        self.sampler = DeviceSampler(self.state, self.most_rows)
        self._seated: list[tuple[Sequence, int] | None] = [None] * seats
        """Who sat there, in which epoch, when the device was last told."""

    def take(self, sequences: Seq[Sequence]) -> Controls:
        """Tell the device about those it does not know in their seats; what drawing for all of them takes."""
        fresh = []
        for seq in sequences:
            seat = seq.allocation.seat
            if self._seated[seat] != (seq, seq.epoch):
                self._seated[seat] = (seq, seq.epoch)
                fresh.append(Seated(seat, seq.state, len(seq.tokens), seq.tokens[-1]))
        self.state.assign(fresh)
        return self.state.controls([seq.allocation.seat for seq in sequences])


def drawing(groups: Seq[RowGroup]) -> list[Sequence]:
    """Whose draws a step decides: not those in the middle of their prompts, nor those who have ended since it was
    planned. Their rows run all the same and what they yield is dropped."""
    return [group.seq for group in groups
            if group.logits_from < len(group.tokens) and group.seq.allocation is not None]


def send(values: np.ndarray, target: torch.Tensor) -> None:
    """Copy to the device in its own time: from pinned memory, which torch keeps until the copy has run."""
    source = torch.from_numpy(values)
    target.copy_(source.pin_memory() if target.is_cuda else source, non_blocking=True)
