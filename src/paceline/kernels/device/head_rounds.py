"""HeadRounds: a round of a trained head as a part of a repeated step, on the device. The head's own networks run
between these operations; for whom they draft, where their rows lie, which tokens are drawn and what becomes of them is
here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from paceline.kernels.device.repeats import Drafts, RepeatInputs
from paceline.kernels.device.rows import DeviceRows
from paceline.kernels.device.seats import SeatTables

NO_MATCH = -1
"""In place of how many tokens had matched: nothing was looked up."""


class RoundScope(NamedTuple):
    """For whom a round is, and where what it writes lies."""

    number: int
    """Of the head (lookup.head_number): groups that want another one are left out."""
    longest: int | None
    """Positions that the head knows; None: any."""
    blocks: Tensor
    """[G or more, B] int32: the groups' blocks."""
    block_size: int


@dataclass(frozen=True, slots=True)
class HeadRound:
    """One entry for each group of the step."""

    owners: Tensor
    """[G] int32: the seat; -1: nothing is drafted for it."""
    places: Tensor
    """[G] int64: the position of its newest token; 0 where nothing is drafted."""
    ends: Tensor
    """[G] int64: the first position that must not be written."""
    previous: Tensor
    """[G] int64: the token drafted last, at first the newest one."""
    before: Tensor
    """[G] int64: the slot of the token before the newest; 0: there is none."""
    tokens: Tensor
    """[G, levels] int32: what was drafted; below 0: nothing could be."""
    chances: Tensor
    """[G, levels] float32: that it is accepted if all before it are."""

    @staticmethod
    def of(groups: int, levels: int, device: torch.device) -> HeadRound:
        places, ends, previous, before = torch.empty((4, groups), dtype=torch.int64, device=device)
        return HeadRound(torch.empty(groups, dtype=torch.int32, device=device), places, ends, previous, before,
                         torch.empty((groups, levels), dtype=torch.int32, device=device),
                         torch.empty((groups, levels), dtype=torch.float32, device=device))

    def note(self, level: int, sampled: Tensor, chances: Tensor) -> None:
        """Tokens [G] that somebody else has drawn."""
        self.tokens[:, level].copy_(sampled)
        self.chances[:, level].copy_(chances)
        self.previous.copy_(sampled.clamp(min=0))


@dataclass(frozen=True, slots=True)
class PassRows:
    """A pass over the same number of rows of each group. Rows at positions that are not reserved are padding."""

    positions: Tensor
    """[G rows] int64; 0: padding."""
    slots: Tensor
    """[G rows] int64; -1: padding."""
    rows: DeviceRows


@dataclass(frozen=True, slots=True)
class Bigrams:
    """What the token before adds to the logits: second[v] . first[token]."""

    first: Tensor
    """[target's vocabulary, rank]."""
    second: Tensor
    """[draft vocabulary, rank]."""


@dataclass(frozen=True, slots=True)
class Sureness:
    """How sure a head is of what it drafts: sigmoid(weight . [hidden, of the token before] + bias)."""

    hidden: Tensor
    """[G, h], the last axis contiguous."""
    weight: Tensor
    """[h], or [h + rank]: with the row of Bigrams.first."""
    bias: Tensor
    """[1]."""


@dataclass(frozen=True, slots=True)
class DraftSlot:
    """What the next token of each group is drawn from."""

    logits: Tensor
    """[G, draft vocabulary], the last axis contiguous."""
    bigrams: Bigrams | None = None
    chances: Sureness | Tensor | None = None
    """That what is drawn is accepted: as they are made, or made already, [G] float32; None: its probability."""


class HeadRounds(Protocol):
    """For up to so many groups at a time (DeviceKernels.head_rounds)."""

    draws: bool
    """Whether there is a `draw`. Otherwise tokens are sampled as the target's are, from logits of its vocabulary."""

    def open(self, inputs: RepeatInputs, tables: SeatTables, scope: RoundScope, levels: int) -> HeadRound:
        """Who takes part: those whose seats want this head (columns.LOOKUP), where there is room for a token."""
        ...

    def lay_out(self, opened: HeadRound, scope: RoundScope, first: int, rows: int, mutual: bool) -> PassRows:
        """The rows of a pass: `rows` of each group, from `first` behind its newest token on. `mutual`: they see each
        other."""
        ...

    def draw(self, opened: HeadRound, level: int, slot: DraftSlot, ids: Tensor | None, tables: SeatTables) -> None:
        """The token of each group at its next position: the likeliest, or the one that the target's noise there makes
        the best. `ids` [draft vocabulary] int64, ascending: the target's; None: they are the same. What truncates or
        edits a request's distribution is not looked at: where requests have that, drafts are sampled as the
        target samples, for most of what is drawn otherwise would be refused."""
        ...

    def close(self, opened: HeadRound, inputs: RepeatInputs, tables: SeatTables, drafts: Drafts) -> None:
        """Each group's draft, as far as it is worth a row. Groups that took no part keep what they have, and so do
        those that look drafts up as well, and have found something that promises more."""
        ...
