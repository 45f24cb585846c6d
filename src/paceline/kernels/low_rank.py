"""Low-rank additions to weights (LoRA). All adapters of a model lie side by side, each in a slot, and the rows of a
step name theirs: so a step can be captured whoever is in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from paceline.kernels.packed import Weight

NOBODY = -1
"""In place of a slot: no adapter, the row is the model's own."""
FEWEST = 4
"""Slots that there is room for at first; twice as many whenever they do not suffice."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """What a linear layer's output gets: up (down x)."""

    down: torch.Tensor
    """[r, K]."""
    up: torch.Tensor
    """[M, r]; scaled already. Outputs that the adapter leaves alone have zeros."""


Additions = Mapping[Weight, LowRank]
"""An adapter as kernels see it: by the weights it adds to. Those it does not name stay as they are."""


@dataclass(frozen=True, slots=True)
class LowRankSlots:
    """What each slot adds to one weight."""

    down: torch.Tensor
    """[slots, room, K]."""
    up: torch.Tensor
    """[slots, M, room]."""
    ranks: torch.Tensor
    """[slots] int32: how many of the room's ranks count; 0: nothing is added. Contents of the others mean nothing."""
    host_ranks: list[int]
    """The same, for who must not wait for a device."""

    @staticmethod
    def like(low: LowRank, slots: int, room: int) -> LowRankSlots:
        """Empty ones that such a pair fits into."""
        down, up = low.down, low.up
        return LowRankSlots(down.new_zeros((slots, room, down.shape[1])), up.new_zeros((slots, up.shape[0], room)),
                            torch.zeros(slots, dtype=torch.int32, device=down.device), [0] * slots)

    def of(self, slot: int) -> LowRank | None:
        """The pair of a slot in its own rank, laid out as if it were alone: its sums must not tell how much room
        others need."""
        rank = self.host_ranks[slot]
        return LowRank(self.down[slot, :rank], self.up[slot, :, :rank].contiguous()) if rank else None

    def set(self, slot: int, low: LowRank | None) -> None:
        rank = 0 if low is None else low.down.shape[0]
        if low is not None:
            self.down[slot, :rank] = low.down
            self.up[slot, :, :rank] = low.up
        self.ranks[slot] = rank
        self.host_ranks[slot] = rank

    def grown(self, slots: int, room: int) -> LowRankSlots:
        """The same with more room."""
        found = LowRankSlots.like(LowRank(self.down[0], self.up[0]), slots, room)
        for slot in range(len(self.host_ranks)):
            found.set(slot, self.of(slot))
        return found


class AdapterSlots:
    """All adapters of one model, by the weights they add to. Written in the order of the stream that steps run on, and
    only where nobody runs: whoever is in flight reads what was there when it was launched."""

    def __init__(self) -> None:
        self.layout = 0
        """Another number whenever something has moved: what was captured before then reads the wrong place. 0: there
        has never been an adapter."""
        self._by_weight: dict[Weight, LowRankSlots] = {}
        self._taken: list[bool] = []

    def get(self, weight: Weight) -> LowRankSlots | None:
        """None: no adapter adds to it."""
        return self._by_weight.get(weight)

    @torch.inference_mode()
    def load(self, additions: Additions) -> int:
        """The slot in which an adapter lies from now on. Without memory for it nothing has changed."""
        slot = self._taken.index(False) if False in self._taken else len(self._taken)
        # Of every weight as many as there are: whoever has one of the others may be asked about any of them.
        room = max(FEWEST, 1 << max(slot, len(self._taken) - 1).bit_length())
        moved: dict[Weight, LowRankSlots] = {}
        for weight in {**self._by_weight, **additions}:
            old, low = self._by_weight.get(weight), additions.get(weight)
            rank = 0 if low is None else low.down.shape[0]
            if old is None and low is not None:
                moved[weight] = LowRankSlots.like(low, room, rank)
            elif old is not None and (slot >= old.down.shape[0] or rank > old.down.shape[1]):
                moved[weight] = old.grown(max(room, old.down.shape[0]), max(rank, old.down.shape[1]))
        self._by_weight |= moved
        self.layout += bool(moved)
        self._taken[slot:slot + 1] = [True]
        for weight, slots in self._by_weight.items():
            slots.set(slot, additions.get(weight))
        return slot

    def free(self, slot: int) -> None:
        """Nobody who may still be launched has it."""
        self._taken[slot] = False


class RowSlots:
    """The adapter of each row of a step."""

    def __init__(self, slots: torch.Tensor) -> None:
        """[N] int64, where the step runs: a slot, or NOBODY."""
        self.slots = slots

    def at(self, rows: torch.Tensor) -> RowSlots:
        """Of these rows, [n] int64."""
        return RowSlots(self.slots.index_select(0, rows))

    @cached_property
    def segments(self) -> list[tuple[int, torch.Tensor | None]]:
        """The slots that are named and the rows of each, [n] int64; None: all rows. Waits for the device: for kernels
        that cannot read a row's slot by themselves."""
        slots: np.ndarray[Any, Any] = self.slots.cpu().numpy()
        found: list[tuple[int, torch.Tensor | None]] = []
        for slot in np.unique(slots[slots >= 0]).tolist():
            rows = np.flatnonzero(slots == slot)
            found.append((slot, None if len(rows) == len(slots) else torch.from_numpy(rows).to(self.slots.device)))
        return found
