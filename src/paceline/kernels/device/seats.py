"""SeatTables: what device kernels know about the running requests, one row per seat, in persistent device tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.kernels.device import columns
from paceline.kernels.low_rank import NOBODY


class SeatTables:
    """The host writes a seat when a request takes it; the device itself moves `texts` and `counts` on as tokens are
    sampled. All tensors stay where they are, so captured steps may read them."""

    def __init__(self, seats: int, vocab_size: int, device: torch.device, *, longest: int = 1,
                 list_room: int = 512) -> None:
        """`longest`: tokens of a text. `list_room`: tokens a request may bias, stop tokens under min_tokens
        included."""
        self.seats, self.vocab_size, self.device = seats, vocab_size, device
        self.list_room = list_room
        self.table = torch.zeros(seats, columns.COLUMNS, dtype=torch.int64, device=device)
        """Parameters, as `columns` says."""
        self.texts = torch.zeros(seats, longest, dtype=torch.int32, device=device)
        """The tokens of each seat from its prompt on, `lengths` of them. The newest is what a pending one stands
        for."""
        self.lengths = torch.zeros(seats, dtype=torch.int32, device=device)
        self.ids = torch.full((seats, list_room), -1, dtype=torch.int32, device=device)
        self.values = torch.zeros(seats, list_room, dtype=torch.float32, device=device)
        """Biased tokens and what is added to their logits; -inf takes a token out."""
        self.counts: Tensor | None = None
        """[seats, V] int32, 2 * (times in the output) + (1 if in the prompt)."""
        self.masks: Tensor | None = None
        """[seats, words] int32, one bit per token that may come. There, as `counts` are, once a request needs edits."""

    def adapters(self, seats: Tensor) -> Tensor:
        """seats [N] int32 -> [N] int64: the slots of their adapters; those of padding, seat -1, are NOBODY."""
        slots = self.table[:, columns.ADAPTER].index_select(0, seats.clamp(min=0))
        return slots.masked_fill(seats < 0, NOBODY)

    def prepare(self) -> None:
        """Allocate what requests with edits need, all of it: a graph that was captured for some of them serves all."""
        if self.counts is None:
            counts = torch.zeros(self.seats, self.vocab_size, dtype=torch.int32, device=self.device)
            self.masks = torch.zeros(self.seats, -(-self.vocab_size // 32), dtype=torch.int32, device=self.device)
            self.counts = counts
